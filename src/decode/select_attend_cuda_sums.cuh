// Sums of a head's masses, from the sums that the scorer left of each tile: where a tile's masses
// leave the range of a float they lie shifted down, and sums carry the shift along.
//
// Every CTA makes all sums of its row and KV head: to share the work would cost an exchange, which
// takes longer. The order of additions is part of the contract, since page sets hang on it: tiles
// in runs of kTilesPerRun, runs dealt out to the lanes of kSumParts warps, then a tree.
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
  if (a.shift == b.shift) return {a.sum + b.sum, a.shift};
  const int shift = max(a.shift, b.shift);
  return {scale_down(a.sum, shift - a.shift) + scale_down(b.sum, shift - b.shift), shift};
}

inline constexpr int kSumLanes = kSumParts * kWarpLanes;

// The sum over a part: its lane l takes the tiles first_tile + n * kSumLanes + l in order, then the
// lanes are added in a tree. All lanes of the warp return the sum. The general form is seldom
// needed.
static __device__ __noinline__ Shifted sum_part_shifted(const float* sums,
                                                        const std::int32_t* shifts, int num_tiles,
                                                        int first_tile) {
  Shifted total{0, 0};
#pragma unroll 1
  for (int t = first_tile + static_cast<int>(threadIdx.x) % kWarpLanes; t < num_tiles;
       t += kSumLanes) {
    const float tile = sums[t];
    total = add(total, tile < 0 ? Shifted{-tile, shifts[t]} : Shifted{tile, 0});
  }
#pragma unroll 1
  for (int apart = 1; apart < kWarpLanes; apart *= 2) {
    total = add(total, {__shfl_xor_sync(kAllLanes, total.sum, apart),
                        __shfl_xor_sync(kAllLanes, total.shift, apart)});
  }
  return total;
}

// The next of a lane's tiles, on their way: asked for before the masses, which are many more bytes.
struct LaneTiles {
  static constexpr int kAtOnce = 64;
  static constexpr int kSome = 8;
  float sum[kAtOnce];

  __device__ void load(const float* sums, int num_tiles, int first_tile) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
#pragma unroll
    for (int i = 0; i < kAtOnce; i += kSome) {
#pragma unroll
      for (int k = i; k < i + kSome; ++k) sum[k] = 0;
      if (first_tile + i * kSumLanes >= num_tiles) continue;  // of the warp
#pragma unroll
      for (int k = i; k < i + kSome; ++k) {
        const int t = first_tile + k * kSumLanes + lane;
        if (t < num_tiles) sum[k] = sums[t];
      }
    }
  }
};

// `tiles` holds the lane's first ones.
__device__ inline Shifted sum_part(LaneTiles& tiles, const float* sums, const std::int32_t* shifts,
                                   int num_tiles, int first_tile) {
  float total = 0;
  std::uint32_t signs = 0;
#pragma unroll 1
  for (int tile = first_tile;;) {
#pragma unroll
    for (int i = 0; i < LaneTiles::kAtOnce; i += LaneTiles::kSome) {
      if (tile + i * kSumLanes >= num_tiles) continue;  // of the warp
      const float* x = tiles.sum + i;
#pragma unroll
      for (int k = 0; k < LaneTiles::kSome; ++k) signs |= __float_as_uint(x[k]);
      total += ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
    tile += kSumLanes * LaneTiles::kAtOnce;
    if (tile >= num_tiles) break;
    tiles.load(sums, num_tiles, tile);
  }
  if (__any_sync(kAllLanes, signs >> 31 != 0)) {
    return sum_part_shifted(sums, shifts, num_tiles, first_tile);
  }
#pragma unroll
  for (int apart = 1; apart < kWarpLanes; apart *= 2) {
    total += __shfl_xor_sync(kAllLanes, total, apart);
  }
  return {total, 0};
}

}  // namespace locks::detail
