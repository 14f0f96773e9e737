// Builds records a warp each, the warps of a CTA together, for the formats that are built most:
// pages of four tokens, rank 1, improved, 4-bit coefficients (`fine`, `fine8`), 16-bit keys in
// aligned rows, head_dim 64 or 128. The same bytes as build_record.cuh and the CPU.
//
// Keys come by asynchronous copies a record ahead. Eight lanes take a page and hold the sum and the
// differences of its four keys (differences.h) in registers to the end: 64 numbers a lane at 128
// channels. The eigenproblem of a page is one lane's, so the pages of a group of warps are the work
// of one more warp, which solves while they turn and round the centroids. Registers
// are what limits the number of warps: 18 that build instead of 16 took 8 to 9 % off the time.
//
// Bound by instructions: 1,640 of a warp a record of `fine` at d = 128 (ncu, H200, November 2026),
// of which 870 are sums and products, that must not be fused; 77 % of the issue slots are taken.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/ptx.cuh"
#include "core/scalar.h"
#include "locks/summary.h"
#include "summary/differences.h"
#include "summary/key_hash.h"
#include "summary/lane_rows.cuh"
#include "summary/quantise.h"
#include "summary/record_job.cuh"
#include "summary/rotate_rows.cuh"
#include "summary/warp.cuh"

namespace locks::detail {

inline constexpr int kFourPages = kBlockTokens / 4;
inline constexpr int kFourWarps = 6;  // whose pages are eigenproblems of one warp, a lane each

__host__ __device__ constexpr bool builds_fours(const SummaryFormat& format, int head_dim,
                                                ScalarType type, bool keys_aligned) {
  return uses_differences(format) && format.coefficient_bits == 4 &&
         (head_dim == 64 || head_dim == 128) && keys_aligned && type != ScalarType::kFloat32;
}

// A format and a head size: bits of the rows of centroid and direction.
template <int D, int kCentroid, int kBasis>
struct FourShape {
  static constexpr int kDim = D, kCentroidBits = kCentroid, kBasisBits = kBasis;
  static constexpr int kCentroidBytes = D * kCentroid / 8;
  static constexpr int kPageRows = kCentroidBytes + D * kBasis / 8;
  // Where the parts behind the rows lie, as record_layout has them.
  static constexpr int kScales = kFourPages * kPageRows;
  static constexpr int kCoefficients = kScales + kFourPages * 4;
  static constexpr int kHeader = kCoefficients + kFourPages * 2;
};

// One record to build, or none.
struct FourItem {
  const std::uint8_t* keys;  // of token 0; null: none
  std::uint8_t* record;
  int head;
};

// Shared memory of a warp: raw keys, an exchange, the rows of a record, and the records that are
// next. Pages lie so that lanes of two of them meet different banks.
template <int D>
struct FourMemory {
  static constexpr int kRowBytes = 2 * D;
  static constexpr int kPageBytes = 4 * kRowBytes + 64;
  static constexpr int kRawBytes = kFourPages * kPageBytes;
  static constexpr int kExchangeFloats = exchange_floats(D / 64);
  static constexpr int kRowPadding = 8;  // bytes behind the rows of each page
  static constexpr int kItemBytes = kWarpSize * static_cast<int>(sizeof(FourItem));

  FourItem* items;  // [32]
  std::uint8_t* raw;
  float* exchange;
  std::uint8_t* rows;

