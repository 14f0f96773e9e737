// Dot products of a run's queries with the rows of 16 pages, by products of 16-bit pairs (pmaddwd):
// for levels without AVX-512's products of bytes, see tile_dots.h. Exact: |query| <= 32512, |code|
// <= 128 and at most 256 channels stay below 2^30.1. Intrinsics, since compilers do not find
// pmaddwd when several sums share their operands.
//
// Rows are unpacked to 16 bits once for the whole group and stay in the first- or second-level
// cache: (1 + r) * 16 * d * 2 bytes, 8 KiB for `fine` at d = 128. The limit is the multiply-add: (1
// + r) * 16 / B * d a block and head.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "score/batch.h"
#include "score/score_kernels.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

// Unpacks `count` consecutive rows to consecutive rows of 16-bit codes, padded.
using UnpackRows = void (*)(const std::uint8_t* rows, int count, std::int16_t* out);

template <int kHeadDim>
void unpack_int4_rows(const std::uint8_t* rows, int count, std::int16_t* out) {
  constexpr int kHalf = kHeadDim / 2;
  for (int row = 0; row < count; ++row) {
    const auto* packed = reinterpret_cast<const signed char*>(rows + row * kHalf);
    std::int16_t* __restrict codes = out + row * padded_channels(kHeadDim);
    for (int b = 0; b < kHalf; ++b) {
      const auto byte = static_cast<std::int16_t>(packed[b]);
      codes[b] = static_cast<std::int16_t>((byte & 15) - 8);
      codes[b + kHalf] = static_cast<std::int16_t>(byte >> 4);
    }
    for (int c = kHeadDim; c < padded_channels(kHeadDim); ++c) codes[c] = 0;
  }
}

template <int kHeadDim>
void unpack_int8_rows(const std::uint8_t* rows, int count, std::int16_t* out) {
  for (int row = 0; row < count; ++row) {
    const auto* packed = reinterpret_cast<const signed char*>(rows + row * kHeadDim);
    std::int16_t* __restrict codes = out + row * padded_channels(kHeadDim);
    for (int c = 0; c < kHeadDim; ++c) codes[c] = packed[c];
    for (int c = kHeadDim; c < padded_channels(kHeadDim); ++c) codes[c] = 0;
  }
}

inline UnpackRows find_unpack_rows(int bits, int head_dim) {
  const bool is_int4 = bits == 4;
  switch (head_dim) {
    case 64:
      return is_int4 ? unpack_int4_rows<64> : unpack_int8_rows<64>;
    case 80:
      return is_int4 ? unpack_int4_rows<80> : unpack_int8_rows<80>;
    case 96:
      return is_int4 ? unpack_int4_rows<96> : unpack_int8_rows<96>;
    case 128:
      return is_int4 ? unpack_int4_rows<128> : unpack_int8_rows<128>;
    case 192:
      return is_int4 ? unpack_int4_rows<192> : unpack_int8_rows<192>;
    default:
      return is_int4 ? unpack_int4_rows<256> : unpack_int8_rows<256>;
  }
}

#if defined(__AVX2__)

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

// The rows of a batch, unpacked: [page][centroid, then basis rows][padded channels], the order of
// the record.
template <int kRank>
class RowDots {
 public:
  static constexpr int kMostHeads = 2;

  explicit RowDots(const ScoreRun& run)
      : run_(run),
        channels_(padded_channels(run.layout.head_dim)),
        unpack_centroid_(find_unpack_rows(run.layout.format.centroid_bits, run.layout.head_dim)),
        unpack_basis_(find_unpack_rows(run.layout.format.basis_bits, run.layout.head_dim)),
        dot_two_heads_(find_dot_rows<2>(channels_)),
        dot_one_head_(find_dot_rows<1>(channels_)) {}

  // Takes the rows of the records of 16 pages.
  void load(const std::uint8_t* const* records) {
    const int num_pages = run_.layout.format.pages_per_block();
    const int record_codes = num_pages * (1 + kRank) * channels_;
    for (int i = 0; i < kBatchPages / num_pages; ++i) {
      unpack_record(records[i], num_pages, rows_ + i * record_codes);
    }
  }

  // sums[h]: of query head + h.
  template <int kHeads>
  void dot(int head, HeadSums<kRank>* sums) const {
    const DotRows dot_rows = kHeads == 2 ? dot_two_heads_ : dot_one_head_;
    for (int j = 0; j <= kRank; ++j) {
      dot_rows(rows_ + j * channels_, (1 + kRank) * channels_, run_.query_codes + head * channels_,
               sums[0][j], (1 + kRank) * kBatchPages);
    }
  }

 private:
  void unpack_record(const std::uint8_t* record, int num_pages, std::int16_t* out) const {
    if (unpack_centroid_ == unpack_basis_) {
      unpack_basis_(record, num_pages * (1 + kRank), out);
      return;
    }
    for (int p = 0; p < num_pages; ++p) {
      const std::uint8_t* rows = record + p * run_.layout.page_rows_bytes;
      unpack_centroid_(rows, 1, out);
      unpack_basis_(rows + run_.layout.centroid_row_bytes, kRank, out + channels_);
      out += (1 + kRank) * channels_;
    }
  }

  const ScoreRun& run_;
  const int channels_;
  const UnpackRows unpack_centroid_;
  const UnpackRows unpack_basis_;
  const DotRows dot_two_heads_;
  const DotRows dot_one_head_;
  alignas(64) std::int16_t rows_[extent(kBatchPages * (1 + kRank) * kMaxHeadDim)];
};

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
