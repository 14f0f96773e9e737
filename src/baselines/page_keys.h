// What the selectors share: the keys of a page, sums over channels, and numbers as they are stored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/scalar.h"
#include "locks/page.h"

namespace locks::detail {

// Independent sums, so that the loops vectorise; divides every head_dim.
inline constexpr int kSumLanes = 16;

// Sum of term(c) over the channels, in the terms' type.
template <class Term>
auto sum_channels(int head_dim, const Term& term) {
  using Sum = decltype(term(0));
  Sum sums[kSumLanes] = {};
  for (int c = 0; c < head_dim; c += kSumLanes) {
    for (int lane = 0; lane < kSumLanes; ++lane) sums[lane] += term(c + lane);
  }
  Sum total = 0;
  for (Sum sum : sums) total += sum;
  return total;
}

template <class T>
T dot(const T* a, const T* b, int head_dim) {
  return sum_channels(head_dim, [=](int c) { return a[c] * b[c]; });
}

inline float as_fp16(float value) { return fp16_to_float(float_to_fp16(value)); }

// The keys of one page, as floats.
struct PageKeys {
  float rows[kBlockTokens][kMaxHeadDim];
  int num_tokens;
  int head_dim;
};

// Exact log-sum-exp of the page's logits; the query carries the softmax scale.
inline float log_mass(const PageKeys& keys, const float* query) {
  float logits[kBlockTokens];
  float max = -std::numeric_limits<float>::infinity();
  for (int t = 0; t < keys.num_tokens; ++t) {
    logits[t] = dot(query, keys.rows[t], keys.head_dim);
    max = std::max(max, logits[t]);
  }
  float sum = 0;
  for (int t = 0; t < keys.num_tokens; ++t) sum += std::exp(logits[t] - max);
  return max + std::log(sum);
}

// Zero, or NaN if some key is NaN or infinite: added to a score, it forces the page, whatever
// minimum and maximum have made of the NaN.
inline float poison(const PageKeys& keys) {
  float sum = 0;
  for (int t = 0; t < keys.num_tokens; ++t) {
    const float* row = keys.rows[t];
    sum += sum_channels(keys.head_dim, [=](int c) { return row[c] - row[c]; });
  }
  return sum;
}

// The selectors that store codes find them in double: a code then hangs on the keys alone, and not
// on how a float sum was rounded, which near a tie would move it by a whole step.
inline void find_mean(const PageKeys& keys, double* mean) {
  for (int c = 0; c < keys.head_dim; ++c) {
    double sum = 0;
    for (int t = 0; t < keys.num_tokens; ++t) sum += static_cast<double>(keys.rows[t][c]);
    mean[c] = sum / keys.num_tokens;
  }
}

// The row as symmetric codes of `bits` bits and one fp16 scale give it back, rounded to nearest
// even. A row too large for an fp16 scale becomes NaN, and its page is read.
inline void quantise_row(double* row, int count, int bits) {
  const double limit = (1 << (bits - 1)) - 1;
  double largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::abs(row[i]));
  const auto stored = static_cast<double>(as_fp16(static_cast<float>(largest / limit)));
  const double scale = std::max(stored, 0x1p-24);  // fp16's least: codes divide by it
  for (int i = 0; i < count; ++i) {
    row[i] = std::clamp(std::nearbyint(row[i] / scale), -limit, limit) * scale;
  }
}

}  // namespace locks::detail
