// The operators of the CUDA backend. They check shapes, strides and devices; what lies on the
// device (lengths, tables, plans) they cannot look at. Nothing allocates or waits: calls can be
// captured.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "calls.h"
#include "cuda_call.h"
#include "locks/cuda.h"

namespace locks::binding {

namespace {

constexpr std::int64_t kPlanFields = sizeof(RowPlan) / sizeof(std::int32_t);

// The checks of a call that writes `written`, which names the device.
Checks checks_of(const char* op, const Tensor& written) {
  return Checks(op, written.is_cuda() ? written.get_device_index() : kOnCpu);
}

void summarise_blocks_cuda_op(const Tensor& keys, const Tensor& block_table,
                              const Tensor& begin_tokens, const Tensor& lengths,
                              std::int64_t format, const std::optional<Tensor>& reference_keys,
                              const Tensor& record_table, const Tensor& records,
                              const std::optional<Tensor>& counters) {
  const Checks checks = checks_of("summarise_blocks", records);
  const SummariseCall call =
      describe_summarise(checks, keys, block_table, begin_tokens, lengths, format, reference_keys,
                         record_table, records, counters);
  const CudaCall on(checks.device());
  checks.ok(summarise_blocks_cuda(call.summary, call.keys, call.seqs, call.begin_tokens,
                                  call.records, call.num_built, on.stream()));
}

void verify_blocks_op(const Tensor& keys, const Tensor& block_table, const Tensor& lengths,
                      const std::optional<Tensor>& rows, std::int64_t format,
                      const std::optional<Tensor>& reference_keys, const Tensor& record_table,
                      const Tensor& records, const std::optional<Tensor>& counters) {
  const Checks checks = checks_of("verify_blocks", records);
  const SummariseCall call =
      describe_summarise(checks, keys, block_table, std::nullopt, lengths, format, reference_keys,
                         record_table, records, counters);
  if (rows.has_value()) {
    checks.tensor("rows", *rows, {call.seqs.num_seqs}, kUInt8, Strides::kContiguous);
  }
  const CudaCall on(checks.device());
  checks.ok(verify_blocks_cuda(call.summary, call.keys, call.seqs,
                               rows.has_value() ? const_data<std::uint8_t>(*rows) : nullptr,
                               call.records, call.num_built, on.stream()));
}

RowPlan* checked_plan(const Checks& checks, const Tensor& plan, int num_rows) {
  checks.tensor("plan", plan, {"num_rows + 1", kPlanFields}, kInt32, Strides::kContiguous);
  if (plan.size(0) <= num_rows) {
    checks.fail("plan: expected at least ", num_rows + 1, " rows, got ", plan.size(0));
  }
  return static_cast<RowPlan*>(plan.mutable_data_ptr());
}

void plan_decode_op(const Tensor& lengths, const std::optional<Tensor>& row_flags, double budget,
                    std::int64_t page_tokens, std::int64_t dense_tokens, std::int64_t max_tiles,
                    const Tensor& plan) {
  const Checks checks = checks_of("plan_decode", plan);
  const std::int32_t* row_lengths = checked_lengths(checks, lengths, "num_rows");
  const int num_rows = checks.to_int("lengths", lengths.size(0));
  if (row_flags.has_value()) {
    checks.tensor("row_flags", *row_flags, {num_rows}, kUInt8, Strides::kContiguous);
  }
  const ScoreLimits limits{checks.to_int("dense_tokens", dense_tokens),
                           checks.to_int("max_tiles", max_tiles)};
  RowPlan* rows = checked_plan(checks, plan, num_rows);
  const CudaCall on(checks.device());
  checks.ok(plan_rows_cuda(row_lengths,
                           row_flags.has_value() ? const_data<std::uint8_t>(*row_flags) : nullptr,
                           num_rows, budget_of(checks, budget),
                           checks.to_int("page_tokens", page_tokens), limits, rows, on.stream()));
}

std::int64_t decode_step_workspace_bytes_op(std::int64_t num_rows, std::int64_t num_query_heads,
                                            std::int64_t num_kv_heads, std::int64_t head_dim,
                                            std::int64_t format, std::int64_t max_tiles) {
  const Checks checks("decode_step_workspace_bytes");
  const DecodePlan plan = plan_of(checks, num_query_heads, num_kv_heads, head_dim, format);
  return static_cast<std::int64_t>(decode_workspace_bytes_cuda(
      plan, checks.to_int("num_rows", num_rows), checks.to_int("max_tiles", max_tiles)));
}

NewTokens checked_new_tokens(const Checks& checks, const DecodeCall& call, const Tensor& keys,
                             const std::optional<Tensor>& new_keys,
                             const std::optional<Tensor>& new_values,
                             const std::optional<Tensor>& slots) {
  if (!new_keys.has_value() && !new_values.has_value() && !slots.has_value()) return {};
  if (!new_keys.has_value() || !new_values.has_value() || !slots.has_value()) {
    checks.fail("expected all of new_keys, new_values and slots, or none");
  }
  const ScalarType dtype = keys.scalar_type();
  const int heads = call.keys.num_kv_heads, head_dim = call.keys.head_dim;
  const auto check_rows = [&](const char* name, const Tensor& rows) {
    checks.tensor(name, rows, {call.seqs.num_seqs, heads, head_dim}, {&dtype, 1}, Strides::kRows);
  };
  check_rows("new_keys", *new_keys);
  check_rows("new_values", *new_values);
  checks.tensor("slots", *slots, {call.seqs.num_seqs}, kInt64, Strides::kContiguous);
  const std::int64_t dense = std::int64_t{heads} * head_dim;
  return {new_keys->const_data_ptr(),       new_values->const_data_ptr(),
          stride_or(*new_keys, 0, dense),   stride_or(*new_keys, 1, head_dim),
          stride_or(*new_values, 0, dense), stride_or(*new_values, 1, head_dim),
          const_data<std::int64_t>(*slots)};
}

void decode_step_op(const Tensor& query, const Tensor& keys, const Tensor& values,
                    const Tensor& block_table, const Tensor& plan, const Tensor& records,
                    const Tensor& record_table, std::int64_t format,
                    const std::optional<Tensor>& reference_keys, double scale,
                    std::int64_t max_tiles, const Tensor& workspace, const Tensor& output,
                    const std::optional<Tensor>& lse, const Tensor& counters,
                    const std::optional<Tensor>& selected, const std::optional<Tensor>& new_keys,
                    const std::optional<Tensor>& new_values, const std::optional<Tensor>& slots) {
  const Checks checks = checks_of("decode_step", output);
  const DecodeCall call = describe_decode(checks, query, keys, values, block_table, records,
                                          record_table, format, reference_keys, scale, output, lse);
  const RowPlan* rows = checked_plan(checks, plan, call.seqs.num_seqs);
  checks.tensor("workspace", workspace, {"bytes"}, kUInt8, Strides::kContiguous);
  checks.tensor("counters", counters, {kNumCounters}, kInt64, Strides::kContiguous);
  const NewTokens added = checked_new_tokens(checks, call, keys, new_keys, new_values, slots);
  SelectionMask mask;
  if (selected.has_value()) {
    checks.tensor("selected", *selected, {call.seqs.num_seqs, call.keys.num_kv_heads, "pages"},
                  kUInt8, Strides::kContiguous);
    mask = {mutable_data<std::uint8_t>(*selected), selected->size(2)};
  }
  const CudaCall on(checks.device());
  checks.ok(decode_cuda(call.plan, call.query, call.keys, call.values, added, call.records,
                        call.seqs, rows, checks.to_int("max_tiles", max_tiles), call.output, mask,
                        mutable_data<std::int64_t>(counters), workspace.mutable_data_ptr(),
                        static_cast<std::size_t>(workspace.numel()), on.stream()));
}

}  // namespace

}  // namespace locks::binding

STABLE_TORCH_LIBRARY_IMPL(locks, CUDA, library) {
  using namespace locks::binding;
  library.impl("summarise_blocks", TORCH_BOX(&summarise_blocks_cuda_op));
  library.impl("verify_blocks", TORCH_BOX(&verify_blocks_op));
  library.impl("plan_decode", TORCH_BOX(&plan_decode_op));
  library.impl("decode_step", TORCH_BOX(&decode_step_op));
}

STABLE_TORCH_LIBRARY_IMPL(locks, CompositeExplicitAutograd, library) {
  library.impl("decode_step_workspace_bytes",
               TORCH_BOX(&locks::binding::decode_step_workspace_bytes_op));
}
