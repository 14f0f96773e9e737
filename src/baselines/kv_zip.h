// KVzip: Kim, Kim, Kwon, Lee, Yun, Song, "KVzip: Query-Agnostic KV Cache Compression with Context
// Reconstruction", NeurIPS 2025, arXiv 2505.23416. The model is made to repeat its context, chunk
// by chunk; a token's importance is the largest attention that it gets from any query of the pass
// that repeats its chunk and any head of the group, and the least important are evicted, for all
// questions to come. That attention is a softmax over the tokens before the context, the chunk, and
// the pass's own keys up to the query. What precedes and what follows the context stays. The paper
// spreads the budget over the heads of all layers; here each KV head has the same, as its uniform
// variant has it.
#pragma once

#include "baselines/step_tokens.h"
#include "locks/executor.h"

namespace locks::detail {

// Importance of the tokens of all chunks, from the first token of the first.
std::vector<double> reconstruction_importance(const AttentionTrace& trace,
                                              const Executor& executor);

class KvZip : public TokenSelector {
 public:
  KvZip(const AttentionTrace& trace, const Executor& executor);

  void choose(int, StepTokens& tokens) const override {
    tokens.force(0, begin_);
    tokens.force(end_, tokens.length());
    for (std::int32_t place : order_) tokens.take(begin_ + place);
  }
  std::int64_t statistics_bytes(std::int32_t) const override { return 0; }
  std::int64_t read_bytes(std::int32_t) const override { return 0; }
  std::int64_t kept_tokens(std::int32_t, std::int64_t chosen) const override { return chosen; }

 private:
  std::int32_t begin_;  // of the context
  std::int32_t end_;
  std::vector<std::int32_t> order_;  // places in the context, the most important first
};

}  // namespace locks::detail
