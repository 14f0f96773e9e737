// Chains the stages. Rows that a budget covers are read whole; to the ranking stages they look like
// sequences of length 0, so that one call serves a batch of both kinds.
#include "locks/decode.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/message.h"
#include "decode/workspace.h"

namespace locks {

using detail::join;

namespace {

// One step: the arguments that its parts share.
struct Step {
  const DecodePlan& plan;
  const QueryTensor& query;
  const PagedTensor& keys;
  const PagedTensor& values;
  const RecordCache& records;
  const SequenceBatch& seqs;
  const Budget& budget;
  const Executor& executor;
  int num_workers;

  int page_tokens() const { return plan.layout().format.page_tokens; }
  int num_kv_heads() const { return plan.attention().num_kv_heads; }
};

Status check_call(const Step& step, const AttentionOutput& output, const PageSets* selected,
                  const void* workspace) {
  const DecodePlan& plan = step.plan;
  if (plan.layout().record_bytes == 0) {
    return invalid_argument("decode: plan is empty, expected one of DecodePlan::create");
  }
  LOCKS_RETURN_IF_ERROR(validate(plan.attention(), step.keys, step.values));
  LOCKS_RETURN_IF_ERROR(validate(step.seqs, step.keys, nullptr));
  LOCKS_RETURN_IF_ERROR(validate(step.budget));
  if (step.seqs.num_seqs == 0) return {};
  LOCKS_RETURN_IF_ERROR(validate(plan.attention(), step.query));
  LOCKS_RETURN_IF_ERROR(validate(plan.attention(), step.seqs.num_seqs, output));
  const std::int32_t* lengths = step.seqs.lengths;
  const bool has_pages = std::any_of(lengths, lengths + step.seqs.num_seqs,
                                     [](std::int32_t length) { return length > 0; });
  if (selected != nullptr &&
      (selected->counts == nullptr || (selected->ids == nullptr && has_pages))) {
    return invalid_argument("decode: selected: ids or counts is null");
  }
  if (workspace == nullptr) return invalid_argument("decode: workspace is null");
  return {};
}

Status check_records(const Step& step, const SequenceBatch& scored) {
  LOCKS_RETURN_IF_ERROR(
      validate(step.records, step.plan.layout(), step.num_kv_heads(), "decode: records"));
  return validate(scored, step.keys, &step.records);
}

Status too_small(const Step& step, std::size_t given) {
  return invalid_argument(join("decode: workspace_bytes = ", given, ", expected at least ",
                               step.plan.workspace_bytes(step.seqs, step.num_workers)));
}

// Decides row by row; returns the batch of the rows to score.
SequenceBatch split_rows(const Step& step, const PageIndex& pages, const detail::DecodeIndex& index,
                         DecodeCounters& counters) {
  for (int i = 0; i < step.seqs.num_seqs; ++i) {
    const std::int32_t length = step.seqs.lengths[i];
    index.scored_lengths[i] = 0;
    if (length == 0) continue;  // a padded row is neither sparse nor dense
    bool raised = false;
    const std::int64_t allowed = budget_pages(step.budget, length, step.page_tokens(), &raised);
    counters.raised_budgets += raised ? 1 : 0;
    if (allowed < pages.pages(i)) index.scored_lengths[i] = length;
  }
  SequenceBatch scored = step.seqs;
  scored.lengths = index.scored_lengths;
  return scored;
}

// Fills `sets`, ragged over `pages`, for the rows of `scored`.
Status rank_pages(const Step& step, const SequenceBatch& scored, const PageIndex& pages,
                  const detail::DecodeArrays& arrays, const PageSets& sets,
                  DecodeCounters& counters) {
  const AttentionParams& attention = step.plan.attention();
  const SummaryParams& summary = step.plan.summary();
  LOCKS_RETURN_IF_ERROR(prepare_queries(attention, summary, step.query, scored.num_seqs,
                                        arrays.prepared, step.executor));
  LOCKS_RETURN_IF_ERROR(score_pages(attention, summary, arrays.prepared, step.records, scored,
                                    pages, arrays.scores, &counters.invalid_records,
                                    step.executor));
  LOCKS_RETURN_IF_ERROR(score_unrecorded_pages(attention, step.query, step.keys, scored, pages,
                                               arrays.scores, step.executor));
  SelectCounters select;
  LOCKS_RETURN_IF_ERROR(select_pages(attention, arrays.scores, scored, pages, step.budget,
                                     GroupRule::kMeanOfShares, sets, &select, arrays.select,
                                     step.executor));
  counters.nonfinite_pages += select.nonfinite_pages;
  return {};
}

// Turns the sets of the scored rows into sets of all rows, in place. A row's run starts no earlier
// in the whole batch's index: from the last row to the first, nothing still to move is overwritten.
void spread_sets(const Step& step, const SequenceBatch& scored, const PageIndex& scored_pages,
                 const PageIndex& pages, const PageSets& sets) {
  const int kv_heads = step.num_kv_heads();
  for (int i = step.seqs.num_seqs - 1; i >= 0; --i) {
    const std::int64_t held = pages.pages(i);
    for (int kv_head = kv_heads - 1; kv_head >= 0; --kv_head) {
      std::int32_t& count = sets.counts[static_cast<std::int64_t>(i) * kv_heads + kv_head];
      std::int32_t* to = sets.ids + pages.offset(i, kv_head, kv_heads);
      if (scored.lengths[i] > 0) {
        const std::int32_t* from = sets.ids + scored_pages.offset(i, kv_head, kv_heads);
        std::memmove(to, from, static_cast<std::size_t>(count) * sizeof *to);
      } else {
        std::iota(to, to + held, 0);
        count = static_cast<std::int32_t>(held);
      }
    }
  }
}

void count_row(const Step& step, int seq, bool scored, const PageIndex& pages, const PageSets& sets,
               DecodeCounters& counters) {
  const std::int64_t length = step.seqs.lengths[seq];
  const int kv_heads = step.num_kv_heads();
  const std::int64_t token_bytes = step.plan.attention().head_dim *
                                   (scalar_bytes(step.keys.type) + scalar_bytes(step.values.type));
  const std::int64_t held = pages.pages(seq);
  bool all_read = true;
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    const std::int32_t count = sets.counts[static_cast<std::int64_t>(seq) * kv_heads + kv_head];
    const std::int32_t* ids = sets.ids + pages.offset(seq, kv_head, kv_heads);
    std::int64_t tokens = static_cast<std::int64_t>(count) * step.page_tokens();
    if (count > 0 && ids[count - 1] == held - 1) tokens -= held * step.page_tokens() - length;
    counters.pages_read += count;
    counters.bytes_read += tokens * token_bytes;
    counters.bytes_dense += length * token_bytes;
    all_read = all_read && count == held;
  }
  if (scored) {
    const std::int64_t num_records = length / kBlockTokens * kv_heads;
    counters.records_read += num_records;
    counters.bytes_read += num_records * step.plan.layout().record_bytes;
  }
  if (length > 0) ++(all_read ? counters.dense_rows : counters.sparse_rows);
}

void add(const DecodeCounters& step, DecodeCounters& total) {
  total.sparse_rows += step.sparse_rows;
  total.dense_rows += step.dense_rows;
  total.records_read += step.records_read;
  total.pages_read += step.pages_read;
  total.bytes_read += step.bytes_read;
  total.bytes_dense += step.bytes_dense;
  total.nonfinite_pages += step.nonfinite_pages;
  total.invalid_records += step.invalid_records;
  total.raised_budgets += step.raised_budgets;
}

}  // namespace

