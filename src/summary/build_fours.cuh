// Builds records a warp each, the warps of a CTA together, for the formats that are built most:
// pages of four tokens, rank 1, improved, 4-bit coefficients (`fine`, `fine8`), 16-bit keys in
// aligned rows, head_dim 64 or 128. The same bytes as build_record.cuh and the CPU.
//
// Keys come by asynchronous copies a record ahead. Eight lanes take a page and hold the sum and the
// differences of its four keys (differences.h) in registers to the end: 64 numbers a lane at 128
// channels. The eigenproblem of a page is one lane's, which is why a CTA has eight warps: their 32
// pages are one warp's work, in turn, while the others turn and round the centroids.
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

__host__ __device__ constexpr bool builds_fours(const SummaryFormat& format, int head_dim,
                                                ScalarType type, bool keys_aligned) {
  return uses_differences(format) && format.coefficient_bits == 4 &&
         (head_dim == 64 || head_dim == 128) && keys_aligned && type != ScalarType::kFloat32;
}

// Shared memory of a warp: raw keys, an exchange, and the rows of a record. Pages lie so that lanes
// of two of them meet different banks.
template <int D>
struct FourMemory {
  static constexpr int kRowBytes = 2 * D;
  static constexpr int kPageBytes = 4 * kRowBytes + 64;
  static constexpr int kRawBytes = kFourPages * kPageBytes;
  static constexpr int kExchangeFloats = exchange_floats(D / 64);
  static constexpr int kRowPadding = 8;  // bytes behind the rows of each page

  std::uint8_t* raw;
  float* exchange;
  std::uint8_t* rows;

  __device__ explicit FourMemory(std::uint8_t* memory)
      : raw(memory),
        exchange(reinterpret_cast<float*>(memory + kRawBytes)),
        rows(memory + kRawBytes + 4 * kExchangeFloats) {}
  LOCKS_HD static constexpr int bytes(const RecordLayout& layout) {
    const int rows_bytes = kFourPages * (layout.page_rows_bytes + kRowPadding);
    return (kRawBytes + 4 * kExchangeFloats + rows_bytes + 15) / 16 * 16;
  }
};

// What the warps of a CTA exchange: of each page the lanes' shares of the Gram matrix, and the
// direction found from it, its fourth number 1 if the page is scorable.
struct PageExchange {
  static constexpr int kGramFloats = kGramEntries * kRowLanes + 4;  // meets all banks
  float* gram;
  float4* direction;
  LOCKS_HD static constexpr int bytes(int num_warps) {
    return num_warps * kFourPages * (kGramFloats + 4) * static_cast<int>(sizeof(float));
  }
  __device__ PageExchange(std::uint8_t* memory, int num_warps)
      : gram(reinterpret_cast<float*>(memory)),
        direction(reinterpret_cast<float4*>(gram + num_warps * kFourPages * kGramFloats)) {}
};

// One record to build, or none.
struct FourItem {
  const std::uint8_t* keys;  // of token 0; null: none
  std::uint8_t* record;
  int head;
};

__device__ __forceinline__ void copy_16_async(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
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
    const int place = pass / kPagePasses * M::kPageBytes + pass % kPagePasses * kRows * M::kRowBytes;
    copy_16_async(to + place, from);
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

// What a lane adds to, and flips in, the words of its channels.
template <int D>
struct LaneKeys {
  std::uint32_t hash;
  std::uint32_t flips[D / 32][2];
};

template <int D>
__device__ __forceinline__ LaneKeys<D> find_lane_keys() {
  const int lane = lane_index(), j = lane % kRowLanes;
  LaneKeys<D> keys;
  keys.hash = hash_lane_key(lane / kRowLanes, j);
#pragma unroll
  for (int k = 0; k < D / 32; ++k) {
    const std::uint32_t flips = flips_of_piece(32 * k + 4 * j);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      keys.flips[k][w] = (flips >> (2 * w) & 1u) << 15 | (flips >> (2 * w + 1) & 1u) << 31;
    }
  }
  return keys;
}

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
  std::uint64_t hash = 0;
