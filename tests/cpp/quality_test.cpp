// Retained mass and output error over synthetic traces.
#include "locks/quality.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "locks/locks.h"
#include "support/text.h"

namespace locks {
namespace {

// Keys wander, so that neighbours are alike; a query resembles some key.
struct SyntheticTrace {
  std::vector<float> queries, keys, values;
  std::vector<std::int32_t> positions;
  AttentionTrace view;

  SyntheticTrace(int group_size, int num_steps, int num_tokens, int head_dim) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto d = static_cast<std::size_t>(head_dim);
    const auto tokens = static_cast<std::size_t>(num_tokens);
    const auto steps = static_cast<std::size_t>(num_steps);
    keys.resize(tokens * d);
    values.resize(tokens * d);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      keys[i] = normal(random) + (i < d ? 0.0f : 0.8f * keys[i - d]);
      values[i] = normal(random);
    }
    for (std::size_t t = 0; t < steps; ++t) {
      positions.push_back(num_tokens - num_steps + static_cast<std::int32_t>(t));
    }
    for (std::size_t row = 0; row < static_cast<std::size_t>(group_size) * steps; ++row) {
      const std::size_t like = random() % tokens;
      for (std::size_t c = 0; c < d; ++c) {
        queries.push_back(0.5f * keys[like * d + c] + 0.7f * normal(random));
      }
    }
    view = {queries.data(),   keys.data(), values.data(),
            positions.data(), group_size,  num_steps,
            num_tokens,       head_dim,    1.0f / std::sqrt(static_cast<float>(d)),
            0,                {}};
  }
};

Quality measured(const AttentionTrace& trace, Selector selector, const SummaryFormat& format,
                 const Budget& budget) {
  const Result<Quality> quality =
      measure_quality(trace, selector, format, budget, serial_executor());
  EXPECT_TRUE(quality.ok()) << quality.status().message();
  return quality.value();
}

TEST(Quality, AllPages_RetainEverything) {
  const SyntheticTrace trace(3, 5, 600, 64);
  for (Selector selector : {Selector::kLocks, Selector::kOracle, Selector::kQuest}) {
    const Quality quality = measured(trace.view, selector, kFine, Budget::all());
    EXPECT_EQ(quality.retained, 1.0);
    EXPECT_EQ(quality.retained_oracle, 1.0);
    EXPECT_EQ(quality.output_error, 0.0);
  }
}

TEST(Quality, Oracle_IsItsOwnMeasure) {
  const SyntheticTrace trace(4, 6, 904, 128);
  const Quality quality = measured(trace.view, Selector::kOracle, kCompact, Budget::tokens(200));
  EXPECT_EQ(quality.retained, quality.retained_oracle);
  EXPECT_GT(quality.output_error, 0.0);
  EXPECT_EQ(quality.bytes_per_record, 0);
}

TEST(Quality, MoreBudget_RetainsMore) {
  const SyntheticTrace trace(1, 8, 1500, 64);
  for (Selector selector : {Selector::kOracle, Selector::kLocks}) {
    double last = 0;
    for (int tokens : {96, 192, 384, 768, 1400}) {
      const double retained =
          measured(trace.view, selector, kFine, Budget::tokens(tokens)).retained;
      EXPECT_GE(retained, last);
      last = retained;
    }
    EXPECT_LT(last, 1.0);
  }
}

TEST(Quality, OneHead_NobodyBeatsTheOracle) {
  const SyntheticTrace trace(1, 8, 1200, 64);
  for (const SummaryFormat& format : {kFine, kFine8, kCompact, kWide, kPaper}) {
    for (Selector selector : {Selector::kLocks, Selector::kQuest, Selector::kMeanStd,
                              Selector::kCentroid, Selector::kInt3, Selector::kSharedLowRank}) {
      const Quality quality = measured(trace.view, selector, format, Budget::fraction(0.2));
      EXPECT_LE(quality.retained, quality.retained_oracle + 1e-6);
      EXPECT_EQ(quality.bytes_per_record, selector_bytes_per_block(selector, format, 64));
    }
    const double locks =
        measured(trace.view, Selector::kLocks, format, Budget::fraction(0.2)).retained;
    const double centroid =
        measured(trace.view, Selector::kCentroid, format, Budget::fraction(0.2)).retained;
    EXPECT_GT(locks, centroid);
  }
}

