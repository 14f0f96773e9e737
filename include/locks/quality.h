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
  // For a selector of tokens, the share of those pages' tokens.
  std::vector<double> recall;       // [steps]
  std::vector<double> tokens_read;  // [steps]
  // What the selector keeps of the step's complete blocks, and 16-bit keys and values of the tokens
  // read.
  std::vector<double> bytes_read;  // [steps]
  // What must stay in memory for the KV head: all keys and values, or those that an eviction has
  // left, in 16 bits, and what the selector keeps.
  std::vector<double> resident_bytes;  // [steps]
  // Whether every page that overlaps the span is read; true for a span behind the step.
  std::vector<std::uint8_t> carriers_read;  // [steps, spans]
  // The same for the pages that the oracle reads.
  std::vector<std::uint8_t> carriers_wanted;  // [steps, spans]
};

// Runs the selector at `budget` over pages of the format's size (Quest, mean+std, centroid and int3
// keep one statistic a page of that size; the shared low rank also takes the format's bytes and
// code widths; selectors of tokens read as many tokens as those pages hold, and have pages of
// their own or none). The reference key of improved formats is the mean of the trace's rotated keys
// 64 to 1087. Allocates. Errors name the field of the trace.
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

// The theory's chain, spectral tail -> residual -> score error -> retained mass -> output error:
// what each bound allows beside what happens. Reach is scale * |q| of a step and head.
struct ChainError {
  double residual = 0;     // max_i |k_i - khat_i|
  double score_error = 0;  // the largest |score - exact log mass| over judged steps and heads
  double score_bound = 0;  // the largest reach * residual over the same
};

// A page of a complete block.
struct ChainPage {
  ChainError ideal;   // khat by the page's own basis, nothing rounded
  ChainError stored;  // khat as its record gives it back
};

struct ChainChoice {
  double delta = 0;     // the largest reach * residual over pages and heads
  double retained = 0;  // the group's mean, at least exp(-4 delta) times the oracle's
};

struct ChainStep {
  ChainChoice oracle;  // delta 0
  ChainChoice ideal;
  ChainChoice stored;
  // Of the stored choice, means over the group's heads.
  double output_error = 0;  // |o - o_dense|
  double output_bound = 0;  // (1 - retained mass) * a bound on the diameter of the values
};

struct Chain {
  std::vector<ChainPage> pages;
  std::vector<ChainStep> steps;  // behind the window
};

// ideal_keys: [num_tokens, head_dim], each page's keys projected onto its own basis of the format's
// rank about its centroid. Allocates. Errors as in measure_quality.
Result<Chain> measure_chain(const AttentionTrace& trace, const SummaryFormat& format,
                            const Budget& budget, const float* ideal_keys,
                            const Executor& executor);

}  // namespace locks
