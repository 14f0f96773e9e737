// Checks a decode step's arguments on the host and enqueues its launches.
#include <cuda_runtime.h>

#include "core/message.h"
#include "core/workspace.h"
#include "decode/step_cuda.h"
#include "locks/cuda.h"

namespace locks {

using namespace detail;

namespace {

constexpr int kRowAlignment = 16;  // bytes: what a load of keys and values takes at once

static_assert(kRecordsBuilt == kNumCudaCounters - 1, "the fields of DecodeCounters come first");

Status cuda_status(const char* call, const char* what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return unsupported(join(call, ": ", what, ": ", cudaGetErrorString(error)));
}

StepWorkspace cut_step(WorkspaceCutter& cutter, const DecodePlan& plan, int num_rows,
                       std::int32_t max_tiles) {
  const AttentionParams& attention = plan.attention();
  const SummaryFormat& format = plan.layout().format;
  const auto rows = static_cast<std::size_t>(num_rows);
  const auto heads = rows * static_cast<std::size_t>(attention.num_query_heads);
  const auto tiles =
      static_cast<std::size_t>(max_tiles) * static_cast<std::size_t>(attention.num_query_heads);
  const auto tile_pages = static_cast<std::size_t>(kTileBlocks * format.pages_per_block());
  const auto words =
      static_cast<std::size_t>(fragment_words(format, attention.group_size(), attention.head_dim));
  StepWorkspace workspace;
  workspace.rotated = cutter.take<float>(heads * static_cast<std::size_t>(attention.head_dim));
  workspace.fragments =
      cutter.take<std::uint32_t>(rows * static_cast<std::size_t>(attention.num_kv_heads) * words);
  workspace.base = cutter.take<float>(heads);
  workspace.log2_tail = cutter.take<float>(heads);
  workspace.masses = cutter.take<__nv_bfloat16>(tiles * tile_pages);
  workspace.tile_sums = cutter.take<float>(tiles);
  workspace.tile_shifts = cutter.take<std::int32_t>(tiles);
  return workspace;
}

// What a grid has room for: a row is one of its third dimension.
constexpr int kMostRows = 65535;

bool is_multiple(std::int64_t bytes) { return bytes % kRowAlignment == 0; }

Status check_rows_aligned(const PagedTensor& tensor, const char* name) {
  const std::int64_t element = scalar_bytes(tensor.type);
  if (tensor.type == ScalarType::kFloat32) {
    return unsupported(join("decode_cuda: ", name, ": float32, expected bf16 or fp16"));
  }
  if (!is_multiple(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data))) ||
      !is_multiple(tensor.block_stride * element) || !is_multiple(tensor.head_stride * element) ||
      !is_multiple(tensor.token_stride * element)) {
    return invalid_argument(join("decode_cuda: ", name, ": expected rows aligned to ",
                                 kRowAlignment, " bytes, got strides of ", tensor.block_stride,
                                 ", ", tensor.head_stride, " and ", tensor.token_stride,
                                 " elements at address ", tensor.data));
  }
  return {};
}

Status check_added(const NewTokens& added, const PagedTensor& keys) {
  const int given = (added.keys != nullptr ? 1 : 0) + (added.values != nullptr ? 1 : 0) +
                    (added.slots != nullptr ? 1 : 0);
  if (given == 0) return {};
  if (given != 3) {
    return invalid_argument(
        "decode_cuda: expected all of added.keys, added.values and added.slots, or none");
  }
  const std::int64_t element = scalar_bytes(keys.type);
  for (const void* data : {added.keys, added.values}) {
    if (!is_multiple(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data)))) {
      return invalid_argument(join("decode_cuda: added: expected rows aligned to ", kRowAlignment,
                                   " bytes, got address ", data));
    }
  }
  for (const std::int64_t stride : {added.key_seq_stride, added.key_head_stride,
                                    added.value_seq_stride, added.value_head_stride}) {
    if (!is_multiple(stride * element)) {
      return invalid_argument(join("decode_cuda: added: expected rows aligned to ", kRowAlignment,
                                   " bytes, got a stride of ", stride, " elements"));
    }
  }
  return {};
}

Status check_step(const DecodePlan& plan, const QueryTensor& query, const PagedTensor& keys,
                  const PagedTensor& values, const NewTokens& added, const RecordCache& records,
                  const SequenceBatch& seqs, const RowPlan* rows, std::int32_t max_tiles,
                  const AttentionOutput& output) {
  if (plan.layout().record_bytes == 0) {
    return invalid_argument("decode_cuda: plan is empty, expected one of DecodePlan::create");
  }
  if (seqs.num_seqs < 0 || seqs.num_seqs > kMostRows) {
    return invalid_argument(
        join("decode_cuda: seqs.num_seqs = ", seqs.num_seqs, ", expected 0 to ", kMostRows));
  }
  const AttentionParams& attention = plan.attention();
  LOCKS_RETURN_IF_ERROR(validate(attention, keys, values));
  LOCKS_RETURN_IF_ERROR(validate(attention, query));
  LOCKS_RETURN_IF_ERROR(validate(attention, seqs.num_seqs, output));
  LOCKS_RETURN_IF_ERROR(
      validate(records, plan.layout(), attention.num_kv_heads, "decode_cuda: records"));
  LOCKS_RETURN_IF_ERROR(check_rows_aligned(keys, "keys"));
  LOCKS_RETURN_IF_ERROR(check_rows_aligned(values, "values"));
  if (keys.type != values.type) {
    return unsupported(
        "decode_cuda: keys and values of different types, expected both bf16 or both fp16");
  }
  LOCKS_RETURN_IF_ERROR(check_added(added, keys));
  if (rows == nullptr) return invalid_argument("decode_cuda: rows is null");
  if (max_tiles < 0) {
    return invalid_argument(join("decode_cuda: max_tiles = ", max_tiles, ", expected 0 or more"));
  }
  return {};
}

}  // namespace

