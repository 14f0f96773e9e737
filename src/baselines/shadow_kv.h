// ShadowKV: Sun, Chang, Bao, Zheng, Zheng, Liu, Dong, Chi, Chen, "ShadowKV: KV Cache in Shadows for
// High-Throughput Long-Context LLM Inference", ICML 2025, arXiv 2410.21465: its choice of tokens.
// Keys after RoPE are cut into chunks of eight, each kept as its mean, the landmark; the chunks
// with the least cosine similarity between a key and the mean, the outliers, are read by every step
// (48 of 128K tokens in the paper; here the same share, rounded up). A step takes, for each head,
// the softmax over the landmarks, then the largest over the heads of the group, and reads the best
// chunks. The latest tokens have no landmark. Outliers count in the budget here, as all that a step
// reads does. Its other half, keys rebuilt from a low rank and values from the host, is left out:
// the chosen keys are exact, to its advantage. Bytes as the paper states them: a landmark of
// head_dim numbers for each chunk that is no outlier, all of them read by a step.
#pragma once

#include "baselines/step_tokens.h"
#include "locks/executor.h"

namespace locks::detail {

inline constexpr int kShadowKvChunk = 8;
// Of 1,024 chunks: 48 of the 16,384 chunks of 128K tokens.
inline constexpr int kShadowKvOutliers = 3;

class ShadowKv : public TokenSelector {
 public:
  ShadowKv(const AttentionTrace& trace, const Executor& executor);

  void choose(int step, StepTokens& tokens) const override;
  std::int64_t statistics_bytes(std::int32_t length) const override;
  std::int64_t read_bytes(std::int32_t length) const override { return statistics_bytes(length); }
  std::int64_t kept_tokens(std::int32_t length, std::int64_t) const override { return length; }

 private:
  static std::int32_t chunks_of(std::int32_t length);  // those that have landmarks
  const float* landmark(std::int32_t chunk) const;
  std::vector<double> scores(int step, std::int32_t chunks) const;

  const AttentionTrace& trace_;
  std::vector<float> landmarks_;        // [chunk, d]
  std::vector<std::int32_t> outliers_;  // ascending
  std::vector<bool> is_outlier_;        // [chunk]
};

}  // namespace locks::detail
