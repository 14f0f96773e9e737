// What attend.cpp asks of its kernels. A task's pointers are resolved for one sequence and KV head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "locks/page.h"

namespace locks::detail {

// Tokens attended to at a time: whole pages of every format, and the most that 4-token pages
// scattered over the cache fill without waiting for more.
inline constexpr int kTileTokens = 16;

// The keys, or the values, of one KV head.
struct HeadRows {
  const std::byte* data = nullptr;
  ScalarType type = ScalarType::kFloat32;
  std::int64_t block_bytes = 0;  // from cache block to cache block
  std::int64_t token_bytes = 0;  // from token to token
};

// Floats of one worker, each array 64-byte aligned.
struct AttendScratch {
  float* query = nullptr;    // [group, head_dim], times scale * log2(e)
  float* keys = nullptr;     // [kTileTokens, head_dim]
  float* values = nullptr;   // [kTileTokens, head_dim]
  float* weights = nullptr;  // [group, kTileTokens]
  float* sums = nullptr;     // [group, kTileTokens], added up when the split ends
};

// The result of a split, before merging: max in units of log2, sum and output relative to 2^max.
struct PartialAttention {
  float* max = nullptr;     // [group]
  float* sum = nullptr;     // [group]
  float* output = nullptr;  // [group, head_dim]
};

struct SplitTask {
  const void* query = nullptr;
  ScalarType query_type = ScalarType::kFloat32;
  std::int64_t query_offset = 0;  // elements to the group's first head
  std::int64_t query_head_stride = 0;
  int group_size = 0;
  int head_dim = 0;
  float scale = 0;

  HeadRows keys;
  HeadRows values;
  const std::int32_t* block_ids = nullptr;
  std::uint32_t block_tokens = 0;

  const std::int32_t* page_ids = nullptr;  // ascending
  int num_pages = 0;
  int page_tokens = 0;
  std::int64_t length = 0;

  AttendScratch scratch;
  PartialAttention partial;
};

struct AttendKernels {
  void (*attend_split)(const SplitTask& task);
};

}  // namespace locks::detail
