// The select stage against a full sort in double, at every CPU level.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "locks/locks.h"
#include "support/executors.h"
#include "support/index.h"
#include "support/paged_fixture.h"

namespace locks {
namespace {

using namespace testing;

using Pages = std::vector<std::int32_t>;

struct Selector {
  int kv_heads = 1;
  int group = 1;
  int page_tokens = 4;
  GroupRule rule = GroupRule::kMeanOfShares;
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> begin;
  SelectCounters counters;

  AttentionParams attention() const { return {kv_heads * group, kv_heads, 64, 0.125f}; }

  // Ragged [sequence, KV head].
  std::vector<Pages> run(const std::vector<float>& scores, const Budget& budget,
                         const Executor& executor = serial_executor()) {
    const SequenceBatch seqs{static_cast<int>(lengths.size()), lengths.data(), {}, {}};
    begin.assign(lengths.size() + 1, 0);
    const PageIndex pages = build_page_index(seqs, page_tokens, begin.data());
    std::vector<std::int32_t> ids(at(begin.back() * kv_heads) + 1, -7);
    std::vector<std::int32_t> counts(lengths.size() * at(kv_heads), -7);
    std::vector<std::byte> workspace(select_workspace_bytes(seqs, pages, executor.num_workers),
                                     std::byte{0xFF});
    counters = {};
    const Status status =
        select_pages(attention(), scores.data(), seqs, pages, budget, rule,
                     {ids.data(), counts.data()}, &counters, workspace.data(), executor);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(ids.back(), -7);
    std::vector<Pages> sets;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      for (int h = 0; h < kv_heads; ++h) {
        const std::int64_t count = begin[i + 1] - begin[i];
        const auto first = ids.begin() + (begin[i] * kv_heads + h * count);
        sets.emplace_back(first, first + counts[i * at(kv_heads) + at(h)]);
      }
    }
    return sets;
  }
};

std::vector<float> random_scores(std::size_t count, unsigned seed, float spread = 3) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> x(count);
  for (float& value : x) value = normal(random);
  return x;
}

// Shares in double; NaN where some head is not finite.
std::vector<double> values_of(const std::vector<float>& scores, int group, std::size_t pages,
                              GroupRule rule) {
  std::vector<double> values(pages, 0);
  for (int h = 0; h < group; ++h) {
    for (std::size_t p = 0; p < pages; ++p) {
      if (!std::isfinite(scores[at(h) * pages + p])) values[p] = NAN;
    }
  }
  for (int h = 0; h < group; ++h) {
    double total = 0;
    const float* row = scores.data() + at(h) * pages;
    double largest = -INFINITY;
    for (std::size_t p = 0; p < pages; ++p) {
      if (!std::isnan(values[p])) largest = std::max(largest, static_cast<double>(row[p]));
    }
    for (std::size_t p = 0; p < pages; ++p) {
      if (!std::isnan(values[p])) total += std::exp(static_cast<double>(row[p]) - largest);
    }
    for (std::size_t p = 0; p < pages; ++p) {
      const auto score = static_cast<double>(row[p]);
      if (rule == GroupRule::kMeanOfShares) {
        values[p] += std::exp(score - largest) / total / group;
      } else {
        values[p] = h == 0 && !std::isnan(values[p]) ? score
                    : values[p] < score              ? score
                                                     : values[p];
      }
    }
  }
  return values;
}

