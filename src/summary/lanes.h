// Sixteen floats in lockstep, as the compilers' vector type: one AVX-512 register, two of AVX2, four of SSE.
//
// Channel c of a row belongs to lane c % 16 at every level, and lanes are reduced by one fixed tree. So all
// levels (and a GPU that follows this order) round alike and write the same bytes.
#pragma once

#include <cstdint>

#include "core/cpu_namespace.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

inline constexpr int kLanes = 16;

using Lanes = float __attribute__((vector_size(64)));
using LaneInts = std::int32_t __attribute__((vector_size(64)));
using LaneBytes = std::int8_t __attribute__((vector_size(16)));

// ((lanes l + l+8) + ... ): halves are added until one lane is left.
inline float sum_lanes(Lanes x) {
  alignas(64) float lane[kLanes];
  __builtin_memcpy(lane, &x, sizeof lane);
  float eight[8], four[4];
  for (int i = 0; i < 8; ++i) eight[i] = lane[i] + lane[i + 8];
  for (int i = 0; i < 4; ++i) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float dot(const Lanes* a, const Lanes* b, int groups) {
  Lanes sum{};
  for (int g = 0; g < groups; ++g) sum += a[g] * b[g];
  return sum_lanes(sum);
}

// The largest magnitude. Magnitudes are compared as integers, which orders NaN above everything: a NaN in
// the row is never lost, as it would be in a chain of `a > b ? a : b`.
inline float max_magnitude(const Lanes* row, int groups) {
  LaneInts largest{};
  for (int g = 0; g < groups; ++g) {
    const LaneInts magnitude = (LaneInts)row[g] & 0x7FFFFFFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  std::int32_t top = 0;
  for (int i = 0; i < kLanes; ++i) top = largest[i] > top ? largest[i] : top;
  return __builtin_bit_cast(float, top);
}

// x / scale to the nearest integer, ties to even, within +-limit. Adding 1.5 * 2^23 puts the integer into
// the low bits, rounded by the addition itself. x / scale must be finite.
inline LaneInts round_to_codes(Lanes x, float scale, float limit) {
  Lanes ratio = x / scale;
  const Lanes high = Lanes{} + limit;
  ratio = ratio > high ? high : ratio;
  ratio = ratio < -high ? -high : ratio;
  return (LaneInts)(ratio + 12582912.0f) - 0x4B400000;
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
