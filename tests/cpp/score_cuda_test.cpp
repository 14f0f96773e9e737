// The GPU scorer against the double-precision reference: masses and tile sums of every format and
// shape, rows and tiles of all numbers. Needs a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/score_rig.h"

namespace locks::testing {
namespace {

class ScoreCuda : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(ScoreCuda, Masses_AreTheReferences) {
  Rig rig(GetParam());
  const Scored scored = rig.score();
  const double worst = check_all(rig, scored);
  RecordProperty("largest_error", std::to_string(worst));
  expect_equal(scored, rig.score());
}

std::vector<EdgeCase> table_cases() {
  std::vector<EdgeCase> cases;
  for (const EdgeCase& edge : edge_cases()) {
    if (!edge.top_of_big_pool) cases.push_back(edge);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Edge, ScoreCuda, ::testing::ValuesIn(table_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

// Shapes of models: every number of KV heads a unit can hold, groups in one and two fragments.
std::vector<EdgeCase> model_shapes() {
  std::vector<EdgeCase> cases;
  const SummaryFormat formats[] = {kFine, kFine8, kCompact, kWide, kPaper};
  const int groups[] = {1, 3, 4, 5, 6, 7, 8, 9, 16};
  int n = 0;
  for (int heads : {1, 2, 3, 4, 5, 8, 9}) {
    for (const SummaryFormat& format : formats) {
      cases.push_back({.name = "heads_" + std::to_string(heads) + "_group_" +
                               std::to_string(groups[n % 9]) + "_" + format_name(format),
                       .format = format,
                       .lengths = {16 * 37 + 3, 0, 47, 260, 1700},
                       .head_dim = 128,
                       .num_kv_heads = heads,
                       .group_size = groups[n % 9],
                       .type = ScalarType::kBFloat16});
      ++n;
    }
  }
  for (int block_tokens : {16, 32, 128}) {
    for (const SummaryFormat& format : {kFine, kWide}) {
      cases.push_back({.name = "cache_" + std::to_string(block_tokens) + "_" + format_name(format),
                       .format = format,
                       .lengths = {700, 333},
                       .head_dim = 128,
                       .num_kv_heads = 3,
                       .group_size = 7,
                       .record_block_tokens = block_tokens,
                       .padding = block_tokens == 32 ? 8 : 0});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Model, ScoreCuda, ::testing::ValuesIn(model_shapes()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

INSTANTIATE_TEST_SUITE_P(Formats, ScoreCudaFormat, score_cuda_formats(),
                         [](const auto& tested) { return format_name(tested.param); });

TEST_P(ScoreCudaFormat, WholeAndPaddedRows_HaveNoTilesAndOthersDoNotNotice) {
  Rig rig(plain_case(GetParam(), {500, 90, 0, 1000, 64, 300}, 2, 4));
  rig.rows[0].scored_blocks = 0;
  rig.rows[3].scored_blocks = 0;
  const Scored scored = rig.score();
  check_all(rig, scored);
  expect_batch_invariant(rig, scored);
}

TEST_P(ScoreCudaFormat, NothingToScore_TouchesNothing) {
  Rig rig(plain_case(GetParam(), {500, 0}));
  for (RowPlan& row : rig.rows) row.scored_blocks = 0;
  check_all(rig, rig.score());
}

TEST_P(ScoreCudaFormat, ManyRows_EachFindsItsTiles) {
  std::vector<int> lengths;
  for (int i = 0; i < 1024; ++i)
    lengths.push_back(i % 7 == 0 ? 0 : i % 11 == 0 ? 300 : 16 + i % 40);
  EdgeCase edge = plain_case(GetParam(), lengths, 1, 2);
  edge.head_dim = 64;
  Rig rig(edge);
  const Scored scored = rig.score();
  check_all(rig, scored);
}

// Records of one sequence at the top of a pool of 5 GiB: offsets past 2^32.
TEST_P(ScoreCudaFormat, TopOfABigPool_IsReached) {
  Rig rig(plain_case(GetParam(), {16 * 70 + 3}, 2, 3));
  const RecordCache small = rig.fixture.records();
  RecordCache big = small;
  big.block_stride = 1 << 20;
  big.num_blocks = 5000;
  std::uint8_t* pool = nullptr;
  ASSERT_CUDA(cudaMalloc(&pool, static_cast<std::size_t>(big.num_blocks * big.block_stride)));
  const std::int64_t lift = big.num_blocks - small.num_blocks;
  for (std::int64_t block = 0; block < small.num_blocks; ++block) {
    ASSERT_CUDA(cudaMemcpy(
        pool + (lift + block) * big.block_stride, small.data + block * small.block_stride,
        static_cast<std::size_t>(2 * small.record_bytes), cudaMemcpyHostToDevice));
  }
  rig.edit_table = [&](std::vector<std::int32_t>& table, std::int64_t) {
    for (std::int32_t& id : table) id += id < 0 ? 0 : static_cast<std::int32_t>(lift);
  };
  check_all(rig, rig.score(pool, big));
  cudaFree(pool);
}

// Enough tiles that the ring goes around more than once and that tickets deal out some of them.
TEST_P(ScoreCudaFormat, ManyTiles_AreTheReferences) {
  EdgeCase edge = plain_case(GetParam(), {16 * 16 * 20 + 16 * 5, 16 * 16 * 30}, 4, 2);
  edge.head_dim = 64;
  Rig rig(edge, 24);
  const Scored scored = rig.score();
  check_all(rig, scored);
  expect_equal(scored, rig.score());
}

}  // namespace
}  // namespace locks::testing
