// What select_attend's attention reads: tiles of tokens from one of three sources, and queries.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/scalar.h"
#include "decode/select_attend_cuda_keys.cuh"

namespace locks::detail {

// Where a warp's tiles come from. One class for all sources: attention is then one piece of code,
// which matters because each launch reads its instructions anew.
//   kDense: all tokens of the row; block t of the row is a tile of CTA t % cluster.
//   kList:  pages of the CTA's list.
//   kWalk:  pages found by a walk over the keys, 4 groups at a time; the warp keeps a short queue.
enum class Source { kDense, kList, kWalk };

struct Tiles {
  Source source;
  const RowHead& row;
  const Keys& keys;
  const PageKey* list;
  int listed;
  int tiles;             // kUnknown: a walk finds out
  std::uint32_t* queue;  // 64 pages of this warp
  std::uint64_t cut;
  int next;  // tile, or four of groups
  int step;
  int head = 0;  // of the queue
  int tail = 0;
  PageKey page{};  // of the list, that this lane's quad lies in

  static constexpr int kUnknown = 0x7FFFFFFF;

  // Gives this lane the first token of quad lane / 8 of the next tile and the number of its valid
  // tokens, 0 if there are none; returns whether there was a tile. While there is no cut (0), all
  // pages of the list are taken.
  __device__ bool fill(int& token, int& tokens) {
    token = 0;
    tokens = 0;
    if (next >= tiles) return false;  // at once: most warps have one tile
    if (source == Source::kWalk) return fill_found(token, tokens);
    const int quad = next * 4 + lane() / 8;
    next += step;
    if (source == Source::kDense) {
      set_tokens((quad / 4 * row.cluster() + row.rank()) * kBlockTokens + quad % 4 * 4, token,
                 tokens);
    } else if (quad >> quad_shift() < listed) {
      page = list[quad >> quad_shift()];
      if (is_taken(page.key, page.page, cut)) set(page.page, quad, token, tokens);
    }
    return true;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % kWarpLanes); }
  __device__ int quad_shift() const { return row.page_shift - 2; }  // log2 of quads a page

  __device__ void set_tokens(int first, int& token, int& tokens) const {
    token = first;
    tokens = min(max(row.length - first, 0), 4);
  }
  __device__ void set(std::uint32_t page, int quad, int& token, int& tokens) const {
    set_tokens(static_cast<int>(page << row.page_shift) + (quad & ((1 << quad_shift()) - 1)) * 4,
               token, tokens);
  }

  __device__ bool fill_found(int& token, int& tokens) {
    const int wanted = 4 >> quad_shift();
#pragma unroll 1
    while (tail - head < wanted && next * 4 < row.all_groups()) {
      const int group_idx = next * 4 + lane() / 8;
      bool taken = false;
      std::uint32_t page = 0;
      if (group_idx < row.all_groups()) {
        page = static_cast<std::uint32_t>(row.page(group_idx, lane() % 8));
        taken = is_taken(keys.one(group_idx, lane() % 8), page, cut);
      }
      const unsigned mask = __ballot_sync(kAllLanes, taken);
      if (taken) queue[(tail + __popc(mask & ((1u << lane()) - 1))) & 63] = page;
      tail += __popc(mask);
      next += step;
      __syncwarp();
    }
    const int entry = lane() / 8 >> quad_shift();
    const int held = min(tail - head, wanted);
    if (entry < held) set(queue[(head + entry) & 63], lane() / 8, token, tokens);
    head += held;
    __syncwarp();
    return held > 0;
  }
};

template <bool kBf16>
__device__ inline std::uint32_t pack_pair(float low, float high) {
  if constexpr (kBf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}

template <bool kBf16>
__device__ inline float round_to_cache(float x) {
  if constexpr (kBf16) {
    return __bfloat162float(__float2bfloat16_rn(x));
  } else {
    return __half2float(__float2half_rn(x));
  }
}

// Queries of a pass as A operands: [step][lane] of 16 bytes, for heads [first_head, end_head), at
// most 8. Step s of 32-channel run c holds, for k = 2 j + e and 8 + 2 j + e, channels
// 32 c + 8 j + 4 (s % 2) + e and + 2; a rest of 16 channels (80) holds 64 + 4 j + e and + 2.
template <int kHeadDim, bool kBf16, int kThreads>
__device__ __noinline__ void load_query(const QueryTensor& query, bool as_cache, uint4* fragments,
                                        int row, int first_head, int end_head) {
  constexpr int kSteps = kHeadDim / 16;
  // The last warps first: the first ones are busy with sums.
#pragma unroll 1
  for (int i = kThreads - 1 - static_cast<int>(threadIdx.x); i < kSteps * kWarpLanes;
       i += kThreads) {
    const int step = i / kWarpLanes;
    const int head = first_head + i % kWarpLanes / 4;
    const int j = i % 4;
    const bool in_run = step * 16 < kHeadDim / 32 * 32;
    const int channel = in_run ? step / 2 * 32 + j * 8 + step % 2 * 4 : step * 16 + j * 4;
    const std::int64_t at =
        std::int64_t{row} * query.seq_stride + head * query.head_stride + channel;
    if (as_cache) {
      uint2 q{};
      if (head < end_head) {
        q = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(query.data) + at);
      }
      fragments[i] = make_uint4(q.x, 0, q.y, 0);
      continue;
    }
    float high[4] = {}, low[4] = {};
    if (head < end_head) {
#pragma unroll
      for (int e = 0; e < 4; ++e) low[e] = load_scalar(query.data, query.type, at + e);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        high[e] = round_to_cache<kBf16>(low[e]);
        low[e] -= high[e];
      }
    }
    fragments[i] = make_uint4(pack_pair<kBf16>(high[0], high[1]), pack_pair<kBf16>(low[0], low[1]),
                              pack_pair<kBf16>(high[2], high[3]), pack_pair<kBf16>(low[2], low[3]));
  }
}

}  // namespace locks::detail
