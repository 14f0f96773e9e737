// select_attend on the GPU, on masses and sums made here: the pages taken are exactly those of a
// host reference with the same float arithmetic, outputs are near those of a double-precision one.
// Needs a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "support/select_attend_config.h"
#include "support/select_attend_masses.h"
#include "support/select_attend_scene.h"
#include "support/select_attend_timing.h"

namespace locks::testing {
namespace {

using detail::SelectAttendCut;

const std::vector<SelectAttendCut>& all_cuts() {
  static const std::vector<SelectAttendCut> cuts = {{512, 16}, {512, 13}, {512, 8}, {512, 4},
                                                    {512, 3},  {512, 2},  {512, 1}, {256, 8},
                                                    {256, 7},  {256, 4},  {256, 2}, {256, 1}};
  return cuts;
}

std::string cut_name(const SelectAttendCut& cut) {
  return std::to_string(cut.threads) + "x" + std::to_string(cut.cluster);
}

// Weights are rounded to the cache's type before the second product, by up to 2^-9 or 2^-12 each;
// values of random sign make outputs smaller than their terms, which costs a factor, here 2. A bf16
// or fp16 output rounds once more.
double output_bound(const SceneConfig& c) {
  const auto unit = [](ScalarType type) {
    return type == ScalarType::kBFloat16 ? 0x1p-8 : type == ScalarType::kFloat16 ? 0x1p-11 : 0.0;
  };
  return unit(c.cache) + unit(c.output) + 1e-4;
}

bool check_sets(const SelectAttendScene& scene, const SceneResult& result,
                std::vector<SceneMasses::Choice>& choices, const std::string& label) {
  const SceneConfig& c = scene.config();
  choices.clear();
  bool good = true;
  for (int row = 0; row < c.num_rows(); ++row) {
    for (int head = 0; head < c.kv_heads; ++head) {
      choices.push_back(scene.masses().choose(row, head));
      if (!c.has_mask) continue;  // outputs and counters tell what was taken
      const auto& taken = choices.back().taken;
      const std::uint8_t* mask =
          result.selected.data() + (row * c.kv_heads + head) * scene.mask_pages();
      std::int64_t wrong = 0, first = -1;
      for (std::int64_t p = 0; p < scene.mask_pages(); ++p) {
        const int expected =
            p < static_cast<std::int64_t>(taken.size()) ? taken[static_cast<std::size_t>(p)] : 0;
        if (mask[p] != expected) {
          if (wrong++ == 0) first = p;
        }
      }
      if (wrong != 0) {
        good = false;
        std::int64_t has = 0;
        for (std::int64_t p = 0; p < scene.mask_pages(); ++p) has += mask[p] == 1 ? 1 : 0;
        ADD_FAILURE() << c.name << " " << label << " row " << row << " head " << head << ": "
                      << wrong << " pages differ of " << taken.size() << ", first " << first
                      << " is " << int{mask[first]} << "; taken " << has << ", expected "
                      << std::accumulate(taken.begin(), taken.end(), std::int64_t{0});
      }
    }
  }
  return good;
}

void check_outputs(const SelectAttendScene& scene, const SceneResult& result,
                   const std::vector<SceneMasses::Choice>& choices, const std::string& label) {
  const SceneConfig& c = scene.config();
  const auto d = static_cast<std::size_t>(c.head_dim);
  double worst = 0, worst_lse = 0;
  int failures = 0;
  for (int row = 0; row < c.num_rows(); ++row) {
    for (int head = 0; head < c.num_heads(); ++head) {
      const auto exact = scene.attend(
          row, head, choices[static_cast<std::size_t>(row * c.kv_heads + head / c.group)].taken);
      const float* out = result.output.data() +
                         static_cast<std::size_t>(row) * scene.head_channels() +
                         static_cast<std::size_t>(head) * d;
      double error = 0, size = 0;
      for (std::size_t i = 0; i < d; ++i) {
        error += (out[i] - exact.output[i]) * (out[i] - exact.output[i]);
        size += exact.output[i] * exact.output[i];
      }
      const double relative = size > 0 ? std::sqrt(error / size) : std::sqrt(error);
      const float lse = result.lse[static_cast<std::size_t>(row * c.num_heads() + head)];
      const double lse_error = !c.has_lse                ? (std::isnan(lse) ? 0 : 1)
                               : exact.lse == -kInfinity ? (lse == -kInfinity ? 0 : 1)
                                                         : std::abs(lse - exact.lse);
      if (!(relative <= output_bound(c)) || !(lse_error <= 1e-4)) {
        if (++failures <= 3) {
          ADD_FAILURE() << c.name << " " << label << " row " << row << " head " << head
                        << ": relative L2 error " << relative << " of " << output_bound(c)
                        << ", lse " << lse << " expected " << exact.lse << ", out " << out[0] << " "
                        << out[1] << " " << out[d - 1] << " expected " << exact.output[0] << " "
                        << exact.output[1] << " " << exact.output[d - 1];
        }
      }
      worst = std::max(worst, relative);
      worst_lse = std::max(worst_lse, lse_error);
    }
  }
  std::printf("  %s %s: worst relative L2 %.2e, lse %.1e\n", c.name.c_str(), label.c_str(), worst,
              worst_lse);
}

void check_counters(const SelectAttendScene& scene, const SceneResult& result,
                    const std::vector<SceneMasses::Choice>& choices, const std::string& label) {
  const SceneConfig& c = scene.config();
  const auto a = scene.arguments();
  std::vector<std::int64_t> want(kNumCudaCounters, 0);
  for (int row = 0; row < c.num_rows(); ++row) {
    const RowPlan& plan = scene.masses().plan()[static_cast<std::size_t>(row)];
    if (plan.length == 0) continue;
    for (int head = 0; head < c.kv_heads; ++head) {
      const auto& choice = choices[static_cast<std::size_t>(row * c.kv_heads + head)];
      const auto pages = std::accumulate(choice.taken.begin(), choice.taken.end(), std::int64_t{0});
      const std::int64_t tokens =
          pages * c.page_tokens -
          (std::int64_t{scene.masses().pages_of(row)} * c.page_tokens - plan.length);
      want[detail::kPagesRead] += pages;
      want[detail::kRecordsRead] += plan.scored_blocks;
      want[detail::kBytesRead] +=
          tokens * c.head_dim * 4 + std::int64_t{plan.scored_blocks} * a.layout.record_bytes;
      want[detail::kBytesDense] += std::int64_t{plan.length} * c.head_dim * 4;
      want[detail::kNonfinitePages] += choice.bad_pages;
      if (head == 0) {
        want[pages == scene.masses().pages_of(row) ? detail::kDenseRows : detail::kSparseRows] += 1;
        want[detail::kRaisedBudgets] += plan.raised;
      }
    }
  }
  for (int i = 0; i < kNumCudaCounters; ++i) {
    const auto is = static_cast<std::int64_t>(result.counters[static_cast<std::size_t>(i)]);
    const std::int64_t should = want[static_cast<std::size_t>(i)];
    if (i == detail::kBytesUnused) {
      // Each CTA may bring twice its even share of the budget, and a few pages more.
      std::int64_t most = 0;
      for (const SceneRow& row : c.rows) most += row.budget_pages + 16 * 16;
      EXPECT_GE(is, 0) << c.name << " " << label;
      EXPECT_LE(is, most * c.kv_heads * c.page_tokens * c.head_dim * 4) << c.name << " " << label;
    } else {
      EXPECT_EQ(is, should) << c.name << " " << label << " counter " << i;
    }
  }
}

void run(SelectAttendScene& scene, const SelectAttendCut& cut) {
  scene.poison();
  ASSERT_CUDA(launch_select_attend(scene.arguments(), cut, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
}

// Launches with every cut and checks all there is to check.
void check_scene(const SceneConfig& config, const std::vector<SelectAttendCut>& cuts = all_cuts()) {
  SelectAttendScene scene(config);
  bool first = true;
  for (const SelectAttendCut& cut : cuts) {
    const std::string label = cut_name(cut);
    run(scene, cut);
    if (::testing::Test::HasFatalFailure()) {
      std::printf("  %s %s: launch failed\n", config.name.c_str(), label.c_str());
      std::exit(1);  // the device is lost: nothing after this would mean anything
    }
    const SceneResult result = scene.download();
    std::vector<SceneMasses::Choice> choices;
    if (!check_sets(scene, result, choices, label)) continue;
    check_counters(scene, result, choices, label);
    if (config.check_attention || first) check_outputs(scene, result, choices, label);
    run(scene, cut);
    const SceneResult again = scene.download();
    EXPECT_EQ(
        std::memcmp(result.raw_output.data(), again.raw_output.data(), again.raw_output.size()), 0)
        << config.name << " " << label << ": outputs differ from run to run";
    first = false;
  }
}

const std::vector<SelectAttendCut> kFewCuts = {{512, 16}, {256, 4}, {256, 1}};

TEST(SelectAttendCuda, OneRow_AllCuts) { check_scene({.name = "one_row", .rows = {{8192, 128}}}); }

TEST(SelectAttendCuda, WholeAndPaddedRows) {
  check_scene({.name = "whole",
               .rows = {{1, 0}, {0, 0}, {3, 0}, {16, 0}, {17, 0}, {100, 0}, {1000, 0}, {2500, 0}}});
}

TEST(SelectAttendCuda, MixedRows_UnfinishedPagesAndBlocks) {
  check_scene(
      {.name = "mixed",
       .rows = {{4097, 64}, {0, 0}, {777, 0}, {2000, 30}, {5003, 400}, {1234, 24}, {333, 22}},
       .has_lse = false});
}

// Few launches of few CTAs, for tools that slow a kernel down a thousand times.
TEST(SelectAttendCuda, SmallRows) {
  check_scene({.name = "small",
               .rows = {{613, 40}, {40, 0}, {0, 0}},
               .kv_heads = 1,
               .group = 2,
               .head_dim = 64},
              {{512, 16}, {256, 8}, {256, 3}, {256, 1}});
}

// Where nobody asks for the mask, tiles lie in the place of the keys too: of so many pages in so
// few CTAs, every warp has one.
TEST(SelectAttendCuda, SmallRows_WithoutMask) {
  check_scene({.name = "small_without_mask",
               .rows = {{613, 80}, {40, 0}, {0, 0}},
               .kv_heads = 1,
               .group = 2,
               .has_mask = false},
              {{512, 1}, {256, 2}, {256, 1}});
}

TEST(SelectAttendCuda, PageSizes) {
  for (const int page_tokens : {8, 16}) {
    check_scene({.name = "page_" + std::to_string(page_tokens),
                 .rows = {{4111, 300 / page_tokens}, {2048, 1000 / page_tokens}, {999, 0}},
                 .page_tokens = page_tokens});
  }
}

TEST(SelectAttendCuda, HeadDims) {
  for (const int d : {64, 80, 96, 128, 192, 256}) {
    for (const ScalarType type : {ScalarType::kBFloat16, ScalarType::kFloat16}) {
      check_scene({.name = "head_dim_" + std::to_string(d) +
                           (type == ScalarType::kBFloat16 ? "_bf16" : "_fp16"),
                   .rows = {{3001, 100}, {600, 0}},
                   .group = 3,
                   .head_dim = d,
                   .cache = type,
                   .query = type,
                   .output = d == 80   ? ScalarType::kBFloat16
                             : d == 96 ? ScalarType::kFloat16
                                       : ScalarType::kFloat32},
                  kFewCuts);
    }
  }
}

TEST(SelectAttendCuda, Groups) {
  for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 71}) {
    check_scene({.name = "group_" + std::to_string(group),
                 .rows = {{2500, 150}, {700, 0}},
                 .group = group,
                 .head_dim = 64},
                kFewCuts);
  }
}

TEST(SelectAttendCuda, Layouts) {
  const RowLayout layouts[] = {RowLayout::kTogether, RowLayout::kSeparate, RowLayout::kTokenMajor,
                               RowLayout::kUnaligned};
  for (const int block_tokens : {16, 48, 128}) {
    for (const RowLayout layout : layouts) {
      check_scene({.name = "layout_" + std::to_string(static_cast<int>(layout)) + "_" +
                           std::to_string(block_tokens),
                   .rows = {{2103, 120}, {517, 0}},
                   .group = 4,
                   .query = ScalarType::kFloat32,
                   .block_tokens = block_tokens,
                   .layout = layout},
                  kFewCuts);
    }
  }
}

// Rows whose pages alone are of interest, chosen by the masses given.
SceneConfig ranking(std::string name, int length, int budget,
                    std::function<float(int, int, int, Random&)> mass, int group = 2) {
  return {.name = std::move(name),
          .rows = {{length, budget}},
          .kv_heads = 1,
          .group = group,
          .head_dim = 64,
          .most_blocks = 300,
          .mass = std::move(mass),
          .check_attention = false};
}

const std::vector<SelectAttendCut> kRankingCuts = {{512, 16}, {512, 8}, {256, 7},
                                                   {256, 4},  {512, 2}, {256, 1}};

TEST(SelectAttendCuda, Ranking_ClusteredInRuns) {
  for (const int run : {8, 64, 500}) {
    check_scene(ranking("runs_" + std::to_string(run), 131072, 512,
                        [run](int, int, int page, Random& random) {
                          return (page / run) % 20 == 7 ? 100 + random.uniform() : random.uniform();
                        }),
                kRankingCuts);
  }
}

TEST(SelectAttendCuda, Ranking_EqualMasses) {
  check_scene(ranking("equal", 65536, 512, [](int, int, int, Random&) { return 1.5f; }),
              kRankingCuts);
  check_scene(ranking("zero", 65536, 512, [](int, int, int, Random&) { return 0.0f; }),
              kRankingCuts);
  check_scene(
      ranking("few_values", 65536, 512,
              [](int, int, int, Random& random) { return static_cast<float>(random.bits() % 8); }),
      kRankingCuts);
  check_scene(ranking("one_value_stands_out", 65536, 512,
                      [](int, int, int page, Random&) { return page == 9999 ? 1e30f : 1e-3f; }),
              kRankingCuts);
}

TEST(SelectAttendCuda, Ranking_BadPages) {
  for (const int every : {2, 50, 1000}) {
    check_scene(ranking("bad_every_" + std::to_string(every), 40000, 600,
                        [every](int, int head, int page, Random& random) {
                          if (page % every == 1 && head == page / every % 2) return kNan;
                          return std::exp(2 * random.normal());
                        }),
                kRankingCuts);
  }
  check_scene(ranking("all_bad", 5000, 300, [](int, int, int, Random&) { return kNan; }),
              kRankingCuts);
  // Exactly as many forced pages as the budget, and one more.
  for (const int extra : {0, 1}) {
    check_scene(ranking("forced_is_budget_plus_" + std::to_string(extra), 8192, 100,
                        [extra](int, int, int page, Random& random) {
                          return page >= 100 && page < 180 + extra ? kNan : random.uniform();
                        }),
                kRankingCuts);
  }
}

TEST(SelectAttendCuda, Ranking_ShiftedTiles) {
  SceneConfig c = ranking("shifted", 60000, 400, [](int, int, int, Random& random) {
    return std::exp(10 * random.normal());
  });
  c.shift = [](int, int head, int tile) { return head == 0 && tile % 40 < 3 ? tile % 40 + 1 : 0; };
  check_scene(c, kRankingCuts);
  c.name = "all_shifted";
  c.shift = [](int, int, int) { return 2; };
  check_scene(c, kRankingCuts);
}

TEST(SelectAttendCuda, Ranking_Budgets) {
  for (const int budget : {21, 22, 40, 150, 600, 1200, 4000, 8190, 8191}) {
    check_scene(ranking("budget_" + std::to_string(budget), 32768, budget, scattered_mass, 3),
                kRankingCuts);
  }
  // All but a few.
  check_scene(ranking("all_but_one", 500, 124, scattered_mass, 1), kRankingCuts);
  check_scene(ranking("sharp", 100000, 512,
                      [](int, int, int, Random& random) { return std::exp(12 * random.normal()); }),
              kRankingCuts);
}

TEST(SelectAttendCuda, Ranking_MillionTokens) {
  for (const int page_tokens : {4, 16}) {
    SceneConfig c = ranking("million_" + std::to_string(page_tokens), 1048576, 2048 / page_tokens,
                            scattered_mass, 3);
    c.page_tokens = page_tokens;
    check_scene(c, {{512, 16}, {256, 8}, {512, 1}});
  }
  check_scene(ranking(
                  "million_equal", 1048575, 512,
                  [](int, int, int page, Random&) { return page < 200000 ? 1.0f : 2.0f; }, 1),
              {{512, 16}, {256, 4}, {512, 1}});  // one CTA counts more in a bin than 16 bits tell
  check_scene(ranking("million_half", 1000000, 125000, scattered_mass, 1), {{512, 16}, {256, 8}});
}

// More keys than shared memory has room for, of few heads and of more than are brought at once.
TEST(SelectAttendCuda, Ranking_KeysMadeAgain) {
  for (const int group : {3, 20}) {
    SceneConfig c = ranking(
        "made_again_" + std::to_string(group), 150000, 512,
        [](int, int, int page, Random& random) {
          return page % 997 == 3 ? kNan : std::exp(2.2f * random.normal());
        },
        group);
    check_scene(c, {{512, 2}, {256, 4}, {256, 3}, {256, 1}});
    c.name += "_shifted";
    c.shift = [](int, int head, int tile) { return head == 0 && tile % 40 < 3 ? tile % 40 : 0; };
    check_scene(c, {{256, 3}});
  }
}

// More pages than a list holds: attention walks over the keys, which tiles must not lie upon.
TEST(SelectAttendCuda, Walk_WithoutMask) {
  for (const int group : {3, 20}) {
    SceneConfig c = ranking("walk_" + std::to_string(group), 150000, 4000, scattered_mass, group);
    c.has_mask = false;
    c.check_attention = true;
    check_scene(c, {{512, 2}, {256, 3}});
  }
}

TEST(SelectAttendCuda, BigPool_OffsetsPass32Bits) {
  SceneConfig c{.name = "big_pool", .rows = {{1500, 60}, {300, 0}}};
  c.first_block = 300000;  // * 16 * 2 * 256 elements
  check_scene(c, kFewCuts);
}

TEST(SelectAttendCuda, BlockIdsOutsideTheCache_AreSkipped) {
  SelectAttendScene scene({.name = "bad_ids", .rows = {{500, 0}}});
  auto a = scene.arguments();
  a.keys.num_blocks = 0;
  for (const SelectAttendCut& cut : kFewCuts) {
    scene.poison();
    ASSERT_CUDA(launch_select_attend(a, cut, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    const SceneResult result = scene.download();
    for (const float x : result.output) ASSERT_EQ(x, 0);
    for (const float x : result.lse) ASSERT_EQ(x, -kInfinity);
  }
}

TEST(SelectAttendCuda, CapturedOnce_ReplaysWithNewLengths) {
  SelectAttendScene scene({.name = "replay", .rows = {{900, 0}, {4000, 80}, {2000, 0}}});
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_CUDA(launch_select_attend(scene.arguments(), stream));
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (const int length : {900, 0, 1, 77, 512}) {
    scene.change_length(0, length);
    scene.poison();
    ASSERT_CUDA(cudaGraphLaunch(replay, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    const SceneResult result = scene.download();
    std::vector<SceneMasses::Choice> choices;
    if (check_sets(scene, result, choices, "replay")) {
      check_outputs(scene, result, choices, "replay " + std::to_string(length));
    }
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(SelectAttendCuda, WhatItCannotServe_IsRefused) {
  SelectAttendScene scene({.name = "refused", .rows = {{100, 0}}});
  auto a = scene.arguments();
  a.keys.type = a.values.type = ScalarType::kFloat32;
  EXPECT_EQ(launch_select_attend(a, nullptr), cudaErrorInvalidValue);
  a = scene.arguments();
  a.values.type = ScalarType::kFloat16;
  EXPECT_EQ(launch_select_attend(a, nullptr), cudaErrorInvalidValue);
  for (const SelectAttendCut cut : {SelectAttendCut{512, 0}, {512, 17}, {256, 9}, {384, 4}}) {
    EXPECT_EQ(launch_select_attend(scene.arguments(), cut, nullptr), cudaErrorInvalidValue);
  }
}

// Timing: --gtest_also_run_disabled_tests --gtest_filter=*Timing*

TEST(SelectAttendCuda, DISABLED_Timing) {
  const TimedCase cases[] = {{"1M x 1", 1, 1000000, 512, 4, 7},
                             {"131072 x 1", 1, 131072, 512, 4, 7},
                             {"131072 x 8", 8, 131072, 512, 4, 7},
                             {"262144 x 7", 7, 262144, 512, 4, 7},
                             {"131072 x 1, 8 heads x 4", 1, 131072, 512, 8, 4},
                             {"whole 2048 x 1", 1, 2048, 0, 4, 7},
                             {"whole 8192 x 1", 1, 8192, 0, 4, 7},
                             {"whole 16384 x 1", 1, 16384, 0, 4, 7},
                             {"whole 8192 x 8", 8, 8192, 0, 4, 7},
                             {"whole 1024 x 64", 64, 1024, 0, 4, 7}};
  for (const TimedCase& c : cases) {
    const TimedStep step(c);
    SelectAttendCut chosen{};
    choose_select_attend_cut(step.arguments(0), chosen);
    std::printf("%-24s chosen %s:", c.name, cut_name(chosen).c_str());
    for (const SelectAttendCut& cut : all_cuts()) {
      // Clusters that cannot all be resident are not worth a look, unless they are small.
      if (c.rows * c.kv_heads * cut.cluster > (cut.threads == 512 ? 132 : 264) && cut.cluster > 1) {
        continue;
      }
      std::printf(" %s %.1f", cut_name(cut).c_str(), step.time(cut));
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace locks::testing
