// Keys, values and queries of one KV head, random or real, for the tests of the theory.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "score/score_ref.h"
#include "support/index.h"
#include "support/trace_file.h"

namespace locks::testing {

using ref::Vector;

inline constexpr std::uint64_t kSeeds[] = {1, 2, 3, 4, 5};
// Rounding of a few thousand double operations, relative to the size of what they add up.
inline constexpr double kRounding = 1e-10;

inline double norm(const Vector& x) { return std::sqrt(ref::dot(x, x.data())); }

inline Vector difference(const double* a, const Vector& b) {
  Vector result(b.size());
  for (std::size_t c = 0; c < b.size(); ++c) result[c] = a[c] - b[c];
  return result;
}

inline Vector normal_vector(std::mt19937_64& random, int n, double scale = 1) {
  std::normal_distribution<double> normal(0, scale);
  Vector x(at(n));
  for (double& value : x) value = normal(random);
  return x;
}

struct Head {
  int num_tokens = 0;
  int head_dim = 0;
  Vector keys, values;          // [num_tokens, head_dim]
  std::vector<Vector> queries;  // scaled
};

inline void add_random_queries(Head& head, int count, std::mt19937_64& random) {
  for (int h = 0; h < count; ++h) {
    head.queries.push_back(normal_vector(random, head.head_dim, 2 / std::sqrt(head.head_dim)));
  }
}

// A walk, so that pages differ in mass.
inline Head random_head(std::uint64_t seed, int num_tokens, int head_dim, int group_size) {
  std::mt19937_64 random(seed);
  Head head{num_tokens, head_dim, {}, {}, {}};
  Vector state = normal_vector(random, head_dim);
  for (int i = 0; i < num_tokens; ++i) {
    const Vector step = normal_vector(random, head_dim, 0.3);
    for (std::size_t c = 0; c < at(head_dim); ++c) state[c] = 0.95 * state[c] + step[c];
    head.keys.insert(head.keys.end(), state.begin(), state.end());
  }
  head.values = normal_vector(random, num_tokens * head_dim);
  add_random_queries(head, group_size, random);
  return head;
}

// Pages that lie within `noise` of `rank` directions of their own, and of nearly equal mass: here
// the bounds are tight enough to mean something, and small errors change the selection.
inline Head nearly_low_rank_head(std::uint64_t seed, int num_pages, int page_tokens, int rank,
                                 double noise) {
  constexpr int kDim = 64, kGroup = 4;
  std::mt19937_64 random(seed);
  Head head{num_pages * page_tokens, kDim, {}, {}, {}};
  for (int page = 0; page < num_pages; ++page) {
    const Vector mean = normal_vector(random, kDim, 0.02);
    const Vector directions = normal_vector(random, rank * kDim, 0.3);
    for (int i = 0; i < page_tokens; ++i) {
      Vector key = normal_vector(random, kDim, noise);
      const Vector coefficients = normal_vector(random, rank);
      for (int c = 0; c < kDim; ++c) {
        key[at(c)] += mean[at(c)];
        for (int m = 0; m < rank; ++m) {
          key[at(c)] += coefficients[at(m)] * directions[at(m * kDim + c)];
        }
      }
      head.keys.insert(head.keys.end(), key.begin(), key.end());
    }
  }
  add_random_queries(head, kGroup, random);
  return head;
}

inline const TraceFile& real_trace() {
  static const TraceFile trace =
      read_trace(std::string(LOCKS_TEST_DATA_DIR) + "/smollm2_slice.safetensors");
  return trace;
}

// A slice of real attention: `num_tokens` keys up to the last position, queries of the last step.
inline Head real_head(int num_tokens) {
  const TraceFile& trace = real_trace();
  const std::ptrdiff_t first =
      static_cast<std::ptrdiff_t>(trace.num_tokens - num_tokens) * trace.head_dim;
  Head head{num_tokens, trace.head_dim, {}, {}, {}};
  head.keys.assign(trace.keys.begin() + first, trace.keys.end());
  head.values.assign(trace.values.begin() + first, trace.values.end());
  for (int h = 0; h < trace.group_size; ++h) {
    head.queries.push_back(ref::scaled(trace.query(h, trace.num_steps - 1), trace.scale));
  }
  return head;
}

struct Shape {
  const char* name = "";
  SummaryFormat format;
  bool quantised = false;
};

// One page's summary and its largest residual eps_j = max_i |k_i - khat_i|. Rotations keep norms
// and dot products, so improved formats are examined in rotated channels.
struct ScoredPage {
  double eps = 0;
  double tail = 0;             // sum of the eigenvalues past the rank
  std::vector<double> scores;  // by head
  std::vector<double> exact;
};

inline ScoredPage examine_page(const Head& head, const Shape& shape, int page) {
  const SummaryFormat& f = shape.format;
  const int d = head.head_dim;
  const double* keys = head.keys.data() + static_cast<std::ptrdiff_t>(page) * f.page_tokens * d;
  Vector spectrum;
  const ref::PageSummary exact = ref::summarise_exact(keys, f.page_tokens, d, f.rank, &spectrum);
  const bool turned = shape.quantised && f.improved;
  const ref::PageSummary summary =
      shape.quantised ? ref::dequantise(f, d, ref::summarise_page(f, keys, d, {})) : exact;
  ScoredPage result;
  for (int i = 0; i < f.page_tokens; ++i) {
    const Vector key(keys + i * d, keys + (i + 1) * d);
    const Vector rebuilt = ref::reconstruct_key(summary, i);
    const Vector same_channels = turned ? ref::rotate(key) : key;
    result.eps = std::max(result.eps, norm(difference(same_channels.data(), rebuilt)));
  }
  result.tail = std::accumulate(spectrum.begin() + f.rank, spectrum.end(), 0.0);
  for (const Vector& query : head.queries) {
    result.scores.push_back(ref::score_page(summary, turned ? ref::rotate(query) : query, {}));
    result.exact.push_back(ref::log_mass(keys, f.page_tokens, query));
  }
  return result;
}

}  // namespace locks::testing