  __device__ explicit FourMemory(std::uint8_t* memory)
      : items(reinterpret_cast<FourItem*>(memory)),
        raw(memory + kItemBytes),
        exchange(reinterpret_cast<float*>(raw + kRawBytes)),
        rows(raw + kRawBytes + 4 * kExchangeFloats) {}
  LOCKS_HD static constexpr int bytes(int page_rows) {
    const int rows_bytes = kFourPages * (page_rows + kRowPadding);
    return (kItemBytes + kRawBytes + 4 * kExchangeFloats + rows_bytes + 15) / 16 * 16;
  }
};

// What the warps of a group exchange with the one that solves their eigenproblems: whether each
// wants them solved, of each page the lanes' shares of the Gram matrix, and the direction found
// from it, its fourth number 1 if the page is scorable.
struct PageExchange {
  static constexpr int kPages = kFourWarps * kFourPages;
  static constexpr int kGramFloats = kGramEntries * kRowLanes + 4;  // meets all banks
  float4 direction[kPages];
  float gram[kPages][kGramFloats];
  alignas(16) std::int32_t is_wanted[kFourWarps];
};
static_assert(PageExchange::kPages <= kWarpSize && sizeof(PageExchange) % 16 == 0);

// A condition that is the same on all lanes, told in a way that the compiler understands: it then
// knows that the lanes stay together.
__device__ __forceinline__ bool is_any(bool condition) {
  return __any_sync(kEveryLane, condition) != 0;
}

__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

template <int D>
__device__ __forceinline__ void start_copy(const PagedTensor& keys, const FourItem& item,
                                           std::uint8_t* raw) {
  using M = FourMemory<D>;
  constexpr int kPieces = M::kRowBytes / 16;     // of a row
  constexpr int kRows = kWarpSize / kPieces;     // at a time
  constexpr int kPasses = kBlockTokens / kRows;  // of the warp
  if (item.keys == nullptr) return;
  const int lane = lane_index(), row = lane / kPieces, column = lane % kPieces * 16;
  const std::int64_t stride = 2 * keys.token_stride;
  const std::uint8_t* from = item.keys + row * stride + column;
  const std::uint32_t to = shared_address(raw) + row * M::kRowBytes + column;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    constexpr int kPagePasses = 4 / kRows;
    const int place =
        pass / kPagePasses * M::kPageBytes + pass % kPagePasses * kRows * M::kRowBytes;
    copy_async_16(to + place, from);
    from += kRows * stride;
  }
}

template <bool kBFloat16>
__device__ __forceinline__ void unpack_word(std::uint32_t word, float& low, float& high) {
  if constexpr (kBFloat16) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
  } else {
    low = __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xFFFFu)));
    high = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
}

// What lanes add to, and flip in, the words of their channels. In shared memory: computed anew for
// each record it would be fifty instructions, and registers have no room for it.
template <int D>
struct LaneKeys {
  uint2 flips[D / 32][kRowLanes];
  std::uint32_t hash[kWarpSize];

  // By one warp.
  __device__ void fill() {
    const int lane = lane_index();
    hash[lane] = hash_lane_key(lane / kRowLanes, lane % kRowLanes);
    for (int i = lane; i < D / 4; i += kWarpSize) {
      const std::uint32_t bits = flips_of_piece(4 * i);
      const auto signs = [bits](int w) {
        return (bits >> (2 * w) & 1u) << 15 | (bits >> (2 * w + 1) & 1u) << 31;
      };
      flips[i / kRowLanes][i % kRowLanes] = make_uint2(signs(0), signs(1));
    }
  }
};

// The sum (0) and the differences of a page's keys, near rows.
template <int D>
struct FourRows {
  float y[4][LaneRow<D>::kSlots];
};

// Reads a block's keys; returns this lane's share of their hash.
template <int D, bool kBFloat16>
__device__ __forceinline__ std::uint64_t take_keys(const std::uint8_t* raw,
                                                   const LaneKeys<D>& lane_keys,
                                                   FourRows<D>& rows) {
  using M = FourMemory<D>;
  static_assert(kHashLanes == kRowLanes && kHashTokens == 4);
  const int lane = lane_index();
  const std::uint8_t* from = raw + lane / kRowLanes * M::kPageBytes + lane % kRowLanes * 8;
  const std::uint32_t lane_hash = lane_keys.hash[lane];
  std::uint64_t hash = 0;
#pragma unroll
  for (int k = 0; k < D / 32; ++k) {
    const uint2 flips = lane_keys.flips[k][lane % kRowLanes];
    float key[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint2 pair = *reinterpret_cast<const uint2*>(from + t * M::kRowBytes + k * 64);
      hash += hash_pair(pair.x + (hash_key(t, k, 0) + lane_hash),
                        pair.y + (hash_key(t, k, 1) + lane_hash));
      unpack_word<kBFloat16>(pair.x ^ flips.x, key[t][0], key[t][1]);
      unpack_word<kBFloat16>(pair.y ^ flips.y, key[t][2], key[t][3]);
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const float a = key[0][u] + key[1][u], b = key[0][u] - key[1][u];
      const float e = key[2][u] + key[3][u], f = key[2][u] - key[3][u];
      rows.y[0][4 * k + u] = a + e;
      rows.y[1][4 * k + u] = a - e;
      rows.y[2][4 * k + u] = b + f;
      rows.y[3][4 * k + u] = b - f;
    }
  }
  return hash;
}

