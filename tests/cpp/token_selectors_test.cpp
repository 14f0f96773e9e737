// ShadowKV, RocketKV, SnapKV and KVzip against references in double, and what they promise.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "baselines/kv_zip.h"
#include "baselines/rocket_kv.h"
#include "locks/locks.h"
#include "support/executors.h"
#include "support/text.h"
#include "support/token_traces.h"
#include "support/tokens_ref.h"

namespace locks::testing {
namespace {

constexpr Selector kAll[] = {Selector::kShadowKv, Selector::kRocketKv, Selector::kSnapKv,
                             Selector::kKvZip};

TokenSets chosen(const AttentionTrace& trace, Selector selector, int page_tokens,
                 const Budget& budget, const Executor& executor = serial_executor()) {
  const auto sets = select_tokens(selector, trace, page_tokens, {&budget, 1}, executor);
  EXPECT_TRUE(sets.ok()) << sets.status().message();
  return sets.value().front();
}

std::string refusal(const AttentionTrace& trace, Selector selector,
                    const Budget& budget = Budget::tokens(160), int page_tokens = 4) {
  return select_tokens(selector, trace, page_tokens, {&budget, 1}, serial_executor())
      .status()
      .message();
}

std::vector<std::int32_t> read_by(const TokenSets& sets, std::size_t step) {
  return {sets.ids.begin() + sets.begin[step], sets.ids.begin() + sets.begin[step + 1]};
}

int allowed(int length, int page_tokens, const Budget& budget) {
  const auto pages = static_cast<int>(budget_pages(budget, length, page_tokens, nullptr));
  const int whole = (length + page_tokens - 1) / page_tokens * page_tokens;
  return pages * page_tokens - (whole - length);
}

std::vector<double> reference_scores(const TraceMatrices& trace, Selector selector, int step,
                                     int page_tokens, const Budget& budget) {
  const int first_length = trace.length(trace.trace.window);
  switch (selector) {
    case Selector::kShadowKv:
      return shadowkv_scores(trace, step);
    case Selector::kRocketKv:
      return rocketkv_scores(trace, step, allowed(first_length, page_tokens, budget), page_tokens);
    case Selector::kSnapKv:
      return snapkv_scores(trace, step);
    default:
      return kvzip_scores(trace, step);
  }
}

// Everything forced is read, as many tokens as allowed, and nothing that the reference ranks below
// something left. The margin is the rounding of a float dot product, in shares below 1.
void check_step(const std::vector<std::int32_t>& read, std::vector<double> scores, int page_tokens,
                int tokens) {
  const auto length = static_cast<std::int64_t>(scores.size());
  for (std::int64_t t = 0; t < length; ++t) {
    if (always_read(t / page_tokens, length, page_tokens)) {
      scores[static_cast<std::size_t>(t)] = kForced;
    }
  }
  ASSERT_TRUE(std::is_sorted(read.begin(), read.end()));
  ASSERT_EQ(read.size(), static_cast<std::size_t>(tokens));
  double worst_read = kForced;
  double best_left = kGone;
  for (std::size_t t = 0; t < scores.size(); ++t) {
    if (std::binary_search(read.begin(), read.end(), static_cast<std::int32_t>(t))) {
      worst_read = std::min(worst_read, scores[t]);
    } else {
      best_left = std::max(best_left, scores[t]);
    }
  }
  EXPECT_GT(worst_read, kGone) << "an evicted token is read";
  EXPECT_GE(worst_read, best_left - 1e-6 * std::abs(best_left));
}

void check(const TraceShape& shape, Selector selector, int page_tokens, const Budget& budget) {
  SCOPED_TRACE(std::string(selector_name(selector)) + ", pages of " + std::to_string(page_tokens));
  const TokenTrace trace(shape);
  const TraceMatrices matrices(trace.view());
  const TokenSets sets = chosen(trace.view(), selector, page_tokens, budget);
  for (int step = shape.window; step < shape.num_steps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    check_step(read_by(sets, static_cast<std::size_t>(step - shape.window)),
               reference_scores(matrices, selector, step, page_tokens, budget), page_tokens,
               allowed(matrices.length(step), page_tokens, budget));
  }
}

const TraceShape kUsual = {.chunks = {300, 200, 60}};

TEST(TokenSelectors, ChooseAsTheirReferences) {
  for (Selector selector : kAll) {
    for (int page_tokens : {4, 8, 16}) {
      check(kUsual, selector, page_tokens, Budget::tokens(160));
    }
    check(kUsual, selector, 4, Budget::fraction(0.4));
    check({.group = 7,
           .num_steps = 4,
           .window = 2,
           .num_tokens = 1104,
           .head_dim = 128,
           .chunks = {500, 510}},
          selector, 8, Budget::tokens(200));
    check({.group = 1, .num_steps = 2, .window = 1, .head_dim = 80, .chunks = {3, 1}, .sink = 0},
          selector, 16, Budget::tokens(640));
  }
}

// Long enough beside the budget for pages of two and of three tokens, over some of the channels.
TEST(TokenSelectors, RocketKvRanksPages) {
  check({.num_tokens = 2400}, Selector::kRocketKv, 4, Budget::tokens(120));
  check({.group = 2, .num_tokens = 9600, .head_dim = 128}, Selector::kRocketKv, 16,
        Budget::tokens(120));
}

TEST(TokenSelectors, KvZipsImportanceIsTheReferences) {
  const TokenTrace trace(kUsual);
  const auto found = detail::reconstruction_importance(trace.view(), serial_executor());
  const auto expected = kvzip_scores(TraceMatrices(trace.view()), 11);
  ASSERT_EQ(found.size(), 560u);
  for (std::size_t t = 0; t < found.size(); ++t) {
    EXPECT_NEAR(found[t], expected[t + 4], 2e-6 * expected[t + 4]);  // a float dot product's
  }
}

TEST(TokenSelectors, ABudgetOfAllTokensReadsThem) {
  const TokenTrace trace(kUsual);
  for (Selector selector : kAll) {
    const TokenSets sets = chosen(trace.view(), selector, 16, Budget::all());
    std::vector<std::int32_t> everything(640);
    std::iota(everything.begin(), everything.end(), 0);
    EXPECT_EQ(read_by(sets, 5), everything) << selector_name(selector);
  }
}

TEST(TokenSelectors, DoNotDependOnThreads) {
  const TokenTrace trace(kUsual);
  for (Selector selector : kAll) {
    const Budget budget = Budget::tokens(120);
    EXPECT_EQ(chosen(trace.view(), selector, 4, budget).ids,
              chosen(trace.view(), selector, 4, budget, thread_executor(3)).ids);
  }
}

// An eviction is for good: what a step reads of the prompt, the next ones could still read.
TEST(TokenSelectors, EvictionsDoNotBringTokensBack) {
  const TokenTrace trace(kUsual);
  for (Selector selector : {Selector::kSnapKv, Selector::kKvZip}) {
    const TokenSets sets = chosen(trace.view(), selector, 4, Budget::tokens(160));
    std::vector<std::int32_t> ever;
    for (std::size_t step = 0; step < 6; ++step) {
      for (std::int32_t token : read_by(sets, step)) {
        if (token < 500) ever.push_back(token);
      }
    }
    std::sort(ever.begin(), ever.end());
    ever.erase(std::unique(ever.begin(), ever.end()), ever.end());
    EXPECT_LE(ever.size(), 160u) << selector_name(selector);
  }
}

// The worked example of section 3.6: 64 times fewer tokens by 10.3, pages of 3 and 2.1.
TEST(TokenSelectors, RocketKvSplitsTheRatioAsItsPaper) {
  const detail::RocketKvSplit split = detail::rocket_kv_split(65536, 512, 128);
  EXPECT_EQ(split.capacity, static_cast<std::int64_t>(65536 / std::pow(64.0, 0.56)));
  EXPECT_EQ(split.page_tokens, 3);
  EXPECT_EQ(split.channels, static_cast<int>(128 * 3 / std::pow(64.0, 0.44)));
  const detail::RocketKvSplit none = detail::rocket_kv_split(100, 512, 128);
  EXPECT_EQ(none.capacity, 100);
  EXPECT_EQ(none.page_tokens, 1);
  EXPECT_EQ(none.channels, 128);
}

TEST(TokenSelectors, BytesAreOfWhatStaysAndOfWhatIsReadToChoose) {
  const TokenTrace trace({.num_tokens = 2400, .head_dim = 128, .chunks = {2330}});
  const std::int64_t d = 128;
  const auto bytes = [&](Selector selector) {
    const TokenSets sets = chosen(trace.view(), selector, 16, Budget::tokens(160));
    return std::pair(sets.resident_bytes.back(), sets.read_bytes.back());
  };
  EXPECT_EQ(bytes(Selector::kSnapKv), std::pair(160 * 4 * d, std::int64_t{0}));
  EXPECT_EQ(bytes(Selector::kKvZip), std::pair(160 * 4 * d, std::int64_t{0}));
  // 292 chunks before the last 64 tokens, one of them an outlier.
  EXPECT_EQ(bytes(Selector::kShadowKv), std::pair(2400 * 4 * d + 291 * 2 * d, 291 * 2 * d));
  const detail::RocketKvSplit split = detail::rocket_kv_split(2394, 155, 128);
  const std::int64_t left = split.capacity + 6;
  const std::int64_t pages = (left + split.page_tokens - 1) / split.page_tokens;
  EXPECT_EQ(bytes(Selector::kRocketKv),
            std::pair(left * 4 * d + pages * 4 * d, pages * 2 * split.channels));
  EXPECT_LT(left, 2000);
}

TEST(TokenSelectors, WhatTheyLackIsNamed) {
  const TokenTrace trace({.chunks = {}});
  EXPECT_EQ(refusal(trace.view(), Selector::kSnapKv), "");
  EXPECT_TRUE(contains(refusal(trace.view(), Selector::kKvZip),
                       "selector = kvzip: the trace holds no pass in which the model repeats its "
                       "context, expected one captured with `locks capture --repeat-context`"));
  EXPECT_TRUE(
      contains(refusal(trace.view(), Selector::kQuest), "selector = quest: it ranks pages"));
  EXPECT_TRUE(contains(refusal(trace.view(), Selector::kSnapKv, Budget::tokens(0)), "tokens = 0"));
  EXPECT_TRUE(contains(refusal(trace.view(), Selector::kSnapKv, Budget::all(), 5),
                       "page_tokens = 5, expected 4, 8 or 16"));
  AttentionTrace view = trace.view();
  view.window = 0;
  for (Selector selector : {Selector::kSnapKv, Selector::kRocketKv}) {
    EXPECT_TRUE(contains(refusal(view, selector), "and window = 0, expected 1 to 11"));
  }
  EXPECT_EQ(refusal(view, Selector::kShadowKv), "");
}

TEST(TokenSelectors, WhatDoesNotFitIsNamed) {
  const TokenTrace trace({.chunks = {600}});
  AttentionTrace view = trace.view();
  EXPECT_EQ(refusal(view, Selector::kKvZip), "");
  std::vector<std::int32_t> positions(view.positions, view.positions + view.num_steps);
  view.positions = positions.data();
  std::swap(positions[0], positions[11]);
  EXPECT_TRUE(contains(refusal(view, Selector::kSnapKv), "the window reaches position 639"));
  std::swap(positions[0], positions[11]);
  positions[0] = 400;
  EXPECT_TRUE(contains(refusal(view, Selector::kSnapKv), "exceed the budget by"));
  positions[6] = 500;
  EXPECT_TRUE(contains(refusal(view, Selector::kKvZip), "the context ends at token 604"));

  const std::int32_t apart[] = {4, 300, 0, 300, 301, 600, 300, 600};
  view.reconstruction.chunks = apart;
  view.reconstruction.num_chunks = 2;
  EXPECT_TRUE(contains(refusal(view, Selector::kKvZip), "reconstruction chunk 1 has tokens 301"));
  std::vector<float> keys(view.keys, view.keys + 640 * 64);
  keys[70] = std::numeric_limits<float>::quiet_NaN();
  view = trace.view();
  view.keys = keys.data();
  EXPECT_TRUE(contains(refusal(view, Selector::kShadowKv), "keys holds NaN or infinity"));
}

TEST(TokenSelectors, Quality_CountsTheirTokens) {
  const TokenTrace trace(kUsual);
  const Budget budgets[] = {Budget::tokens(160), Budget::all()};
  const TokenSpan spans[] = {{620, 640}, {40, 300}};
  for (Selector selector : kAll) {
    SCOPED_TRACE(selector_name(selector));
    const auto measured =
        measure_steps(trace.view(), selector, kWide, budgets, spans, serial_executor());
    ASSERT_TRUE(measured.ok()) << measured.status().message();
    const StepQuality& some = measured.value()[0];
    const StepQuality& all = measured.value()[1];
    EXPECT_EQ(some.tokens_read.back(), 160);
    EXPECT_EQ(some.carriers_read[10], 1);  // the last step reads the last tokens
    EXPECT_EQ(some.carriers_read[11], 0);
    EXPECT_EQ(all.carriers_read[11], 1);
    EXPECT_EQ(all.retained.back(), 1);
    EXPECT_EQ(all.output_error.back(), 0);
    EXPECT_EQ(all.recall.back(), 1);
    const TokenSets sets = chosen(trace.view(), selector, 16, budgets[0]);
    const TraceMatrices matrices(trace.view());
    const Eigen::VectorXd shares =
        softmax_of(matrices.scale() * matrices.keys * matrices.queries[2].row(11).transpose());
    double kept = 0;
    for (std::int32_t token : read_by(sets, 5)) kept += shares(token);
    EXPECT_NEAR(some.retained.back(), kept, 1e-12);
    EXPECT_EQ(some.resident_bytes.back(), static_cast<double>(sets.resident_bytes.back()));
    EXPECT_GT(some.output_error.back(), 0);
    EXPECT_GT(some.retained_oracle.back(), 0);
  }
}

}  // namespace
}  // namespace locks::testing
