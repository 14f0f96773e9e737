// Builds two records at a time with one warp, for the formats that are built most: pages of
// four tokens, rank 1, improved, 4-bit coefficients (`fine`, `fine8`), 16-bit keys in aligned rows,
// head_dim 64 or 128. The same bytes as build_record.cuh and the CPU.
//
// Keys pass through registers twice. Loading, a lane holds 16 channels in a row of K = d / 16
// lanes: signs and the first four stages of the rotation are its own. Through shared memory
// (16-byte stores, 8-byte loads, swizzled, no bank conflicts) it then holds, of page lane / 8, all
// four tokens of the channels 2 j, 2 j + 1 (mod 16), j = lane % 8: the other stages of the
// rotation, the centroid, and each of the 16 lanes of core/lanes.h are its own, and the tree that
// adds them needs three exchanges. The eight 4 x 4 eigenproblems of two records are one for each
// four lanes, which is why records come in pairs; the keys of the first one wait in shared memory.
//
// Bound by instructions: 3,850 of a warp a record of `fine` at d = 128, of which 1,400 are sums and
// products that may not be fused, 800 the eigensolver and 350 the hash of the keys, against 4.6 KB
// of memory traffic. On an H200 (ncu) 54 % of the issue slots are taken, by 12 warps a
// multiprocessor; with every slot taken it would reach 26 % of the read ceiling.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/lanes.h"
#include "core/scalar.h"
#include "locks/summary.h"
#include "summary/eigensolver.cuh"
#include "summary/key_hash.h"
#include "summary/quantise.h"
#include "summary/quantise_lanes.cuh"
#include "summary/record_job.cuh"
#include "summary/rotate_rows.cuh"
#include "summary/warp.cuh"

namespace locks::detail {

__host__ __device__ constexpr bool builds_pairs(const SummaryFormat& format, int head_dim,
                                                ScalarType type, bool keys_aligned) {
  return format.page_tokens == 4 && format.rank == 1 && format.coefficient_bits == 4 &&
         format.improved && (head_dim == 64 || head_dim == 128) && keys_aligned &&
         type != ScalarType::kFloat32;
}

// Bytes of shared memory of a warp: two blocks of keys as floats, two records.
LOCKS_HD constexpr int pair_bytes(const RecordLayout& layout) {
  return 2 * (kBlockTokens * layout.head_dim * 4 + layout.record_bytes);
}

template <int D>
struct PairShape {
  static constexpr int kChunks = D / kLanes;            // lanes of a row when keys are loaded
  static constexpr int kRows = kWarpSize / kChunks;     // rows that a warp loads at a time
  static constexpr int kPasses = kBlockTokens / kRows;  // loads of a block
  static constexpr int kSlots = 2 * kChunks;            // channels of a lane, of one token
  static constexpr int kRowWords = D / 2;

