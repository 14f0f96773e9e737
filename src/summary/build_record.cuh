// Builds one record on the GPU, for every format, by a team of one warp or of one CTA: the same
// bytes as the CPU's.
//
// The team loads the 16 keys of a block, 8 channels a thread and load, hashes them, rotates them
// and leaves them as floats in shared memory; then each of its warps takes whole pages. Sums over
// channels run in the 16 lanes of core/lanes.h, half a warp a sum. Code that includes this file is
// compiled with --fmad=false: no product is fused with a sum.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/lanes.h"
#include "core/scalar.h"
#include "locks/summary.h"
#include "summary/eigensolver.cuh"
#include "summary/key_hash.h"
#include "summary/quantise.h"
#include "summary/record_job.cuh"
#include "summary/rotate_rows.cuh"

namespace locks::detail {

inline constexpr int kWarpSize = 32;

// How the warps of a team share the pages of a block.
template <int B, int kWarps>
struct TeamShape {
  static constexpr int kPages = kBlockTokens / B;
  static constexpr int kWorkers = kWarps == 1 ? 1 : kPages;  // pages at a time
  static constexpr int kPageWarps = kWarps / kWorkers;
  static constexpr int kPageThreads = kPageWarps * kWarpSize;
  static constexpr int kHalves = 2 * kPageWarps;  // half warps of a page
  static_assert(kWarps % kWorkers == 0 && kHalves <= B);
};

// What a team keeps in shared memory, in floats. For each page: its centroid, Gram matrix, weights
// and energy. For each page that is being worked on: basis, coefficients, overlaps of basis rows,
// and scratch of the eigensolver. Then a few words of the team.
template <int B, int kWarps>
struct TeamMemory : TeamShape<B, kWarps> {
  using Shape = TeamShape<B, kWarps>;
  using Shape::kPages;
  using Shape::kWorkers;
  static constexpr int kLargestRank = B / 2;
  static constexpr int kGramFloats = B * kMatrixStride<B>;
  static constexpr int kWorkFloats = B == 4 ? 0 : kGramFloats;
  static constexpr int kWorkerFloats =
      kLargestRank * kBlockTokens + kLargestRank + kLargestRank * kLargestRank + kWorkFloats;
  static constexpr int kPageFloats = kGramFloats + kLargestRank * B + 1;
  static constexpr int kTeamFloats = kWarps + 3;

  LOCKS_HD static constexpr int floats(int rank, int d) {
    const int all = kBlockTokens * row_floats(d) + kPages * (d + kPageFloats) +
                    kWorkers * (rank * d + kWorkerFloats) + kTeamFloats;
    return (all + 3) / 4 * 4;
  }

  __device__ TeamMemory(float* memory, int rank, int d, int worker) {
    stride = row_floats(d);
    const auto take = [&memory](int count) {
      float* start = memory;
      memory += count;
      return start;
    };
    keys = take(kBlockTokens * stride);
    centroids = take(kPages * d);
    basis = take(kWorkers * rank * d) + worker % kWorkers * rank * d;
    gram = take(kPages * kGramFloats);
    weights = take(kPages * kLargestRank * B);
    energy = take(kPages);
    float* own = take(kWorkers * kWorkerFloats) + worker % kWorkers * kWorkerFloats;
    coefficients = own;
    scales = coefficients + kLargestRank * kBlockTokens;
    overlap = scales + kLargestRank;
    work = overlap + kLargestRank * kLargestRank;
    words = reinterpret_cast<std::uint32_t*>(take(kTeamFloats));
  }

