// Rounding of rows and coefficients to codes, and the least squares that refit coefficients: the
// arithmetic of a record that the CPU and the GPU share, operation by operation, so that both write
// the same bytes.
#pragma once

#include <cstdint>

#include "core/cpu_namespace.h"
#include "core/scalar.h"
#include "locks/summary.h"
#include "summary/eigensolver.h"
#include "summary/rows.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

inline constexpr int kMaxRank = 8;
// Added to the diagonal of the least squares that refit coefficients, whose rows have norms near 1:
// it keeps a row that quantised to zero solvable and moves the others by a millionth.
inline constexpr float kRidge = 1e-6f;
// A direction with less than this share of the page's energy is rounding noise of the Gram matrix.
inline constexpr float kNoiseEnergy = 1e-12f;

LOCKS_HD constexpr float code_limit(int bits) { return bits == 4 ? 7.0f : 127.0f; }

// A row's scale, as stored and as read back.
struct Quantised {
  std::uint16_t scale_bits;
  float scale;
};

// The fp16 scale with which codes within +-limit reach `largest`. Never zero, since codes divide by
// it; infinite or NaN if `largest` is too large for fp16 or is itself infinite or NaN.
LOCKS_HD inline Quantised find_scale(float largest, float limit) {
  std::uint16_t bits = float_to_fp16(largest / limit);
  if (bits == 0) bits = 1;
  return {bits, fp16_to_float(bits)};
}

LOCKS_HD inline void store_fp16(std::uint8_t* scales, int index, std::uint16_t bits) {
  __builtin_memcpy(scales + 2 * index, &bits, sizeof bits);
}

// Quantises the coefficients of one component against one scale and packs them from code place
// `first`.
LOCKS_HD inline Quantised pack_coefficients(const float* c, int count, int bits, int first,
                                            std::uint8_t* packed) {
  const float limit = code_limit(bits);
  float row[kLanes] = {};
  for (int i = 0; i < count; ++i) row[i] = c[i];
  const Quantised result = find_scale(max_magnitude(row, kLanes), limit);
  const bool finite = is_finite(result.scale);
  for (int i = 0; i < count; ++i) {
    const int code = finite ? round_to_code(row[i], result.scale, limit) : 0;
    const int stored = code + (bits == 4 ? 8 : 128);
    const int place = first + i;
    const int shift = bits == 4 ? place % 2 * 4 : 0;
    std::uint8_t& byte = packed[bits == 4 ? place / 2 : place];
    byte = static_cast<std::uint8_t>((shift == 0 ? 0 : byte) | stored << shift);
  }
  return result;
}

// Solves (gram + kRidge I) c = rhs for the B right-hand sides in place, by Cholesky. A pivot is
// never below the ridge, which float's rounding could otherwise bring to zero.
template <int B>
LOCKS_HD void solve_refit(float (&gram)[kMaxRank][kMaxRank], int rank,
                          float (&rhs)[kMaxRank][kBlockTokens]) {
  for (int k = 0; k < rank; ++k) {
    float pivot = gram[k][k] + kRidge;
    for (int m = 0; m < k; ++m) pivot -= gram[k][m] * gram[k][m];
    pivot = square_root(pivot > kRidge ? pivot : kRidge);
    gram[k][k] = pivot;
    for (int i = k + 1; i < rank; ++i) {
      float entry = gram[i][k];
      for (int m = 0; m < k; ++m) entry -= gram[i][m] * gram[k][m];
      gram[i][k] = entry / pivot;
    }
    for (int t = 0; t < B; ++t) {
      float entry = rhs[k][t];
      for (int m = 0; m < k; ++m) entry -= gram[k][m] * rhs[m][t];
      rhs[k][t] = entry / pivot;
    }
  }
  for (int k = rank - 1; k >= 0; --k) {
    for (int t = 0; t < B; ++t) {
      float entry = rhs[k][t];
      for (int m = k + 1; m < rank; ++m) entry -= gram[m][k] * rhs[m][t];
      rhs[k][t] = entry / gram[k][k];
    }
  }
}

// The last 8 bytes of a record.
LOCKS_HD inline void write_header(const RecordLayout& layout, std::uint8_t format_code,
                                  std::uint32_t key_hash, std::uint8_t* record) {
  std::uint8_t* header = record + layout.header_offset;
  const std::uint16_t magic = kRecordMagic;
  __builtin_memcpy(header, &magic, 2);
  header[2] = kRecordVersion;
  header[3] = format_code;
  __builtin_memcpy(header + 4, &key_hash, 4);
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