// The set must hold the forced pages, be as large as it should, ascend, and hold no page that is
// worse than one left out. "Worse" allows shares that differ by less than the relative error of a
// float share: exp 2.5e-7, sums of 16-page lanes and the mean over the group a few 1e-7 more.
void check_set(const Pages& set, const std::vector<double>& values, std::int64_t length,
               int page_tokens, const Budget& budget, GroupRule rule) {
  const auto pages = static_cast<std::int64_t>(values.size());
  std::vector<bool> chosen(values.size());
  for (std::size_t i = 0; i < set.size(); ++i) {
    ASSERT_TRUE(set[i] >= 0 && set[i] < pages && (i == 0 || set[i - 1] < set[i]));
    chosen[at(set[i])] = true;
  }
  std::int64_t forced = 0;
  double worst_in = INFINITY;
  double best_out = -INFINITY;
  for (std::int64_t p = 0; p < pages; ++p) {
    if (always_read(p, length, page_tokens) || std::isnan(values[at(p)])) {
      ++forced;
      ASSERT_TRUE(chosen[at(p)]) << "forced page " << p;
    } else if (chosen[at(p)]) {
      worst_in = std::min(worst_in, values[at(p)]);
    } else {
      best_out = std::max(best_out, values[at(p)]);
    }
  }
  ASSERT_EQ(static_cast<std::int64_t>(set.size()),
            std::max(forced, budget_pages(budget, length, page_tokens, nullptr)));
  const double slack = rule == GroupRule::kMeanOfShares ? 1e-6 * best_out : 0;
  ASSERT_GE(worst_in, best_out - slack);
}

TEST(SelectPages, RandomScores_MatchAFullSort) {
  for (int group : {1, 3, 5, 7, 8, 16, 71}) {
    for (int page_tokens : {4, 8, 16}) {
      for (GroupRule rule : {GroupRule::kMeanOfShares, GroupRule::kMaxOfScores}) {
        Selector selector{2, group, page_tokens, rule, {3000, 0, 129, 4099}, {}, {}};
        selector.run({}, Budget::all());  // fills `begin`
        auto scores = random_scores(at(selector.begin.back() * 2 * group), 5);
        const auto place = [&](std::size_t seq, int head, std::int64_t page) {
          return at(selector.begin[seq] * 2 * group +
                    head * (selector.begin[seq + 1] - selector.begin[seq]) + page);
        };
        scores[place(0, 0, 50)] = NAN;
        scores[place(0, 2 * group - 1, 60)] = INFINITY;
        scores[place(3, group, 0)] = -INFINITY;
        for (const Budget& budget : {Budget::tokens(512), Budget::fraction(0.3)}) {
          std::vector<Pages> first;
          for (CpuLevel level : cpu_levels()) {
            ASSERT_TRUE(set_cpu_level(level).ok());
            const auto sets = selector.run(scores, budget);
            if (first.empty()) first = sets;
            ASSERT_EQ(sets, first) << cpu_level_name(level);
            EXPECT_EQ(selector.run(scores, budget, thread_executor(4)), first);
            EXPECT_EQ(selector.counters.nonfinite_pages, 3);
          }
          for (std::size_t seq = 0; seq < 4; ++seq) {
            const auto pages = at(selector.begin[seq + 1] - selector.begin[seq]);
            for (int h = 0; h < 2; ++h) {
              if (budget_pages(budget, selector.lengths[seq], page_tokens, nullptr) ==
                  static_cast<std::int64_t>(pages)) {
                EXPECT_EQ(first[seq * 2 + at(h)].size(), pages);
                continue;
              }
              const auto* begin = scores.data() + place(seq, h * group, 0);
              const std::vector<float> rows(begin, begin + pages * at(group));
              check_set(first[seq * 2 + at(h)], values_of(rows, group, pages, rule),
                        selector.lengths[seq], page_tokens, budget, rule);
            }
          }
        }
      }
    }
  }
}

TEST(SelectPages, Batch_MatchesEachSequenceAlone) {
  Selector all{1, 4, 4, GroupRule::kMeanOfShares, {5000, 200, 9000, 1, 2049, 8191}, {}, {}};
  all.run({}, Budget::all());
  const auto scores = random_scores(at(all.begin.back() * 4), 8);
  for (const Executor& executor : {serial_executor(), thread_executor(3)}) {
    const auto together = all.run(scores, Budget::tokens(256), executor);
    for (std::size_t i = 0; i < all.lengths.size(); ++i) {
      Selector one{1, 4, 4, GroupRule::kMeanOfShares, {all.lengths[i]}, {}, {}};
      const std::vector<float> rows(scores.begin() + all.begin[i] * 4,
                                    scores.begin() + all.begin[i + 1] * 4);
      EXPECT_EQ(one.run(rows, Budget::tokens(256))[0], together[i]) << i;
    }
  }
}