  // Float index of channels 16 chunk + 4 sub .. + 3 of a row. Lanes that store one `sub` of all
  // chunks, or load all `sub` of two neighbouring pages, meet all 32 banks.
  __device__ static int place(int row, int chunk, int sub) {
    const int turn = D == 128 ? chunk >> 1 & 3 : (chunk >> 1 & 1) | (row & 1) << 1;
    return row * D + (chunk ^ (row >> 2 & 1)) * kLanes + (sub ^ turn) * 4;
  }
};

// The raw keys of a block: passes x two pieces of eight channels.
template <int D>
struct RawBlock {
  uint4 piece[PairShape<D>::kPasses][2];
};

template <int D>
__device__ __forceinline__ RawBlock<D> load_raw_block(const PagedTensor& keys, std::int64_t first) {
  using S = PairShape<D>;
  const int lane = lane_index();
  const auto* row = static_cast<const std::uint16_t*>(keys.data) + first +
                    lane / S::kChunks * keys.token_stride + lane % S::kChunks * kLanes;
  RawBlock<D> raw;
#pragma unroll
  for (int pass = 0; pass < S::kPasses; ++pass) {
    const auto* from = reinterpret_cast<const uint4*>(row + pass * S::kRows * keys.token_stride);
    raw.piece[pass][0] = from[0];
    raw.piece[pass][1] = from[1];
  }
  return raw;
}

template <int D>
__device__ __forceinline__ std::uint32_t hash_block(const RawBlock<D>& raw) {
  using S = PairShape<D>;
  const int lane = lane_index();
  const auto first =
      static_cast<std::uint32_t>(lane / S::kChunks * S::kRowWords + lane % S::kChunks * 8);
  std::uint32_t hash = 0;
#pragma unroll
  for (int pass = 0; pass < S::kPasses; ++pass) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4& p = raw.piece[pass][half];
      const std::uint32_t at =
          first + static_cast<std::uint32_t>(pass * S::kRows * S::kRowWords + half * 4);
      hash += mix_key_word(p.x, at) + mix_key_word(p.y, at + 1) + mix_key_word(p.z, at + 2) +
              mix_key_word(p.w, at + 3);
    }
  }
  return finish_key_hash(__reduce_add_sync(kEveryLane, hash), kBlockTokens * S::kRowWords);
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

// The sign bits that the rotation flips in the words of a lane's 16 channels.
struct LaneSigns {
  std::uint32_t word[8];
};

template <int D>
__device__ __forceinline__ LaneSigns find_signs() {
  const std::uint32_t flips = flips_of_piece(lane_index() % PairShape<D>::kChunks * kLanes);
  LaneSigns signs;
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    signs.word[w] = (flips >> (2 * w) & 1u) << 15 | (flips >> (2 * w + 1) & 1u) << 31;
  }
  return signs;
}

// Signs, four stages of the rotation, and to shared memory.
template <int D, bool kBFloat16>
__device__ __forceinline__ void spread_block(const RawBlock<D>& raw, const LaneSigns& signs,
                                             float* keys) {
  using S = PairShape<D>;
  const int lane = lane_index();
#pragma unroll
  for (int pass = 0; pass < S::kPasses; ++pass) {
    float x[kLanes];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4& p = raw.piece[pass][half];
      const std::uint32_t words[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int c = 8 * half + 2 * w;
        unpack_word<kBFloat16>(words[w] ^ signs.word[4 * half + w], x[c], x[c + 1]);
      }
    }
    butterflies(x);
    const int row = pass * S::kRows + lane / S::kChunks;
#pragma unroll
    for (int sub = 0; sub < 4; ++sub) {
      *reinterpret_cast<float4*>(keys + S::place(row, lane % S::kChunks, sub)) =
          make_float4(x[4 * sub], x[4 * sub + 1], x[4 * sub + 2], x[4 * sub + 3]);
    }
  }
}

// Keys of a page in a lane: x[token][2 k + u] is channel 16 k + 2 j + u.
template <int D>
struct PageKeys {
  float x[4][PairShape<D>::kSlots];
};

template <int D>
__device__ __forceinline__ float2* key_address(float* keys, int t, int k) {
  const int lane = lane_index(), j = lane % 8;
  const int at = PairShape<D>::place(lane / 8 * 4 + t, k, j / 2) + j % 2 * 2;
  return reinterpret_cast<float2*>(keys + at);
}

template <int D>
__device__ __forceinline__ PageKeys<D> load_page(float* keys) {
  PageKeys<D> page;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#pragma unroll
    for (int k = 0; k < PairShape<D>::kChunks; ++k) {
      const float2 pair = *key_address<D>(keys, t, k);
      page.x[t][2 * k] = pair.x;
      page.x[t][2 * k + 1] = pair.y;
    }
  }
  return page;
}

template <int D>
__device__ __forceinline__ void store_page(const PageKeys<D>& page, float* keys) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#pragma unroll
    for (int k = 0; k < PairShape<D>::kChunks; ++k) {
      *key_address<D>(keys, t, k) = make_float2(page.x[t][2 * k], page.x[t][2 * k + 1]);
    }
  }
}

