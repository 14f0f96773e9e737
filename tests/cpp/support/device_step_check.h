// Compares the outputs of a decode step on the GPU with the brute-force reference, and with those
// of another run of the same step: of the one that writes the mask, where this one does not.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support/attention_check.h"
#include "support/device_array.h"
#include "support/device_step.h"
#include "support/stage_calls.h"

namespace locks::testing {

// Weights of the second matrix product are 16-bit, as are the products' inputs: each weight is off
// by at most a roundoff u of the cache's type (relative), so the output by 2 u max |v|, and by one
// rounding to the output's type.
inline void check_output(const PagedFixture& fixture, const DeviceStep& step, int seq, int head,
                         const std::vector<bool>& mask) {
  const ExpectedAttention reference = expected_attention(fixture, seq, head, mask);
  const auto& [expected, error] = reference;
  const std::vector<float> row = step.output_row(seq, head);
  if (reference.broken()) {
    for (float value : row) ASSERT_FALSE(std::isfinite(value));
    return;
  }
  // exp2 of the fast unit: 2 ulp and the rounding of its argument, which logits in the hundreds
  // make larger; both are within the float error of the logits.
  const double logit = 4 * error.logit + 0x1p-18;
  ASSERT_TRUE(near(step.lse(seq, head), expected.lse,
                   {2 * logit + 8 * kFloatRoundoff, 4 * kFloatRoundoff, "float logits"}))
      << "lse";
  const double u = roundoff(fixture.edge().type);
  ASSERT_TRUE(arrays_near(row.data(), expected.output.data(), row.size(),
                          {(2 * logit + 2 * u) * error.value, u * (1 + 0x1p-6),
                           "16-bit weights, float logits and sums, the output's rounding"}));
}

// Two runs that attend to the same tokens in another order: tokens go to other warps, or to more of
// them. Logits and the largest of all are the same, so the lse hangs on the order of float sums
// alone. A warp rounds its weights against its own largest logit, so they are rounded anew, and the
// output is rounded once more: each by u at most and 0.4 u as a rule, in either run. The fixture's
// values have random signs, so the weights' errors add up as the values themselves do: 0.9 u of the
// output's length as a rule, at most 4 u where one token has all the weight.
inline void check_reordered(const PagedFixture& fixture, const DeviceStep& actual,
                            const DeviceStep& expected, int seq, int head,
                            const std::vector<bool>& mask) {
  const std::vector<float> row = actual.output_row(seq, head);
  const std::vector<float> other = expected.output_row(seq, head);
  if (!std::isfinite(other.front())) return;  // of NaN and infinite keys: check_output knows them
  const auto tokens = std::count(mask.begin(), mask.end(), true);
  ASSERT_TRUE(near(actual.lse(seq, head), expected.lse(seq, head),
                   {0x1p-18 + 2 * sum_error(tokens), 4 * kFloatRoundoff, "the order of sums"}))
      << "lse of two runs";
  double distance = 0, length = 0;
  for (std::size_t c = 0; c < row.size(); ++c) {
    distance += std::pow(double{row[c]} - other[c], 2);
    length += std::pow(double{other[c]}, 2);
  }
  ASSERT_LE(std::sqrt(distance), 4 * roundoff(fixture.edge().type) * std::sqrt(length))
      << "outputs of two runs";
}

// The records of all complete blocks, by the CPU, in the fixture's pool.
inline void summarise_on_host(const PagedFixture& fixture) {
  const std::vector<std::int32_t> begin(fixture.edge().lengths.size(), 0);
  const Status status =
      summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(), begin.data(),
                       fixture.records(), nullptr, serial_executor());
  ASSERT_TRUE(status.ok()) << status.message();
}

// What is in L2, poison of workspaces above all, goes to memory: there a mass that is read after
// its drop may come from.
inline void flood_l2() { const DeviceArray<std::uint8_t> flood(std::int64_t{128} << 20, 0); }

// The step without the mask: near the reference for the pages that the step with it takes, and
// nearer to that step's outputs. Records are the host's, so that no other kernel is at work here.
inline void check_without_mask(const EdgeCase& edge, const std::vector<Budget>& budgets) {
  PagedFixture fixture(edge);
  summarise_on_host(fixture);
  DeviceStep with(fixture), without(fixture);
  without.set_wants_mask(false);
  flood_l2();
  for (const Budget& budget : budgets) {
    SCOPED_TRACE(::testing::Message() << "budget " << budget.value);
    for (DeviceStep* step : {&with, &without}) {
      step->poison_results();
      step->run(budget);
      step->fetch();
    }
    EXPECT_EQ(without.counters(), with.counters());
    for (int head = 0; head < fixture.num_seqs() * fixture.num_query_heads(); ++head) {
      const int seq = head / fixture.num_query_heads();
      const int query_head = head % fixture.num_query_heads();
      SCOPED_TRACE(::testing::Message() << "sequence " << seq << ", head " << query_head);
      const auto mask =
          ref::token_mask(with.selected(seq, query_head / edge.group_size), edge.format.page_tokens,
                          edge.lengths[static_cast<std::size_t>(seq)]);
      check_output(fixture, without, seq, query_head, mask);
      check_reordered(fixture, without, with, seq, query_head, mask);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace locks::testing