#pragma unroll
  for (int k = 0; k < D / 32; ++k) {
    float key[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint2 pair = *reinterpret_cast<const uint2*>(from + t * M::kRowBytes + k * 64);
      hash += hash_pair(pair.x + (hash_key(t, k, 0) + lane_keys.hash),
                        pair.y + (hash_key(t, k, 1) + lane_keys.hash));
      unpack_word<kBFloat16>(pair.x ^ lane_keys.flips[k][0], key[t][0], key[t][1]);
      unpack_word<kBFloat16>(pair.y ^ lane_keys.flips[k][1], key[t][2], key[t][3]);
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

// The sum of the lanes' shares, from three sums of 32 bits.
__device__ __forceinline__ std::uint32_t finish_hash(std::uint64_t share, int head_dim) {
  const auto low = static_cast<std::uint32_t>(share);
  const std::uint64_t sum =
      __reduce_add_sync(kEveryLane, low & 0xFFFFu) +
      (static_cast<std::uint64_t>(__reduce_add_sync(kEveryLane, low >> 16)) << 16) +
      (static_cast<std::uint64_t>(
           __reduce_add_sync(kEveryLane, static_cast<std::uint32_t>(share >> 32)))
       << 32);
  return finish_key_hash(sum, static_cast<std::uint32_t>(kBlockTokens * head_dim / 2));
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
__device__ __forceinline__ void store_gram(const FourRows<D>& rows, float* warp_gram) {
  const int lane = lane_index();
  float* entry =
      warp_gram + lane / kRowLanes * PageExchange::kGramFloats + lane % kRowLanes;
  const auto& y = rows.y;
  entry[0] = dot_share(y[1], y[1]);
  entry[1 * kRowLanes] = dot_share(y[2], y[2]);
  entry[2 * kRowLanes] = dot_share(y[3], y[3]);
  entry[3 * kRowLanes] = dot_share(y[1], y[2]);
  entry[4 * kRowLanes] = dot_share(y[1], y[3]);
  entry[5 * kRowLanes] = dot_share(y[2], y[3]);
}

// The directions of all pages of the CTA, a lane each; by one warp.
template <int D>
__device__ __forceinline__ void find_directions(const PageExchange& pages, int num_pages) {
  const int page = lane_index();
  if (page >= num_pages) return;
  const auto* share = reinterpret_cast<const float4*>(pages.gram + page * PageExchange::kGramFloats);
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

// Rotates the sum of the keys, subtracts the reference and leaves the centroid's row in `out`.
template <int D>
__device__ __forceinline__ std::uint16_t write_centroid(const RecordJob& job, int head,
                                                        float (&row)[LaneRow<D>::kSlots],
                                                        float* exchange, std::uint8_t* out) {
  constexpr int kSlots = LaneRow<D>::kSlots;
  const int j = lane_index() % kRowLanes;
  turn_lanes(row, exchange);
  const float scale = 0.25f * rotation_scale(D);
#pragma unroll
  for (int s = 0; s < kSlots; ++s) row[s] *= scale;
  if (job.reference_keys != nullptr) {
    const float* reference = job.reference_keys + head * D + j % 4 + j / 4 * 32;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) row[s] -= reference[s / 8 * 64 + s % 8 * 4];
  }
  const int bits = job.layout.format.centroid_bits;
  const Quantised q = scale_lanes(row, bits);
  if (bits == 4) {
    pack_row4(row, out);
  } else {
    pack_row8(row, out);
  }
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
  const std::uint32_t component =
      is_scorable ? to_half_bits(basis_scale * scale.scale) : kFp16Nan;
  return {(is_scorable ? centroid_scale : kFp16Nan) | component << 16,
          static_cast<std::uint16_t>(packed)};
}

// The direction's row, in `out`, and the coefficients of the four keys.
template <int D, int kBasisBits>
__device__ __forceinline__ PageTail write_direction(const FourRows<D>& rows, float4 weights,
                                                    std::uint16_t centroid_scale, float* exchange,
                                                    std::uint8_t* out) {
  constexpr int kSlots = LaneRow<D>::kSlots;
  const auto& y = rows.y;
  float row[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    row[s] = (y[1][s] * weights.x + y[2][s] * weights.y) + y[3][s] * weights.z;
  }
  turn_lanes(row, exchange);
  const Quantised q = scale_lanes(row, kBasisBits);
  if constexpr (kBasisBits == 4) {
    pack_row4(row, out);
  } else {
    pack_row8(row, out);
  }
  float sums[4];
  sums[3] = turn_codes<kBasisBits>(row, exchange);
#pragma unroll
  for (int m = 0; m < kDifferences; ++m) sums[m] = dot_share(row, y[m + 1]);
  add_over_lanes(sums);
  const float product[kDifferences] = {sums[0], sums[1], sums[2]};
  const float c = combine_differences(product, lane_index() % 4) *
                  refit_factor(q.scale, sums[3], rotation_scale(D));
  return make_tail(c, weights.w != 0, q.scale, centroid_scale);
}

// Rows from shared memory, and what comes behind them, to the record.
template <int D>
__device__ __forceinline__ void store_record(const RecordLayout& layout, const std::uint8_t* rows,
                                             const PageTail& tail, uint2 header,
                                             std::uint8_t* record) {
  const int lane = lane_index(), page = lane / kRowLanes, j = lane % kRowLanes;
  const auto* from = rows + page * (layout.page_rows_bytes + FourMemory<D>::kRowPadding);
  std::uint8_t* to = record + page * layout.page_rows_bytes;
#pragma unroll 2
  for (int b = 8 * j; b < layout.page_rows_bytes; b += 8 * kRowLanes) {
    *reinterpret_cast<uint2*>(to + b) = *reinterpret_cast<const uint2*>(from + b);
  }
  if (j == 0) {
    *reinterpret_cast<std::uint32_t*>(record + layout.scales_offset + 4 * page) = tail.scales;
    *reinterpret_cast<std::uint16_t*>(record + layout.coefficients_offset + 2 * page) =
        tail.coefficients;
  }
  if (lane == 0) *reinterpret_cast<uint2*>(record + layout.header_offset) = header;
}

// Whether the record already describes these keys: one lane's reading, since another row of the
// batch may be writing it.
__device__ __forceinline__ bool is_current(const RecordLayout& layout, uint2 header,
                                           const std::uint8_t* record) {
  const uint2 found = *reinterpret_cast<const uint2*>(record + layout.header_offset);
  return __shfl_sync(kEveryLane, found.x, 0) == header.x &&
         __shfl_sync(kEveryLane, found.y, 0) == header.y;
}

// A condition that is the same on all lanes, told in a way that the compiler understands: it then
// knows that the lanes stay together.
__device__ __forceinline__ bool is_any(bool condition) {
  return __any_sync(kEveryLane, condition) != 0;
}

// No record is built from these; a page that holds one has zero codes.
template <int D>
__device__ __forceinline__ void clear_unscorable(const RecordLayout& layout, bool is_scorable,
                                                 std::uint8_t* centroid) {
  if (!is_any(!is_scorable)) return;
  if (!is_scorable) {
    const std::uint8_t zero = layout.format.centroid_bits == 4 ? 8 : 0;
#pragma unroll 1
    for (int b = lane_index() % kRowLanes; b < layout.centroid_row_bytes; b += kRowLanes) {
      centroid[b] = zero;
    }
  }
}

}  // namespace locks::detail
