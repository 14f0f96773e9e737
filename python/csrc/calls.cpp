#include "calls.h"

namespace locks::binding {

SummariseCall describe_summarise(const Checks& checks, const Tensor& keys,
                                 const Tensor& block_table,
                                 const std::optional<Tensor>& begin_tokens, const Tensor& lengths,
                                 std::int64_t format, const std::optional<Tensor>& reference_keys,
                                 const Tensor& record_table, const Tensor& records,
                                 const std::optional<Tensor>& counters) {
  SummariseCall call;
  call.keys = checked_keys(checks, keys);
  call.summary = {format_of(checks, format), checked_reference(checks, reference_keys, call.keys)};
  const RecordLayout layout = record_layout(call.summary.format, call.keys.head_dim);
  call.records = checked_records(checks, records, call.keys.num_kv_heads, layout.record_bytes,
                                 Strides::kOwnRows);
  SequenceBatch& seqs = call.seqs;
  seqs.lengths = checked_lengths(checks, lengths, "num_seqs");
  seqs.num_seqs = checks.to_int("lengths", lengths.size(0));
  seqs.cache_blocks = checked_table(checks, "block_table", block_table, seqs.num_seqs);
  seqs.record_blocks = checked_table(checks, "record_table", record_table, seqs.num_seqs);
  if (begin_tokens.has_value()) {
    checks.tensor("begin_tokens", *begin_tokens, {seqs.num_seqs}, kInt32, Strides::kContiguous);
    call.begin_tokens = const_data<std::int32_t>(*begin_tokens);
  }
  if (counters.has_value()) {
    checks.tensor("counters", *counters, {kNumCounters}, kInt64, Strides::kContiguous);
    call.num_built = mutable_data<std::int64_t>(*counters) + kNumDecodeCounters;
  }
  return call;
}

DecodePlan plan_of(const Checks& checks, std::int64_t num_query_heads, std::int64_t num_kv_heads,
                   std::int64_t head_dim, std::int64_t format) {
  const AttentionParams attention{checks.to_int("num_query_heads", num_query_heads),
                                  checks.to_int("num_kv_heads", num_kv_heads),
                                  checks.to_int("head_dim", head_dim), 1.0f};
  return checks.value(DecodePlan::create(attention, {format_of(checks, format), nullptr}));
}

DecodeCall describe_decode(const Checks& checks, const Tensor& query, const Tensor& keys,
                           const Tensor& values, const Tensor& block_table, const Tensor& records,
                           const Tensor& record_table, std::int64_t format,
                           const std::optional<Tensor>& reference_keys, double scale,
                           const Tensor& output, const std::optional<Tensor>& lse) {
  DecodeCall call;
  call.keys = checked_keys(checks, keys);
  const ScalarType cache_dtype = keys.scalar_type();
  checks.tensor("values", values, {keys.size(0), keys.size(1), keys.size(2), keys.size(3)},
                {&cache_dtype, 1}, Strides::kRows);
  call.values = paged_tensor(checks, "values", values);

  const int head_dim = call.keys.head_dim;
  checks.tensor("query", query, {"num_seqs", "q_heads", head_dim}, kFloating, Strides::kRows);
  const ScalarType query_dtype = query.scalar_type();
  const int num_seqs = checks.to_int("query", query.size(0));
  const int num_query_heads = checks.to_int("query", query.size(1));
  call.query = {query.const_data_ptr(), core_type(query), num_query_heads,
                stride_or(query, 0, num_query_heads * query.size(2)),
                stride_or(query, 1, query.size(2))};
  checks.tensor("output", output, {num_seqs, num_query_heads, head_dim}, {&query_dtype, 1},
                Strides::kOwnRows);
  if (lse.has_value()) {
    checks.tensor("lse", *lse, {num_seqs, num_query_heads}, kFloat32, Strides::kContiguous);
  }
  call.output = {output.mutable_data_ptr(), core_type(output),
                 stride_or(output, 0, num_query_heads * output.size(2)),
                 stride_or(output, 1, output.size(2)),
                 lse.has_value() ? mutable_data<float>(*lse) : nullptr};

  call.seqs.num_seqs = num_seqs;
  call.seqs.cache_blocks = checked_table(checks, "block_table", block_table, num_seqs);
  call.seqs.record_blocks = checked_table(checks, "record_table", record_table, num_seqs);

  const AttentionParams attention{num_query_heads, call.keys.num_kv_heads, head_dim,
                                  static_cast<float>(scale)};
  const SummaryParams summary{format_of(checks, format),
                              checked_reference(checks, reference_keys, call.keys)};
  call.plan = checks.value(DecodePlan::create(attention, summary));
  call.records = checked_records(checks, records, call.keys.num_kv_heads,
                                 call.plan.layout().record_bytes, Strides::kRows);
  return call;
}

}  // namespace locks::binding