  int stride;            // floats from key to key
  float* keys;           // [16][stride]
  float* centroids;      // [pages][d]
  float* gram;           // [pages][B][B + 1]
  float* weights;        // [pages][largest rank][B]
  float* energy;         // [pages]
  float* basis;          // [rank][d], of this warp's page, like all that follows
  float* coefficients;   // [largest rank][16]
  float* scales;         // [largest rank]
  float* overlap;        // [largest rank][largest rank]
  float* work;           // [B][B + 1]
  std::uint32_t* words;  // the team's: hash sums of its warps, then a record's header
};

template <int kWarps>
__device__ __forceinline__ void sync_team() {
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// The warps that share a page.
template <int B, int kWarps>
__device__ __forceinline__ void sync_page(int page) {
  using S = TeamShape<B, kWarps>;
  if constexpr (S::kPageWarps == 1) {
    __syncwarp();
  } else if constexpr (S::kPageWarps == kWarps) {
    __syncthreads();
  } else {  // barrier 0 is the CTA's
    asm volatile("bar.sync %0, %1;" ::"r"(1 + page), "n"(S::kPageThreads) : "memory");
  }
}

template <int B, int kWarps>
__device__ __forceinline__ int page_thread() {
  return static_cast<int>(threadIdx.x) % TeamShape<B, kWarps>::kPageThreads;
}

// The warp's index in its CTA. By a shuffle, so that the compiler knows it to be one number a warp,
// and what hangs on it to be free of divergence.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(kEveryLane, static_cast<int>(threadIdx.x) / kWarpSize, 0);
}

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarpSize; }

// K dot products of rows at base + a[k] and base + b[k] by the half warp that calls it, in the
// order of lanes.h; every lane of the half gets the sums.
template <int K>
__device__ __forceinline__ void dots_half_warp(const float* base, const int (&a)[K],
                                               const int (&b)[K], int d, float (&sum)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) sum[k] = 0;
  for (int c = lane_index() % kLanes; c < d; c += kLanes) {
#pragma unroll
    for (int k = 0; k < K; ++k) sum[k] += base[a[k] + c] * base[b[k] + c];
  }
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int k = 0; k < K; ++k) sum[k] += __shfl_xor_sync(kEveryLane, sum[k], apart);
  }
}

__device__ __forceinline__ float dot_half_warp(const float* a, const float* b, int d) {
  float sum[1];
  dots_half_warp<1>(a, {0}, {static_cast<int>(b - a)}, d, sum);
  return sum[0];
}

__device__ __forceinline__ float max_magnitude_warp(std::uint32_t largest_bits) {
  return __uint_as_float(__reduce_max_sync(kEveryLane, largest_bits));
}

// Loads the block's keys as floats, rotated as far as begin_rotation goes, and leaves each warp's
// sum of hashed words in m.words.
template <int B, int kWarps>
__device__ void load_block(const RecordJob& job, std::int64_t first,
                           const TeamMemory<B, kWarps>& m) {
  constexpr int kThreads = kWarps * kWarpSize;
  // Loads in flight. A CTA has a thread for each piece, or two; code for more only takes time to
  // fetch.
  constexpr int kBatch = kWarps == 1 ? 4 : 1;
  const PagedTensor& keys = job.keys;
  const int thread = kWarps == 1 ? lane_index() : static_cast<int>(threadIdx.x);
  const int row_pieces = keys.head_dim / kPieceChannels;
  const int row_words = keys.head_dim * static_cast<int>(scalar_bytes(keys.type)) / 4;
  const int words = row_words / row_pieces;  // of a piece
  std::uint32_t hash = 0;
  for (int begin = thread; begin < kBlockTokens * row_pieces; begin += kBatch * kThreads) {
    RawPiece raw[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int piece = begin + n * kThreads;
      const int t = piece / row_pieces, c = piece % row_pieces * kPieceChannels;
      raw[n] = {};
      if (piece < kBlockTokens * row_pieces) {
        raw[n] =
            load_raw(keys.data, keys.type, job.keys_aligned, first + t * keys.token_stride + c);
      }
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int piece = begin + n * kThreads;
      if (piece >= kBlockTokens * row_pieces) continue;
      const int t = piece / row_pieces, c = piece % row_pieces * kPieceChannels;
#pragma unroll
      for (int w = 0; w < kPieceWords; ++w) {
        if (w < words) {
          hash += mix_key_word(raw[n].words[w], static_cast<std::uint32_t>(piece * words + w));
        }
      }
      float x[kPieceChannels];
      to_floats(raw[n], keys.type, x);
      if (job.layout.format.improved) begin_rotation(x, c);
      store_piece(m.keys + t * m.stride + c, x);
    }
  }
  hash = __reduce_add_sync(kEveryLane, hash);
  if (lane_index() == 0) m.words[thread / kWarpSize] = hash;
}

