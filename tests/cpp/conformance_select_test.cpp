// Page selection, against a full sort in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "select/select_ref.h"
#include "support/compare.h"
#include "support/selection_check.h"
#include "support/stage_calls.h"

namespace locks::testing {
namespace {

const Budget kBudgets[] = {
    Budget::all(),          Budget::tokens(1),       Budget::tokens(96),
    Budget::tokens(130),    Budget::tokens(512),     Budget::tokens(1 << 20),
    Budget::fraction(0.02), Budget::fraction(0.125), Budget::fraction(0.999)};

enum class ScorePattern {
  kNormal,  // all apart
  kTies,    // few values, so that most pages tie with others
  kAllEqual,
  kClustered,  // differences of a few float steps around one value
  kHuge,       // most shares underflow
  kNan,        // a few NaN and infinities
  kAllNan,
};

std::vector<float> make_scores(PagedFixture& fixture, ScorePattern pattern, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  const PageIndex pages = fixture.pages();
  std::vector<float> scores(
      static_cast<std::size_t>(pages.begin[fixture.num_seqs()] * fixture.num_query_heads()));
  for (float& score : scores) {
    const float x = normal(random);
    switch (pattern) {
      case ScorePattern::kNormal:
        score = x;
        break;
      case ScorePattern::kTies:
        score = std::round(x / 3);
        break;
      case ScorePattern::kAllEqual:
        score = 1.25f;
        break;
      case ScorePattern::kClustered:
        score = 8 + std::round(x) * 0x1p-20f;
        break;
      case ScorePattern::kHuge:
        score = x * 500;
        break;
      case ScorePattern::kNan:
        score = random() % 97 == 0    ? NAN
                : random() % 101 == 0 ? INFINITY
                : random() % 89 == 0  ? -INFINITY
                                      : x;
        break;
      case ScorePattern::kAllNan:
        score = NAN;
        break;
    }
  }
  return scores;
}

class SelectConformance : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(SelectConformance, Sets_EqualTheSort) {
  PagedFixture fixture(GetParam());
  const EdgeCase& edge = fixture.edge();
  const PageIndex pages = fixture.pages();
  int n = 0;
  for (ScorePattern pattern :
       {ScorePattern::kNormal, ScorePattern::kTies, ScorePattern::kAllEqual,
        ScorePattern::kClustered, ScorePattern::kHuge, ScorePattern::kNan, ScorePattern::kAllNan}) {
    const std::vector<float> scores = make_scores(fixture, pattern, 5);
    for (const Budget& budget : kBudgets) {
      const GroupRule rule = ++n % 3 == 0 ? GroupRule::kMaxOfScores : GroupRule::kMeanOfShares;
      SCOPED_TRACE(::testing::Message() << "pattern " << static_cast<int>(pattern) << ", budget "
                                        << budget.value << ", rule " << static_cast<int>(rule));
      Sets first;
      for_each_setting([&](const Executor& executor) {
        const Sets sets = call_select(fixture, scores, budget, rule, executor);
        if (first.ids.empty()) {
          first = sets;
          check_selection(fixture, scores, budget, rule, sets);
        }
        EXPECT_TRUE(sets.counts == first.counts);
        for (int i = 0; i < fixture.num_seqs(); ++i) {
          for (int h = 0; h < edge.num_kv_heads; ++h) {
            EXPECT_TRUE(sets.of(pages, edge.num_kv_heads, i, h) ==
                        first.of(pages, edge.num_kv_heads, i, h))
                << "sets differ between CPU levels or numbers of workers";
          }
        }
        EXPECT_EQ(sets.counters.nonfinite_pages, first.counters.nonfinite_pages);
        EXPECT_EQ(sets.counters.raised_budgets, first.counters.raised_budgets);
      });
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Edge, SelectConformance, ::testing::ValuesIn(edge_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

TEST(SelectConformance, BudgetPages_MatchTheirDefinition) {
  for (int page_tokens : {4, 8, 16}) {
    for (std::int64_t length = 0; length < 700; ++length) {
      for (const Budget& budget : kBudgets) {
        bool raised = false, expected_raised = false;
        ASSERT_EQ(budget_pages(budget, length, page_tokens, &raised),
                  ref::budget_pages(budget, length, page_tokens, &expected_raised))
            << "page " << page_tokens << ", length " << length << ", budget " << budget.value;
        ASSERT_EQ(raised, expected_raised)
            << "page " << page_tokens << ", length " << length << ", budget " << budget.value;
      }
      for (std::int64_t page = 0; page < num_pages(length, page_tokens); ++page) {
        ASSERT_EQ(always_read(page, length, page_tokens),
                  ref::always_read(page, length, page_tokens))
            << "page " << page << " of length " << length;
      }
    }
  }
}

// A context of a million tokens with clustered scores: more candidates share a bucket than any
// buffer.
TEST(SelectConformance, MillionTokens_ClusteredScores_EqualTheSort) {
  PagedFixture fixture({.name = "", .lengths = {0}, .num_kv_heads = 1, .group_size = 1});
  const std::int32_t length = 1'000'003;
  SequenceBatch batch = fixture.seqs();
  batch.lengths = &length;
  std::int64_t begin[2];
  const PageIndex pages = build_page_index(batch, 4, begin);
  std::mt19937_64 random(3);
  std::vector<float> scores(static_cast<std::size_t>(begin[1]));
  for (float& score : scores) score = 3 + static_cast<float>(random() % 5) * 0x1p-21f;
  Sets sets{std::vector<std::int32_t>(scores.size(), -1), {-1}, {}};
  const Workspace workspace(select_workspace_bytes(batch, pages, 1));
  const Status status = select_pages(fixture.attention(), scores.data(), batch, pages,
                                     Budget::tokens(4096), GroupRule::kMeanOfShares, sets.view(),
                                     &sets.counters, workspace.data(), serial_executor());
  ASSERT_TRUE(status.ok()) << status.message();
  check_head_selection({sets.ids.begin(), sets.ids.begin() + sets.counts[0]}, scores, 1, length, 4,
                       Budget::tokens(4096), GroupRule::kMeanOfShares);
}

}  // namespace
}  // namespace locks::testing
