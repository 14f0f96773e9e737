// RocketKV: Behnam, Fu, Zhao, Tsai, Yu, Tumanov, "RocketKV: Accelerating Long-Context LLM Inference
// via Two-Stage KV Cache Compression", ICML 2025, arXiv 2502.14051. First, when the prompt ends, it
// is evicted as by SnapKV, with the maximum of 63 neighbours for pooling and one set a KV head.
// Then each step ranks pages of what is left by hybrid sparse attention: of the head_dim channels
// those with the largest |q|, summed over the group, and of each page the channel's maximum or
// minimum, by the sign of the group's sum of q; the softmax has SparQ's temperature for the
// channels left out, as in the published code, and the heads' shares are averaged.
//
// The paper's token budget t counts what choosing reads as well, and gives half of it to either
// half of the step. Budgets here are of tokens attended to, so t is twice the budget. Its section
// 3.6 splits the ratio c of the prompt to t: c^r for the eviction, r = min(0.2 + 0.06 log2 c, 0.8);
// of the rest, the square root rounded up for the pages, and what remains for the channels.
#pragma once

#include "baselines/step_tokens.h"
#include "locks/executor.h"

namespace locks::detail {

inline constexpr int kRocketKvKernel = 63;

struct RocketKvSplit {
  std::int64_t capacity = 0;  // tokens of the prompt that are left
  int page_tokens = 1;
  int channels = 0;
};
RocketKvSplit rocket_kv_split(std::int64_t prompt, std::int64_t budget, int head_dim);

class RocketKv : public TokenSelector {
 public:
  RocketKv(const AttentionTrace& trace, int page_tokens, const Executor& executor);

  void set_budget(const Budget& budget) override;

  void choose(int step, StepTokens& tokens) const override;
  std::int64_t statistics_bytes(std::int32_t length) const override;
  std::int64_t read_bytes(std::int32_t length) const override;
  std::int64_t kept_tokens(std::int32_t length, std::int64_t) const override;

 private:
  struct Channel {
    int index;
    bool upper;  // the page's maximum counts, not its minimum
  };
  std::vector<std::int32_t> residents(std::int32_t length) const;
  std::int64_t num_pages(std::int32_t length) const;
  std::vector<Channel> channels(int step) const;
  std::vector<float> bounds(const std::vector<std::int32_t>& tokens,
                            const std::vector<Channel>& chosen) const;  // [page, channel]
  std::vector<double> scores(int step, const std::vector<std::int32_t>& tokens) const;

  const AttentionTrace& trace_;
  int page_tokens_;  // of the budget's pages
  std::int32_t prompt_end_;
  std::vector<std::int32_t> order_;  // tokens before the window, the most voted for first
  RocketKvSplit split_;
  std::vector<std::int32_t> kept_;  // of the prompt, ascending
};

}  // namespace locks::detail
