// Dot products of a run's queries with the rows of 16 pages, by AVX-512's products of bytes
// (vpdpbusd). Exact: the same integers as those of row_dots.h.
//
// A tile holds one row of each of the 16 pages, turned so that a lane is a page: column c has the
// codes of channels 4c to 4c + 3 of all pages, as unsigned bytes. A query's code is 256 high + low,
// both signed bytes. So a product takes 64 codes by one half of a query, whose four bytes are the
// same in all lanes, and no sum has to be gathered from lanes at the end. Rows are turned once, for
// all heads of the group: 64 shuffles for 16 rows of up to 64 bytes.
//
// The limit is the products: (1 + r) * 16 / B * d / 32 a record and head, 128 for `fine` at d = 128
// and 4 heads, of which Zen 5 starts two a cycle.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "score/batch.h"
#include "score/score_kernels.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

// The forms with a full mask are the same instructions; g++ 12 takes the others' unused
// pass-through operand for an uninitialised variable (-Wmaybe-uninitialized).
inline __m512i low_words(__m512i a, __m512i b) { return _mm512_maskz_unpacklo_epi32(0xFFFF, a, b); }
inline __m512i high_words(__m512i a, __m512i b) {
  return _mm512_maskz_unpackhi_epi32(0xFFFF, a, b);
}
inline __m512i low_pairs(__m512i a, __m512i b) { return _mm512_maskz_unpacklo_epi64(0xFF, a, b); }
inline __m512i high_pairs(__m512i a, __m512i b) { return _mm512_maskz_unpackhi_epi64(0xFF, a, b); }
inline __m512i even_quarters(__m512i a, __m512i b) {
  return _mm512_maskz_shuffle_i32x4(0xFFFF, a, b, 0x88);
}
inline __m512i odd_quarters(__m512i a, __m512i b) {
  return _mm512_maskz_shuffle_i32x4(0xFFFF, a, b, 0xDD);
}

// Word j of x[i] becomes word i of x[j].
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 4) {  // 4 x 4 words in each quarter of a register
    const __m512i a = low_words(x[i], x[i + 1]), b = low_words(x[i + 2], x[i + 3]);
    const __m512i c = high_words(x[i], x[i + 1]), d = high_words(x[i + 2], x[i + 3]);
    y[i] = low_pairs(a, b);
    y[i + 1] = high_pairs(a, b);
    y[i + 2] = low_pairs(c, d);
    y[i + 3] = high_pairs(c, d);
  }
  for (int i = 0; i < 4; ++i) {  // then 4 x 4 quarters
    const __m512i a = even_quarters(y[i], y[i + 4]), b = odd_quarters(y[i], y[i + 4]);
    const __m512i c = even_quarters(y[i + 8], y[i + 12]), d = odd_quarters(y[i + 8], y[i + 12]);
    x[i] = even_quarters(a, c);
    x[i + 4] = even_quarters(b, d);
    x[i + 8] = odd_quarters(a, c);
    x[i + 12] = odd_quarters(b, d);
  }
}

// Word c of the rows of 16 pages: the codes of channels 4c to 4c + 3 or, of int4 rows, of as many
// more half of the channels on.
using TileColumn = std::int32_t[kBatchPages];

// `count` of a tile's columns, up to 16. All 16 are the common case: no masks, no branches.
template <bool kAll>
void fill_columns(const std::uint8_t* const (&rows)[kBatchPages], int first, int count,
                  TileColumn* columns) {
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  __m512i x[16];
  for (int i = 0; i < 16; ++i) {
    const std::uint8_t* words = rows[i] + 4 * first;
    x[i] = kAll ? _mm512_loadu_si512(words) : _mm512_maskz_loadu_epi32(mask, words);
  }
  transpose(x);
  for (int i = 0; i < (kAll ? 16 : count); ++i) _mm512_store_si512(columns + i, x[i]);
}

// Fills a tile from one row of each page.
inline void fill_tile(const std::uint8_t* const (&rows)[kBatchPages], int num_columns,
                      TileColumn* tile) {
  int first = 0;
  for (; first + 16 <= num_columns; first += 16) fill_columns<true>(rows, first, 16, tile + first);
  if (first < num_columns) {
    fill_columns<false>(rows, first, num_columns - first, tile + first);
  }
}

// A query's codes as bytes. The rows' codes are made unsigned by adding 8 or 128, and the sum takes
// that off again.
struct SplitQuery {
  std::int8_t low[kMaxHeadDim];
  std::int8_t high[kMaxHeadDim];
  std::int32_t sum;  // of its codes
};

inline void split_query(const std::int16_t* codes, int head_dim, SplitQuery& query) {
  query.sum = 0;
  for (int c = 0; c < head_dim; ++c) {
    query.low[c] = static_cast<std::int8_t>(codes[c]);
    query.high[c] = static_cast<std::int8_t>((codes[c] + 128) >> 8);
    query.sum += codes[c];
  }
}

inline __m512i four_codes(const std::int8_t* codes) {
  std::int32_t word;
  std::memcpy(&word, codes, sizeof(word));
  return _mm512_set1_epi32(word);
}

// sum + codes . four_codes, lane by lane. Not the intrinsic: g++ 12 copies its sum around each use
// and, where many are live, through memory.
inline __m512i add_product(__m512i sum, __m512i codes, __m512i query) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(query));
  return sum;
}

