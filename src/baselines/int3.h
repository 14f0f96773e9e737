// Keys of 3 bits about their page's mean: the rival of the same bytes that keeps every channel and
// no structure. No paper has it in this form; it is the plainest way to spend a record's bytes.
#pragma once

#include "baselines/page_keys.h"

namespace locks::detail {

inline constexpr int kInt3Bits = 3;
inline constexpr int kInt3MeanBits = 8;

// Bytes a page: the mean (int8) and its fp16 scale; for each token 3 bits a channel and an fp16
// scale.
constexpr std::int64_t int3_page_bytes(int page_tokens, int head_dim) {
  constexpr int kScaleBytes = 2;
  return head_dim * kInt3MeanBits / 8 + kScaleBytes +
         page_tokens * (head_dim * kInt3Bits / 8 + kScaleBytes);
}

// What is stored is scored: the log mass of the keys as they are read back. Residuals are taken
// from the stored mean, so that its own rounding costs nothing.
struct Int3Page {
  PageKeys restored;

  explicit Int3Page(const PageKeys& keys) {
    const int d = keys.head_dim;
    restored.num_tokens = keys.num_tokens;
    restored.head_dim = d;
    double mean[kMaxHeadDim];
    find_mean(keys, mean);
    quantise_row(mean, d, kInt3MeanBits);
    for (int t = 0; t < keys.num_tokens; ++t) {
      double residual[kMaxHeadDim];
      for (int c = 0; c < d; ++c) residual[c] = static_cast<double>(keys.rows[t][c]) - mean[c];
      quantise_row(residual, d, kInt3Bits);
      for (int c = 0; c < d; ++c) restored.rows[t][c] = static_cast<float>(mean[c] + residual[c]);
    }
  }

  float score(const float* query) const { return log_mass(restored, query); }
};

}  // namespace locks::detail
