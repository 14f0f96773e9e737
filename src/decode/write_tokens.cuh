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

// Writes the key and the value that a row adds. One warp; keys of 128 channels and their values are
// a load and a store a lane. Loads do not wait for the slot, which tells only where they go.
__device__ inline void write_token(const StepArguments& step, int row, int head) {
  constexpr int kMostParts = 2 * kMaxHeadDim * 4 / static_cast<int>(sizeof(TokenPart));
  const std::int64_t slot = step.added.slots[row];
  const TokenPart* const key = find_new_key(step, row, head);
  const TokenPart* const value = find_new_value(step, row, head);
  const int parts = token_parts(step.keys);
  TokenPart part[kMostParts / kWarpSize];
#pragma unroll
  for (int n = 0; n < kMostParts / kWarpSize; ++n) {
    const int i = n * kWarpSize + lane_index();
    if (i < 2 * parts) part[n] = i < parts ? key[i] : value[i - parts];
  }
  if (slot < 0) return;
  const std::int64_t block = slot / step.keys.block_tokens, token = slot % step.keys.block_tokens;
  if (block >= step.keys.num_blocks || block >= step.values.num_blocks) return;
  TokenPart* const to_key = find_token_parts(step.keys, block, token, head);
  TokenPart* const to_value = find_token_parts(step.values, block, token, head);
#pragma unroll
  for (int n = 0; n < kMostParts / kWarpSize; ++n) {
    const int i = n * kWarpSize + lane_index();
    if (i < 2 * parts) *(i < parts ? to_key + i : to_value + i - parts) = part[n];
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
