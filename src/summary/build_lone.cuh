// Builds one record by a CTA, for the formats and keys of build_fours.cuh: that of a decode step,
// which a whole layer waits for. The same bytes as build_record.cuh and the CPU.
//
// Nothing hides latency here, so what counts is how few instructions a warp executes one after the
// other. A page has two warps, and each of their lanes every 32nd channel of its four keys, the
// places of the CPU's dot_by_fours: the rotation's stages 32 and 64 channels apart are a lane's
// own, the others exchanges between lanes. One warp finds the page's direction, its row and the
// coefficients; the other hashes the keys and rounds the centroid. What both do to a row is the
// same code. They meet once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/scalar.h"
#include "locks/summary.h"
#include "summary/build_fours.cuh"
#include "summary/differences.h"
#include "summary/key_hash.h"
#include "summary/lane_rows.cuh"
#include "summary/quantise.h"
#include "summary/record_job.cuh"
#include "summary/rotate_rows.cuh"
#include "summary/warp.cuh"
#include "summary/write_page.cuh"

namespace locks::detail {

inline constexpr int kLoneWarps = 2 * kFourPages;  // of the CTA

// A record to build, and this lane's part in it.
struct LoneItem {
  const std::uint16_t* keys[4];  // of its page, from its first channel on
  const float* reference;        // likewise; null: zero
  std::uint8_t* record;          // null: none
  std::uint8_t* codes;           // of its first channel
  int page;
  bool is_centroid;
};

// All but the keys.
__device__ __forceinline__ LoneItem make_lone_item(const RecordJob& job, std::uint8_t* record,
                                                   int head) {
  const RecordLayout& layout = job.layout;
  const int lane = lane_index(), page = warp_index() % kFourPages;
  const bool is_centroid = warp_index() >= kFourPages;
  const float* reference = job.reference_keys;
  if (reference != nullptr) reference += std::int64_t{head} * layout.head_dim + lane;
  std::uint8_t* codes = find_page(layout, record, page).rows + lane;
  if (!is_centroid) codes += layout.centroid_row_bytes;
  return {.keys = {},
          .reference = reference,
          .record = record,
          .codes = codes,
          .page = page,
          .is_centroid = is_centroid};
}

struct LoneMemory {
  // Floats from one sum's places to the next: quads of lanes read two sums from different banks.
  static constexpr int kPlaceRow = 48;
  alignas(16) float places[kFourPages][kGramEntries * kPlaceRow];
  std::uint64_t hashes[kFourPages];  // the pages' shares
  std::int32_t is_scorable[kFourPages];
};

// Of its page's keys a lane's channels, lane + 32 k, as they lie in memory; for the warps of
// centroids also its pair of words of each key, if there are as many, and the reference.
template <int D>
struct LoneKeys {
  static constexpr int kSlots = D / kWarpSize;
  std::uint16_t keys[4][kSlots];
  uint2 pairs[4];
  float reference[kSlots];
};

template <int D>
__device__ __forceinline__ void load_keys(const LoneItem& item, LoneKeys<D>& raw) {
  constexpr int kSlots = LoneKeys<D>::kSlots;
  const int lane = lane_index();
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      raw.keys[t][k] = __ldcg(item.keys[t] + k * kWarpSize);
    }
  }
  if (!item.is_centroid) return;
  if (lane < D / 4) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      raw.pairs[t] = __ldcg(reinterpret_cast<const uint2*>(item.keys[t] + 3 * lane));
    }
  }
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    raw.reference[k] = item.reference == nullptr ? 0.0f : item.reference[k * kWarpSize];
  }
}

// The page's share of the hash.
template <int D>
__device__ __forceinline__ std::uint64_t hash_page(const uint2 (&pairs)[4], int page) {
  const int pair = lane_index(), step = pair / kHashLanes;
  const std::uint32_t lane_key = hash_lane_key(page, pair % kHashLanes);
  std::uint64_t share = 0;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    share += hash_pair(pairs[t].x + (hash_key(t, step, 0) + lane_key),
                       pairs[t].y + (hash_key(t, step, 1) + lane_key));
  }
  return add_shares(pair < D / 4 ? share : 0);
}

// The four keys as floats, with the signs that the rotation wants.
template <bool kBFloat16, int K>
__device__ __forceinline__ void unpack_keys(const std::uint16_t (&raw)[4][K], float (&key)[4][K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const std::uint32_t flip = flips_of_piece(lane_index() + k * kWarpSize) << 31;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      // Adding the top bit flips it, in the instruction that shifts.
      const std::uint32_t bits = kBFloat16
                                     ? std::uint32_t{raw[t][k]} << 16
                                     : __float_as_uint(__half2float(__ushort_as_half(raw[t][k])));
      key[t][k] = __uint_as_float(bits + flip);
    }
  }
}

