// Ranks the pages of one KV head, by the mean over the group of each head's softmax over the pages,
// or by the largest score.
//
// Passes over the scores of a head: largest, then masses exp(s - largest) and their sum, then
// shares. Sums go to lane `page % 16`, lanes are added up at the end of each run of 2,048 tokens,
// runs in order.
#include <bit>

#include "core/cpu_namespace.h"
#include "core/fast_math.h"
#include "core/lanes.h"
#include "core/scalar.h"
#include "select/select_kernels.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {
namespace {

constexpr float kNaN = __builtin_nanf("");

// Unsigned integers in the order of the floats, for all but NaN. Adding zero makes -0 equal to 0.
inline std::uint32_t order_bits(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// A page that is not finite for some head holds NaN in `values`, every other one 0. NaN stays
// whatever is added, so `values` is its own mask.
void mark_nonfinite(const PageRanking& ranking) {
  float* __restrict values = ranking.values;
  for (std::int64_t p = 0; p < ranking.num_pages; ++p) values[p] = 0;
  for (int h = 0; h < ranking.group_size; ++h) {
    const float* __restrict scores = ranking.scores + h * ranking.num_pages;
    for (std::int64_t p = 0; p < ranking.num_pages; ++p) {
      values[p] = is_finite(scores[p]) ? values[p] : kNaN;
    }
  }
}

// The largest finite score; the lowest float if there is none.
float largest_score(const float* __restrict scores, const float* __restrict mask,
                    std::int64_t num_pages) {
  constexpr float kLowest = -3.402823466e38f;
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = kLowest;
  const auto take = [&](std::int64_t p, int i) {
    const float score = is_finite(mask[p]) ? scores[p] : kLowest;
    lanes[i] = score > lanes[i] ? score : lanes[i];
  };
  std::int64_t p = 0;
  for (; p + kLanes <= num_pages; p += kLanes) {
    for (int i = 0; i < kLanes; ++i) take(p + i, i);
  }
  for (int i = 0; p + i < num_pages; ++i) take(p + i, i);
  float largest = kLowest;
  for (int i = 0; i < kLanes; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  return largest;
}

// masses[p] = exp(score - largest), 0 where not finite; returns their sum. A page more than 87 nats
// below the head's best has mass 0.
double sum_masses(const float* __restrict scores, const float* __restrict mask, float largest,
                  const PageRanking& ranking) {
  float* __restrict masses = ranking.masses;
  for (std::int64_t p = 0; p < ranking.num_pages; ++p) {
    const float mass = fast_exp(scores[p] - largest);
    masses[p] = is_finite(mask[p]) ? mass : 0.0f;
  }
  double total = 0;
  for (std::int64_t begin = 0; begin < ranking.num_pages; begin += ranking.run_pages) {
    const std::int64_t rest = ranking.num_pages - begin;
    const std::int64_t end = begin + (rest < ranking.run_pages ? rest : ranking.run_pages);
    float lanes[kLanes] = {};
    std::int64_t p = begin;
    for (; p + kLanes <= end; p += kLanes) {
      for (int i = 0; i < kLanes; ++i) lanes[i] += masses[p + i];
    }
    for (int i = 0; p + i < end; ++i) lanes[i] += masses[p + i];
    total += static_cast<double>(sum_lanes(lanes));
  }
  return total;
}

// Turns values into ranks and counts the pages that are not finite.
std::int64_t finish_ranks(const PageRanking& ranking) {
  const float* __restrict values = ranking.values;
  std::uint32_t* __restrict ranks = ranking.ranks;
  std::int64_t num_nonfinite = 0;
  for (std::int64_t p = 0; p < ranking.num_pages; ++p) {
    const bool finite = is_finite(values[p]);
    ranks[p] = finite ? order_bits(values[p]) : kForcedRank;
    num_nonfinite += finite ? 0 : 1;
  }
  return num_nonfinite;
}

std::int64_t rank_by_mean_of_shares(const PageRanking& ranking) {
  mark_nonfinite(ranking);
  for (int h = 0; h < ranking.group_size; ++h) {
    const float* scores = ranking.scores + h * ranking.num_pages;
    const float largest = largest_score(scores, ranking.values, ranking.num_pages);
    const double total = sum_masses(scores, ranking.values, largest, ranking);
    const auto weight = static_cast<float>(1.0 / (total * ranking.group_size));
    if (!(total > 0)) continue;  // no page is finite: all are forced
    const float* __restrict masses = ranking.masses;
    float* __restrict values = ranking.values;
    for (std::int64_t p = 0; p < ranking.num_pages; ++p) values[p] += masses[p] * weight;
  }
  return finish_ranks(ranking);
}

std::int64_t rank_by_max_of_scores(const PageRanking& ranking) {
  mark_nonfinite(ranking);
  float* __restrict values = ranking.values;
  for (int h = 0; h < ranking.group_size; ++h) {
    const float* __restrict scores = ranking.scores + h * ranking.num_pages;
    for (std::int64_t p = 0; p < ranking.num_pages; ++p) {
      const bool better = h == 0 || scores[p] > values[p];
      values[p] = is_finite(values[p]) && better ? scores[p] : values[p];
    }
  }
  return finish_ranks(ranking);
}

}  // namespace

const SelectKernels& select_kernels() {
  static constexpr SelectKernels kKernels{rank_by_mean_of_shares, rank_by_max_of_scores};
  return kKernels;
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
