// Page scores of the other selectors against their formulas in double.
#include "locks/baselines.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "locks/locks.h"
#include "support/compare.h"
#include "support/paged_fixture.h"
#include "support/text.h"

namespace locks::testing {
namespace {

// Those whose formula is here; baselines_quantised_test.cpp has the two that keep codes.
constexpr Selector kEstimates[] = {Selector::kOracle, Selector::kQuest, Selector::kMeanStd,
                                   Selector::kCentroid};

double fp16(double value) { return round_to(ScalarType::kFloat16, value); }

// The formula of the header, over the `count` keys at `keys`.
double expected_score(Selector selector, const Vector& query, const double* keys,
                      std::int64_t count) {
  const std::size_t d = query.size();
  double exact = 0;
  std::vector<double> low(d, 1e300), high(d, -1e300), mean(d), variance(d);
  for (std::int64_t t = 0; t < count; ++t) {
    double logit = 0;
    for (std::size_t c = 0; c < d; ++c) {
      const double key = keys[static_cast<std::size_t>(t) * d + c];
      logit += query[c] * key;
      low[c] = std::min(low[c], key);
      high[c] = std::max(high[c], key);
      mean[c] += key / static_cast<double>(count);
    }
    exact += std::exp(logit);
  }
  double quest = 0;
  double flat = std::log(static_cast<double>(count));
  double spread = 0;
  for (std::size_t c = 0; c < d; ++c) {
    for (std::int64_t t = 0; t < count; ++t) {
      const double residual = keys[static_cast<std::size_t>(t) * d + c] - mean[c];
      variance[c] += residual * residual / static_cast<double>(count);
    }
    quest += std::max(query[c] * fp16(low[c]), query[c] * fp16(high[c]));
    flat += query[c] * fp16(mean[c]);
    spread += 0.5 * query[c] * query[c] * fp16(variance[c]);
  }
  switch (selector) {
    case Selector::kQuest:
      return quest;
    case Selector::kMeanStd:
      return flat + spread;
    case Selector::kCentroid:
      return flat;
    default:
      return std::log(exact);
  }
}

std::vector<float> scores_of(PagedFixture& fixture, Selector selector, const Executor& executor) {
  const PageIndex pages = fixture.pages();
  std::vector<float> scores(
      static_cast<std::size_t>(pages.begin[fixture.num_seqs()] * fixture.num_query_heads()));
  EXPECT_TRUE(score_baseline(selector, fixture.edge().format, fixture.attention(), fixture.query(),
                             fixture.keys(), fixture.seqs(), pages, scores.data(), executor)
                  .ok());
  return scores;
}

TEST(Baselines, Names_RoundTrip) {
  for (const char* name : {"locks", "oracle", "quest", "mean_std", "centroid", "int3",
                           "shared_low_rank", "shadowkv", "rocketkv", "snapkv", "kvzip"}) {
    const Result<Selector> selector = parse_selector(name);
    ASSERT_TRUE(selector.ok());
    EXPECT_STREQ(selector_name(selector.value()), name);
  }
  const Status status = parse_selector("Quest").status();
  EXPECT_NE(status.message().find("\"Quest\", expected locks, oracle"), std::string::npos);
}

TEST(Baselines, Bytes_AsPublished) {
  EXPECT_EQ(selector_bytes_per_block(Selector::kQuest, kWide, 64), 256);
  EXPECT_EQ(selector_bytes_per_block(Selector::kQuest, kWide, 256), 1024);
  EXPECT_EQ(selector_bytes_per_block(Selector::kMeanStd, kFine, 64), 4 * 256);
  EXPECT_EQ(selector_bytes_per_block(Selector::kCentroid, kWide, 64), 128);
  EXPECT_EQ(selector_bytes_per_block(Selector::kLocks, kFine, 64), 288);
  EXPECT_EQ(selector_bytes_per_block(Selector::kOracle, kFine, 64), 0);
}

TEST(Baselines, OnlyQuest_RanksByLargestScore) {
  EXPECT_EQ(group_rule(Selector::kQuest), GroupRule::kMaxOfScores);
  for (Selector selector : {Selector::kLocks, Selector::kOracle, Selector::kMeanStd,
                            Selector::kCentroid, Selector::kInt3, Selector::kSharedLowRank}) {
    EXPECT_EQ(group_rule(selector), GroupRule::kMeanOfShares);
  }
}

TEST(Baselines, Scores_MatchFormulas) {
  for (const SummaryFormat& format : {kFine, kCompact, kWide}) {
    PagedFixture fixture({.name = "baselines",
                          .format = format,
                          .lengths = {203, 0, 16, 2100, 1},
                          .head_dim = 80,
                          .group_size = 9,
                          .type = ScalarType::kBFloat16});
    const PageIndex pages = fixture.pages();
    for (Selector selector : kEstimates) {
      SCOPED_TRACE(format_name(format) + " " + selector_name(selector));
      const std::vector<float> scores = scores_of(fixture, selector, serial_executor());
      EXPECT_EQ(scores, scores_of(fixture, selector, thread_executor(3)));
      std::size_t next = 0;
      for (int seq = 0; seq < fixture.num_seqs(); ++seq) {
        const std::int64_t length = fixture.edge().lengths[static_cast<std::size_t>(seq)];
        for (int head = 0; head < fixture.num_query_heads(); ++head) {
          Vector query = fixture.dense_query(seq, head);
          for (double& x : query) x *= static_cast<double>(fixture.attention().scale);
          const Vector& keys = fixture.dense_keys(seq, head / 9);
          for (std::int64_t page = 0; page < pages.pages(seq); ++page) {
            const std::int64_t first = page * format.page_tokens;
            const double expected =
                expected_score(selector, query, keys.data() + first * 80,
                               std::min<std::int64_t>(format.page_tokens, length - first));
            // Logits stay below 100; statistics may round to the neighbouring fp16.
            ASSERT_TRUE(near(static_cast<double>(scores[next]), expected,
                             {selector == Selector::kOracle ? 2e-5 : 4e-3, 1e-3, "fp16"}))
                << "sequence " << seq << ", head " << head << ", page " << page;
            ++next;
          }
        }
      }
    }
  }
}

TEST(Baselines, Bounds_HoldOnEveryPage) {
  PagedFixture fixture({.name = "bounds", .format = kWide, .lengths = {1600}});
  const auto exact = scores_of(fixture, Selector::kOracle, serial_executor());
  const auto quest = scores_of(fixture, Selector::kQuest, serial_executor());
  const auto centroid = scores_of(fixture, Selector::kCentroid, serial_executor());
  for (std::size_t i = 0; i < exact.size(); ++i) {
    EXPECT_GE(quest[i] + std::log(16.0f), exact[i] - 0.02f);  // an upper bound of each logit
    EXPECT_LE(centroid[i], exact[i] + 0.02f);                 // Jensen
  }
}

TEST(Baselines, NanOrInfiniteKey_PoisonsItsPageAlone) {
  for (KeyPattern pattern : {KeyPattern::kNanKey, KeyPattern::kInfKey}) {
    PagedFixture fixture({.name = "nan", .lengths = {400}, .group_size = 1, .keys = pattern});
    for (Selector selector : {Selector::kOracle, Selector::kQuest, Selector::kMeanStd,
                              Selector::kCentroid, Selector::kInt3, Selector::kSharedLowRank}) {
      SCOPED_TRACE(selector_name(selector));
      const std::vector<float> scores = scores_of(fixture, selector, serial_executor());
      for (int head = 0; head < 2; ++head) {
        const Vector& keys = fixture.dense_keys(0, head);
        for (std::size_t page = 0; page < 100; ++page) {
          const bool finite =
              std::all_of(keys.begin() + static_cast<std::ptrdiff_t>(page * 256),
                          keys.begin() + static_cast<std::ptrdiff_t>(page * 256 + 256),
                          [](double key) { return std::isfinite(key); });
          EXPECT_EQ(std::isfinite(scores[static_cast<std::size_t>(head) * 100 + page]), finite);
        }
      }
    }
  }
}

TEST(Baselines, BadInput_IsNamed) {
  PagedFixture fixture({.name = "errors", .lengths = {40}});
  std::vector<float> scores(60);
  const auto message = [&](Selector selector, PagedTensor keys, PageIndex pages, float* target) {
    return score_baseline(selector, fixture.edge().format, fixture.attention(), fixture.query(),
                          keys, fixture.seqs(), pages, target, serial_executor())
        .message();
  };
  const PageIndex pages = fixture.pages();
  EXPECT_EQ(message(Selector::kQuest, fixture.keys(), pages, scores.data()), "");
  EXPECT_TRUE(contains(message(Selector::kLocks, fixture.keys(), pages, scores.data()),
                       "selector = locks"));
  EXPECT_TRUE(contains(message(Selector::kSnapKv, fixture.keys(), pages, scores.data()),
                       "selector = snapkv: it chooses tokens"));
  EXPECT_TRUE(
      contains(message(Selector::kQuest, fixture.keys(), pages, nullptr), "scores is null"));
  PagedTensor keys = fixture.keys();
  keys.num_kv_heads = 3;
  EXPECT_TRUE(contains(message(Selector::kQuest, keys, pages, scores.data()), "num_kv_heads = 3"));
  EXPECT_TRUE(contains(message(Selector::kQuest, fixture.keys(), {pages.begin, 8}, scores.data()),
                       "has 10, expected 5"));
  EXPECT_TRUE(contains(
      score_baseline(Selector::kQuest, kCompact, fixture.attention(), fixture.query(),
                     fixture.keys(), fixture.seqs(), pages, scores.data(), serial_executor())
          .message(),
      "page_tokens = 4, expected the format's 8"));
}

}  // namespace
}  // namespace locks::testing
