// Pages of four tokens and rank 1 in improved formats (`fine`, `fine8`): the arithmetic of their
// records that the CPU and the GPU share, operation by operation.
//
// Four keys k_0 .. k_3, their signs already flipped as the rotation wants, become a sum and three
// differences, a Hadamard matrix over the tokens:
//   y_0 = (k_0 + k_1) + (k_2 + k_3)      y_1 = (k_0 + k_1) - (k_2 + k_3)
//   y_2 = (k_0 - k_1) + (k_2 - k_3)      y_3 = (k_0 - k_1) - (k_2 - k_3)
// The centroid is y_0 / 4 and key t less the centroid (+-y_1 +-y_2 +-y_3) / 4: nothing is centred,
// and the Gram matrix has six entries. Lengths and products do not change by the rotation, so it is
// applied to two rows, the centroid and the direction, and, backwards, to the direction's codes
// when coefficients are fitted.
#pragma once

#include <cstdint>

#include "core/cpu_namespace.h"
#include "core/scalar.h"
#include "locks/summary.h"
#include "summary/eigensolver.h"
#include "summary/quantise.h"
#include "summary/rotation.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

inline constexpr int kDifferences = 3;
inline constexpr int kGramEntries = 6;

LOCKS_HD constexpr bool uses_differences(const SummaryFormat& format) {
  return format.page_tokens == 4 && format.rank == 1 && format.improved;
}

// The Gram matrix of the differences: entries 11, 22, 33, 12, 13, 23.
struct DifferenceGram {
  float entry[kGramEntries];
};

// The differences' weights in the direction of largest energy, times the rotation's scale: their
// sum, rotated, has unit length. Zeros for a page without energy.
struct Direction {
  float weight[kDifferences];
  bool is_scorable;  // no: a NaN or infinite key, or more energy than a float holds
};

LOCKS_HD inline float trace(const DifferenceGram& g) {
  return (g.entry[0] + g.entry[1]) + g.entry[2];
}

LOCKS_HD inline void square(DifferenceGram& g) {
  const float a = g.entry[0], b = g.entry[1], c = g.entry[2];
  const float d = g.entry[3], e = g.entry[4], f = g.entry[5];
  const float dd = d * d, ee = e * e, ff = f * f;
  g = {{(a * a + dd) + ee, (b * b + dd) + ff, (c * c + ee) + ff, d * (a + b) + e * f,
        e * (a + c) + d * f, f * (b + c) + d * e}};
}

// The matrix is squared ten times: a column of its 1024th power is the eigenvector of the largest
// eigenvalue, but for what a second one within a few per mille of it leaves, and those directions
// hold as much energy. Powers of two keep the numbers near 1: after five squarings the largest
// eigenvalue, at least a sixth, is above 2^-83.
// kUnroll: squarings that a GPU has code for; a lone warp waits longer for code than for jumps.
template <int kUnroll = 5>
LOCKS_HD inline Direction find_direction(const DifferenceGram& gram, float rotation_scale) {
  const float energy = trace(gram);
  const float scale = power_of_two_near_inverse(energy);
  DifferenceGram first, power;
  for (int i = 0; i < kGramEntries; ++i) first.entry[i] = gram.entry[i] * scale;
  power = first;
#ifdef __CUDA_ARCH__
#pragma unroll kUnroll
#endif
  for (int half = 0; half < 2; ++half) {
#ifdef __CUDA_ARCH__
#pragma unroll kUnroll
#endif
    for (int n = 0; n < 5; ++n) square(power);
    const float again = power_of_two_near_inverse(trace(power));
    for (int i = 0; i < kGramEntries; ++i) power.entry[i] *= again;
  }
  const float(&p)[kGramEntries] = power.entry;
  float x = p[0], y = p[3], z = p[4], largest = p[0];
  if (p[1] > largest) x = p[3], y = p[1], z = p[5], largest = p[1];
  if (p[2] > largest) x = p[4], y = p[5], z = p[2];
  const float(&g)[kGramEntries] = first.entry;
  const float gx = (g[0] * x + g[3] * y) + g[4] * z;
  const float gy = (g[3] * x + g[1] * y) + g[5] * z;
  const float gz = (g[4] * x + g[5] * y) + g[2] * z;
  // The exact inverse of a power of two.
  const float unscale =
      __builtin_bit_cast(float, 0x7F000000u - __builtin_bit_cast(std::uint32_t, scale));
  const float squared = ((x * gx + y * gy) + z * gz) * unscale;
  const float factor = squared > 0 ? rotation_scale / square_root(squared) : 0.0f;
  return {{x * factor, y * factor, z * factor}, is_finite(energy)};
}

// What a product of the direction's codes with a centred key is to be multiplied with for the
// least-squares coefficient. products are taken with the differences, unrotated.
LOCKS_HD inline float refit_factor(float basis_scale, float squared_codes, float rotation_scale) {
  const float pivot = squared_codes * basis_scale * basis_scale + kRidge;
  return basis_scale * (0.25f * rotation_scale) / pivot;
}

// Token t's share of the products with the three differences.
LOCKS_HD inline float combine_differences(const float (&product)[kDifferences], int t) {
  const float a = t < 2 ? product[0] : -product[0];
  const float b = t % 2 == 0 ? product[1] : -product[1];
  const float c = t == 0 || t == 3 ? product[2] : -product[2];
  return (a + b) + c;
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
