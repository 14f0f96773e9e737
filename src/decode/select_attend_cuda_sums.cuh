// Sums of a head's masses, from the sums that the scorer left of each tile: where a tile's masses
// leave the range of a float they lie shifted down, and sums carry the shift along.
//
// The order of additions is part of the contract, since page sets hang on it: tiles in runs of
// kTilesPerRun, runs dealt out to kSumSlots slots, eight lanes a slot, then a tree.
#pragma once

#include "decode/select_attend_cuda_shared.cuh"

namespace locks::detail {

// sum * 2^(kShiftUnit * shift).
struct Shifted {
  float sum;
  int shift;
};

// x * 2^(-kShiftUnit * units), in two steps so that no factor is denormal.
__device__ inline float scale_down(float x, int units) {
  const float once = units == 0 ? 1.0f : units == 3 ? 0x1p-96f : 0x1p-64f;
  const float twice = units < 2 ? 1.0f : units == 2 ? 0x1p-64f : 0x1p-96f;
  return units > 3 ? 0.0f : x * once * twice;  // below 2^100 * 2^-256
}

__device__ inline Shifted add(Shifted a, Shifted b) {
  const int shift = max(a.shift, b.shift);
  return {scale_down(a.sum, shift - a.shift) + scale_down(b.sum, shift - b.shift), shift};
}

// Sums the runs of one slot of one head (runs slot, slot + 16, ...) with 8 lanes: lane l takes
// every eighth of them, in order; then the lanes in a tree. All 8 lanes return the sum. All lanes
// of the warp take part; those without work have no tiles. The general form is seldom needed.
static __device__ __noinline__ Shifted sum_slot_shifted(const float* sums,
                                                        const std::int32_t* shifts, int num_tiles,
                                                        int slot) {
  const int first = slot + kSumSlots * (static_cast<int>(threadIdx.x) % 8);
  Shifted total{0, 0};
#pragma unroll 1
  for (int run = first; run * kTilesPerRun < num_tiles; run += kSumSlots * 8) {
    Shifted sum{0, 0};
#pragma unroll 1
    for (int t = run * kTilesPerRun; t < min(num_tiles, (run + 1) * kTilesPerRun); ++t) {
      const float tile = sums[t];
      const Shifted mass = tile < 0 ? Shifted{-tile, shifts[t]} : Shifted{tile, 0};
      sum = add(sum, mass);
    }
    total = add(total, sum);
  }
#pragma unroll 1
  for (int apart = 1; apart < 8; apart *= 2) {
    total = add(total, {__shfl_xor_sync(kAllLanes, total.sum, apart),
                        __shfl_xor_sync(kAllLanes, total.shift, apart)});
  }
  return total;
}

// The first of a lane's runs of a slot, on their way: asked for before the masses, which are many
// more bytes.
struct SlotRuns {
  static constexpr int kAtOnce = 4;
  static constexpr int kApart = kSumSlots * 8;
  float tile[kAtOnce][kTilesPerRun];

  __device__ void load(const float* sums, int num_tiles, int run) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int left = num_tiles - (run + i * kApart) * kTilesPerRun;
      const float* from = sums + (run + i * kApart) * kTilesPerRun;
#pragma unroll
      for (int t = 0; t < kTilesPerRun; ++t) tile[i][t] = 0;
      if (__any_sync(kAllLanes, left > 0)) {
#pragma unroll
        for (int t = 0; t < kTilesPerRun; ++t) {
          if (t < left) tile[i][t] = from[t];
        }
      }
    }
  }
};

// `runs` holds the lane's first ones.
__device__ inline Shifted sum_slot(SlotRuns& runs, const float* sums, const std::int32_t* shifts,
                                   int num_tiles, int slot) {
  int run = slot + kSumSlots * (static_cast<int>(threadIdx.x) % 8);
  float total = 0;
  float least = 0;
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int i = 0; i < SlotRuns::kAtOnce; ++i) {
      float sum = 0;
#pragma unroll
      for (int t = 0; t < kTilesPerRun; ++t) {
        least = fminf(least, runs.tile[i][t]);
        sum += runs.tile[i][t];
      }
      total += sum;
    }
    run += SlotRuns::kApart * SlotRuns::kAtOnce;
    if (!__any_sync(kAllLanes, run * kTilesPerRun < num_tiles)) break;
    runs.load(sums, num_tiles, run);
  }
  if (__any_sync(kAllLanes, least < 0)) return sum_slot_shifted(sums, shifts, num_tiles, slot);
#pragma unroll
  for (int apart = 1; apart < 8; apart *= 2) {
    total += __shfl_xor_sync(kAllLanes, total, apart);
  }
  return {total, 0};
}

}  // namespace locks::detail
