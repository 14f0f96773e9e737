// How a window of queries at the end of the prompt attends to what lies before it: what SnapKV, and
// RocketKV after it, evict the prompt by.
#pragma once

#include <cstdint>
#include <vector>

#include "locks/executor.h"
#include "locks/trace.h"

namespace locks::detail {

// Position of the first token of the window; the prompt ends with its last.
std::int32_t window_begin(const AttentionTrace& trace);
std::int32_t prompt_end(const AttentionTrace& trace);

// For each token before the window, the attention that it gets from the window's queries (each a
// softmax over all keys up to its own position), summed over queries and the heads of the group:
// one ranking a KV head, as RocketKV and kvpress have it, where SnapKV's code keeps one a head.
std::vector<double> window_votes(const AttentionTrace& trace, const Executor& executor);

// Sliding mean with zeros around, and sliding maximum, over `kernel` (odd) neighbours.
std::vector<double> mean_pooled(const std::vector<double>& votes, int kernel);
std::vector<double> max_pooled(const std::vector<double>& votes, int kernel);

}  // namespace locks::detail