// The sum of the lanes' shares of a hash, from three sums of 32 bits.
__device__ __forceinline__ std::uint64_t add_shares(std::uint64_t share) {
  const auto low = static_cast<std::uint32_t>(share);
  return __reduce_add_sync(kEveryLane, low & 0xFFFFu) +
         (static_cast<std::uint64_t>(__reduce_add_sync(kEveryLane, low >> 16)) << 16) +
         (static_cast<std::uint64_t>(
              __reduce_add_sync(kEveryLane, static_cast<std::uint32_t>(share >> 32)))
          << 32);
}

__device__ __forceinline__ std::uint32_t finish_hash(std::uint64_t share, int head_dim) {
  return finish_key_hash(add_shares(share),
                         static_cast<std::uint32_t>(kBlockTokens * head_dim / 2));
}

// A lane's share of a product of near rows, in the order of the CPU's dot_by_fours; the lanes are
// added by exchanges 4, 2 and 1 apart.
template <int N>
__device__ __forceinline__ float dot_share(const float (&a)[N], const float (&b)[N]) {
  float sum[4];
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    sum[u] = a[u] * b[u];
#pragma unroll
    for (int s = u + 4; s < N; s += 4) sum[u] += a[s] * b[s];
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <int D>
__device__ __forceinline__ void store_gram(const FourRows<D>& rows, int warp, PageExchange& pages) {
  const int lane = lane_index();
  float* entry = pages.gram[warp * kFourPages + lane / kRowLanes] + lane % kRowLanes;
  const auto& y = rows.y;
  entry[0] = dot_share(y[1], y[1]);
  entry[1 * kRowLanes] = dot_share(y[2], y[2]);
  entry[2 * kRowLanes] = dot_share(y[3], y[3]);
  entry[3 * kRowLanes] = dot_share(y[1], y[2]);
  entry[4 * kRowLanes] = dot_share(y[1], y[3]);
  entry[5 * kRowLanes] = dot_share(y[2], y[3]);
}

// The directions of all pages, a lane each, if any warp wants them.
template <int D>
__device__ __forceinline__ void find_directions(PageExchange& pages) {
  const int page = min(lane_index(), PageExchange::kPages - 1);
  if (!is_any(pages.is_wanted[page / kFourPages] != 0)) return;
  const auto* share = reinterpret_cast<const float4*>(pages.gram[page]);
  DifferenceGram gram;
#pragma unroll
  for (int i = 0; i < kGramEntries; ++i) {
    const float4 a = share[2 * i], b = share[2 * i + 1];
    gram.entry[i] = ((a.x + b.x) + (a.z + b.z)) + ((a.y + b.y) + (a.w + b.w));
  }
  const Direction found = find_direction(gram, rotation_scale(D));
  pages.direction[page] =
      make_float4(found.weight[0], found.weight[1], found.weight[2], found.is_scorable ? 1.0f : 0);
}

// Rotates the sum of the keys, subtracts the reference (null: zero) and leaves the centroid's row
// in `out`.
template <class Shape>
__device__ __forceinline__ std::uint16_t write_centroid(const float* reference,
                                                        float (&row)[LaneRow<Shape::kDim>::kSlots],
                                                        float* exchange, std::uint8_t* out) {
  constexpr int kSlots = LaneRow<Shape::kDim>::kSlots;
  const int j = lane_index() % kRowLanes;
  turn_lanes(row, exchange);
  const float scale = 0.25f * rotation_scale(Shape::kDim);
#pragma unroll
  for (int s = 0; s < kSlots; ++s) row[s] *= scale;
  if (reference != nullptr) {
    reference += j % 4 + j / 4 * 32;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) row[s] -= reference[s / 8 * 64 + s % 8 * 4];
  }
  const Quantised q = scale_lanes<Shape::kCentroidBits>(row);
  pack_row<Shape::kCentroidBits>(row, out);
  return q.scale_bits;
}

// What a page's tail holds: scales and coefficients.
struct PageTail {
  std::uint32_t scales;
  std::uint16_t coefficients;
};