// The codes of a column's word as unsigned bytes: all of an int8 word; the low nibbles of an int4
// word, which have 8 added already, or its high ones.
template <int kBits>
__m512i codes_of(__m512i words, bool high) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(1 << (kBits - 1)));
  if constexpr (kBits == 8) return _mm512_xor_si512(words, sign);
  const __m512i nibbles = _mm512_set1_epi8(0x0F);
  if (!high) return _mm512_and_si512(words, nibbles);
  const __m512i shifted = _mm512_maskz_srli_epi32(0xFFFF, words, 4);
  return _mm512_xor_si512(_mm512_and_si512(shifted, nibbles), sign);
}

// sums[h][t]: of kHeads queries with kTiles tiles of kBits a code. One function, all its sums
// local: they must stay in registers.
template <int kHeads, int kTiles, int kBits>
void dot_tiles(const TileColumn* tiles, int num_columns, const SplitQuery* queries,
               __m512i (&sums)[extent(kHeads)][extent(kTiles)]) {
  __m512i low[extent(kHeads)][extent(kTiles)], high[extent(kHeads)][extent(kTiles)];
  for (int h = 0; h < kHeads; ++h) {
    for (int t = 0; t < kTiles; ++t) {
      low[h][t] = _mm512_set1_epi32(-(1 << (kBits - 1)) * queries[h].sum);
      high[h][t] = _mm512_setzero_si512();
    }
  }
  for (int c = 0; c < num_columns; ++c) {
#pragma GCC unroll 2
    for (int half = 0; half < 8 / kBits; ++half) {
      const int channel = 4 * (half * num_columns + c);
      __m512i codes[extent(kTiles)];
      for (int t = 0; t < kTiles; ++t) {
        codes[t] = codes_of<kBits>(_mm512_load_si512(tiles + t * num_columns + c), half == 1);
      }
      for (int h = 0; h < kHeads; ++h) {
        const __m512i low_codes = four_codes(queries[h].low + channel);
        const __m512i high_codes = four_codes(queries[h].high + channel);
        for (int t = 0; t < kTiles; ++t) {
          low[h][t] = add_product(low[h][t], codes[t], low_codes);
          high[h][t] = add_product(high[h][t], codes[t], high_codes);
        }
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int t = 0; t < kTiles; ++t) {
      sums[h][t] = _mm512_add_epi32(low[h][t], _mm512_maskz_slli_epi32(0xFFFF, high[h][t], 8));
    }
  }
}

// The queries of a run, and a batch's tiles: the centroids', then one a component.
template <int kRank>
class TileDots {
 public:
  static constexpr int kMostHeads = 4;  // with two tiles, their sums take half of the registers

  explicit TileDots(const ScoreRun& run) : layout_(run.layout) {
    const int channels = padded_channels(layout_.head_dim);
    for (int h = 0; h < run.group_size; ++h) {
      split_query(run.query_codes + h * channels, layout_.head_dim, queries_[h]);
    }
  }

  // Takes the rows of the records of 16 pages.
  void load(const std::uint8_t* const* records) {
    const int num_pages = layout_.format.pages_per_block();
    const std::uint8_t* rows[kBatchPages];
    for (int lane = 0; lane < kBatchPages; ++records) {
      for (int p = 0; p < num_pages; ++p) rows[lane++] = *records + p * layout_.page_rows_bytes;
    }
    int row_bytes = layout_.centroid_row_bytes;
    TileColumn* tile = tiles_;
    for (int j = 0; j <= kRank; ++j) {
      fill_tile(rows, row_bytes / 4, tile);
      tile += row_bytes / 4;
      for (const std::uint8_t*& row : rows) row += row_bytes;
      row_bytes = layout_.basis_row_bytes;
    }
  }

  // sums[h]: of query head + h.
  template <int kHeads>
  void dot(int head, HeadSums<kRank>* sums) const {
    const SummaryFormat& format = layout_.format;
    const TileColumn* tile = tiles_;
    int j = 0;
    if (format.centroid_bits != format.basis_bits) {
      dot_some<kHeads, 1>(format.centroid_bits, tile, head, j++, sums);
      tile += layout_.centroid_row_bytes / 4;
    }
    for (; j < kRank; j += 2, tile += layout_.basis_row_bytes / 2) {
      dot_some<kHeads, 2>(format.basis_bits, tile, head, j, sums);
    }
    if (j == kRank) dot_some<kHeads, 1>(format.basis_bits, tile, head, j, sums);
  }

 private:
  template <int kHeads, int kTiles>
  void dot_some(int bits, const TileColumn* tiles, int head, int first,
                HeadSums<kRank>* sums) const {
    __m512i tile_sums[extent(kHeads)][extent(kTiles)];
    (bits == 4 ? dot_tiles<kHeads, kTiles, 4>
               : dot_tiles<kHeads, kTiles, 8>)(tiles, layout_.head_dim * bits / 32, queries_ + head,
                                               tile_sums);
    for (int h = 0; h < kHeads; ++h) {
      for (int t = 0; t < kTiles; ++t) _mm512_store_si512(sums[h][first + t], tile_sums[h][t]);
    }
  }

  const RecordLayout& layout_;
  SplitQuery queries_[kMaxGroupSize];
  alignas(64) TileColumn tiles_[extent((1 + kRank) * kMaxHeadDim / 4)];
};

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