TEST(SelectPages, PermutedPages_GivePermutedSets) {
  // Distinct shares far apart, so that the order of float additions cannot change a choice.
  const int pages = 600;
  std::vector<float> scores(pages);
  for (int p = 0; p < pages; ++p) scores[at(p)] = static_cast<float>(p) * 0.05f;
  std::mt19937 random(3);
  std::set<float> first;
  for (int round = 0; round < 10; ++round) {
    std::shuffle(scores.begin() + 4, scores.end() - 16, random);  // always-read pages stay
    Selector selector{1, 1, 4, GroupRule::kMeanOfShares, {pages * 4}, {}, {}};
    std::set<float> chosen;
    const Pages set = selector.run(scores, Budget::tokens(400))[0];
    for (std::int32_t p : set) chosen.insert(scores[at(p)]);
    if (first.empty()) first = chosen;
    EXPECT_EQ(chosen, first);
  }
}

TEST(SelectPages, EqualScores_GoToLowerPages) {
  for (GroupRule rule : {GroupRule::kMeanOfShares, GroupRule::kMaxOfScores}) {
    for (float value : {0.0f, -0.0f, -1e30f, 7.5f}) {
      for (CpuLevel level : cpu_levels()) {
        ASSERT_TRUE(set_cpu_level(level).ok());
        Selector selector{1, 2, 4, rule, {4000}, {}, {}};
        const std::vector<float> scores(2000, value);
        Pages expected(44);  // 64 pages in all: 20 always read, the 44 lowest others
        std::iota(expected.begin(), expected.end(), 4);
        expected.insert(expected.begin(), {0, 1, 2, 3});
        for (std::int32_t p = 984; p < 1000; ++p) expected.push_back(p);
        EXPECT_EQ(selector.run(scores, Budget::tokens(256))[0], expected);
      }
    }
  }
}

TEST(SelectPages, TiesAtTheCut_GoToLowerPages) {
  std::vector<float> scores(1000, 1.0f);
  for (int p : {700, 500, 900}) scores[at(p)] = 2.0f;
  scores[10] = 0.0f;
  scores[300] = -0.0f;
  Selector selector{1, 1, 4, GroupRule::kMaxOfScores, {4000}, {}, {}};
  const auto set = selector.run(scores, Budget::tokens(4 * 30))[0];
  const Pages expected = {0,   1,   2,   3,   4,   5,   6,   7,   8,   9,
                          11,  500, 700, 900, 984, 985, 986, 987, 988, 989,
                          990, 991, 992, 993, 994, 995, 996, 997, 998, 999};
  EXPECT_EQ(set, expected);
}

TEST(SelectPages, NonfinitePagesBeyondTheBudget_GrowTheSet) {
  std::vector<float> scores(2 * 1000, 1.0f);
  for (int p = 100; p < 400; ++p) scores[at(1000 + p)] = NAN;
  Selector selector{1, 2, 4, GroupRule::kMeanOfShares, {4000}, {}, {}};
  const auto set = selector.run(scores, Budget::tokens(128))[0];
  EXPECT_EQ(set.size(), 320u);
  EXPECT_EQ(selector.counters.nonfinite_pages, 300);
  std::fill(scores.begin(), scores.end(), NAN);
  EXPECT_EQ(selector.run(scores, Budget::tokens(128))[0].size(), 1000u);
}

TEST(SelectPages, HugeScores_StayInOrder) {
  std::vector<float> scores(1000, -3e38f);
  scores[123] = 3e38f;
  for (GroupRule rule : {GroupRule::kMeanOfShares, GroupRule::kMaxOfScores}) {
    Selector selector{1, 1, 4, rule, {4000}, {}, {}};
    const auto set = selector.run(scores, Budget::tokens(4 * 21))[0];
    EXPECT_EQ(set.size(), 21u);
    EXPECT_EQ(std::count(set.begin(), set.end(), 123), 1);
  }
}