// Centres a page in place; fills its centroid, Gram matrix and energy. The page's warps.
template <int B, int kWarps>
__device__ void measure_page(const TeamMemory<B, kWarps>& m, int page, int d) {
  using S = TeamShape<B, kWarps>;
  const int thread = page_thread<B, kWarps>();
  float* x = m.keys + page * B * m.stride;
  for (int c = thread; c < d; c += S::kPageThreads) {
    float key[B];
#pragma unroll
    for (int t = 0; t < B; ++t) key[t] = x[t * m.stride + c];
    float sum = key[0];
#pragma unroll
    for (int t = 1; t < B; ++t) sum += key[t];
    const float mean = sum * (1.0f / B);
    m.centroids[page * d + c] = mean;
#pragma unroll
    for (int t = 0; t < B; ++t) x[t * m.stride + c] = key[t] - mean;
  }
  sync_page<B, kWarps>(page);
  constexpr int kEntries = B * (B + 1) / 2;
  constexpr int kShare = (kEntries + S::kHalves - 1) / S::kHalves;
  constexpr int kBatches = (kShare + 16) / 17;
  constexpr int kBatch = (kShare + kBatches - 1) / kBatches;
  float* gram = m.gram + page * m.kGramFloats;
  for (int batch = 0; batch < kBatches; ++batch) {
    int i[kBatch], j[kBatch], a[kBatch], b[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {  // entry i (i + 1) / 2 + j of the lower triangle
      const int entry = min(thread / kLanes + (batch * kBatch + k) * S::kHalves, kEntries - 1);
      i[k] = 0;
#pragma unroll
      for (int row = 1; row < B; ++row) i[k] += entry >= row * (row + 1) / 2 ? 1 : 0;
      j[k] = entry - i[k] * (i[k] + 1) / 2;
      a[k] = i[k] * m.stride;
      b[k] = j[k] * m.stride;
    }
    float sum[kBatch];
    dots_half_warp<kBatch>(x, a, b, d, sum);
    if (thread % kLanes == 0) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (thread / kLanes + (batch * kBatch + k) * S::kHalves >= kEntries) break;
        gram[i[k] * kMatrixStride<B> + j[k]] = gram[j[k] * kMatrixStride<B> + i[k]] = sum[k];
      }
    }
  }
  sync_page<B, kWarps>(page);
  float energy = 0;
  for (int i = 0; i < B; ++i) energy += gram[i * kMatrixStride<B> + i];
  if (thread == 0) m.energy[page] = energy;
  sync_page<B, kWarps>(page);
}

// Eigenvectors of this warp's page, or, for a team of one warp, of all pages.
template <int B, int kWarps>
__device__ void find_weights(const TeamMemory<B, kWarps>& m, int page, int rank) {
  using S = TeamShape<B, kWarps>;
  if constexpr (B == 4) {
    if (page_thread<B, kWarps>() < kWarpSize) {
      // Eight matrices a warp: all four pages, or one, and copies.
      const int mine = kWarps == 1 ? lane_index() / 4 % S::kPages : page;
      const float* from = m.gram + mine * m.kGramFloats + lane_index() % 4 * kMatrixStride<4>;
      const float row[4] = {from[0], from[1], from[2], from[3]};
      const bool is_copy = lane_index() >= (kWarps == 1 ? 4 * S::kPages : 4);
      top_eigenvectors_quad(row, rank, is_copy, m.weights + mine * m.kLargestRank * B);
    }
    sync_page<B, kWarps>(page);
  } else {
    for (int mine = kWarps == 1 ? 0 : page; mine < S::kPages; mine += S::kWorkers) {
      if (!is_finite(m.energy[mine])) continue;
      top_eigenvectors<B, S::kPageWarps>(
          m.gram + mine * m.kGramFloats, m.work, rank, m.weights + mine * m.kLargestRank * B,
          page_thread<B, kWarps>(), [page] { sync_page<B, kWarps>(page); });
    }
  }
}

