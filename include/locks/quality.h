// How well a selector chooses: retained attention mass and output error against dense attention.
#pragma once

#include <cstdint>

#include "locks/baselines.h"
#include "locks/executor.h"
#include "locks/select.h"
#include "locks/status.h"
#include "locks/summary.h"

namespace locks {

// Captured attention of one layer and one KV head. Queries are post-RoPE and unscaled.
struct AttentionTrace {
  const float* queries = nullptr;           // [group_size, num_steps, head_dim]
  const float* keys = nullptr;              // [num_tokens, head_dim]
  const float* values = nullptr;            // [num_tokens, head_dim]
  const std::int32_t* positions = nullptr;  // [num_steps]; step t attends to keys 0 .. positions[t]
  int group_size = 0;
  int num_steps = 0;
  int num_tokens = 0;  // cut to whole pages before anything is measured
  int head_dim = 0;
  float scale = 0;
  // Steps 0 .. window - 1 are only for selectors to look at, and none is judged on them: so all
  // selectors are compared on the same steps, those that need queries to look at and the others.
  int window = 0;
};

// Means over the steps behind the window and the heads of the group.
struct Quality {
  double retained_oracle = 0;  // attention mass in the pages that the exact log-sum-exp chooses
  double retained = 0;         // the same for the selector
  double output_error = 0;     // |o_selected - o_dense| / |o_dense|
  std::int64_t bytes_per_record = 0;
};

// Runs the selector at `budget` over pages of the format's size (Quest, mean+std, centroid and int3
// keep one statistic a page of that size; the shared low rank also takes the format's bytes and
// code widths). The reference key of improved formats is the mean of the trace's rotated keys 64 to
// 1087. Allocates. Errors name the field of the trace.
Result<Quality> measure_quality(const AttentionTrace& trace, Selector selector,
                                const SummaryFormat& format, const Budget& budget,
                                const Executor& executor);

}  // namespace locks
