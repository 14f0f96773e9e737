// A fixture's rows as the GPU scorer of a decode step finds them between prepare and score; the
// launch; and checks of what it leaves behind against the double-precision reference.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "decode/step_cuda.h"
#include "locks/locks.h"
#include "score/query_fragments.cuh"
#include "score/score_ref.h"
#include "support/device_array.h"
#include "support/edge_cases.h"
#include "support/index.h"
#include "support/paged_fixture.h"
#include "support/query_fragments_kernel.h"

namespace locks::testing {

inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr std::uint16_t kPoisonBits = 0xFFFF;  // of a bf16; the scorer's NaN has other bits
inline constexpr std::int64_t kGuard = 256;  // elements behind each array that nobody may touch

inline float bf16_value(std::uint16_t bits) {
  const std::uint32_t word = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// What a launch left behind, with the index of the contract.
struct Scored {
  std::vector<std::uint16_t> masses;
  std::vector<float> sums;
  std::vector<std::int32_t> shifts;
  std::vector<unsigned long long> counters;
};

// A fixture's rows as the GPU step sees them between prepare and score.
class Rig {
 public:
  // Each sequence of the fixture is `copies` rows, with other queries.
  explicit Rig(const EdgeCase& edge, int copies = 1) : fixture(edge), copies_(copies) {
    const std::vector<std::int32_t> begin(at(fixture.num_seqs()), 0);
    EXPECT_TRUE(summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(), begin.data(),
                                 fixture.records(), nullptr, serial_executor())
                    .ok());
    const AttentionParams attention = fixture.attention();
    for (int row = 0; row < num_rows(); ++row) {
      const double size =
          static_cast<double>(attention.scale) * kLog2E * (1 - 0.01 * (row / fixture.num_seqs()));
      for (int head = 0; head < attention.num_query_heads; ++head) {
        Vector query = fixture.dense_query(seq_of(row), head);
        if (edge.format.improved) query = ref::rotate(query);
        for (double x : query) rotated.push_back(static_cast<float>(x * size));
      }
      RowPlan plan{};
      plan.length = edge.lengths[at(seq_of(row))];
      plan.scored_blocks = plan.length / kBlockTokens;
      plan.first_new_block = std::max(plan.scored_blocks - row % 3, 0);
      rows.push_back(plan);
    }
    centre_base();
  }

  int num_rows() const { return fixture.num_seqs() * copies_; }
  int seq_of(int row) const { return row % fixture.num_seqs(); }
  int heads() const { return fixture.num_query_heads(); }
  int group() const { return fixture.edge().group_size; }
  const SummaryFormat& format() const { return fixture.edge().format; }
  int pages() const { return format().pages_per_block(); }
  float* query(int row, int head) {
    return rotated.data() + at(row * heads() + head) * at(fixture.edge().head_dim);
  }
  float& base_of(int row, int head) { return base[at(row * heads() + head)]; }

  // log2 of a page's mass, before the base; NaN if its record cannot be scored.
  double log2_mass(int row, int head, int block, int page, const Vector& natural) {
    const auto& unpacked = unpack(row, head / group(), block);
    if (unpacked.empty()) return NAN;
    return ref::score_page(unpacked[at(page)], natural, {}) * kLog2E;
  }

  Vector natural_query(int row, int head) {
    Vector q;
    for (int c = 0; c < fixture.edge().head_dim; ++c) {
      q.push_back(static_cast<double>(query(row, head)[c]) / kLog2E);
    }
    return q;
  }

  // Empty if the header is not valid.
  const std::vector<ref::PageSummary>& unpack(int row, int kv_head, int block) {
    const std::size_t idx =
        (at(seq_of(row)) * at(fixture.edge().num_kv_heads) + at(kv_head)) * 512 + at(block);
    if (cache_.size() <= idx) cache_.resize(idx + 1);
    if (!cache_[idx].known) {
      cache_[idx].known = true;
      cache_[idx].pages = ref::unpack_pages(layout(), fixture.record(seq_of(row), kv_head, block));
    }
    return cache_[idx].pages;
  }
  void forget_records() { cache_.clear(); }

  RecordLayout layout() const { return record_layout(format(), fixture.edge().head_dim); }

  // Masses near 1: base is the largest page's log2 mass, rounded.
  void centre_base() {
    base.assign(at(num_rows() * heads()), 0.0f);
    for (int row = 0; row < num_rows(); ++row) {
      for (int head = 0; head < heads(); ++head) {
        double largest = -INFINITY;
        const Vector q = natural_query(row, head);
        for (int block = 0; block < rows[at(row)].scored_blocks; ++block) {
          for (int page = 0; page < pages(); ++page) {
            largest = std::fmax(largest, log2_mass(row, head, block, page, q));
          }
        }
        base_of(row, head) = std::isfinite(largest) ? static_cast<float>(largest) : 0.0f;
      }
    }
  }

  std::vector<RowPlan> plan() const {
    std::vector<RowPlan> result = rows;
    int tiles = 0;
    for (RowPlan& row : result) {
      row.first_tile = tiles;
      tiles += detail::num_tiles(row.scored_blocks);
    }
    result.push_back({});
    result.back().first_tile = tiles;
    return result;
  }

  Scored score() {
    const RecordCache records = fixture.records();
    const std::int64_t bytes = (records.num_blocks - 1) * records.block_stride +
                               (records.num_kv_heads - 1) * records.head_stride +
                               records.block_tokens / kBlockTokens * records.record_bytes;
    const DeviceArray<std::uint8_t> pool(records.data, bytes);
    return score(pool.get(), records);
  }

  Scored score(std::uint8_t* device_records, RecordCache records) {
    const std::vector<RowPlan> row_plan = plan();
    const std::int64_t tiles = row_plan.back().first_tile * std::int64_t{heads()};
    const std::int64_t num_masses = tiles * detail::kTileBlocks * pages();
    SequenceBatch seqs = fixture.seqs();
    const std::int64_t stride = seqs.record_blocks.seq_stride;
    std::vector<std::int32_t> table;
    for (int row = 0; row < num_rows(); ++row) {
      const std::int32_t* ids = seqs.record_blocks.ids + seq_of(row) * stride;
      table.insert(table.end(), ids, ids + stride);
    }
    seqs.num_seqs = num_rows();
    if (edit_table) edit_table(table, stride);
    const AttentionParams attention = fixture.attention();
    const int words = detail::fragment_words(format(), attention.group_size(), attention.head_dim);

    const DeviceArray<RowPlan> device_plan(row_plan.data(),
                                           static_cast<std::int64_t>(row_plan.size()));
    const DeviceArray<std::int32_t> device_table(table.data(),
                                                 static_cast<std::int64_t>(table.size()));
    const DeviceArray<float> device_rotated(rotated.data(),
                                            static_cast<std::int64_t>(rotated.size()));
    const DeviceArray<float> device_base(base.data(), static_cast<std::int64_t>(base.size()));
    const DeviceArray<std::uint32_t> fragments(
        std::int64_t{seqs.num_seqs} * attention.num_kv_heads * words, 0xFF);
    const DeviceArray<std::uint16_t> masses(num_masses + kGuard, 0xFF);
    const DeviceArray<float> sums(tiles + kGuard, 0xFF);
    const DeviceArray<std::int32_t> shifts(tiles + kGuard, 0xFF);
    const DeviceArray<unsigned long long> counters(kNumCudaCounters, 0);
    if (words > 0) {
      EXPECT_EQ(write_all_fragments(format(), attention, seqs.num_seqs, device_rotated.get(),
                                    fragments.get()),
                cudaSuccess);
    }
    detail::StepArguments step{};
    step.attention = attention;
    step.layout = layout();
    step.format_code = encode_format(format());
    step.records = records;
    step.records.data = device_records;
    step.seqs = seqs;
    step.seqs.lengths = nullptr;
    step.seqs.cache_blocks.ids = nullptr;
    step.seqs.record_blocks.ids = device_table.get();
    step.plan = device_plan.get();
    step.counters = counters.get();
    step.workspace.rotated = device_rotated.get();
    step.workspace.fragments = fragments.get();
    step.workspace.base = device_base.get();
    step.workspace.masses = reinterpret_cast<__nv_bfloat16*>(masses.get());
    step.workspace.tile_sums = sums.get();
    step.workspace.tile_shifts = shifts.get();
    EXPECT_EQ(detail::launch_score(step, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return {masses.download(), sums.download(), shifts.download(), counters.download()};
  }

  PagedFixture fixture;
  std::vector<float> rotated;  // [row, query head, d], log2 units
  std::vector<float> base;     // [row, query head]
  std::vector<RowPlan> rows;
  std::function<void(std::vector<std::int32_t>&, std::int64_t seq_stride)> edit_table;

 private:
  struct Unpacked {
    bool known = false;
    std::vector<ref::PageSummary> pages;
  };
  int copies_;
  std::vector<Unpacked> cache_;
};

// Standard deviation of the error that 16-bit codes of a query make in its product with `row`.
// An int4 row meets codes of q[b + d/2] and of 16 q[b] - q[b + d/2] in steps of the largest over
// 32,512, rounded up to 8 bits: see query_fragments.cuh.
inline double row_deviation(const double* row, const Vector& q, int bits) {
  const std::size_t d = q.size(), half = d / 2;
  double largest = 0, squares = 0;
  for (std::size_t c = 0; c < (bits == 4 ? half : d); ++c) {
    if (bits == 4) {
      largest = std::max({largest, std::fabs(q[c + half]), std::fabs(16 * q[c] - q[c + half])});
      const double raw = (16 * row[c + half] + row[c]) / 16;
      squares += raw * raw + row[c] * row[c] / 256;
    } else {
      largest = std::max(largest, std::fabs(q[c]));
      squares += row[c] * row[c];
    }
  }
  return largest / 32512 * (1 + 0x1p-7) / std::sqrt(12.0) * std::sqrt(squares);
}

// Allowed error of ln mass: half a unit of bf16; six deviations of the query's rounding for the
// worst token; float arithmetic on logits of that size.
inline double allowed_error(const ref::PageSummary& page, const Vector& q,
                            const SummaryFormat& format, double base) {
  double worst = 0, size = std::fabs(base);
  const double centroid = row_deviation(page.centroid.data(), q, format.centroid_bits);
  for (int t = 0; t < page.page_tokens; ++t) {
    double variance = centroid * centroid;
    double magnitude = std::fabs(ref::dot(q, page.centroid.data())) + std::fabs(base);
    for (int k = 0; k < page.rank; ++k) {
      const double c = std::fabs(page.coefficients[at(k * page.page_tokens + t)]);
      const double* row = page.basis.data() + k * page.head_dim;
      const double deviation = row_deviation(row, q, format.basis_bits) * c;
      variance += deviation * deviation;
      // A rank-1 weight is 24 times larger inside, and 16 + code a sum of those.
      magnitude += 4 * std::fabs(ref::dot(q, row)) * c;
    }
    worst = std::max(worst, variance);
    size = std::max(size, magnitude);
  }
  return 0x1p-8 + 6 * std::sqrt(worst) + size * 0x1p-20;
}

// Checks one (row, query head) against the reference. Returns the largest error in nats.
inline double check_run(Rig& rig, const RowPlan& row_plan, int row, int head,
                        const Scored& scored) {
  const int pages = rig.pages(), tile_pages = detail::kTileBlocks * pages;
  const std::int64_t first = detail::tile_index(row_plan, rig.heads(), head);
  const Vector q = rig.natural_query(row, head);
  const double base = static_cast<double>(rig.base_of(row, head));
  double worst = 0;
  for (int tile = 0; tile < detail::num_tiles(row_plan.scored_blocks); ++tile) {
    const float stored_sum = scored.sums[at(first + tile)];
    const bool special = std::signbit(stored_sum);
    const int shift = special ? scored.shifts[at(first + tile)] : 0;
    EXPECT_GE(shift, 0);
    double sum = 0;
    bool finite = true;
    for (int block = 0; block < detail::kTileBlocks; ++block) {
      const int row_block = tile * detail::kTileBlocks + block;
      for (int page = 0; page < pages; ++page) {
        const std::uint16_t bits =
            scored
                .masses[at((first + tile) * tile_pages + detail::mass_offset(block, page, pages))];
        const double mass = static_cast<double>(bf16_value(bits));
        const auto place = [&] {
          return "row " + std::to_string(row) + " head " + std::to_string(head) + " block " +
                 std::to_string(row_block) + " page " + std::to_string(page);
        };
        EXPECT_NE(bits, kPoisonBits) << place();
        if (row_block >= row_plan.scored_blocks) {
          EXPECT_EQ(mass, 0) << place();
          continue;
        }
        const double expected =
            (rig.log2_mass(row, head, row_block, page, q) - base) / kLog2E - shift * 64 / kLog2E;
        if (!std::isfinite(expected)) {
          EXPECT_TRUE(std::isnan(mass)) << place() << ": " << mass;
          finite = false;
          continue;
        }
        EXPECT_FALSE(std::isnan(mass)) << place() << ", expected ln " << expected;
        sum += mass;
        if (expected < -80) {  // below what a float's exponent holds, or near it
          EXPECT_LE(mass, 0x1p-110) << place();
          continue;
        }
        const double allowed =
            allowed_error(rig.unpack(row, head / rig.group(), row_block)[at(page)], q, rig.format(),
                          base / kLog2E);
        const double error = std::fabs(std::log(mass) - expected);
        EXPECT_LE(error, allowed) << place() << ": ln mass " << std::log(mass) << ", expected "
                                  << expected << ", shift " << shift;
        worst = std::max(worst, error);
        if (::testing::Test::HasFailure() && worst > allowed) return worst;
      }
    }
    EXPECT_TRUE(finite || special);
    // Masses were rounded to bf16 after they were added.
    EXPECT_NEAR(std::fabs(static_cast<double>(stored_sum)), sum, sum * 0x1p-8 + 0x1p-120)
        << "row " << row << " head " << head << " tile " << tile;
    EXPECT_LE(std::fabs(stored_sum), detail::kLargestTileSum);
    EXPECT_TRUE(shift == 0 || std::fabs(static_cast<double>(stored_sum)) * 0x1p64 > 0x1p99);
  }
  return worst;
}

inline double check_all(Rig& rig, const Scored& scored) {
  const std::vector<RowPlan> plan = rig.plan();
  double worst = 0;
  for (int row = 0; row < rig.num_rows(); ++row) {
    for (int head = 0; head < rig.heads(); ++head) {
      worst = std::max(worst, check_run(rig, plan[at(row)], row, head, scored));
      if (::testing::Test::HasFailure()) return worst;
    }
  }
  const std::int64_t tiles = plan.back().first_tile * std::int64_t{rig.heads()};
  const std::int64_t masses = tiles * detail::kTileBlocks * rig.pages();
  for (std::int64_t i = 0; i < kGuard; ++i) {
    EXPECT_EQ(scored.masses[at(masses + i)], kPoisonBits);
    EXPECT_TRUE(std::isnan(scored.sums[at(tiles + i)]));
    EXPECT_EQ(scored.shifts[at(tiles + i)], -1);
  }
  return worst;
}

inline void expect_equal(const Scored& a, const Scored& b) {
  EXPECT_EQ(a.masses, b.masses);
  ASSERT_EQ(a.sums.size(), b.sums.size());
  EXPECT_EQ(std::memcmp(a.sums.data(), b.sums.data(), a.sums.size() * sizeof(float)), 0);
  EXPECT_EQ(a.shifts, b.shifts);
}

// Every row alone gives the bits that it has in the batch.
inline void expect_batch_invariant(Rig& rig, const Scored& scored) {
  const std::vector<RowPlan> plan = rig.plan();
  const std::vector<RowPlan> all = rig.rows;
  for (std::size_t row = 0; row < all.size(); ++row) {
    for (RowPlan& other : rig.rows) other.scored_blocks = 0;
    rig.rows[row].scored_blocks = all[row].scored_blocks;
    const Scored alone = rig.score();
    const std::int64_t first = detail::tile_index(plan[row], rig.heads(), 0);
    const std::int64_t tiles =
        detail::num_tiles(all[row].scored_blocks) * std::int64_t{rig.heads()};
    const std::int64_t tile_masses = detail::kTileBlocks * std::int64_t{rig.pages()};
    for (std::int64_t i = 0; i < tiles; ++i) {
      ASSERT_EQ(std::memcmp(&alone.sums[at(i)], &scored.sums[at(first + i)], sizeof(float)), 0);
    }
    for (std::int64_t i = 0; i < tiles * tile_masses; ++i) {
      ASSERT_EQ(alone.masses[at(i)], scored.masses[at(first * tile_masses + i)]);
    }
    rig.rows = all;
  }
}

inline EdgeCase plain_case(const SummaryFormat& format, std::vector<int> lengths, int kv_heads = 4,
                           int group = 7) {
  return {.name = "plain",
          .format = format,
          .lengths = std::move(lengths),
          .head_dim = 128,
          .num_kv_heads = kv_heads,
          .group_size = group,
          .type = ScalarType::kBFloat16};
}

// Each preset, for tests of one condition on plain_case.
class ScoreCudaFormat : public ::testing::TestWithParam<SummaryFormat> {};

inline auto score_cuda_formats() {
  return ::testing::Values(kFine, kFine8, kCompact, kWide, kPaper);
}

}  // namespace locks::testing
