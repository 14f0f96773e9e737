// What select_attend did with a scene: the pages taken are exactly those of a host reference with
// the same float arithmetic, outputs are near those of a double-precision one, counters are right,
// and all of it is the same from run to run.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "support/select_attend_config.h"
#include "support/select_attend_masses.h"
#include "support/select_attend_scene.h"

namespace locks::testing {

using detail::SelectAttendCut;

inline const std::vector<SelectAttendCut>& all_cuts() {
  static const std::vector<SelectAttendCut> cuts = {{512, 16}, {512, 13}, {512, 8}, {512, 4},
                                                    {512, 3},  {512, 2},  {512, 1}, {256, 8},
                                                    {256, 7},  {256, 4},  {256, 2}, {256, 1}};
  return cuts;
}

inline std::string cut_name(const SelectAttendCut& cut) {
  return std::to_string(cut.threads) + "x" + std::to_string(cut.cluster);
}

// Weights are rounded to the cache's type before the second product, by up to 2^-9 or 2^-12 each;
// values of random sign make outputs smaller than their terms, which costs a factor, here 2. A bf16
// or fp16 output rounds once more.
inline double output_bound(const SceneConfig& c) {
  const auto unit = [](ScalarType type) {
    return type == ScalarType::kBFloat16 ? 0x1p-8 : type == ScalarType::kFloat16 ? 0x1p-11 : 0.0;
  };
  return unit(c.cache) + unit(c.output) + 1e-4;
}

inline bool check_sets(const SelectAttendScene& scene, const SceneResult& result,
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

inline void check_outputs(const SelectAttendScene& scene, const SceneResult& result,
                          const std::vector<SceneMasses::Choice>& choices,
                          const std::string& label) {
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

inline void check_counters(const SelectAttendScene& scene, const SceneResult& result,
                           const std::vector<SceneMasses::Choice>& choices,
                           const std::string& label) {
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

inline void run(SelectAttendScene& scene, const SelectAttendCut& cut) {
  scene.poison();
  ASSERT_CUDA(launch_select_attend(scene.arguments(), cut, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
}

// Launches with every cut and checks all there is to check.
inline void check_scene(const SceneConfig& config,
                        const std::vector<SelectAttendCut>& cuts = all_cuts()) {
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

}  // namespace locks::testing