// The stages of the rotation between channels 16 and more apart, and its scale.
template <int D>
__device__ __forceinline__ void rotate_page(PageKeys<D>& page) {
  constexpr int kSlots = PairShape<D>::kSlots;
  const float scale = rotation_scale(D);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#pragma unroll
    for (int h = 2; h < kSlots; h *= 2) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if ((s & h) != 0) continue;
        const float low = page.x[t][s], high = page.x[t][s + h];
        page.x[t][s] = low + high;
        page.x[t][s + h] = low - high;
      }
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) page.x[t][s] *= scale;
  }
}

template <int D>
__device__ __forceinline__ void centre_page(PageKeys<D>& page,
                                            float (&mean)[PairShape<D>::kSlots]) {
#pragma unroll
  for (int s = 0; s < PairShape<D>::kSlots; ++s) {
    float sum = page.x[0][s];
#pragma unroll
    for (int t = 1; t < 4; ++t) sum += page.x[t][s];
    mean[s] = sum * 0.25f;
#pragma unroll
    for (int t = 0; t < 4; ++t) page.x[t][s] -= mean[s];
  }
}

// A dot product over the channels of a page's eight lanes, in the order of lanes.h (but for a first
// zero, which could only change the sign of a zero); every lane gets it.
template <int N>
__device__ __forceinline__ float dot_page(const float (&a)[N], const float (&b)[N]) {
  float even = a[0] * b[0], odd = a[1] * b[1];
#pragma unroll
  for (int s = 2; s < N; s += 2) {
    even += a[s] * b[s];
    odd += a[s + 1] * b[s + 1];
  }
#pragma unroll
  for (int apart = 4; apart > 0; apart /= 2) {
    even += __shfl_xor_sync(kEveryLane, even, apart);
    odd += __shfl_xor_sync(kEveryLane, odd, apart);
  }
  return even + odd;
}

// The lower triangle of a page's Gram matrix: entry i (i + 1) / 2 + j.
struct PageGram {
  float entry[10];
  __device__ __forceinline__ float energy() const {
    return ((entry[0] + entry[2]) + entry[5]) + entry[9];
  }
};

template <int D>
__device__ __forceinline__ PageGram find_gram(const PageKeys<D>& page) {
  PageGram gram;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) gram.entry[i * (i + 1) / 2 + j] = dot_page(page.x[i], page.x[j]);
  }
  return gram;
}

// First half: centroid row and Gram matrix. Leaves the centred keys in `keys`.
template <int D>
__device__ __forceinline__ PageGram begin_record(const RecordJob& job, int head, float* keys,
                                                 std::uint8_t* staged) {
  const RecordLayout& layout = job.layout;
  const int lane = lane_index();
  PageKeys<D> page = load_page<D>(keys);
  rotate_page<D>(page);
  float mean[PairShape<D>::kSlots];
  centre_page<D>(page, mean);
  if (job.reference_keys != nullptr) {
    const auto* reference =
        reinterpret_cast<const float2*>(job.reference_keys + head * D) + lane % 8;
#pragma unroll
    for (int k = 0; k < PairShape<D>::kChunks; ++k) {
      const float2 r = reference[k * (kLanes / 2)];
      mean[2 * k] -= r.x;
      mean[2 * k + 1] -= r.y;
    }
  }
  std::uint8_t* row = staged + lane / 8 * layout.page_rows_bytes;
  const Quantised q = quantise_row_lanes(mean, layout.format.centroid_bits);
  pack_row_lanes(mean, layout.format.centroid_bits, row);
  store_page<D>(page, keys);
  const PageGram gram = find_gram<D>(page);
  const bool is_scorable = is_finite(gram.energy());
  if (!is_scorable) {  // codes of zero, over this lane's own
    const std::uint16_t zeros = layout.format.centroid_bits == 4 ? 0x0808 : 0;
    for (int b = lane % 8 * 2; b < layout.centroid_row_bytes; b += kLanes) {
      *reinterpret_cast<std::uint16_t*>(row + b) = zeros;
    }
  }
  if (lane % 8 == 0) {
    store_fp16(staged + layout.scales_offset, lane / 8 * 2, is_scorable ? q.scale_bits : kFp16Nan);
  }
  return gram;
}