// A lane's part in a stage of the rotation: the sum with a lane `kApart` away, or the difference.
template <int kApart, int N>
__device__ __forceinline__ void turn_apart(float (&x)[N]) {
  const float sign = (lane_index() & kApart) != 0 ? -1.0f : 1.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x[n] = __fmaf_rn(x[n], sign, __shfl_xor_sync(kEveryLane, x[n], kApart));  // rounds once
  }
}

// The rotation of a row without signs and scale.
template <int K>
__device__ __forceinline__ void turn_row_by_lanes(float (&row)[K]) {
  turn_apart<1>(row);
  turn_apart<2>(row);
  turn_slots<K>(row);
  turn_apart<4>(row);
  turn_apart<8>(row);
  turn_apart<16>(row);
}

// The same of integers below 2^15, in any order: sums are exact. Two of them go in a word, one
// 2^16 times the other.
template <int K>
__device__ __forceinline__ void turn_codes_by_lanes(const int (&code)[K], float (&turned)[K]) {
  int word[K / 2];
#pragma unroll
  for (int n = 0; n < K / 2; ++n) {
    word[n] = (code[2 * n] + code[2 * n + 1]) + 65536 * (code[2 * n] - code[2 * n + 1]);
  }
  if constexpr (K == 4) {
    const int low = word[0], high = word[1];
    word[0] = low + high;
    word[1] = low - high;
  }
#pragma unroll
  for (int apart = 1; apart < kWarpSize; apart *= 2) {
    const int sign = (lane_index() & apart) != 0 ? -1 : 1;
#pragma unroll
    for (int n = 0; n < K / 2; ++n) {
      word[n] = word[n] * sign + __shfl_xor_sync(kEveryLane, word[n], apart);
    }
  }
#pragma unroll
  for (int n = 0; n < K / 2; ++n) {
    turned[2 * n] = static_cast<float>(static_cast<std::int16_t>(word[n]));
    turned[2 * n + 1] = static_cast<float>((word[n] + 32768) >> 16);
  }
}

// A lane's place of a product of two rows.
template <int K>
__device__ __forceinline__ float place_of_product(const float (&a)[K], const float (&b)[K]) {
  float sum = a[0] * b[0];
#pragma unroll
  for (int k = 1; k < K; ++k) sum += a[k] * b[k];
  return sum;
}

// Adds N sums' places as dot_by_fours does: lanes 1, 2, 16, 8 and 4 apart. Four lanes add the
// places of a sum, a fourth of the exchanges that all lanes would make.
template <int N>
__device__ __forceinline__ void add_places(float (&sum)[N], float* places) {
  constexpr int kRow = LoneMemory::kPlaceRow;
  const int lane = lane_index();
  __syncwarp();  // what was there has been read
#pragma unroll
  for (int n = 0; n < N; ++n) places[n * kRow + lane] = sum[n];
  __syncwarp();
  const auto* from =
      reinterpret_cast<const float4*>(places + min(lane / 4, N - 1) * kRow + lane % 4 * 4);
  const float4 a = from[0], b = from[4];
  float x = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
  x += __shfl_xor_sync(kEveryLane, x, 2);
  x += __shfl_xor_sync(kEveryLane, x, 1);
#pragma unroll
  for (int n = 0; n < N; ++n) sum[n] = __shfl_sync(kEveryLane, x, 4 * n);
}

// Rounds a row to codes and stores it packed; out: of this lane's first channel. A page that is not
// scorable gets a NaN scale and zero codes.
template <int K>
__device__ __forceinline__ Quantised write_codes(float (&row)[K], int bits, bool is_scorable,
                                                 std::uint8_t* out, int (&code)[K]) {
  float largest = is_scorable ? fabsf(row[0]) : __uint_as_float(0x7FC00000u);
#pragma unroll
  for (int k = 1; k < K; ++k) largest = max_keeping_nan(largest, fabsf(row[k]));
  largest = max_magnitude_warp(__float_as_uint(largest));
  const Quantised q = divide_by_scale(row, largest, code_limit(bits));
#pragma unroll
  for (int k = 0; k < K; ++k) {
    code[k] = __float_as_int(row[k] + kRounder) - __float_as_int(kRounder);
  }
  if (bits == 4) {
#pragma unroll
    for (int k = 0; k < K / 2; ++k) {
      store_byte(out + k * kWarpSize, 16 * code[k + K / 2] + code[k] + 8);
    }
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) store_byte(out + k * kWarpSize, code[k]);
  }
  return q;
}

