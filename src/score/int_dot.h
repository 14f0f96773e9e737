// Dot products of 16-bit codes with exact 32-bit sums: |query| <= 32512, |code| <= 128 and at most
// 256 channels stay below 2^30.1. Intrinsics, since compilers do not find the multiply-add of pairs
// (pmaddwd) when several sums share their operands.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "core/cpu_namespace.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

// For array bounds that depend on template arguments, where -Wsign-conversion insists.
constexpr std::size_t extent(int count) { return static_cast<std::size_t>(count); }

#if defined(__AVX512BW__)

// The forms with a full mask are the same instructions; g++ 12 takes the others' unused
// pass-through operand for an uninitialised variable (-Wmaybe-uninitialized).
struct IntVector {
  static constexpr int kCodes = 32;
  __m512i v;
};
inline IntVector zero_ints() { return {_mm512_setzero_si512()}; }
inline IntVector load_codes(const std::int16_t* p) { return {_mm512_load_si512(p)}; }
inline IntVector multiply_add(IntVector sum, IntVector a, IntVector b) {
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
}
inline IntVector add_pairs(IntVector a, IntVector b) {
  return {_mm512_add_epi32(_mm512_maskz_unpacklo_epi32(0xFFFF, a.v, b.v),
                           _mm512_maskz_unpackhi_epi32(0xFFFF, a.v, b.v))};
}
inline IntVector add_halves(IntVector a, IntVector b) {
  return {_mm512_add_epi32(_mm512_maskz_unpacklo_epi64(0xFF, a.v, b.v),
                           _mm512_maskz_unpackhi_epi64(0xFF, a.v, b.v))};
}
inline __m512i add_quarters(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_maskz_shuffle_i32x4(0xFFFF, a, b, 0x88),
                          _mm512_maskz_shuffle_i32x4(0xFFFF, a, b, 0xDD));
}
inline void store_lane_sums(const IntVector (&a)[4], std::int32_t* out) {
  const __m512i low = add_quarters(a[0].v, a[1].v);
  const __m512i high = add_quarters(a[2].v, a[3].v);
  _mm512_store_si512(out, add_quarters(low, high));
}

#elif defined(__AVX2__)

struct IntVector {
  static constexpr int kCodes = 16;
  __m256i v;
};
inline IntVector zero_ints() { return {_mm256_setzero_si256()}; }
inline IntVector load_codes(const std::int16_t* p) {
  return {_mm256_load_si256(reinterpret_cast<const __m256i*>(p))};
}
inline IntVector multiply_add(IntVector sum, IntVector a, IntVector b) {
  return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v))};
}
inline IntVector add_pairs(IntVector a, IntVector b) {
  return {_mm256_add_epi32(_mm256_unpacklo_epi32(a.v, b.v), _mm256_unpackhi_epi32(a.v, b.v))};
}
inline IntVector add_halves(IntVector a, IntVector b) {
  return {_mm256_add_epi32(_mm256_unpacklo_epi64(a.v, b.v), _mm256_unpackhi_epi64(a.v, b.v))};
}
inline void store_lane_sums(const IntVector (&a)[4], std::int32_t* out) {
  for (int i = 0; i < 4; i += 2) {
    const __m256i low = _mm256_permute2x128_si256(a[i].v, a[i + 1].v, 0x20);
    const __m256i high = _mm256_permute2x128_si256(a[i].v, a[i + 1].v, 0x31);
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + 4 * i), _mm256_add_epi32(low, high));
  }
}

#elif defined(__SSE2__)

