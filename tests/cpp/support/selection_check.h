// Compares a selection with the reference's sort, allowing for nothing but the rounding of shares.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "select/select_ref.h"
#include "support/compare.h"
#include "support/stage_calls.h"

namespace locks::testing {

// Float shares differ from exact ones by the rounding of the scores' differences, of exp and of the
// sums. Scores s enter as s - s_max: one float rounding of a number of that size, hence the factor.
inline double share_error(const std::vector<float>& scores, int group_size) {
  double size = 1;
  for (float score : scores) {
    if (std::isfinite(score)) size = std::max(size, std::abs(static_cast<double>(score)));
  }
  return (8 * size + 64 + group_size) * kFloatRoundoff;
}

// One KV head: scores [group_size, pages].
inline void check_head_selection(const std::vector<std::int32_t>& actual,
                                 const std::vector<float>& scores, int group_size,
                                 std::int64_t length, int page_tokens, const Budget& budget,
                                 GroupRule rule) {
  const ref::Selection expected =
      ref::select_pages(scores, group_size, length, page_tokens, budget, rule);
  const auto pages = static_cast<std::int32_t>(expected.forced.size());
  ASSERT_EQ(actual.size(), expected.pages.size());
  ASSERT_TRUE(std::is_sorted(actual.begin(), actual.end()));
  ASSERT_TRUE(std::adjacent_find(actual.begin(), actual.end()) == actual.end()) << "repeated page";
  if (actual.empty()) return;
  ASSERT_GE(actual.front(), 0);
  ASSERT_LT(actual.back(), pages);

  std::vector<bool> chosen(static_cast<std::size_t>(pages), false);
  for (std::int32_t page : actual) chosen[static_cast<std::size_t>(page)] = true;
  double least_chosen = INFINITY, most_left = -INFINITY;
  for (std::size_t p = 0; p < chosen.size(); ++p) {
    if (expected.forced[p]) {
      ASSERT_TRUE(chosen[p]) << "page " << p << " has to be read";
    } else if (chosen[p]) {
      least_chosen = std::min(least_chosen, expected.shares[p]);
    } else {
      most_left = std::max(most_left, expected.shares[p]);
    }
  }
  const bool shares = rule == GroupRule::kMeanOfShares;
  const double slack =
      shares ? share_error(scores, group_size) * std::abs(most_left) + 0x1p-120 : 0;
  EXPECT_LE(most_left, least_chosen + slack) << "a page with a larger share was left";

  // Pages whose heads have the same scores have the same share in any arithmetic: the lower page
  // wins.
  auto column = [&](std::size_t page) {
    std::vector<float> values;
    for (int h = 0; h < group_size; ++h) {
      values.push_back(scores[static_cast<std::size_t>(h * pages) + page]);
    }
    return values;
  };
  std::set<std::vector<float>> left;
  for (std::size_t p = 0; p < chosen.size(); ++p) {
    if (expected.forced[p]) continue;
    if (!chosen[p]) {
      left.insert(column(p));
    } else {
      EXPECT_EQ(left.count(column(p)), 0u) << "page " << p << " was taken before a lower one";
    }
  }
}

// All sequences and KV heads, and the counters.
inline void check_selection(PagedFixture& fixture, const std::vector<float>& scores,
                            const Budget& budget, GroupRule rule, const Sets& sets) {
  const EdgeCase& edge = fixture.edge();
  const PageIndex pages = fixture.pages();
  std::int64_t raised_budgets = 0, nonfinite_pages = 0;
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    const int length = edge.lengths[static_cast<std::size_t>(i)];
    bool raised = false;
    ref::budget_pages(budget, length, edge.format.page_tokens, &raised);
    raised_budgets += raised;
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      SCOPED_TRACE(::testing::Message() << "sequence " << i << ", KV head " << h);
      const auto begin =
          scores.begin() + static_cast<std::ptrdiff_t>(pages.begin[i] * fixture.num_query_heads() +
                                                       h * edge.group_size * pages.pages(i));
      const std::vector<float> rows(
          begin, begin + static_cast<std::ptrdiff_t>(edge.group_size * pages.pages(i)));
      check_head_selection(sets.of(pages, edge.num_kv_heads, i, h), rows, edge.group_size, length,
                           edge.format.page_tokens, budget, rule);
      // A budget of all pages asks no score: none is read because of its score.
      if (ref::budget_pages(budget, length, edge.format.page_tokens, nullptr) == pages.pages(i)) {
        continue;
      }
      nonfinite_pages +=
          ref::select_pages(rows, edge.group_size, length, edge.format.page_tokens, budget, rule)
              .nonfinite_pages;
    }
  }
  EXPECT_EQ(sets.counters.raised_budgets, raised_budgets);
  EXPECT_EQ(sets.counters.nonfinite_pages, nonfinite_pages);
}

}  // namespace locks::testing