// The coefficients of a page's four keys, fitted to the direction's codes.
template <int D, int K>
__device__ __forceinline__ void write_tail(const float (&y)[kDifferences][K], const int (&code)[K],
                                           float basis_scale, bool is_scorable, float* places,
                                           const PagePlace& out) {
  int squared = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) squared += code[k] * code[k];
  squared = __reduce_add_sync(kEveryLane, squared);
  const float factor = refit_factor(basis_scale, static_cast<float>(squared), rotation_scale(D));
  float turned[K], product[kDifferences];
  turn_codes_by_lanes(code, turned);
#pragma unroll
  for (int m = 0; m < kDifferences; ++m) product[m] = place_of_product(turned, y[m]);
  add_places(product, places);
  const float c = combine_differences(product, lane_index() % 4) * factor;
  const PageTail tail = make_tail(c, is_scorable, basis_scale, 0);  // 0: the other warp's scale
  if (lane_index() == 0) {
    reinterpret_cast<std::uint16_t*>(out.scales)[1] = static_cast<std::uint16_t>(tail.scales >> 16);
    *reinterpret_cast<std::uint16_t*>(out.coefficients) = tail.coefficients;
  }
}

// The whole CTA, of kLoneWarps warps, calls it; memory is free again behind its next barrier.
// meanwhile(): what it has to do besides, while the keys are on their way.
template <int D, bool kBFloat16, class Meanwhile>
__device__ void build_lone(const RecordJob& job, const LoneItem& item, LoneMemory& m,
                           Meanwhile meanwhile) {
  constexpr int kSlots = LoneKeys<D>::kSlots;
  constexpr int kBarrier = 1;
  const RecordLayout& layout = job.layout;
  const bool is_centroid = item.is_centroid;
  const int page = item.page;
  LoneKeys<D> raw;
  load_keys(item, raw);
  meanwhile();
  float key[4][kSlots], row[kSlots], y[kDifferences][kSlots];
  unpack_keys<kBFloat16>(raw.keys, key);
  bool is_scorable = false;
  if (is_centroid) {
    const std::uint64_t share = hash_page<D>(raw.pairs, page);
    if (lane_index() == 0) m.hashes[page] = share;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) row[k] = (key[0][k] + key[1][k]) + (key[2][k] + key[3][k]);
    wait_at<kLoneWarps>(kBarrier);
    is_scorable = m.is_scorable[page] != 0;
  } else {
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const float a = key[0][k] + key[1][k], b = key[0][k] - key[1][k];
      const float e = key[2][k] + key[3][k], f = key[2][k] - key[3][k];
      y[0][k] = a - e;
      y[1][k] = b + f;
      y[2][k] = b - f;
    }
    DifferenceGram gram = {{place_of_product(y[0], y[0]), place_of_product(y[1], y[1]),
                            place_of_product(y[2], y[2]), place_of_product(y[0], y[1]),
                            place_of_product(y[0], y[2]), place_of_product(y[1], y[2])}};
    add_places(gram.entry, m.places[page]);
    is_scorable = is_finite(trace(gram));
    if (lane_index() == 0) m.is_scorable[page] = is_scorable ? 1 : 0;
    arrive_at<kLoneWarps>(kBarrier);
    const Direction direction = find_direction<1>(gram, rotation_scale(D));
    const float(&w)[kDifferences] = direction.weight;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) row[k] = (y[0][k] * w[0] + y[1][k] * w[1]) + y[2][k] * w[2];
  }
  turn_row_by_lanes(row);
  if (is_centroid) {
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      row[k] = row[k] * (0.25f * rotation_scale(D)) - raw.reference[k];
    }
  }
  const PagePlace out = find_page(layout, item.record, page);
  const int bits = is_centroid ? layout.format.centroid_bits : layout.format.basis_bits;
  int code[kSlots];
  const Quantised q = write_codes(row, bits, is_scorable, item.codes, code);
  if (!is_centroid) return write_tail<D>(y, code, q.scale, is_scorable, m.places[page], out);
  if (lane_index() != 0) return;
  store_fp16(out.scales, 0, q.scale_bits);
  if (page > 0) return;
  std::uint64_t sum = 0;
#pragma unroll
  for (int p = 0; p < kFourPages; ++p) sum += m.hashes[p];
  const std::uint32_t magic = kRecordMagic | static_cast<std::uint32_t>(kRecordVersion) << 16 |
                              static_cast<std::uint32_t>(job.format_code) << 24;
  *reinterpret_cast<uint2*>(item.record + layout.header_offset) =
      make_uint2(magic, finish_key_hash(sum, kBlockTokens * D / 2));
}

}  // namespace locks::detail
