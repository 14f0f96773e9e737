// Where a thread stands in its warp and in its CTA.
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

}  // namespace locks::detail
