// Checks a layer's shapes and format once, and sizes its workspace.
#include <algorithm>
#include <vector>

#include "decode/workspace.h"
#include "locks/decode.h"

namespace locks {

namespace detail {

DecodeIndex cut_decode_index(WorkspaceCutter& cutter, int num_seqs) {
  const auto rows = static_cast<std::size_t>(num_seqs);
  DecodeIndex index;
  index.begin = cutter.take<std::int64_t>(rows + 1);
  index.scored_begin = cutter.take<std::int64_t>(rows + 1);
  index.scored_lengths = cutter.take<std::int32_t>(rows);
  return index;
}

DecodeArrays cut_decode_arrays(WorkspaceCutter& cutter, const DecodePlan& plan,
                               const SequenceBatch& seqs, const PageIndex& pages, int num_workers) {
  const AttentionParams& attention = plan.attention();
  const auto total_pages = static_cast<std::size_t>(pages.begin[seqs.num_seqs]);
  const auto kv_heads = static_cast<std::size_t>(attention.num_kv_heads);
  const auto query_heads = static_cast<std::size_t>(attention.num_query_heads);

  DecodeArrays arrays;
  arrays.ids = cutter.take<std::int32_t>(total_pages * kv_heads);
  arrays.counts = cutter.take<std::int32_t>(static_cast<std::size_t>(seqs.num_seqs) * kv_heads);
  WorkspaceCutter attend_cutter = cutter;
  arrays.attend =
      attend_cutter.take<std::byte>(attend_workspace_bytes(attention, seqs, pages, num_workers));
  WorkspaceCutter rank_cutter = cutter;
  arrays.prepared = rank_cutter.take<std::byte>(prepared_query_bytes(attention, seqs.num_seqs));
  arrays.scores = rank_cutter.take<float>(total_pages * query_heads);
  arrays.select = rank_cutter.take<std::byte>(select_workspace_bytes(seqs, pages, num_workers));
  cutter = attend_cutter.bytes() > rank_cutter.bytes() ? attend_cutter : rank_cutter;
  return arrays;
}

}  // namespace detail

Result<DecodePlan> DecodePlan::create(const AttentionParams& attention,
                                      const SummaryParams& summary) {
  LOCKS_RETURN_IF_ERROR(validate(attention));
  LOCKS_RETURN_IF_ERROR(validate(summary.format));
  DecodePlan plan;
  plan.attention_ = attention;
  plan.summary_ = summary;
  plan.layout_ = record_layout(summary.format, attention.head_dim);
  return plan;
}

std::size_t DecodePlan::workspace_bytes(const SequenceBatch& seqs, int num_workers) const {
  const bool has_rows = seqs.num_seqs > 0 && seqs.lengths != nullptr;
  if (layout_.record_bytes == 0 || !has_rows) return 0;  // decode() refuses it or has no work
  std::vector<std::int64_t> begin(static_cast<std::size_t>(seqs.num_seqs) + 1);
  const PageIndex pages = build_page_index(seqs, layout_.format.page_tokens, begin.data());
  detail::WorkspaceCutter cutter(nullptr);
  static_cast<void>(detail::cut_decode_index(cutter, seqs.num_seqs));
  static_cast<void>(
      detail::cut_decode_arrays(cutter, *this, seqs, pages, std::max(num_workers, 1)));
  return cutter.bytes();
}

}  // namespace locks
