// Writes the keys and values that a step adds to the caches; in the first launch of a decode step.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "decode/step_cuda.h"
#include "summary/record_job.cuh"
#include "summary/warp.cuh"

namespace locks::detail {

// What one load and one store of a lane move.
using TokenPart = uint4;

__device__ inline int token_parts(const PagedTensor& cache) {
  return cache.head_dim * static_cast<int>(scalar_bytes(cache.type)) /
         static_cast<int>(sizeof(TokenPart));
}

// The bytes of row `row` of new keys or values.
__device__ inline const TokenPart* find_new(const void* data, ScalarType type, int row,
                                            std::int64_t seq_stride, int head,
                                            std::int64_t head_stride) {
  const std::int64_t element = row * seq_stride + head * head_stride;
  return reinterpret_cast<const TokenPart*>(static_cast<const std::uint8_t*>(data) +
                                            element * scalar_bytes(type));
}
__device__ inline const TokenPart* find_new_key(const StepArguments& step, int row, int head) {
  const NewTokens& added = step.added;
  return find_new(added.keys, step.keys.type, row, added.key_seq_stride, head,
                  added.key_head_stride);
}
__device__ inline const TokenPart* find_new_value(const StepArguments& step, int row, int head) {
  const NewTokens& added = step.added;
  return find_new(added.values, step.values.type, row, added.value_seq_stride, head,
                  added.value_head_stride);
}

// The bytes of a token of a cache.
__device__ inline TokenPart* find_token_parts(const PagedTensor& cache, std::int64_t block,
                                              std::int64_t token, int head) {
  const std::int64_t element =
      block * cache.block_stride + head * cache.head_stride + token * cache.token_stride;
  // The step may write where its caller brings new tokens.
  return reinterpret_cast<TokenPart*>(static_cast<std::uint8_t*>(const_cast<void*>(cache.data)) +
                                      element * scalar_bytes(cache.type));
}

// Parts of a token's key and value that one lane moves; null: none. Of 128 channels of 16 bits it
// is one a lane.
struct TokenMove {
  static constexpr int kMostParts =
      2 * kMaxHeadDim * 4 / static_cast<int>(sizeof(TokenPart)) / kWarpSize;
  const TokenPart* from[kMostParts];
  TokenPart* to[kMostParts];
};

// Where this lane of a warp finds its share of what a row adds, and where it goes. Reads nothing
// but the slot, so that all of it may be known before the kernel in front has ended.
__device__ inline TokenMove find_move(const StepArguments& step, int row, int head) {
  TokenMove move{};
  const std::int64_t slot = step.added.slots[row];
  if (slot < 0) return move;
  const std::int64_t block = slot / step.keys.block_tokens, token = slot % step.keys.block_tokens;
  if (block >= step.keys.num_blocks || block >= step.values.num_blocks) return move;
  const TokenPart* const key = find_new_key(step, row, head);
  const TokenPart* const value = find_new_value(step, row, head);
  TokenPart* const to_key = find_token_parts(step.keys, block, token, head);
  TokenPart* const to_value = find_token_parts(step.values, block, token, head);
  const int parts = token_parts(step.keys);
#pragma unroll
  for (int n = 0; n < TokenMove::kMostParts; ++n) {
    const int i = n * kWarpSize + lane_index();
    if (i >= 2 * parts) break;
    move.from[n] = i < parts ? key + i : value + i - parts;
    move.to[n] = i < parts ? to_key + i : to_value + i - parts;
  }
  return move;
}

__device__ inline void move_token(const TokenMove& move) {
  TokenPart part[TokenMove::kMostParts];
#pragma unroll
  for (int n = 0; n < TokenMove::kMostParts; ++n) {
    if (move.from[n] != nullptr) part[n] = *move.from[n];
  }
#pragma unroll
  for (int n = 0; n < TokenMove::kMostParts; ++n) {
    if (move.from[n] != nullptr) *move.to[n] = part[n];
  }
}

// Writes all keys that the step adds to one block: for the CTA that builds its record. It is the
// row whose record it is that completes the block, or one that shares it; nobody else's writes are
// sure to be there yet, and whoever writes too writes the same bytes.
__device__ inline void write_keys_of_block(const StepArguments& step, const RecordJob& job, int seq,
                                           std::int64_t block, int head) {
  const NewTokens& added = step.added;
  if (added.slots == nullptr) return;
  const auto at = static_cast<std::uint32_t>(block);
  const auto blocks = static_cast<std::uint32_t>(job.keys.block_tokens) / kBlockTokens;
  const std::int64_t id = job.cache_blocks.ids[seq * job.cache_blocks.seq_stride + at / blocks];
  const std::int64_t first = id * job.keys.block_tokens + at % blocks * kBlockTokens;
  const int num_rows = id >= 0 && id < job.keys.num_blocks ? step.seqs.num_seqs : 0;
  const int parts = token_parts(step.keys);
  // Mostly it is the row's own key; it is on its way while slots are looked through.
  TokenPart own{};
  if (lane_index() < parts) own = find_new_key(step, seq, head)[lane_index()];
  for (int begin = warp_index() * kWarpSize; begin < num_rows;
       begin += static_cast<int>(blockDim.x)) {
    const int row = begin + lane_index();
    const std::int64_t slot = row < num_rows ? added.slots[row] : -1;
    unsigned found = __ballot_sync(kEveryLane, slot >= first && slot < first + kBlockTokens);
    for (; found != 0; found &= found - 1) {
      const int lane = __ffs(static_cast<int>(found)) - 1;
      const std::int64_t token = __shfl_sync(kEveryLane, slot, lane) - id * job.keys.block_tokens;
      const TokenPart* const from = find_new_key(step, begin + lane, head);
      TokenPart* const to = find_token_parts(step.keys, id, token, head);
      for (int i = lane_index(); i < parts; i += kWarpSize) {
        to[i] = begin + lane == seq && i < kWarpSize ? own : from[i];
      }
    }
  }
  __syncthreads();
}

}  // namespace locks::detail
