// The slow path of the tuned scorer: one (tile, KV head, fragment) whose masses leave the range of
// a float, are not finite, or whose records are not valid. From the records in global memory and
// the query in floats; a lane owns whole pages. Rare, so small code is worth more than speed.
#pragma once

#include <cuda_fp16.h>

#include "core/ptx.cuh"
#include "score/score_cuda_shape.cuh"

namespace locks::detail {

inline constexpr float kLargestTileLog2 = 100;  // of kLargestTileSum
// Larger logits (in log2 units) count as infinite: a shift must fit an int.
inline constexpr float kLargestLogit = 0x1p30f;

template <int kBits, int kHeadDim>
__device__ float dot_row(const std::uint8_t* row, const float* query) {
  float sum = 0;
#pragma unroll 2
  for (int b = 0; b < kHeadDim * kBits / 8; b += 4) {
    const auto word = *reinterpret_cast<const std::uint32_t*>(row + b);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int byte = static_cast<std::int8_t>(word >> (8 * t) & 255);
      if constexpr (kBits == 8) {
        sum += static_cast<float>(byte) * query[b + t];
      } else {
        sum += static_cast<float>((byte & 15) - 8) * query[b + t];
        sum += static_cast<float>(byte >> 4) * query[b + t + kHeadDim / 2];
      }
    }
  }
  return sum;
}

// A page against one query head: logits are centroid + sum_k components[k] * code.
template <class Shape>
struct PageDots {
  const std::uint8_t* record;  // null: not a page of the row, or its record is not valid
  int page;
  float centroid;
  float components[Shape::kRank];

  __device__ void set_query(const float* query, float base) {
    if (record == nullptr) return;
    const std::uint8_t* rows = record + page * Shape::kPageRowsBytes;
    const auto* scales =
        reinterpret_cast<const __half*>(record + Shape::kScalesOffset) + page * (1 + Shape::kRank);
    centroid =
        __half2float(scales[0]) * dot_row<Shape::kCentroidBits, Shape::kHeadDim>(rows, query) -
        base;
    // An infinite scale makes the page unscorable even where its sign would give a mass of 0.
    bool finite = isfinite(__half2float(scales[0]));
#pragma unroll 1
    for (int k = 0; k < Shape::kRank; ++k) {
      const float scale = __half2float(scales[1 + k]);
      finite = finite && isfinite(scale);
      components[k] =
          scale * dot_row<Shape::kBasisBits, Shape::kHeadDim>(
                      rows + Shape::kCentroidRowBytes + k * Shape::kBasisRowBytes, query);
    }
    if (!finite) centroid = __uint_as_float(0x7FC00000u);
  }

  __device__ float logit(int token) const {
    const std::uint8_t* codes =
        record + Shape::kCoefficientsOffset + page * Shape::kPageCoefficientBytes;
    float sum = centroid;
#pragma unroll 1
    for (int k = 0; k < Shape::kRank; ++k) {
      const int place = k * Shape::kPageTokens + token;
      const int code = Shape::kCoefficientBits == 8 ? codes[place] - 128
                                                    : (codes[place / 2] >> place % 2 * 4 & 15) - 8;
      sum += components[k] * static_cast<float>(code);
    }
    return sum;
  }

  // NaN if any logit is not finite.
  __device__ float largest_logit() const {
    float largest = logit(0);
    bool finite = true;
#pragma unroll 1
    for (int t = 0; t < Shape::kPageTokens; ++t) {
      const float x = logit(t);
      finite = finite && x > -INFINITY && x <= kLargestLogit;
      largest = fmaxf(largest, x);
    }
    return finite ? largest : __uint_as_float(0x7FC00000u);
  }

  __device__ float mass(float shift_log2) const {
    float sum = 0;
#pragma unroll 1
    for (int t = 0; t < Shape::kPageTokens; ++t) sum += exp2_fast(logit(t) - shift_log2);
    return sum;
  }
};

// All lanes of the warp. Writes masses, sums and shifts of the tile for the fragment's heads; every
// sum with its sign bit set. Counts invalid records once, with the first fragment.
template <class Shape>
__device__ __noinline__ void score_tile_carefully(const StepArguments& args, const TileWork work) {
  constexpr int kLanePages = (Shape::kTilePages + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int blocks = tile_blocks(work);
  PageDots<Shape> pages[kLanePages];
#pragma unroll
  for (int n = 0; n < kLanePages; ++n) {
    const int page = lane + 32 * n, block = page / Shape::kPages;
    pages[n].record = nullptr;
    pages[n].page = page % Shape::kPages;
    if (page >= Shape::kTilePages || block >= blocks) continue;
    const std::uint8_t* record =
        find_record(args, work.row, work.tile * kTileBlocks + block, work.kv_head);
    if (record != nullptr && *reinterpret_cast<const std::uint32_t*>(
                                 record + Shape::kHeaderOffset) == header_word(args.format_code)) {
      pages[n].record = record;
    } else if (pages[n].page == 0 && work.first_head == 0 && args.counters != nullptr) {
      atomicAdd(args.counters + kInvalidRecords, 1ull);
    }
  }
  __syncwarp();  // other lanes' masses of the fast path come before ours
#pragma unroll 1
  for (int g = 0; g < work.num_heads; ++g) {
    const std::int64_t place = place_of(args, work, g);
    const std::int64_t query_head =
        static_cast<std::int64_t>(work.row) * args.attention.num_query_heads +
        work.kv_head * work.group_size + work.first_head + g;
    const float base = args.workspace.base[query_head];
    float largest[kLanePages];
    float tile_largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < kLanePages; ++n) {
      largest[n] = __uint_as_float(0x7FC00000u);
      if (pages[n].record == nullptr) continue;
      pages[n].set_query(args.workspace.rotated + query_head * Shape::kHeadDim, base);
      largest[n] = pages[n].largest_logit();
      tile_largest = fmaxf(tile_largest, largest[n]);  // fmaxf ignores NaN
    }
    for (int step = 16; step > 0; step /= 2) {
      tile_largest = fmaxf(tile_largest, __shfl_xor_sync(~0u, tile_largest, step));
    }
    // The sum is between 2^largest and 2^(largest + 8): one of two shifts is the smallest that
    // fits.
    int shift = static_cast<int>(
        fmaxf(0.0f, ceilf((tile_largest - kLargestTileLog2) * (1.0f / kShiftUnit))));
    float mass[kLanePages], sum;
    while (true) {
      const float shift_log2 = static_cast<float>(shift) * kShiftUnit;
      sum = 0;
#pragma unroll
      for (int n = 0; n < kLanePages; ++n) {
        mass[n] = isfinite(largest[n]) ? pages[n].mass(shift_log2) : 0.0f;
        sum += mass[n];
      }
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (sum <= kLargestTileSum) break;
      ++shift;
    }
    __nv_bfloat16* masses = args.workspace.masses + place * Shape::kTilePages;
#pragma unroll
    for (int n = 0; n < kLanePages; ++n) {
      const int page = lane + 32 * n, block = page / Shape::kPages;
      if (page >= Shape::kTilePages) continue;
      const bool is_unscorable = block < blocks && !isfinite(largest[n]);
      masses[mass_offset(block, pages[n].page, Shape::kPages)] =
          __float2bfloat16(is_unscorable ? __uint_as_float(0x7FC00000u) : mass[n]);
    }
    if (lane == 0) {
      args.workspace.tile_sums[place] = __uint_as_float(__float_as_uint(sum) | 0x80000000u);
      args.workspace.tile_shifts[place] = shift;
    }
  }
}

}  // namespace locks::detail