// Against dense arithmetic from the trace alone, without a stage.
TEST(Quality, RetainedMass_MatchesBruteForceOracle) {
  const int n = 320;
  const SyntheticTrace trace(1, 1, n, 64);
  std::vector<double> mass(n / 4);
  double total = 0;
  for (std::size_t t = 0; t < n; ++t) {
    double logit = 0;
    for (std::size_t c = 0; c < 64; ++c) {
      logit += static_cast<double>(trace.queries[c]) * static_cast<double>(trace.keys[t * 64 + c]);
    }
    mass[t / 4] += std::exp(logit * 0.125);
    total += std::exp(logit * 0.125);
  }
  double kept = 0;
  for (std::size_t page = 0; page < 4; ++page) kept += mass[page];
  for (std::size_t page = 64; page < 80; ++page) kept += mass[page];
  std::sort(mass.begin() + 4, mass.begin() + 64, std::greater<>());
  for (std::size_t k = 4; k < 14; ++k) kept += mass[k];  // 30 pages in all
  const Quality quality = measured(trace.view, Selector::kOracle, kFine, Budget::tokens(120));
  EXPECT_NEAR(quality.retained, kept / total, 1e-6);
}

TEST(Quality, Tokens_AreCutToWholePages) {
  SyntheticTrace trace(2, 3, 403, 64);
  for (std::int32_t& position : trace.positions) position -= 3;
  AttentionTrace cut = trace.view;
  cut.num_tokens = 400;
  const Quality whole = measured(cut, Selector::kLocks, kFine, Budget::tokens(100));
  const Quality ragged = measured(trace.view, Selector::kLocks, kFine, Budget::tokens(100));
  EXPECT_EQ(whole.retained, ragged.retained);
  EXPECT_EQ(whole.output_error, ragged.output_error);
}

// The steps behind the window, as if they were all.
TEST(Quality, Window_LeavesTheOtherStepsToBeJudged) {
  const SyntheticTrace trace(1, 8, 1200, 64);
  AttentionTrace windowed = trace.view;
  windowed.window = 5;
  AttentionTrace rest = trace.view;
  rest.queries += 5 * 64;
  rest.positions += 5;
  rest.num_steps = 3;
  for (Selector selector : {Selector::kOracle, Selector::kLocks, Selector::kQuest}) {
    const Quality seen = measured(windowed, selector, kFine, Budget::tokens(200));
    const Quality expected = measured(rest, selector, kFine, Budget::tokens(200));
    EXPECT_EQ(seen.retained, expected.retained);
    EXPECT_EQ(seen.retained_oracle, expected.retained_oracle);
    EXPECT_EQ(seen.output_error, expected.output_error);
  }
}

TEST(Quality, BadTrace_IsNamed) {
  const SyntheticTrace trace(2, 3, 400, 64);
  const auto message = [&](const std::function<void(AttentionTrace&)>& spoil,
                           const Budget& budget = Budget::tokens(100)) {
    AttentionTrace view = trace.view;
    spoil(view);
    const Result<Quality> quality =
        measure_quality(view, Selector::kLocks, kFine, budget, serial_executor());
    return quality.status().message();
  };
  EXPECT_EQ(message([](AttentionTrace&) {}), "");
  EXPECT_TRUE(testing::contains(message([](AttentionTrace& t) { t.queries = nullptr; }),
                                "queries is null"));
  EXPECT_TRUE(
      testing::contains(message([](AttentionTrace& t) { t.keys = nullptr; }), "keys is null"));
  EXPECT_TRUE(
      testing::contains(message([](AttentionTrace& t) { t.values = nullptr; }), "values is null"));
  EXPECT_TRUE(testing::contains(message([](AttentionTrace& t) { t.positions = nullptr; }),
                                "positions is null"));
  EXPECT_TRUE(testing::contains(message([](AttentionTrace& t) { t.group_size = 0; }),
                                "group_size = 0, expected 1 to 71"));
  EXPECT_TRUE(
      testing::contains(message([](AttentionTrace& t) { t.num_steps = 0; }), "num_steps = 0"));
  EXPECT_TRUE(testing::contains(message([](AttentionTrace& t) { t.num_tokens = 67; }),
                                "num_tokens = 67, expected at least 68"));
  EXPECT_TRUE(
      testing::contains(message([](AttentionTrace& t) { t.head_dim = 72; }), "head_dim = 72"));
  EXPECT_TRUE(testing::contains(
      message([](AttentionTrace& t) { t.scale = std::numeric_limits<float>::quiet_NaN(); }),
      "scale = nan"));
  EXPECT_TRUE(testing::contains(message([](AttentionTrace& t) { t.num_tokens = 399; }),
                                "positions[0] = 397, expected 0 to 395"));
  const std::int32_t negative[] = {5, -1, 7};
  EXPECT_TRUE(testing::contains(message([&](AttentionTrace& t) { t.positions = negative; }),
                                "positions[1] = -1"));
  EXPECT_TRUE(
      testing::contains(message([](AttentionTrace&) {}, Budget::fraction(2.0)), "fraction = 2"));
  EXPECT_TRUE(
      testing::contains(message([](AttentionTrace& t) { t.scale = 1e38f; }), "NaN or infinite"));
}

}  // namespace
}  // namespace locks
