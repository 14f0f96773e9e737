// The theory's chain over synthetic traces, and what several budgets and answers give step by step.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "locks/locks.h"
#include "support/executors.h"
#include "support/text.h"
#include "support/token_traces.h"

namespace locks {
namespace {

using testing::TokenTrace;
using testing::TraceShape;

constexpr double kScoreSlack = 1e-3;  // nats: queries are scored with 16 bits

// Each page's centroid in place of its keys: an ideal basis of rank 0.
std::vector<float> centroids(const AttentionTrace& trace, int page_tokens) {
  const auto d = static_cast<std::size_t>(trace.head_dim);
  const auto page_floats = static_cast<std::size_t>(page_tokens) * d;
  const auto total = static_cast<std::size_t>(trace.num_tokens) * d;
  std::vector<float> keys(trace.keys, trace.keys + total);
  for (std::size_t page = 0; page + page_floats <= total; page += page_floats) {
    for (std::size_t c = 0; c < d; ++c) {
      float sum = 0;
      for (std::size_t i = c; i < page_floats; i += d) sum += trace.keys[page + i];
      for (std::size_t i = c; i < page_floats; i += d) {
        keys[page + i] = sum / static_cast<float>(page_tokens);
      }
    }
  }
  return keys;
}

Chain chain_of(const AttentionTrace& trace, const SummaryFormat& format, const float* ideal_keys,
               const Executor& executor = serial_executor()) {
  const Result<Chain> chain =
      measure_chain(trace, format, Budget::tokens(160), ideal_keys, executor);
  EXPECT_TRUE(chain.ok()) << chain.status().message();
  return chain.value();
}

TEST(Chain, KeysThemselves_LeaveNothingToBound) {
  const TokenTrace trace(TraceShape{});
  const Chain chain = chain_of(trace.view(), kFine, trace.view().keys);
  EXPECT_EQ(chain.pages.size(), 160u);
  EXPECT_EQ(chain.steps.size(), 6u);  // behind the window
  for (const ChainPage& page : chain.pages) {
    EXPECT_EQ(page.ideal.residual, 0.0);
    EXPECT_EQ(page.ideal.score_bound, 0.0);
    EXPECT_LT(page.ideal.score_error, 1e-4);  // the oracle scores in float
    EXPECT_GT(page.stored.residual, 0.0);
  }
  for (const ChainStep& step : chain.steps) {
    EXPECT_EQ(step.ideal.delta, 0.0);
    EXPECT_NEAR(step.ideal.retained, step.oracle.retained, 1e-6);
  }
}

TEST(Chain, NoTruthIsAboveItsBound) {
  for (const int head_dim : {64, 80, 256}) {
    const TokenTrace trace(TraceShape{.group = 2, .num_tokens = 644, .head_dim = head_dim});
    for (const SummaryFormat& format : {kFine, kFine8, kCompact, kWide, kPaper}) {
      AttentionTrace view = trace.view();
      view.num_tokens = 640;
      std::vector<std::int32_t> positions(static_cast<std::size_t>(view.num_steps));
      for (std::size_t t = 0; t < positions.size(); ++t) {
        positions[t] = 639 - 7 * static_cast<std::int32_t>(positions.size() - 1 - t);
      }
      view.positions = positions.data();
      const std::vector<float> ideal = centroids(view, format.page_tokens);
      const Chain chain = chain_of(view, format, ideal.data());
      for (const ChainPage& page : chain.pages) {
        EXPECT_LE(page.ideal.score_error, page.ideal.score_bound + kScoreSlack);
        EXPECT_LE(page.stored.score_error, page.stored.score_bound + kScoreSlack);
      }
      for (const ChainStep& step : chain.steps) {
        for (const ChainChoice& choice : {step.ideal, step.stored}) {
          EXPECT_GE(choice.retained, std::exp(-4 * choice.delta) * step.oracle.retained);
          EXPECT_LE(choice.retained, step.oracle.retained + 1e-6);
        }
        EXPECT_LE(step.output_error, step.output_bound);
      }
    }
  }
}

TEST(Chain, DoesNotHangOnThreads) {
  const TokenTrace trace(TraceShape{});
  const std::vector<float> ideal = centroids(trace.view(), 8);
  const Chain one = chain_of(trace.view(), kCompact, ideal.data());
  const Chain three = chain_of(trace.view(), kCompact, ideal.data(), testing::thread_executor(3));
  for (std::size_t i = 0; i < one.pages.size(); ++i) {
    EXPECT_EQ(one.pages[i].ideal.score_error, three.pages[i].ideal.score_error);
    EXPECT_EQ(one.pages[i].stored.score_error, three.pages[i].stored.score_error);
  }
  for (std::size_t i = 0; i < one.steps.size(); ++i) {
    EXPECT_EQ(one.steps[i].stored.retained, three.steps[i].stored.retained);
    EXPECT_EQ(one.steps[i].output_error, three.steps[i].output_error);
  }
}

TEST(Chain, NullKeysAreRefused) {
  const TokenTrace trace(TraceShape{});
  const Result<Chain> chain =
      measure_chain(trace.view(), kFine, Budget::all(), nullptr, serial_executor());
  EXPECT_TRUE(testing::contains(chain.status().message(), "ideal_keys is null"));
}

TEST(Steps, SpansThatAreAlwaysReadAreRead) {
  const TokenTrace trace(TraceShape{});
  const TokenSpan spans[] = {{0, 16}, {600, 640}, {639, 640}};
  const Budget budgets[] = {Budget::tokens(84), Budget::all()};
  const auto result =
      measure_steps(trace.view(), Selector::kCentroid, kFine, budgets, spans, serial_executor());
  ASSERT_TRUE(result.ok()) << result.status().message();
  for (const StepQuality& quality : result.value()) {
    ASSERT_EQ(quality.carriers_read.size(), 6u * 3u);
    EXPECT_EQ(std::count(quality.carriers_read.begin(), quality.carriers_read.end(), 1), 18);
    EXPECT_EQ(quality.carriers_wanted, quality.carriers_read);
  }
}

TEST(Steps, SpansOutsideOfTheTraceAreRefused) {
  const TokenTrace trace(TraceShape{});
  for (const TokenSpan& span : {TokenSpan{-1, 3}, TokenSpan{5, 5}, TokenSpan{630, 641}}) {
    const Budget budget = Budget::all();
    const auto result = measure_steps(trace.view(), Selector::kLocks, kFine, {&budget, 1},
                                      {&span, 1}, serial_executor());
    EXPECT_TRUE(testing::contains(result.status().message(), "expected 0 <= begin < end <= 640"));
  }
}

}  // namespace
}  // namespace locks
