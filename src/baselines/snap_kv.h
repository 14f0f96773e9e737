// SnapKV: Li, Huang, Yang, Venkitesh, Locatelli, Ye, Cai, Lewis, Chen, "SnapKV: LLM Knows What You
// are Looking for Before Generation", NeurIPS 2024, arXiv 2404.14469. When the prompt ends, its
// last queries, the window, vote for the tokens before them by their attention; votes are pooled
// over neighbours (mean of 5, the published code's default), and what gets too few is evicted. The
// window and all that is generated stay. One set a KV head: votes are summed over its query heads.
#pragma once

#include "baselines/step_tokens.h"
#include "baselines/window_votes.h"

namespace locks::detail {

inline constexpr int kSnapKvKernel = 5;

class SnapKv : public TokenSelector {
 public:
  SnapKv(const AttentionTrace& trace, const Executor& executor)
      : window_begin_(window_begin(trace)),
        order_(ranking(mean_pooled(window_votes(trace, executor), kSnapKvKernel))) {}

  void choose(int, StepTokens& tokens) const override {
    tokens.force(window_begin_, tokens.length());
    for (std::int32_t token : order_) tokens.take(token);
  }
  std::int64_t statistics_bytes(std::int32_t) const override { return 0; }
  std::int64_t read_bytes(std::int32_t) const override { return 0; }
  std::int64_t kept_tokens(std::int32_t, std::int64_t chosen) const override { return chosen; }

 private:
  std::int32_t window_begin_;
  std::vector<std::int32_t> order_;  // tokens before the window, the most voted for first
};

}  // namespace locks::detail