TEST(SelectPages, WholeBudget_TakesEveryPageWithoutReadingScores) {
  Selector selector{2, 3, 8, GroupRule::kMeanOfShares, {0, 1, 88, 4000}, {}, {}};
  const auto sets = selector.run({}, Budget::all());
  for (std::size_t seq = 0; seq < 4; ++seq) {
    for (std::size_t h = 0; h < 2; ++h) {
      Pages expected(at(num_pages(selector.lengths[seq], 8)));
      std::iota(expected.begin(), expected.end(), 0);
      EXPECT_EQ(sets[seq * 2 + h], expected);
    }
  }
  EXPECT_EQ(selector.counters.nonfinite_pages, 0);
  EXPECT_EQ(selector.counters.raised_budgets, 0);
}

TEST(SelectPages, MillionTokens_GiveTheSameSetOnEveryRun) {
  const std::int32_t length = 1 << 20;
  Selector selector{1, 4, 4, GroupRule::kMeanOfShares, {length}, {}, {}};
  const auto scores = random_scores(4 * 262144, 17);
  const auto values = values_of(scores, 4, 262144, GroupRule::kMeanOfShares);
  Pages first;
  for (CpuLevel level : cpu_levels()) {
    ASSERT_TRUE(set_cpu_level(level).ok());
    for (int run = 0; run < 3; ++run) {
      const auto set = selector.run(scores, Budget::tokens(4096), thread_executor(2))[0];
      if (first.empty()) first = set;
      ASSERT_EQ(set, first);
    }
  }
  check_set(first, values, length, 4, Budget::tokens(4096), GroupRule::kMeanOfShares);
}

TEST(SelectPages, RaisedBudgets_CountSequences) {
  Selector selector{2, 1, 4, GroupRule::kMeanOfShares, {4000, 40, 4000, 0}, {}, {}};
  const auto scores = random_scores(2 * 2010, 1);
  const auto sets = selector.run(scores, Budget::tokens(16));
  EXPECT_EQ(selector.counters.raised_budgets, 3);
  EXPECT_EQ(sets[0].size(), 21u);
  EXPECT_EQ(sets[2].size(), 10u);
  EXPECT_EQ(sets[6].size(), 0u);
}

TEST(BudgetPages, Values_RoundAsDocumented) {
  const auto pages = [](const Budget& budget, std::int64_t length, int page_tokens) {
    return budget_pages(budget, length, page_tokens, nullptr);
  };
  EXPECT_EQ(pages(Budget::tokens(512), 8192, 4), 128);
  EXPECT_EQ(pages(Budget::tokens(515), 8192, 4), 128);
  EXPECT_EQ(pages(Budget::tokens(1), 8192, 4), 21);
  EXPECT_EQ(pages(Budget::tokens(1), 8192, 8), 11);
  EXPECT_EQ(pages(Budget::tokens(1), 8192, 16), 6);
  EXPECT_EQ(pages(Budget::tokens(1), 20, 4), 5);
  EXPECT_EQ(pages(Budget::tokens(std::int64_t{1} << 62), 8191, 4), 2048);
  EXPECT_EQ(pages(Budget::all(), 8191, 4), 2048);
  EXPECT_EQ(pages(Budget::all(), 0, 4), 0);
  EXPECT_EQ(pages(Budget::fraction(0.5), 0, 4), 0);
  EXPECT_EQ(pages(Budget::fraction(0.5), 16 * 101, 16), 50);  // 50.5, ties to even
  EXPECT_EQ(pages(Budget::fraction(0.5), 16 * 103, 16), 52);  // 51.5
  EXPECT_EQ(pages(Budget::fraction(0.02), 8192, 4), 41);      // 40.96
  EXPECT_EQ(pages(Budget::fraction(0.999), 8192, 4), 2046);
}

TEST(BudgetPages, Raised_TellsWhetherTheAlwaysReadSetLiftedIt) {
  const auto raised = [](const Budget& budget, std::int64_t length) {
    bool result = true;
    budget_pages(budget, length, 4, &result);
    return result;
  };
  EXPECT_FALSE(raised(Budget::all(), 10));
  EXPECT_FALSE(raised(Budget::tokens(84), 8192));
  EXPECT_TRUE(raised(Budget::tokens(83), 8192));
  EXPECT_FALSE(raised(Budget::tokens(16), 16));
  EXPECT_TRUE(raised(Budget::tokens(12), 16));
  EXPECT_FALSE(raised(Budget::tokens(1), 0));
}