// Quantises and packs a row with the page's warps; leaves its rounded values in `row` if asked to.
template <int B, int kWarps>
__device__ Quantised write_row(float* row, int d, int bits, bool keep_rounded, int page,
                               std::uint8_t* out) {
  using S = TeamShape<B, kWarps>;
  const int thread = page_thread<B, kWarps>();
  const float limit = code_limit(bits);
  std::uint32_t largest = 0;  // each warp looks at the whole row
  for (int c = lane_index(); c < d; c += kWarpSize) {
    largest = max(largest, __float_as_uint(row[c]) & 0x7FFFFFFFu);
  }
  const Quantised q = find_scale(max_magnitude_warp(largest), limit);
  if constexpr (S::kPageWarps > 1) sync_page<B, kWarps>(page);
  const bool finite = is_finite(q.scale);
  const auto code_of = [&](int c) { return finite ? round_to_code(row[c], q.scale, limit) : 0; };
  const auto rounded = [&](int code) { return static_cast<float>(code) * q.scale; };
  if (bits == 8) {
    for (int c = thread; c < d; c += S::kPageThreads) {
      const int code = code_of(c);
      out[c] = static_cast<std::uint8_t>(code);
      if (keep_rounded) row[c] = rounded(code);
    }
  } else {
    for (int b = thread; b < d / 2; b += S::kPageThreads) {
      const int low = code_of(b), high = code_of(b + d / 2);
      out[b] = static_cast<std::uint8_t>(16 * high + low + 8);
      if (keep_rounded) {
        row[b] = rounded(low);
        row[b + d / 2] = rounded(high);
      }
    }
  }
  sync_page<B, kWarps>(page);
  return q;
}

// Where the parts of a page lie in its record.
struct PagePlace {
  std::uint8_t *rows, *scales, *coefficients;
};

__device__ inline PagePlace find_page(const RecordLayout& layout, std::uint8_t* record, int page) {
  return {record + page * layout.page_rows_bytes,
          record + layout.scales_offset + page * (1 + layout.format.rank) * 2,
          record + layout.coefficients_offset + page * layout.page_coefficient_bytes};
}

__device__ inline void write_unscorable_page(const RecordLayout& layout, const PagePlace& out,
                                             int thread, int num_threads) {
  const SummaryFormat& format = layout.format;
  for (int b = thread; b < layout.page_rows_bytes; b += num_threads) {
    const int bits = b < layout.centroid_row_bytes ? format.centroid_bits : format.basis_bits;
    out.rows[b] = bits == 4 ? 8 : 0;
  }
  if (thread <= format.rank) store_fp16(out.scales, thread, kFp16Nan);
  for (int b = thread; b < layout.page_coefficient_bytes; b += num_threads) {
    out.coefficients[b] = format.coefficient_bits == 4 ? 0x88 : 0x80;
  }
}

// solve_refit for the right-hand side that this lane holds, operation by operation; the factors are
// found by each lane for itself.
template <int kRank>
__device__ void refit(const float* overlap, int rank, float (&c)[kRank]) {
  float gram[kRank][kRank];
#pragma unroll
  for (int k = 0; k < kRank; ++k) {
    if (k >= rank) break;
    float pivot = overlap[k * kRank + k] + kRidge;
#pragma unroll
    for (int m = 0; m < k; ++m) pivot -= gram[k][m] * gram[k][m];
    pivot = square_root(pivot > kRidge ? pivot : kRidge);
    gram[k][k] = pivot;
#pragma unroll
    for (int i = k + 1; i < kRank; ++i) {
      if (i >= rank) break;
      float entry = overlap[i * kRank + k];
#pragma unroll
      for (int m = 0; m < k; ++m) entry -= gram[i][m] * gram[k][m];
      gram[i][k] = entry / pivot;
    }
    float entry = c[k];
#pragma unroll
    for (int m = 0; m < k; ++m) entry -= gram[k][m] * c[m];
    c[k] = entry / pivot;
  }
#pragma unroll
  for (int k = kRank - 1; k >= 0; --k) {
    if (k >= rank) continue;
    float entry = c[k];
#pragma unroll
    for (int m = k + 1; m < kRank; ++m) {
      if (m < rank) entry -= gram[m][k] * c[m];
    }
    c[k] = entry / gram[k][k];
  }
}

