// The first launch of a decode step, and the plain scorer behind it, against the references, over
// the shared table of edge cases. Needs a device. Tests named DISABLED_Time... print times.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/scalar.h"
#include "score/score_cuda.h"
#include "score/score_ref.h"
#include "support/compare.h"
#include "support/device_stage.h"
#include "support/device_timing.h"

namespace locks::testing {
namespace {

using ref::PageSummary;

constexpr double kLog2OfE = 1.4426950408889634;

template <class T>
bool is_untouched(const T* values, std::size_t count) {
  for (std::size_t i = 0; i < count * sizeof(T); ++i) {
    if (reinterpret_cast<const std::uint8_t*>(values)[i] != kPoison) return false;
  }
  return true;
}

double norm(const Vector& x) { return std::sqrt(ref::dot(x, x.data())); }

// scale * log2(e) * q, rotated if the format asks for it.
Vector expected_query(const PagedFixture& fixture, int seq, int head, bool rotated) {
  Vector query = fixture.dense_query(seq, head);
  if (rotated && fixture.edge().format.improved) query = ref::rotate(std::move(query));
  return ref::scaled(query, static_cast<double>(fixture.attention().scale) * kLog2OfE);
}

// Every second row is scored, and rebuilt from its first block.
std::vector<RowPlan> mixed_plan(const PagedFixture& fixture) {
  std::vector<RowPlan> rows;
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    RowPlan row{};
    row.length = fixture.edge().lengths[static_cast<std::size_t>(i)];
    row.first_new_block = i % 2 == 0 ? 0 : std::max(row.length - 1, 0) / kBlockTokens;
    row.scored_blocks = i % 2 == 0 ? row.length / kBlockTokens : 0;
    rows.push_back(row);
  }
  return rows;
}

class PrepareCuda : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(PrepareCuda, Records_EqualTheCpuAndNothingElseIsTouched) {
  PagedFixture fixture(GetParam());
  DeviceStage stage(fixture);
  stage.set_plan(mixed_plan(fixture));
  ASSERT_CUDA(detail::launch_prepare(stage.arguments(), nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  std::vector<std::int32_t> begin;
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    const RowPlan& row = stage.plan()[static_cast<std::size_t>(i)];
    begin.push_back(row.first_new_block * kBlockTokens);
  }
  std::int64_t built = 0;
  ASSERT_TRUE(summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(), begin.data(),
                               fixture.records(), &built, serial_executor())
                  .ok());
  EXPECT_EQ(static_cast<std::int64_t>(stage.counters()[detail::kRecordsBuilt]), built);
  const std::vector<std::uint8_t> actual = stage.records();
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(int{actual[i]}, int{fixture.records().data[i]}) << "byte " << i << " of the pool";
  }
}

// base and log2_tail in double, with the error that float logits allow.
struct ExpectedBase {
  double base, tail, logit_error;
};

ExpectedBase expected_base(const PagedFixture& fixture, int seq, int head) {
  const EdgeCase& edge = fixture.edge();
  const int kv_head = head / edge.group_size, d = edge.head_dim;
  const int length = edge.lengths[static_cast<std::size_t>(seq)];
  const Vector& keys = fixture.dense_keys(seq, kv_head);
  const Vector query = expected_query(fixture, seq, head, false);
  const auto key = [&](int token) { return keys.data() + static_cast<std::ptrdiff_t>(token) * d; };
  ExpectedBase expected{};
  const auto logit = [&](int token) {
    double magnitudes = 0;
    for (int c = 0; c < d; ++c) {
      magnitudes += std::abs(query[static_cast<std::size_t>(c)] * key(token)[c]);
    }
    if (std::isfinite(magnitudes)) {
      expected.logit_error = std::max(expected.logit_error, dot_error(d) * magnitudes);
    }
    return ref::dot(query, key(token));
  };
  double offset = 0;
  if (edge.format.improved && edge.reference_key) {
    const Vector rotated = expected_query(fixture, seq, head, true);
    offset = ref::dot(rotated, fixture.reference(kv_head).data());
    expected.logit_error +=
        (dot_error(d) + 16 * kFloatRoundoff) * norm(rotated) * norm(fixture.reference(kv_head));
  }
  expected.base = std::fmax(logit(0), logit(length - 1)) - offset;
  Vector tail;
  double largest = -INFINITY;
  for (int t = length / kBlockTokens * kBlockTokens; t < length; ++t) {
    tail.push_back(logit(t));
    largest = std::fmax(largest, tail.back());
  }
  double mass = 0;
  for (double x : tail) mass += std::exp2(x - largest);
  expected.tail = tail.empty() ? -INFINITY : largest + std::log2(mass) - offset - expected.base;
  expected.logit_error += 4 * kFloatRoundoff * std::abs(offset);
  return expected;
}

