// What score.cpp asks of its kernels.
#pragma once

#include <cstdint>

#include "core/cpu_namespace.h"
#include "locks/page.h"
#include "locks/select.h"
#include "locks/summary.h"

namespace locks::detail {

inline namespace LOCKS_CPU_NAMESPACE {

// Channels of a prepared query or an unpacked row: whole vectors, zero past head_dim.
inline constexpr int kChannelStep = 32;
constexpr int padded_channels(int head_dim) {
  return (head_dim + kChannelStep - 1) / kChannelStep * kChannelStep;
}

}  // namespace LOCKS_CPU_NAMESPACE

inline constexpr int kRunBlocks = kRunTokens / kBlockTokens;

// One run of blocks of one sequence and KV head, and the query heads of its group.
struct ScoreRun {
  const std::uint8_t* records[kRunBlocks];
  int num_blocks;
  RecordLayout layout;
  std::uint32_t header_word;        // the first four bytes of a valid header
  const std::int16_t* query_codes;  // [group_size, padded channels], 64-byte aligned
  const float* query_scales;        // [group_size]: query = code * scale; NaN if it is not finite
  const float* query_references;    // [group_size]: query . reference key
  int group_size;
  float* scores;  // the run's first page of the group's first head
  std::int64_t head_stride;
};

// Writes the run's scores and returns its number of invalid records.
using ScoreRunFunction = std::int64_t (*)(const ScoreRun& run);

// The unrecorded tokens of one sequence and KV head.
struct UnrecordedTokens {
  const void* keys;  // the block's first token
  ScalarType key_type;
  std::int64_t token_stride;
  int num_tokens;  // 1 to 15
  int page_tokens;
  int head_dim;
  float scale;
  const void* queries;  // of the group's first head
  ScalarType query_type;
  std::int64_t query_stride;
  int group_size;
  float* scores;  // the block's first page of the group's first head
  std::int64_t head_stride;
};

struct ScoreKernels {
  // Null for a format that is not in the list of summary.h.
  ScoreRunFunction (*find_score_run)(const SummaryFormat& format);
  void (*score_unrecorded)(const UnrecordedTokens& tokens);
};

}  // namespace locks::detail