// pack_coefficients with lane t % B at token t; returns the scale.
template <int B>
__device__ float pack_component(float c, int bits, int component, std::uint8_t* packed) {
  const int t = lane_index();
  const float limit = code_limit(bits);
  const Quantised q = find_scale(max_magnitude_warp(__float_as_uint(c) & 0x7FFFFFFFu), limit);
  const int code = is_finite(q.scale) ? round_to_code(c, q.scale, limit) : 0;
  const int stored = code + (bits == 4 ? 8 : 128);
  const int next = __shfl_down_sync(kEveryLane, stored, 1);
  if (t < B) {
    if (bits == 8) {
      packed[component * B + t] = static_cast<std::uint8_t>(stored);
    } else if (t % 2 == 0) {
      packed[(component * B + t) / 2] = static_cast<std::uint8_t>(stored | next << 4);
    }
  }
  return q.scale;
}

// Basis rows, coefficients and scales of a centred page whose weights are known. The page's warps.
template <int B, int kWarps>
__device__ void write_components(const RecordLayout& layout, const TeamMemory<B, kWarps>& m,
                                 int page, const PagePlace& out) {
  using S = TeamShape<B, kWarps>;
  constexpr int kRank = TeamMemory<B, kWarps>::kLargestRank;
  constexpr int kDots = B / S::kHalves;  // tokens of a half warp
  const int thread = page_thread<B, kWarps>(), lane = lane_index(), half = thread / kLanes;
  const SummaryFormat& format = layout.format;
  const int d = layout.head_dim, rank = format.rank;
  const float* x = m.keys + page * B * m.stride;
  for (int k = 0; k < rank; ++k) {
    const float* weights = m.weights + (page * kRank + k) * B;
    float* row = m.basis + k * d;
    for (int c = thread; c < d; c += S::kPageThreads) {
      float sum = x[c] * weights[0];
#pragma unroll
      for (int t = 1; t < B; ++t) sum += x[t * m.stride + c] * weights[t];
      row[c] = sum;
    }
    sync_page<B, kWarps>(page);
    const float squared = dot_half_warp(row, row, d);
    const float factor = squared > kNoiseEnergy * m.energy[page] ? 1 / square_root(squared) : 0.0f;
    sync_page<B, kWarps>(page);
    for (int c = thread; c < d; c += S::kPageThreads) row[c] *= factor;
    sync_page<B, kWarps>(page);
    const Quantised q =
        write_row<B, kWarps>(row, d, format.basis_bits, format.improved, page,
                             out.rows + layout.centroid_row_bytes + k * layout.basis_row_bytes);
    if (thread == 0) m.scales[k] = q.scale;
    int a[kDots], b[kDots];
    float c[kDots];
#pragma unroll
    for (int n = 0; n < kDots; ++n) {
      a[n] = static_cast<int>(row - x);
      b[n] = (n * S::kHalves + half) * m.stride;
    }
    dots_half_warp<kDots>(x, a, b, d, c);
    if (thread % kLanes == 0) {
#pragma unroll
      for (int n = 0; n < kDots; ++n) {
        m.coefficients[k * kBlockTokens + n * S::kHalves + half] = c[n];
      }
    }
    if (format.improved) {
      for (int first = 0; first <= k; first += S::kHalves) {
        const int n = min(first + half, k);
        const float product = dot_half_warp(row, m.basis + n * d, d);
        if (thread % kLanes == 0 && first + half <= k) m.overlap[k * kRank + n] = product;
      }
    }
  }
  sync_page<B, kWarps>(page);
  float c[kRank] = {};
#pragma unroll
  for (int k = 0; k < kRank; ++k) {
    if (k < rank) c[k] = m.coefficients[k * kBlockTokens + lane % B];
  }
  if (format.improved) refit<kRank>(m.overlap, rank, c);
#pragma unroll
  for (int k = 0; k < kRank; ++k) {
    if (k >= rank) break;
    if (k % S::kPageWarps != thread / kWarpSize) continue;
    const float scale = pack_component<B>(c[k], format.coefficient_bits, k, out.coefficients);
    if (lane == 0) store_fp16(out.scales, 1 + k, float_to_fp16(m.scales[k] * scale));
  }
  sync_page<B, kWarps>(page);
}

