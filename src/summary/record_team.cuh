// The team that builds a record, one warp or one CTA: how its warps share the pages of a block,
// what it keeps in shared memory, how its threads meet, and the sums that half a warp makes in the
// order of core/lanes.h. Compiled with --fmad=false: no product is fused with a sum.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/lanes.h"
#include "locks/page.h"
#include "summary/eigensolver.cuh"
#include "summary/rotate_rows.cuh"
#include "summary/warp.cuh"

namespace locks::detail {

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
  static constexpr int kTeamFloats = 2 * (kWarps + 1);

  LOCKS_HD static constexpr int floats(int rank, int d) {
    const int all = kBlockTokens * row_floats(d) + kPages * (d + kPageFloats) +
                    kWorkers * (rank * d + kWorkerFloats) + kTeamFloats;
    return (all + 4) / 4 * 4;  // one for the alignment of hashes
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
    memory += (memory - keys) & 1;
    hashes = reinterpret_cast<std::uint64_t*>(take(2 * kWarps));
    header = reinterpret_cast<uint2*>(take(2));
  }

  int stride;             // floats from key to key
  float* keys;            // [16][stride]
  float* centroids;       // [pages][d]
  float* gram;            // [pages][B][B + 1]
  float* weights;         // [pages][largest rank][B]
  float* energy;          // [pages]
  float* basis;           // [rank][d], of this warp's page, like all that follows
  float* coefficients;    // [largest rank][16]
  float* scales;          // [largest rank]
  float* overlap;         // [largest rank][largest rank]
  float* work;            // [B][B + 1]
  std::uint64_t* hashes;  // the team's: its warps' shares of the hash
  uint2* header;          // the team's: of the record that is there
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

}  // namespace locks::detail
