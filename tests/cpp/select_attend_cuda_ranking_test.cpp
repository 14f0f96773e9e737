// select_attend on the GPU: which pages it takes, of masses that are hard to rank. Needs a device.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/select_attend_check.h"

namespace locks::testing {
namespace {

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

// Counts of one bin that a message has no room for, in one CTA of a cluster, while the other has
// none: their lower 16 bits would tell of just the pages that are wanted, and all of the bin would
// be taken. And the largest count that there is room for.
TEST(SelectAttendCuda, Ranking_CountsPast16Bits) {
  constexpr int kLength = 1048576, kBudget = 512;
  constexpr int kWanted = kBudget - (16 + 64) / 4;  // besides the pages that are always read
  for (const int count : {0xFFFF, 0x10000 + kWanted}) {
    // Equal masses in every other unit of 32 pages, which the first of two CTAs has. Pages without
    // mass are counted in no bin.
    const auto mass = [count](int, int, int page, Random&) {
      const int among = page / 64 * 32 + page % 32 - 32;
      return page % 64 < 32 && among >= 0 && among < count ? 1.0f : 0.0f;
    };
    check_scene(ranking("bin_of_" + std::to_string(count), kLength, kBudget, mass, 1),
                {{512, 1}, {512, 2}, {256, 1}, {256, 4}});
  }
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

// More pages than a list holds: attention walks over the keys, which tiles must not lie upon. Heads
// of 128 channels and more: of smaller ones, all warps have a place for their tile elsewhere. With
// more than 8 heads a second pass walks over what the first has left.
TEST(SelectAttendCuda, Walk_WithoutMask) {
  for (const auto& [group, head_dim] : {std::pair{3, 128}, {20, 128}, {9, 256}}) {
    SceneConfig c = ranking("walk_" + std::to_string(group) + "_" + std::to_string(head_dim),
                            150000, 4000, scattered_mass, group);
    c.head_dim = head_dim;
    c.has_mask = false;
    c.check_attention = true;
    check_scene(c, {{512, 2}, {256, 3}});
  }
}

}  // namespace
}  // namespace locks::testing