Status decode(const DecodePlan& plan, const QueryTensor& query, const PagedTensor& keys,
              const PagedTensor& values, const RecordCache& records, const SequenceBatch& seqs,
              const Budget& budget, const AttentionOutput& output, const PageSets* selected,
              DecodeCounters* counters, void* workspace, std::size_t workspace_bytes,
              const Executor& executor) {
  const Step step{plan,   query,    keys,
                  values, records,  seqs,
                  budget, executor, std::max(executor.num_workers, 1)};
  LOCKS_RETURN_IF_ERROR(check_call(step, output, selected, workspace));
  if (seqs.num_seqs == 0) return {};

  // The workspace is measured from a null base, so that what suffices does not hang on its address.
  detail::WorkspaceCutter ruler(nullptr);
  static_cast<void>(detail::cut_decode_index(ruler, seqs.num_seqs));
  if (workspace_bytes < ruler.bytes()) return too_small(step, workspace_bytes);
  detail::WorkspaceCutter cutter(workspace);
  const detail::DecodeIndex index = detail::cut_decode_index(cutter, seqs.num_seqs);
  const PageIndex pages = build_page_index(seqs, step.page_tokens(), index.begin);
  static_cast<void>(detail::cut_decode_arrays(ruler, plan, seqs, pages, step.num_workers));
  if (workspace_bytes < ruler.bytes()) return too_small(step, workspace_bytes);
  const detail::DecodeArrays arrays =
      detail::cut_decode_arrays(cutter, plan, seqs, pages, step.num_workers);
  const PageSets sets = selected != nullptr ? *selected : PageSets{arrays.ids, arrays.counts};

  DecodeCounters count;
  const SequenceBatch scored = split_rows(step, pages, index, count);
  const PageIndex scored_pages = build_page_index(scored, step.page_tokens(), index.scored_begin);
  if (scored_pages.begin[seqs.num_seqs] > 0) {
    LOCKS_RETURN_IF_ERROR(check_records(step, scored));
    LOCKS_RETURN_IF_ERROR(rank_pages(step, scored, scored_pages, arrays, sets, count));
  }
  spread_sets(step, scored, scored_pages, pages, sets);
  for (int i = 0; i < seqs.num_seqs; ++i) {
    count_row(step, i, scored.lengths[i] > 0, pages, sets, count);
  }
  LOCKS_RETURN_IF_ERROR(attend_pages(plan.attention(), query, keys, values, seqs, pages, sets,
                                     output, arrays.attend, executor));
  if (counters != nullptr) add(count, *counters);
  return {};
}

}  // namespace locks
