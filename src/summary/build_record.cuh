// Builds one record on the GPU, for every format, by a team of one warp or of one CTA: the same
// bytes as the CPU's.
//
// The team loads the 16 keys of a block, 8 channels a thread and load, hashes them, rotates them
// and leaves them as floats in shared memory; then its warps take pages (record_team.cuh): they
// centre and measure them, find the eigenvectors and write the page's part of the record
// (write_page.cuh). Code that includes this file is compiled with --fmad=false: no product is fused
// with a sum.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/lanes.h"
#include "core/scalar.h"
#include "locks/summary.h"
#include "summary/differences.h"
#include "summary/eigensolver.cuh"
#include "summary/key_hash.h"
#include "summary/record_job.cuh"
#include "summary/record_team.cuh"
#include "summary/rotate_rows.cuh"
#include "summary/warp.cuh"
#include "summary/write_differences.cuh"
#include "summary/write_page.cuh"

namespace locks::detail {

// A piece's share of the hash: `words` of them, piece `place` of its row.
__device__ inline std::uint64_t hash_piece(const RawPiece& raw, int words, int t, int place) {
  std::uint64_t hash = 0;
#pragma unroll
  for (int w = 0; w < kPieceWords; w += 2) {
    if (w >= words) break;
    const int pair = (place * words + w) / 2, step = pair / kHashLanes;
    const std::uint32_t lane = hash_lane_key(t / kHashTokens, pair % kHashLanes);
    hash += hash_pair(raw.words[w] + (hash_key(t % kHashTokens, step, 0) + lane),
                      raw.words[w + 1] + (hash_key(t % kHashTokens, step, 1) + lane));
  }
  return hash;
}

__device__ __forceinline__ std::uint64_t add_over_warp(std::uint64_t x) {
#pragma unroll
  for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
    x += __shfl_xor_sync(kEveryLane, x, apart);
  }
  return x;
}

// Loads the block's keys as floats, rotated as far as begin_rotation goes, or, for differences,
// with signs flipped, and leaves each warp's share of the hash in m.hashes.
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
  std::uint64_t hash = 0;
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
      hash += hash_piece(raw[n], words, t, piece % row_pieces);
      float x[kPieceChannels];
      to_floats(raw[n], keys.type, x);
      if (uses_differences(job.layout.format)) {
        flip_signs(x, c);
      } else if (job.layout.format.improved) {
        begin_rotation(x, c);
      }
      store_piece(m.keys + t * m.stride + c, x);
    }
  }
  hash = add_over_warp(hash);
  if (lane_index() == 0) m.hashes[thread / kWarpSize] = hash;
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

// What a record holds besides its pages; the whole team.
template <int B, int kWarps>
__device__ void end_record(const RecordLayout& layout, const TeamMemory<B, kWarps>& m, int thread,
                           uint2 header, std::uint8_t* record) {
  if (thread == 0) {
    const int scales_end = layout.scales_offset + m.kPages * (1 + layout.format.rank) * 2;
    for (int b = scales_end; b < layout.coefficients_offset; ++b) record[b] = 0;
    const int used = layout.coefficients_offset + m.kPages * layout.page_coefficient_bytes;
    for (int b = used; b < layout.header_offset; ++b) record[b] = 0;
    *reinterpret_cast<uint2*>(record + layout.header_offset) = header;
  }
  sync_team<kWarps>();  // the next record reuses the memory
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
    *m.header = header;
  }
  sync_team<kWarps>();
  std::uint64_t sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += m.hashes[w];
  const int key_words = kBlockTokens * d * static_cast<int>(scalar_bytes(job.keys.type)) / 4;
  const std::uint32_t hash = finish_key_hash(sum, static_cast<std::uint32_t>(key_words));
  const std::uint32_t header = kRecordMagic | static_cast<std::uint32_t>(kRecordVersion) << 16 |
                               static_cast<std::uint32_t>(job.format_code) << 24;
  const bool is_current = only_stale && m.header->x == header && m.header->y == hash;
  if (is_current) {
    sync_team<kWarps>();  // the next record reuses the memory
    return false;
  }
  if constexpr (B == 4) {
    if (uses_differences(layout.format)) {
      for (int p = page; p < m.kPages; p += m.kWorkers) {
        measure_differences<B, kWarps>(m, p, d);
        write_differences<B, kWarps>(job, m, p, head, record);
      }
      end_record<B, kWarps>(layout, m, thread, make_uint2(header, hash), record);
      return true;
    }
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
  end_record<B, kWarps>(layout, m, thread, make_uint2(header, hash), record);
  return true;
}

}  // namespace locks::detail