// The page's warps.
template <int B, int kWarps>
__device__ void write_page(const RecordJob& job, const TeamMemory<B, kWarps>& m, int page, int head,
                           std::uint8_t* record) {
  using S = TeamShape<B, kWarps>;
  const int thread = page_thread<B, kWarps>();
  const RecordLayout& layout = job.layout;
  const int d = layout.head_dim;
  const PagePlace out = find_page(layout, record, page);
  // A NaN or infinite key is NaN once centred. Energy past float's range means a key past fp16's.
  if (!is_finite(m.energy[page])) {
    return write_unscorable_page(layout, out, thread, S::kPageThreads);
  }
  float* centroid = m.centroids + page * d;
  if (job.reference_keys != nullptr) {
    const float* reference = job.reference_keys + std::int64_t{head} * d;
    for (int c = thread; c < d; c += S::kPageThreads) centroid[c] -= reference[c];
    sync_page<B, kWarps>(page);
  }
  const Quantised q =
      write_row<B, kWarps>(centroid, d, layout.format.centroid_bits, false, page, out.rows);
  if (thread == 0) store_fp16(out.scales, 0, q.scale_bits);
  write_components<B, kWarps>(layout, m, page, out);
}

// Builds the record of a block, or, with only_stale, leaves one alone whose header says that it
// describes these keys. The whole team calls it (kWarps == 1: the warp, else the CTA of kWarps
// warps) with `memory` of TeamMemory::floats floats. Tells whether a record was written: not if the
// tables name cache blocks that do not exist.
template <int B, int kWarps>
__device__ bool build_record(const RecordJob& job, int seq, std::int64_t block, int head,
                             bool only_stale, float* memory) {
  const RecordLayout& layout = job.layout;
  const int d = layout.head_dim, rank = layout.format.rank;
  const int thread = kWarps == 1 ? lane_index() : static_cast<int>(threadIdx.x);
  const int page = kWarps == 1 ? 0 : warp_index() / TeamShape<B, kWarps>::kPageWarps;
  const TeamMemory<B, kWarps> m(memory, rank, d, page);
  const std::int64_t first = find_keys(job, seq, block, head);
  std::uint8_t* record = find_record(job.records, job.record_blocks, seq, block, head);
  if (record == nullptr || first < 0) return false;
  load_block<B, kWarps>(job, first, m);
  if (only_stale && thread == 0) {  // read once: another row of the batch may write the same record
    const auto header = *reinterpret_cast<const uint2*>(record + layout.header_offset);
    m.words[kWarps] = header.x;
    m.words[kWarps + 1] = header.y;
  }
  sync_team<kWarps>();
  std::uint32_t hash = 0;
  for (int w = 0; w < kWarps; ++w) hash += m.words[w];
  const int key_words = kBlockTokens * d * static_cast<int>(scalar_bytes(job.keys.type)) / 4;
  hash = finish_key_hash(hash, static_cast<std::uint32_t>(key_words));
  const std::uint32_t header = kRecordMagic | static_cast<std::uint32_t>(kRecordVersion) << 16 |
                               static_cast<std::uint32_t>(job.format_code) << 24;
  const bool is_current = only_stale && m.words[kWarps] == header && m.words[kWarps + 1] == hash;
  if (is_current) {
    sync_team<kWarps>();  // the next record reuses the memory
    return false;
  }
  if (layout.format.improved) {
    finish_rotation(m.keys, kBlockTokens, m.stride, d, thread, kWarps * kWarpSize);
    sync_team<kWarps>();
  }
  for (int p = page; p < m.kPages; p += m.kWorkers) measure_page<B, kWarps>(m, p, d);
  find_weights<B, kWarps>(m, page, rank);
  for (int p = page; p < m.kPages; p += m.kWorkers) {
    write_page<B, kWarps>(job, m, p, head, record);
  }
  const int scales_end = layout.scales_offset + m.kPages * (1 + rank) * 2;
  if (thread == 0) {
    for (int b = scales_end; b < layout.coefficients_offset; ++b) record[b] = 0;
    const int used = layout.coefficients_offset + m.kPages * layout.page_coefficient_bytes;
    for (int b = used; b < layout.header_offset; ++b) record[b] = 0;
    *reinterpret_cast<uint2*>(record + layout.header_offset) = make_uint2(header, hash);
  }
  sync_team<kWarps>();
  return true;
}

}  // namespace locks::detail
