// Sums of a head's masses, from the sums that the scorer left of each tile: where a tile's masses
// leave the range of a float they lie shifted down, and sums carry the shift along.
//
// Every CTA makes all sums of its row and KV head: to share the work would cost an exchange, which
// takes longer. The order of additions is part of the contract, since page sets hang on it: tiles
// are dealt out to the lanes of kSumParts warps, which add them in runs of 8, then a tree of lanes.
#pragma once

#include "decode/select_attend_cuda_shared.cuh"

namespace locks::detail {

// sum * 2^(kShiftUnit * shift).
struct __align__(8) Shifted {
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

// A lane's tiles of a part, kSumLanes apart, on their way: whole runs of kRun first, of the warp,
// then what is left of them. Addresses are known, and registers hold them, before the kernel in
// front has ended.
struct LaneTiles {
  static constexpr int kRun = 8;
  static constexpr int kRuns = 7;  // whole ones at a time; those of 1,000,000 tokens at once

  const float* next;
  int runs;       // whole ones, of the warp
  int rest;       // of the lane, after those
  int most_rest;  // of any lane
  float run[kRuns][kRun];
  float last[kRun];

  __device__ LaneTiles(const float* sums, int num_tiles, int first_tile) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    const auto lane_tiles = [&](int l) {
      return (num_tiles - first_tile - l + kSumLanes - 1) / kSumLanes;
    };
    next = sums + first_tile + lane;
    runs = opaque(max(lane_tiles(kWarpLanes - 1), 0) / kRun);
    rest = opaque(lane_tiles(lane) - runs * kRun);
    most_rest = opaque(lane_tiles(0) - runs * kRun);
  }

  __device__ void load() {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      if (i == runs) break;
#pragma unroll
      for (int k = 0; k < kRun; ++k) run[i][k] = next[(i * kRun + k) * kSumLanes];
    }
    if (runs <= kRuns && most_rest <= 0) return;
    next += min(runs, kRuns) * kRun * kSumLanes;
    if (runs > kRuns) return;
#pragma unroll
    for (int k = 0; k < kRun; ++k) last[k] = k < rest ? next[k * kSumLanes] : 0.0f;
  }
};

// Adds a run to a sum, and its signs to those seen.
__device__ inline void add_run(const float (&x)[LaneTiles::kRun], float& total,
                               std::uint32_t& signs) {
#pragma unroll
  for (float tile : x) signs |= __float_as_uint(tile);
  total += ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// The general form of sum_part, seldom needed: a lane adds its tiles one after the other.
static __device__ __noinline__ Shifted sum_part_shifted(const RowHead& row, int part) {
  const std::int64_t head = std::int64_t{part / kSumParts} * row.num_tiles;
  const float* sums = row.tile_sums + head;
  const std::int32_t* shifts = row.tile_shifts + head;
  Shifted total{0, 0};
#pragma unroll 1
  for (int t = part % kSumParts * kWarpLanes + static_cast<int>(threadIdx.x) % kWarpLanes;
       t < row.num_tiles; t += kSumLanes) {
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

// The sum over part p % kSumParts of head p / kSumParts, in all lanes of the warp: lane l adds up
// tiles (p % kSumParts) * kWarpLanes + l + n * kSumLanes, each eight in a tree and these in order;
// then the lanes are added in a tree. `tiles` holds the lane's first ones.
__device__ inline Shifted sum_part(LaneTiles& tiles, const RowHead& row, int part) {
  float total = 0;
  std::uint32_t signs = 0;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < LaneTiles::kRuns; ++i) {
      if (i == tiles.runs) break;
      add_run(tiles.run[i], total, signs);
    }
    if (tiles.runs <= LaneTiles::kRuns) break;
    tiles.runs -= LaneTiles::kRuns;
    tiles.load();
  }
  if (tiles.most_rest > 0) add_run(tiles.last, total, signs);
  if (__any_sync(kAllLanes, signs >> 31 != 0)) return sum_part_shifted(row, part);
#pragma unroll
  for (int apart = 1; apart < kWarpLanes; apart *= 2) {
    total += __shfl_xor_sync(kAllLanes, total, apart);
  }
  return {total, 0};
}

}  // namespace locks::detail