// Lane t (mod 4) rounds the coefficient of token t.
__device__ __forceinline__ PageTail make_tail(float c, bool is_scorable, float basis_scale,
                                              std::uint16_t centroid_scale) {
  const int t = lane_index() % 4;
  float largest = fabsf(c);
  largest = max_keeping_nan(largest, __shfl_xor_sync(kEveryLane, largest, 1));
  largest = max_keeping_nan(largest, __shfl_xor_sync(kEveryLane, largest, 2));
  const float limit = code_limit(4);
  const Quantised scale = find_scale_fast(largest, limit);
  float quotient = divide_by_short(c, scale.scale, reciprocal(scale.scale));
  quotient = fminf(fmaxf(quotient, -limit), limit);
  const int code = is_scorable && is_finite(scale.scale) ? __float2int_rn(quotient) : 0;
  std::uint32_t packed = static_cast<std::uint32_t>(code + 8) << (4 * t);
  packed |= __shfl_xor_sync(kEveryLane, packed, 1);
  packed |= __shfl_xor_sync(kEveryLane, packed, 2);
  const std::uint32_t component = is_scorable ? to_half_bits(basis_scale * scale.scale) : kFp16Nan;
  return {(is_scorable ? centroid_scale : kFp16Nan) | component << 16,
          static_cast<std::uint16_t>(packed)};
}

// The direction's row, in `out`, and the coefficients of the four keys.
template <class Shape>
__device__ __forceinline__ PageTail write_direction(const FourRows<Shape::kDim>& rows,
                                                    float4 weights, std::uint16_t centroid_scale,
                                                    float* exchange, std::uint8_t* out) {
  constexpr int kSlots = LaneRow<Shape::kDim>::kSlots;
  const auto& y = rows.y;
  float row[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    row[s] = (y[1][s] * weights.x + y[2][s] * weights.y) + y[3][s] * weights.z;
  }
  turn_lanes(row, exchange);
  const Quantised q = scale_lanes<Shape::kBasisBits>(row);
  pack_row<Shape::kBasisBits>(row, out);
  float sums[4];
  sums[3] = turn_codes<Shape::kBasisBits>(row, exchange);
#pragma unroll
  for (int m = 0; m < kDifferences; ++m) sums[m] = dot_share(row, y[m + 1]);
  add_over_lanes(sums);
  const float product[kDifferences] = {sums[0], sums[1], sums[2]};
  const float c = combine_differences(product, lane_index() % 4) *
                  refit_factor(q.scale, sums[3], rotation_scale(Shape::kDim));
  return make_tail(c, weights.w != 0, q.scale, centroid_scale);
}

// Rows from shared memory, and what comes behind them, to the record.
template <class Shape>
__device__ __forceinline__ void store_record(const std::uint8_t* rows, const PageTail& tail,
                                             uint2 header, std::uint8_t* record) {
  const int lane = lane_index(), page = lane / kRowLanes, j = lane % kRowLanes;
  const auto* from =
      rows + page * (Shape::kPageRows + FourMemory<Shape::kDim>::kRowPadding) + 8 * j;
  std::uint8_t* to = record + page * Shape::kPageRows + 8 * j;
  constexpr int kPass = 8 * kRowLanes;
#pragma unroll
  for (int b = 0; b < Shape::kPageRows; b += kPass) {
    if (b + kPass <= Shape::kPageRows || b + 8 * j < Shape::kPageRows) {
      *reinterpret_cast<uint2*>(to + b) = *reinterpret_cast<const uint2*>(from + b);
    }
  }
  if (j == 0) {
    *reinterpret_cast<std::uint32_t*>(record + Shape::kScales + 4 * page) = tail.scales;
    *reinterpret_cast<std::uint16_t*>(record + Shape::kCoefficients + 2 * page) = tail.coefficients;
  }
  if (lane == 0) *reinterpret_cast<uint2*>(record + Shape::kHeader) = header;
}

// Whether the record already describes these keys: one lane's reading, since another row of the
// batch may be writing it.
template <class Shape>
__device__ __forceinline__ bool is_current(uint2 header, const std::uint8_t* record) {
  const uint2 found = *reinterpret_cast<const uint2*>(record + Shape::kHeader);
  return __shfl_sync(kEveryLane, found.x, 0) == header.x &&
         __shfl_sync(kEveryLane, found.y, 0) == header.y;
}

// A page that is not scorable has zero codes. (Its direction's are: weights are zero or NaN.)
template <class Shape>
__device__ __forceinline__ void clear_unscorable(bool is_scorable, std::uint8_t* centroid) {
  if (!is_any(!is_scorable)) return;
  if (!is_scorable) {
#pragma unroll 1
    for (int b = lane_index() % kRowLanes; b < Shape::kCentroidBytes; b += kRowLanes) {
      centroid[b] = Shape::kCentroidBits == 4 ? 8 : 0;
    }
  }
}

}  // namespace locks::detail
