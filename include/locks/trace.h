// Captured attention: what selectors are compared on.
#pragma once

#include <cstdint>

#include "locks/status.h"

namespace locks {

// How a model attended to its context while it was made to repeat it, a chunk at a time: each chunk
// behind the whole context and a request to repeat it, in a pass whose own keys are then dropped.
// Row r is a token of such a pass; it attends to the context and to the rows of its chunk up to r.
struct Reconstruction {
  const float* queries = nullptr;  // [group_size, num_rows, head_dim], post-RoPE and unscaled
  const float* keys = nullptr;     // [num_rows, head_dim]
  // [num_chunks, 4]: tokens begin .. end - 1 of the context, and the rows first .. last - 1 that
  // repeat them. Chunks ascend and touch; what lies before the first is never evicted.
  const std::int32_t* chunks = nullptr;
  int num_rows = 0;
  int num_chunks = 0;  // 0: the trace has none
};

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
  Reconstruction reconstruction;

  int judged_steps() const { return num_steps - window; }
  const float* query(int head, int step) const {
    return queries + (static_cast<std::int64_t>(head) * num_steps + step) * head_dim;
  }
};

// Checks shapes, positions and the reconstruction, if there is one. Errors name the field.
Status validate(const AttentionTrace& trace, int page_tokens);

}  // namespace locks