TEST_P(PrepareCuda, Queries_EqualTheReference) {
  PagedFixture fixture(GetParam());
  DeviceStage stage(fixture);
  stage.set_plan(mixed_plan(fixture));
  ASSERT_CUDA(detail::launch_prepare(stage.arguments(), nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  const EdgeCase& edge = fixture.edge();
  const auto d = static_cast<std::size_t>(edge.head_dim);
  const std::vector<float> rotated = stage.rotated(), base = stage.base(), tail = stage.tail();
  const std::vector<std::uint32_t> fragments = stage.fragments();
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    const RowPlan& row = stage.plan()[static_cast<std::size_t>(i)];
    for (int h = 0; h < fixture.num_query_heads(); ++h) {
      const auto at = static_cast<std::size_t>(i * fixture.num_query_heads() + h);
      if (row.scored_blocks == 0) {
        ASSERT_TRUE(is_untouched(rotated.data() + at * d, d)) << "row " << i << " is not scored";
        ASSERT_TRUE(is_untouched(base.data() + at, 1) && is_untouched(tail.data() + at, 1));
        continue;
      }
      const Vector query = expected_query(fixture, i, h, true);
      ASSERT_TRUE(arrays_near(rotated.data() + at * d, query.data(), d,
                              {16 * kFloatRoundoff * norm(query), 0, "float rotation"}))
          << "row " << i << ", head " << h;
      const ExpectedBase expected = expected_base(fixture, i, h);
      ASSERT_TRUE(
          near(base[at], expected.base, {expected.logit_error, 4 * kFloatRoundoff, "float logits"}))
          << "base of row " << i << ", head " << h;
      ASSERT_TRUE(
          near(tail[at], expected.tail,
               {4 * expected.logit_error + 0x1p-20 + 8 * kFloatRoundoff * std::abs(expected.base),
                4 * kFloatRoundoff, "float logits"}))
          << "tail of row " << i << ", head " << h;
    }
  }
}

// Whether kernels can write new tokens to this cache: rows of 16-bit numbers at multiples of 16
// bytes.
bool takes_new_tokens(const EdgeCase& edge) {
  return edge.type != ScalarType::kFloat32 && edge.padding % 8 == 0;
}

TEST_P(PrepareCuda, NewTokens_AreWrittenAndSeen) {
  if (!takes_new_tokens(GetParam())) GTEST_SKIP() << "not in rows that are aligned";
  PagedFixture fixture(GetParam());
  const DeviceNewTokens tokens(fixture);
  DeviceStage expected(fixture), stage(fixture);
  stage.set_added(tokens);
  for (DeviceStage* each : {&expected, &stage}) {
    each->set_plan(mixed_plan(fixture));
    ASSERT_CUDA(detail::launch_prepare(each->arguments(), nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
  }
  EXPECT_TRUE(stage.keys() == expected.keys());
  EXPECT_TRUE(stage.records() == expected.records());
  EXPECT_TRUE(stage.fragments() == expected.fragments());
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  EXPECT_TRUE(same(stage.base(), expected.base()));
  EXPECT_TRUE(same(stage.tail(), expected.tail()));
}

// A row whose records are all built anew shares a block with one that completes it in this step.
TEST(PrepareCudaAdded, Records_SeeTheKeysThatOtherRowsAdd) {
  EdgeCase edge;
  edge.lengths.assign(162, 0);  // more rows than a warp looks through at once
  edge.lengths.front() = edge.lengths.back() = 64;
  edge.type = ScalarType::kBFloat16;
  edge.head_dim = 128;
  PagedFixture fixture(edge);
  const DeviceNewTokens tokens(fixture);
  DeviceStage stage(fixture);
  stage.set_added(tokens);
  std::vector<RowPlan> rows = mixed_plan(fixture);
  for (RowPlan& row : rows) row.first_new_block = 0;
  stage.set_plan(rows);
  detail::StepArguments arguments = stage.arguments();
  const BlockTable table = fixture.seqs().cache_blocks;
  std::vector<std::int32_t> ids(table.ids, table.ids + table_entries(table, fixture.num_seqs()));
  const auto last = static_cast<std::ptrdiff_t>(161 * table.seq_stride);
  std::copy_n(ids.begin(), 64 / fixture.keys().block_tokens, ids.begin() + last);
  const DeviceArray<std::int32_t> shared(ids.data(), static_cast<std::int64_t>(ids.size()));
  arguments.seqs.cache_blocks.ids = shared.get();
  ASSERT_CUDA(detail::launch_prepare(arguments, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  const std::vector<std::uint8_t> records = stage.records();
  const std::int64_t size = record_layout(edge.format, edge.head_dim).record_bytes;
  for (int head = 0; head < edge.num_kv_heads; ++head) {
    for (int block = 0; block < 4; ++block) {
      const auto at = [&](int row) {
        return records.data() + (fixture.record(row, head, block) - fixture.records().data);
      };
      EXPECT_EQ(std::memcmp(at(0), at(161), static_cast<std::size_t>(size)), 0)
          << "head " << head << ", block " << block;
    }
  }
}

// A captured step serves rows that have grown.
TEST(PrepareCudaGraph, CapturedOnce_ReplaysWithOtherPlans) {
  EdgeCase edge;
  edge.lengths = {400, 37, 0, 300};
  edge.type = ScalarType::kBFloat16;
  edge.head_dim = 128;
  PagedFixture fixture(edge);
  DeviceStage stage(fixture);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_CUDA(detail::launch_prepare(stage.arguments(), stream));
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  const std::vector<std::int32_t> zeros(4, 0);
  for (int part = 1; part <= 4; ++part) {
    std::vector<RowPlan> rows;
    for (int i = 0; i < 4; ++i) {
      const int whole = edge.lengths[static_cast<std::size_t>(i)];
      RowPlan row{};
      row.length = whole * part / 4;
      row.first_new_block = whole * (part - 1) / 4 / kBlockTokens;
      row.scored_blocks = row.length / kBlockTokens;
      rows.push_back(row);
    }
    stage.set_plan(rows);
    ASSERT_CUDA(cudaGraphLaunch(replay, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
  }
  ASSERT_TRUE(summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(), zeros.data(),
                               fixture.records(), nullptr, serial_executor())
                  .ok());
  const std::vector<std::uint8_t> actual = stage.records();
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(int{actual[i]}, int{fixture.records().data[i]}) << "byte " << i;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// What a mass may be off by, in binary orders: float rotation and sums against the sizes of what
// they add up (as for the CPU's scores), and bf16's rounding of the mass.
Tolerance mass_tolerance(const PageSummary& page, const Vector& query, double base) {
  double spread = 0, largest_logit = 0;
  PageSummary centred = page;
  centred.centroid.assign(page.centroid.size(), 0.0);
  for (int i = 0; i < page.page_tokens; ++i) {
    spread = std::max(spread, norm(ref::reconstruct_key(centred, i)));
    double logit = 0;
    for (int m = 0; m < page.rank; ++m) {
      const Vector row(page.basis.begin() + m * page.head_dim,
                       page.basis.begin() + (m + 1) * page.head_dim);
      logit += norm(query) * norm(row) *
               std::abs(page.coefficients[static_cast<std::size_t>(m * page.page_tokens + i)]);
    }
    largest_logit = std::max(largest_logit, logit);
  }
  const double norms = norm(page.centroid) + spread;
  const double size = norm(query) * norm(page.centroid) + largest_logit + std::abs(base) + 4;
  return {kLog2OfE * 0x1p-8 * (1 + 0x1p-6) + 16 * kFloatRoundoff * norm(query) * norms +
              (dot_error(page.head_dim) + 8 * kFloatRoundoff) * size,
          0, "bf16 masses, float rotation, float sums"};
}

class ScoreAnyCuda : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(ScoreAnyCuda, Masses_EqualTheReference) {
  PagedFixture fixture(GetParam());
  const EdgeCase& edge = fixture.edge();
  fixture.write_reference_records();
  std::vector<RowPlan> rows;
  unsigned long long num_invalid = 0;
  const RecordLayout layout = record_layout(edge.format, edge.head_dim);
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    RowPlan row{};
    row.length = edge.lengths[static_cast<std::size_t>(i)];
    row.scored_blocks = row.first_new_block = row.length / kBlockTokens;
    rows.push_back(row);
    if (row.scored_blocks > 4) {  // a record of another format
      fixture.record(i, edge.num_kv_heads - 1, 3)[layout.header_offset + 3] ^= 0x10;
      ++num_invalid;
    }
  }
  DeviceStage stage(fixture);
  stage.set_plan(rows);
  ASSERT_CUDA(detail::launch_prepare(stage.arguments(), nullptr));
  ASSERT_CUDA(detail::launch_score_any(stage.arguments(), nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(stage.counters()[detail::kInvalidRecords], num_invalid);
  EXPECT_EQ(stage.counters()[detail::kRecordsBuilt], 0u);

  const int page_count = edge.format.pages_per_block();
  const auto slots = static_cast<std::size_t>(detail::kTileBlocks * page_count);
  const std::vector<__nv_bfloat16> masses = stage.masses();
  const std::vector<float> sums = stage.sums(), bases = stage.base();
  const std::vector<std::int32_t> shifts = stage.shifts();
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    const RowPlan& row = stage.plan()[static_cast<std::size_t>(i)];
    for (int h = 0; h < fixture.num_query_heads(); ++h) {
      const Vector query = expected_query(fixture, i, h, true);
      const double base =
          static_cast<double>(bases[static_cast<std::size_t>(i * fixture.num_query_heads() + h)]);
      const auto first_tile =
          static_cast<std::size_t>(detail::tile_index(row, fixture.num_query_heads(), h));
      const auto num_tiles = static_cast<std::size_t>(detail::num_tiles(row.scored_blocks));
      for (std::size_t tile = first_tile; tile < first_tile + num_tiles; ++tile) {
        const double sum = static_cast<double>(sums[tile]);
        const int shift = sum < 0 ? shifts[tile] : 0;
        ASSERT_TRUE(sum >= 0 || shift > 0) << "shift of tile " << tile;
        ASSERT_LE(std::abs(sum), static_cast<double>(detail::kLargestTileSum));
        if (shift > 0) {
          ASSERT_GT(std::log2(-sum) + detail::kShiftUnit, 100) << "shifted too far";
        }
        double added = 0, most_tolerance = 0;
        for (std::size_t slot = 0; slot < slots; ++slot) {
          const double mass = static_cast<double>(__bfloat162float(masses[tile * slots + slot]));
          const auto group = slot / static_cast<std::size_t>(8 * page_count);
          const int page = static_cast<int>(slot / 8) % page_count;
          const int block =
              static_cast<int>((tile - first_tile) * detail::kTileBlocks + group * 8 + slot % 8);
          ASSERT_EQ(detail::mass_offset(block, page, page_count),
                    static_cast<std::int64_t>((tile - first_tile) * slots + slot));
          if (block >= row.scored_blocks) {
            ASSERT_EQ(mass, 0) << "past the end";
            continue;
          }
          const std::vector<PageSummary> pages =
              ref::unpack_pages(layout, fixture.record(i, h / edge.group_size, block));
          if (pages.empty()) {
            ASSERT_TRUE(std::isnan(mass)) << "invalid record of row " << i << " block " << block;
            continue;
          }
          const PageSummary& summary = pages[static_cast<std::size_t>(page)];
          // The reference's logits are in nats.
          const Vector natural = ref::scaled(query, 1 / kLog2OfE);
          const double log2_mass = ref::score_page(summary, natural, {}) * kLog2OfE - base;
          if (!std::isfinite(log2_mass)) {
            ASSERT_TRUE(std::isnan(mass)) << "row " << i << " block " << block << " page " << page;
            continue;
          }
          ASSERT_FALSE(std::isnan(mass)) << "row " << i << " block " << block << " page " << page;
          const Tolerance tolerance = mass_tolerance(summary, query, base);
          most_tolerance = std::max(most_tolerance, tolerance.absolute);
          added += mass;
          const double shifted = log2_mass - detail::kShiftUnit * shift;
          if (shifted < -120) {  // below the normal numbers of a float
            ASSERT_LT(mass, 0x1p-118);
            continue;
          }
          ASSERT_TRUE(near(std::log2(mass), shifted, tolerance))
              << "row " << i << " head " << h << " block " << block << " page " << page;
        }
        ASSERT_TRUE(near(std::abs(sum), added, {0, 0x1p-8, "bf16 masses"})) << "tile " << tile;
      }
    }
  }
}

TEST_P(ScoreAnyCuda, Masses_AreTheSameInAnyBatch) {
  PagedFixture fixture(GetParam());
  const EdgeCase& edge = fixture.edge();
  fixture.write_reference_records();
  const auto plan = [&](int only) {
    std::vector<RowPlan> rows;
    for (int i = 0; i < fixture.num_seqs(); ++i) {
      RowPlan row{};
      if (only < 0 || only == i) row.length = edge.lengths[static_cast<std::size_t>(i)];
      row.scored_blocks = row.first_new_block = row.length / kBlockTokens;
      rows.push_back(row);
    }
    return rows;
  };
  DeviceStage all(fixture);
  all.set_plan(plan(-1));
  ASSERT_CUDA(detail::launch_prepare(all.arguments(), nullptr));
  ASSERT_CUDA(detail::launch_score_any(all.arguments(), nullptr));
  const std::vector<__nv_bfloat16> batched = all.masses();
  for (int only = 0; only < fixture.num_seqs(); only += 3) {
    DeviceStage one(fixture);
    one.set_plan(plan(only));
    ASSERT_CUDA(detail::launch_prepare(one.arguments(), nullptr));
    ASSERT_CUDA(detail::launch_score_any(one.arguments(), nullptr));
    const std::vector<__nv_bfloat16> alone = one.masses();
    const RowPlan& row = all.plan()[static_cast<std::size_t>(only)];
    const auto slots =
        static_cast<std::size_t>(detail::kTileBlocks * edge.format.pages_per_block());
    const auto heads = static_cast<std::size_t>(fixture.num_query_heads());
    const auto count = static_cast<std::size_t>(detail::num_tiles(row.scored_blocks)) * heads;
    ASSERT_EQ(std::memcmp(alone.data(),
                          batched.data() + static_cast<std::size_t>(row.first_tile) * heads * slots,
                          count * slots * sizeof(__nv_bfloat16)),
              0)
        << "row " << only;
  }
}

INSTANTIATE_TEST_SUITE_P(Edge, PrepareCuda, ::testing::ValuesIn(device_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);
INSTANTIATE_TEST_SUITE_P(Edge, ScoreAnyCuda, ::testing::ValuesIn(device_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

// A decode step's rows of 512 tokens, 28 / 4 heads of 128 channels.
EdgeCase timed_case(const SummaryFormat& format, int rows) {
  EdgeCase edge;
  edge.format = format;
  edge.lengths.assign(static_cast<std::size_t>(rows), 512);
  edge.head_dim = 128;
  edge.num_kv_heads = 4;
  edge.group_size = 7;
  edge.type = ScalarType::kBFloat16;
  return edge;
}

// For profilers: a step that completes one block.
TEST(PrepareCudaTime, DISABLED_OneRecord) {
  for (const SummaryFormat& format : {kFine, kWide}) {
    PagedFixture fixture(timed_case(format, 1));
    DeviceStage stage(fixture);
    RowPlan row{};
    row.length = 512;
    row.first_new_block = 31;
    row.scored_blocks = 32;
    stage.set_plan({row});
    for (int i = 0; i < 3; ++i) ASSERT_CUDA(detail::launch_prepare(stage.arguments(), nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
  }
}

TEST(PrepareCudaTime, DISABLED_Time) {
  for (const SummaryFormat& format : {kFine, kWide}) {
    for (int rows : {1, 8}) {
      PagedFixture fixture(timed_case(format, rows));
      DeviceStage stage(fixture);
      for (const int new_blocks : {0, 1, 32}) {
        for (const bool scored : {false, true}) {
          RowPlan row{};
          row.length = new_blocks == 0 ? 511 : 512;
          row.first_new_block = row.length / kBlockTokens - new_blocks;
          row.scored_blocks = scored ? row.length / kBlockTokens : 0;
          stage.set_plan(std::vector<RowPlan>(static_cast<std::size_t>(rows), row));
          const double us = time_launch(28, [&](int, cudaStream_t stream) {
            EXPECT_EQ(detail::launch_prepare(stage.arguments(), stream), cudaSuccess);
          });
          std::printf("prepare %-6s rows %d, new blocks a row %2d, scored %d: %8.2f us\n",
                      format_name(format).c_str(), rows, new_blocks, scored, us);
        }
      }
      const double us = time_launch(28, [&](int, cudaStream_t stream) {
        EXPECT_EQ(detail::launch_score_any(stage.arguments(), stream), cudaSuccess);
      });
      std::printf("score_any %-6s %d x 512 tokens x 4 heads (hot): %8.2f us\n",
                  format_name(format).c_str(), rows, us);
    }
  }
}

}  // namespace
}  // namespace locks::testing