// Second half: direction, coefficients and scales, from the centred keys of each lane's page.
template <int D>
__device__ __forceinline__ void finish_record(const RecordLayout& layout, float* keys,
                                              std::uint8_t* staged, float energy,
                                              const float (&weights)[4]) {
  constexpr int kSlots = PairShape<D>::kSlots;
  const int lane = lane_index(), page_index = lane / 8;
  const PageKeys<D> page = load_page<D>(keys);
  float row[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    float sum = page.x[0][s] * weights[0];
#pragma unroll
    for (int t = 1; t < 4; ++t) sum += page.x[t][s] * weights[t];
    row[s] = sum;
  }
  const float squared = dot_page(row, row);
  const float factor = squared > kNoiseEnergy * energy ? 1 / square_root(squared) : 0.0f;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) row[s] *= factor;
  const bool is_scorable = is_finite(energy);
  if (!is_scorable) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) row[s] = 0;
  }
  const Quantised q = quantise_row_lanes(row, layout.format.basis_bits);
  pack_row_lanes(row, layout.format.basis_bits,
                 staged + page_index * layout.page_rows_bytes + layout.centroid_row_bytes);
#pragma unroll
  for (int s = 0; s < kSlots; ++s) row[s] = (row[s] - kRounder) * q.scale;
  // The refit of rank 1: two divisions by the Cholesky factor of (row . row + ridge).
  const float pivot = dot_page(row, row) + kRidge;
  const float factor_of_gram = square_root(pivot > kRidge ? pivot : kRidge);
  float products[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) products[t] = dot_page(row, page.x[t]);
  const int t = lane % 4;
  const float low = (t & 1) != 0 ? products[1] : products[0];
  const float high = (t & 1) != 0 ? products[3] : products[2];
  float c = (t & 2) != 0 ? high : low;
  c = c / factor_of_gram;
  c = c / factor_of_gram;
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
  if (lane % 8 == 0) {
    store_fp16(staged + layout.scales_offset, page_index * 2 + 1,
               is_scorable ? to_half_bits(q.scale * scale.scale) : kFp16Nan);
    store_fp16(staged + layout.coefficients_offset, page_index, static_cast<std::uint16_t>(packed));
  }
}

// One record to build.
struct PairItem {
  std::int64_t first;    // element of its first key; there is one even if nothing is built
  std::uint8_t* record;  // null: none is to be built
  int head;
};

// Whether the record already describes these keys: one lane's reading, since another row of the
// batch may be writing it.
__device__ __forceinline__ bool is_current(const RecordLayout& layout, std::uint32_t header,
                                           std::uint32_t hash, const std::uint8_t* record) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(record + layout.header_offset);
  return __shfl_sync(kEveryLane, words[0], 0) == header &&
         __shfl_sync(kEveryLane, words[1], 0) == hash;
}

// Row lane % 4 of a page's Gram matrix.
__device__ __forceinline__ void take_row(const PageGram& gram, float (&row)[4]) {
  const int i = lane_index() % 4;
  const auto entry = [&gram](int a, int b) {
    return a >= b ? gram.entry[a * (a + 1) / 2 + b] : gram.entry[b * (b + 1) / 2 + a];
  };
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float even = (i & 2) != 0 ? entry(2, j) : entry(0, j);
    const float odd = (i & 2) != 0 ? entry(3, j) : entry(1, j);
    row[j] = (i & 1) != 0 ? odd : even;
  }
}

// A condition that is the same on all lanes, told in a way that the compiler understands: it then
// knows that the lanes stay together.
__device__ __forceinline__ bool is_any(bool condition) {
  return __any_sync(kEveryLane, condition) != 0;
}

