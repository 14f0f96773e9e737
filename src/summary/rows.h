// Sums, maxima and rounding over a row of d channels, d a multiple of 16.
//
// Channel c of a row belongs to lane c % 16 at every instruction-set level, and lanes are reduced
// by one fixed tree. So all levels (and a GPU that follows this order) round alike and write the
// same bytes. The loops are plain; each level's compiler maps 16 lanes to one, two or four
// registers.
#pragma once

#include <cstdint>

#include "core/cpu_namespace.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

inline constexpr int kLanes = 16;

LOCKS_HD inline float dot(const float* a, const float* b, int d) {
  float sum[kLanes] = {};
  for (int c = 0; c < d; c += kLanes) {
    for (int l = 0; l < kLanes; ++l) sum[l] += a[c + l] * b[c + l];
  }
  float eight[8], four[4];
  for (int l = 0; l < 8; ++l) eight[l] = sum[l] + sum[l + 8];
  for (int l = 0; l < 4; ++l) four[l] = eight[l] + eight[l + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// The largest magnitude. Magnitudes are compared as integers, which orders NaN above everything: a
// NaN in the row is never lost, as it would be in a chain of `a > b ? a : b`.
LOCKS_HD inline float max_magnitude(const float* row, int d) {
  std::int32_t largest[kLanes] = {};
  for (int c = 0; c < d; c += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const std::int32_t bits = __builtin_bit_cast(std::int32_t, row[c + l]) & 0x7FFFFFFF;
      largest[l] = bits > largest[l] ? bits : largest[l];
    }
  }
  std::int32_t top = 0;
  for (int l = 0; l < kLanes; ++l) top = largest[l] > top ? largest[l] : top;
  return __builtin_bit_cast(float, top);
}

// x / scale to the nearest integer, ties to even, within +-limit. Adding 1.5 * 2^23 puts the
// integer into the low bits, rounded by the addition itself. x must be finite, scale finite and
// positive.
LOCKS_HD inline std::int32_t round_to_code(float x, float scale, float limit) {
  float ratio = x / scale;
  ratio = ratio > limit ? limit : ratio;
  ratio = ratio < -limit ? -limit : ratio;
  return __builtin_bit_cast(std::int32_t, ratio + 12582912.0f) - 0x4B400000;
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