struct IntVector {
  static constexpr int kCodes = 8;
  __m128i v;
};
inline IntVector zero_ints() { return {_mm_setzero_si128()}; }
inline IntVector load_codes(const std::int16_t* p) {
  return {_mm_load_si128(reinterpret_cast<const __m128i*>(p))};
}
inline IntVector multiply_add(IntVector sum, IntVector a, IntVector b) {
  return {_mm_add_epi32(sum.v, _mm_madd_epi16(a.v, b.v))};
}
inline IntVector add_pairs(IntVector a, IntVector b) {
  return {_mm_add_epi32(_mm_unpacklo_epi32(a.v, b.v), _mm_unpackhi_epi32(a.v, b.v))};
}
inline IntVector add_halves(IntVector a, IntVector b) {
  return {_mm_add_epi32(_mm_unpacklo_epi64(a.v, b.v), _mm_unpackhi_epi64(a.v, b.v))};
}
inline void store_lane_sums(const IntVector (&a)[4], std::int32_t* out) {
  for (int i = 0; i < 4; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(out + 4 * i), a[i].v);
}

#else

struct IntVector {
  static constexpr int kCodes = 8;
  std::int32_t v[4];
};
struct CodeVector {
  const std::int16_t* v;
};
inline IntVector zero_ints() { return {{0, 0, 0, 0}}; }
inline CodeVector load_codes(const std::int16_t* p) { return {p}; }
inline IntVector multiply_add(IntVector sum, CodeVector a, CodeVector b) {
  for (int i = 0; i < 4; ++i) sum.v[i] += a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1];
  return sum;
}
inline IntVector add_pairs(IntVector a, IntVector b) {
  return {{a.v[0] + a.v[2], b.v[0] + b.v[2], a.v[1] + a.v[3], b.v[1] + b.v[3]}};
}
inline IntVector add_halves(IntVector a, IntVector b) {
  return {{a.v[0] + a.v[2], a.v[1] + a.v[3], b.v[0] + b.v[2], b.v[1] + b.v[3]}};
}
inline void store_lane_sums(const IntVector (&a)[4], std::int32_t* out) {
  for (int i = 0; i < 16; ++i) out[i] = a[i / 4].v[i % 4];
}

#endif

// Sums are folded four at a time, a transpose and an addition at once, to vectors whose 128-bit
// quarters each hold partial sums of the same four rows; store_lane_sums then folds four of those
// to 16 whole sums.
inline IntVector fold_four(IntVector a, IntVector b, IntVector c, IntVector d) {
  return add_halves(add_pairs(a, b), add_pairs(c, d));
}

inline constexpr int kDotRows = 16;

// sums[h * sum_stride + i] = query h . row i, for `kHeads` queries and 16 rows of `kChannels` codes
// that lie `row_stride` apart. Two heads at a time keep eight sums in registers and load each row
// half as often; a fixed number of channels lets AVX-512 keep the queries there too.
template <int kChannels, int kHeads>
void dot_rows(const std::int16_t* rows, int row_stride, const std::int16_t* queries,
              std::int32_t* sums, int sum_stride) {
  IntVector folded[extent(kHeads)][kDotRows / 4];
  for (int quad = 0; quad < kDotRows / 4; ++quad) {
    const std::int16_t* tile = rows + 4 * quad * row_stride;
    IntVector sum[extent(kHeads)][4];
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < 4; ++i) sum[h][i] = zero_ints();
    }
    for (int c = 0; c < kChannels; c += IntVector::kCodes) {
      for (int i = 0; i < 4; ++i) {
        const auto row = load_codes(tile + i * row_stride + c);
        for (int h = 0; h < kHeads; ++h) {
          sum[h][i] = multiply_add(sum[h][i], row, load_codes(queries + h * kChannels + c));
        }
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      folded[h][quad] = fold_four(sum[h][0], sum[h][1], sum[h][2], sum[h][3]);
    }
  }
  for (int h = 0; h < kHeads; ++h) store_lane_sums(folded[h], sums + h * sum_stride);
}

using DotRows = void (*)(const std::int16_t* rows, int row_stride, const std::int16_t* queries,
                         std::int32_t* sums, int sum_stride);

// For padded channels, see score_kernels.h.
template <int kHeads>
DotRows find_dot_rows(int channels) {
  switch (channels) {
    case 64:
      return dot_rows<64, kHeads>;
    case 96:
      return dot_rows<96, kHeads>;
    case 128:
      return dot_rows<128, kHeads>;
    case 192:
      return dot_rows<192, kHeads>;
    default:
      return dot_rows<256, kHeads>;
  }
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
