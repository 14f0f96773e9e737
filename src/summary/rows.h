// Maxima and rounding over a row of d channels, d a multiple of 16; sums are core/lanes.h's.
#pragma once

#include <cstdint>

#include "core/cpu_namespace.h"
#include "core/lanes.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

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
// integer into the low bits, rounded by the addition itself. Wants x finite, scale finite and > 0.
LOCKS_HD inline std::int32_t round_to_code(float x, float scale, float limit) {
  float ratio = x / scale;
  ratio = ratio > limit ? limit : ratio;
  ratio = ratio < -limit ? -limit : ratio;
  return __builtin_bit_cast(std::int32_t, ratio + 12582912.0f) - 0x4B400000;
}

// x * inverse to the nearest integer, likewise. Two roundings: of the product, then to an integer.
LOCKS_HD inline std::int32_t round_product_to_code(float x, float inverse, float limit) {
  float ratio = x * inverse;
  ratio = ratio > limit ? limit : ratio;
  ratio = ratio < -limit ? -limit : ratio;
  return __builtin_bit_cast(std::int32_t, ratio + 12582912.0f) - 0x4B400000;
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
