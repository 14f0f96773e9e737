// How well a selector chooses: retained attention mass and output error against dense attention.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "locks/baselines.h"
#include "locks/executor.h"
#include "locks/select.h"
#include "locks/status.h"
#include "locks/summary.h"
#include "locks/trace.h"

namespace locks {

// Means over the steps behind the window and the heads of the group.
struct Quality {
  double retained_oracle = 0;  // attention mass in the pages that the exact log-sum-exp chooses
  double retained = 0;         // the same for the selector
  double output_error = 0;     // |o_selected - o_dense| / |o_dense|
  std::int64_t bytes_per_record = 0;
};

// Tokens begin .. end - 1, such as those that carry the answer to the trace's question.
struct TokenSpan {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

// The same and more for each step behind the window, in order; [steps, group] are its heads.
struct StepQuality {
  std::vector<double> retained_oracle;  // [steps, group]
  std::vector<double> retained;         // [steps, group]
  std::vector<double> output_error;     // [steps, group]
  // Of the pages that the oracle reads and need not, the share that the selector reads; 1 if none.
  std::vector<double> recall;       // [steps]
  std::vector<double> tokens_read;  // [steps]
  // What the selector keeps of the step's complete blocks, and 16-bit keys and values of the tokens
  // read.
  std::vector<double> bytes_read;  // [steps]
  // Whether every page that overlaps the span is read; true for a span behind the step.
  std::vector<std::uint8_t> carriers_read;  // [steps, spans]
};

// Runs the selector at `budget` over pages of the format's size (Quest, mean+std, centroid and int3
// keep one statistic a page of that size; the shared low rank also takes the format's bytes and
// code widths). The reference key of improved formats is the mean of the trace's rotated keys 64 to
// 1087. Allocates. Errors name the field of the trace.
Result<Quality> measure_quality(const AttentionTrace& trace, Selector selector,
                                const SummaryFormat& format, const Budget& budget,
                                const Executor& executor);

// The same at several budgets, scoring once: one StepQuality a budget. Spans lie within the tokens
// of whole pages.
Result<std::vector<StepQuality>> measure_steps(const AttentionTrace& trace, Selector selector,
                                               const SummaryFormat& format,
                                               std::span<const Budget> budgets,
                                               std::span<const TokenSpan> spans,
                                               const Executor& executor);

}  // namespace locks