TEST(AlwaysRead, CoversFirstLastAndUnrecordedTokens) {
  for (int page_tokens : {4, 8, 16}) {
    for (std::int64_t length = 0; length < 400; ++length) {
      const std::int64_t pages = num_pages(length, page_tokens);
      std::int64_t count = 0;
      for (std::int64_t p = 0; p < pages; ++p) {
        const std::int64_t end = (p + 1) * page_tokens;
        const bool first = end <= 16;
        const bool last = end > length / page_tokens * page_tokens - 64;
        const bool unrecorded = end > length / 16 * 16;
        ASSERT_EQ(always_read(p, length, page_tokens), first || last || unrecorded)
            << length << " " << p;
        count += first || last || unrecorded;
      }
      ASSERT_LE(count, budget_pages(Budget::tokens(1), length, page_tokens, nullptr));
    }
  }
}

TEST(SelectValidation, NullArrays_AreNamed) {
  const std::int32_t length = 800;
  const SequenceBatch seqs{1, &length, {}, {}};
  std::int64_t begin[2];
  const PageIndex pages = build_page_index(seqs, 4, begin);
  std::vector<std::int32_t> ids(200);
  std::int32_t count = 0;
  const auto message = [&](const SequenceBatch& batch, const PageSets& sets) {
    return select_pages({2, 1, 64, 0.125f}, nullptr, batch, pages, Budget::tokens(120),
                        GroupRule::kMeanOfShares, sets, nullptr, nullptr, serial_executor())
        .message();
  };
  EXPECT_EQ(message(seqs, {}), "select_pages: sets: ids or counts is null");
  EXPECT_EQ(message(seqs, {ids.data(), &count}), "select_pages: scores is null");
  EXPECT_EQ(message({1, nullptr, {}, {}}, {ids.data(), &count}), "lengths: null");
  EXPECT_EQ(message({-1, &length, {}, {}}, {ids.data(), &count}), "num_seqs = -1, expected >= 0");
}

TEST(BudgetValidation, BadValues_AreNamed) {
  EXPECT_TRUE(validate(Budget::all()).ok());
  EXPECT_TRUE(validate(Budget::tokens(1)).ok());
  EXPECT_TRUE(validate(Budget::fraction(0.5)).ok());
  EXPECT_EQ(validate(Budget::tokens(0)).message(),
            "budget: tokens = 0, expected a whole number >= 1");
  for (double value : {-1.0, 1.5, 0.5, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    EXPECT_EQ(validate(Budget{Budget::Kind::kTokens, value}).code(), StatusCode::kInvalidArgument)
        << value;
  }
  for (double value :
       {0.0, 1.0, -0.1, 2.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    EXPECT_EQ(validate(Budget::fraction(value)).code(), StatusCode::kInvalidArgument) << value;
  }
  EXPECT_EQ(validate(Budget::fraction(1.0)).message(),
            "budget: fraction = 1, expected a value in (0, 1); all pages are Budget::all()");

  Selector selector{1, 1, 4, GroupRule::kMeanOfShares, {4000}, {}, {}};
  selector.run({}, Budget::all());
  const SequenceBatch seqs{1, selector.lengths.data(), {}, {}};
  const auto status = [&](int page_tokens, GroupRule rule, const Budget& budget) {
    return select_pages(selector.attention(), nullptr, seqs, {selector.begin.data(), page_tokens},
                        budget, rule, {}, nullptr, nullptr, serial_executor())
        .code();
  };
  EXPECT_EQ(status(5, GroupRule::kMeanOfShares, Budget::tokens(64)), StatusCode::kInvalidArgument);
  EXPECT_EQ(status(4, static_cast<GroupRule>(9), Budget::tokens(64)), StatusCode::kInvalidArgument);
  EXPECT_EQ(status(4, GroupRule::kMeanOfShares, Budget::fraction(1)), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace locks