// Brings a block's keys closer before they are asked for, a line of 128 bytes a lane.
template <int D>
__device__ __forceinline__ void prefetch_block(const PagedTensor& keys, std::int64_t first) {
  constexpr int kLines = D / 64;  // of a row
  const int lane = lane_index();
  if (lane >= kLines * kBlockTokens) return;
  const auto* line = static_cast<const std::uint16_t*>(keys.data) + first +
                     lane / kLines * keys.token_stride + lane % kLines * 64;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// Builds up to two records (only the stale ones, if asked to) by the warp that calls it; memory:
// pair_bytes. Returns how many were written.
//
// A warp's way through this code is longer than what instruction caches hold, so the warps of a CTA
// may go it together: then all call, and barriers keep them close (240 against 287 us for 131,072
// tokens x 4 heads, H200). Where few records turn out stale they had better not. For the same
// reason the loops over the two records are not unrolled.
template <int D, bool kBFloat16, bool kTogether>
__device__ int build_pair(const RecordJob& job, const PairItem (&items)[2], const LaneSigns& signs,
                          bool only_stale, float* memory) {
  const RecordLayout& layout = job.layout;
  const int lane = lane_index();
  const std::uint32_t header = kRecordMagic | static_cast<std::uint32_t>(kRecordVersion) << 16 |
                               static_cast<std::uint32_t>(job.format_code) << 24;
  auto* staged = reinterpret_cast<std::uint8_t*>(memory + 2 * kBlockTokens * D);
  // Lanes 0-3 of a page's eight take a row of the first record's page, lanes 4-7 of the second's.
  float row[4] = {};
  float energy = 0;  // of the same page
  unsigned writes = 0;
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    if constexpr (kTogether) __syncthreads();
    const PairItem item = n == 0 ? items[0] : items[1];
    if (!is_any(item.record != nullptr)) continue;
    float* keys = memory + n * kBlockTokens * D;
    const RawBlock<D> raw = load_raw_block<D>(job.keys, item.first);
    const std::uint32_t hash = hash_block<D>(raw);
    if (is_any(only_stale && is_current(layout, header, hash, item.record))) continue;
    writes |= 1u << n;
    spread_block<D, kBFloat16>(raw, signs, keys);
    __syncwarp();
    std::uint8_t* record = staged + n * layout.record_bytes;
    const PageGram gram = begin_record<D>(job, item.head, keys, record);
    if (lane / 4 % 2 == n) {
      take_row(gram, row);
      energy = gram.energy();
    }
    if (lane == 0) {
      *reinterpret_cast<uint2*>(record + layout.header_offset) = make_uint2(header, hash);
    }
  }
  if constexpr (kTogether) __syncthreads();
  float vector[4] = {};
  int best = 0;
  if (is_any(writes != 0)) best = top_eigenvector_quad(row, vector);
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    if constexpr (kTogether) __syncthreads();
    if (!is_any((writes >> n & 1u) != 0)) continue;
    const int quad = lane / 8 * 8 + 4 * n;
    const int source = quad + __shfl_sync(kEveryLane, best, quad);
    const float page_energy = __shfl_sync(kEveryLane, energy, quad);
    float weights[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) weights[j] = __shfl_sync(kEveryLane, vector[j], source);
    std::uint8_t* record = staged + n * layout.record_bytes;
    finish_record<D>(layout, memory + n * kBlockTokens * D, record, page_energy, weights);
    __syncwarp();
    auto* out = reinterpret_cast<uint4*>(n == 0 ? items[0].record : items[1].record);
#pragma unroll 1
    for (int i = lane; i < layout.record_bytes / 16; i += kWarpSize) {
      out[i] = reinterpret_cast<const uint4*>(record)[i];
    }
  }
  __syncwarp();  // the next records reuse the memory
  return __popc(writes);
}

}  // namespace locks::detail
