// Selectors that choose tokens one by one or in chunks of their own, beside those that rank pages:
// evictions of the prompt, and landmarks of chunks. For comparison only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "locks/baselines.h"
#include "locks/executor.h"
#include "locks/select.h"
#include "locks/status.h"
#include "locks/trace.h"

namespace locks {

// What each judged step of a trace reads, and what it costs.
struct TokenSets {
  std::vector<std::int32_t> ids;  // ascending within a step
  // [judged steps + 1]: step t has ids[begin[t]] .. ids[begin[t + 1] - 1].
  std::vector<std::int64_t> begin;
  // [judged steps], of one KV head, with numbers of 16 bits.
  std::vector<std::int64_t> resident_bytes;  // in memory: keys and values left, and statistics
  std::vector<std::int64_t> read_bytes;      // of the statistics, read to choose the tokens
};

// Runs a selector of tokens (selects_tokens) over the judged steps of a trace, at each budget. A
// step reads what the budget gives to a selector of pages of `page_tokens`: the same always-read
// tokens, and as many tokens in all. Evictions have one ranking, made when the prompt ends, of
// which each step reads the best; what follows the prompt is never evicted. Refuses, by name, a
// selector that lacks its window or its reconstruction, and a budget that what is never evicted
// exceeds. Allocates.
Result<std::vector<TokenSets>> select_tokens(Selector selector, const AttentionTrace& trace,
                                             int page_tokens, std::span<const Budget> budgets,
                                             const Executor& executor);

}  // namespace locks