namespace detail {

StepWorkspace cut_step_workspace(void* workspace, const DecodePlan& plan, int num_rows,
                                 std::int32_t max_tiles) {
  WorkspaceCutter cutter(workspace);
  return cut_step(cutter, plan, num_rows, max_tiles);
}

}  // namespace detail

Status plan_rows_cuda(const std::int32_t* lengths, const std::uint8_t* row_flags, int num_rows,
                      const Budget& budget, int page_tokens, const ScoreLimits& limits,
                      RowPlan* plan, void* stream) {
  LOCKS_RETURN_IF_ERROR(validate(budget));
  if (page_tokens != 4 && page_tokens != 8 && page_tokens != 16) {
    return invalid_argument(
        join("plan_rows_cuda: page_tokens = ", page_tokens, ", expected 4, 8 or 16"));
  }
  if (num_rows < 0 || limits.dense_tokens < 0 || limits.max_tiles < 0) {
    return invalid_argument(join("plan_rows_cuda: num_rows = ", num_rows,
                                 ", dense_tokens = ", limits.dense_tokens,
                                 ", max_tiles = ", limits.max_tiles, ", expected 0 or more"));
  }
  if (plan == nullptr || (lengths == nullptr && num_rows > 0)) {
    return invalid_argument("plan_rows_cuda: lengths or plan is null");
  }
  const PlanArguments arguments{lengths, row_flags, num_rows, budget, page_tokens, limits, plan};
  return cuda_status("plan_rows_cuda", "launch",
                     launch_plan_rows(arguments, static_cast<cudaStream_t>(stream)));
}

std::size_t decode_workspace_bytes_cuda(const DecodePlan& plan, int num_rows,
                                        std::int32_t max_tiles) {
  if (plan.layout().record_bytes == 0 || num_rows <= 0 || max_tiles < 0) return 0;
  WorkspaceCutter ruler(nullptr);
  static_cast<void>(cut_step(ruler, plan, num_rows, max_tiles));
  return ruler.bytes();
}

Status decode_cuda(const DecodePlan& plan, const QueryTensor& query, const PagedTensor& keys,
                   const PagedTensor& values, const NewTokens& added, const RecordCache& records,
                   const SequenceBatch& seqs, const RowPlan* rows, std::int32_t max_tiles,
                   const AttentionOutput& output, const SelectionMask& selected,
                   std::int64_t* counters, void* workspace, std::size_t workspace_bytes,
                   void* stream) {
  if (seqs.num_seqs == 0) return {};
  LOCKS_RETURN_IF_ERROR(
      check_step(plan, query, keys, values, added, records, seqs, rows, max_tiles, output));
  if (const std::size_t needed = decode_workspace_bytes_cuda(plan, seqs.num_seqs, max_tiles);
      workspace_bytes < needed) {
    return invalid_argument(
        join("decode_cuda: workspace_bytes = ", workspace_bytes, ", expected at least ", needed));
  }
  if (workspace == nullptr) return invalid_argument("decode_cuda: workspace is null");
  if (counters == nullptr) return invalid_argument("decode_cuda: counters is null");
  const SummaryParams& summary = plan.summary();
  StepArguments step{};
  step.attention = plan.attention();
  step.layout = plan.layout();
  step.format_code = encode_format(summary.format);
  step.reference_keys = summary.format.improved ? summary.reference_keys : nullptr;
  step.query = query;
  step.keys = keys;
  step.values = values;
  step.added = added;
  step.records = records;
  step.seqs = seqs;
  step.plan = rows;
  step.output = output;
  step.selected = selected.mask;
  step.selected_pages = selected.num_pages;
  step.counters = reinterpret_cast<unsigned long long*>(counters);
  step.drops_masses = true;
  step.workspace = cut_step_workspace(workspace, plan, seqs.num_seqs, max_tiles);
  const auto on = static_cast<cudaStream_t>(stream);
  LOCKS_RETURN_IF_ERROR(cuda_status("decode_cuda", "prepare", launch_prepare(step, on)));
  LOCKS_RETURN_IF_ERROR(cuda_status("decode_cuda", "score", launch_score(step, on)));
  return cuda_status("decode_cuda", "select and attend", launch_select_attend(step, on));
}

}  // namespace locks
