// Compares attention outputs with the brute-force reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attend/attend_ref.h"
#include "support/compare.h"
#include "support/stage_calls.h"

namespace locks::testing {

// What float accumulation may cost one head that attends to the masked-in tokens.
struct AttentionError {
  double logit = 0;   // absolute, of q.k and of the distance to the running maximum
  double weight = 0;  // relative, of a softmax weight
  double value = 0;   // largest |v|
};

inline AttentionError attention_error(const ref::Vector& query, const ref::Vector& keys,
                                      const ref::Vector& values, const std::vector<bool>& mask) {
  const std::size_t d = query.size();
  AttentionError error;
  double size = 0;
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < mask.size(); ++i) {
    if (!mask[i]) continue;
    ++tokens;
    double magnitude = 0;
    for (std::size_t c = 0; c < d; ++c) {
      const double term = std::abs(query[c] * keys[i * d + c]);
      if (std::isfinite(term)) magnitude += term;
      error.value = std::max(error.value, std::abs(values[i * d + c]));
    }
    size = std::max(size, magnitude);
  }
  error.logit = dot_error(static_cast<int>(d)) * size + 8 * kFloatRoundoff;
  error.weight = 2 * error.logit + sum_error(tokens);
  return error;
}

// What one head is to get from the masked-in tokens.
struct ExpectedAttention {
  ref::Attention attention;
  AttentionError error;

  // A NaN key, or an infinite logit: dense attention has no value either.
  bool broken() const { return std::isnan(attention.lse) || attention.lse == INFINITY; }
};

inline ExpectedAttention expected_attention(const PagedFixture& fixture, int seq, int head,
                                            const std::vector<bool>& mask) {
  const int kv_head = head / fixture.edge().group_size;
  const ref::Vector query =
      ref::scaled(fixture.dense_query(seq, head), static_cast<double>(fixture.attention().scale));
  const ref::Vector& keys = fixture.dense_keys(seq, kv_head);
  const ref::Vector& values = fixture.dense_values(seq, kv_head);
  return {ref::attend(query, keys.data(), values.data(), mask),
          attention_error(query, keys, values, mask)};
}

inline void check_attention(const Output& output, int seq, int head, const PagedFixture& fixture,
                            const std::vector<bool>& mask) {
  const ExpectedAttention reference = expected_attention(fixture, seq, head, mask);
  const auto& [expected, error] = reference;
  const std::vector<float> row = output.row(seq, head);
  if (reference.broken()) {
    EXPECT_FALSE(std::isfinite(output.lse(seq, head)));
    for (float value : row) ASSERT_TRUE(std::isnan(value));
    return;
  }
  EXPECT_TRUE(near(output.lse(seq, head), expected.lse,
                   {error.logit + error.weight, 2 * kFloatRoundoff, "float logits and their sum"}));
  ASSERT_TRUE(
      arrays_near(row.data(), expected.output.data(), row.size(),
                  {error.weight * error.value, roundoff(fixture.edge().type) * (1 + 0x1p-6),
                   "float logits, weights and sums; then one rounding to the output's type"}));
}

}  // namespace locks::testing
