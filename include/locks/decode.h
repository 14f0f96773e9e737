// One layer's decode step: score, select, attend, with a workspace that the caller owns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "locks/attend.h"
#include "locks/executor.h"
#include "locks/page.h"
#include "locks/score.h"
#include "locks/select.h"
#include "locks/status.h"
#include "locks/summary.h"

namespace locks {

// What a layer has done so far; decode() adds to it. Rows are the sequences of a step; padded rows,
// of length 0, are neither sparse nor dense.
struct DecodeCounters {
  std::int64_t sparse_rows = 0;      // rows in which some page was not read
  std::int64_t dense_rows = 0;       // rows in which every page was read
  std::int64_t records_read = 0;     // records, over all KV heads
  std::int64_t pages_read = 0;       // pages, over all KV heads
  std::int64_t bytes_read = 0;       // records and the keys and values of the tokens attended to
  std::int64_t bytes_dense = 0;      // keys and values that dense attention would have read
  std::int64_t nonfinite_pages = 0;  // pages read because their score was NaN or infinite
  std::int64_t invalid_records = 0;  // records whose header did not match: their pages were read
  std::int64_t raised_budgets = 0;   // rows whose budget was below the always-read set
  std::int64_t bytes_unused = 0;     // keys and values fetched before the choice was final, and not
                                     // attended to (GPU; not in bytes_read)
};

// A layer's shapes and format, checked once.
class DecodePlan {
 public:
  DecodePlan() = default;
  // Errors: kInvalidArgument naming the field, its value and what is allowed.
  static Result<DecodePlan> create(const AttentionParams& attention, const SummaryParams& summary);

  const AttentionParams& attention() const { return attention_; }
  const SummaryParams& summary() const { return summary_; }
  const RecordLayout& layout() const { return layout_; }

  // Bytes that decode() needs for this batch, at any address. Allocates.
  std::size_t workspace_bytes(const SequenceBatch& seqs, int num_workers) const;

 private:
  AttentionParams attention_;
  SummaryParams summary_;
  RecordLayout layout_;
};

// The whole step. The budget may change from call to call. A row whose budget covers all its pages
// is read densely and its records are not touched; with Budget::all() every row is.
// selected (if not null): PageSets to fill, ragged over pages of plan.layout().format.page_tokens.
// counters may be null.
// All rows are checked before any work: an error leaves outputs and counters as they were.
Status decode(const DecodePlan& plan, const QueryTensor& query, const PagedTensor& keys,
              const PagedTensor& values, const RecordCache& records, const SequenceBatch& seqs,
              const Budget& budget, const AttentionOutput& output, const PageSets* selected,
              DecodeCounters* counters, void* workspace, std::size_t workspace_bytes,
              const Executor& executor);

}  // namespace locks
