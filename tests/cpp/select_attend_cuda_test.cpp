// select_attend on the GPU, on masses and sums made here: shapes, layouts, launches. Needs a
// device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "support/select_attend_check.h"
#include "support/select_attend_timing.h"

namespace locks::testing {
namespace {

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
