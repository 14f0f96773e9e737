// Where a thread stands in its warp and in its CTA, and how some of its warps meet.
#pragma once

#include <cuda_runtime.h>

namespace locks::detail {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kEveryLane = 0xFFFFFFFFu;

// The warp's index in its CTA. By a shuffle, so that the compiler knows it to be one number a warp,
// and what hangs on it to be free of divergence.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(kEveryLane, static_cast<int>(threadIdx.x) / kWarpSize, 0);
}

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarpSize; }

// kWarps warps of a CTA meet at a barrier, from 1 on (0 is the CTA's): some arrive and go on, the
// others wait for all. The lanes meet first, since these barriers count whole warps.
template <int kWarps>
__device__ __forceinline__ void arrive_at(int barrier) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kWarps * kWarpSize) : "memory");
}
template <int kWarps>
__device__ __forceinline__ void wait_at(int barrier) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kWarps * kWarpSize) : "memory");
}

}  // namespace locks::detail
