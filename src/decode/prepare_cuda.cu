// First launch of a decode step: what must be ready before records are scored.
//
// Grid: CTAs of 256 threads, about one a multiprocessor. Those at the front take (row, KV head) of
// scored rows: the first half of the threads makes the group's queries ready, rotated and scaled,
// as floats and as fragments; the second half finds the base of the masses and the mass of the
// tokens that no record covers, from their keys. The others write the new keys and values to the
// caches, a warp a (row, KV head), build the records of blocks that the step completed, a CTA a
// record (build_record.cuh), and clear the headers of blocks that it left incomplete. A step that
// completes no block finds so from the plan alone; a CTA with nothing to do leaves before its wait.
//
// Bytes: a group's queries and at most 16 keys for each (row, KV head) of scored rows; 4 * d *
// scalar_bytes a new token and KV head; 16 * d * scalar_bytes read and record_bytes written a new
// record. Bound by latency: plan and block table are read before the wait for the kernel in front;
// behind it lie one round of loads and, in registers, a rotation by exchanges on one side and a
// matrix product on the other. Half of the time are instructions on their way, which are cold in
// each launch, and come slowly once the scorer asks for records: no CTA runs through code that is
// not its own.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/launch_cuda.h"
#include "core/ptx.cuh"
#include "decode/prepare_group.cuh"
#include "decode/step_cuda.h"
#include "decode/write_tokens.cuh"
#include "summary/build_record.cuh"

namespace locks::detail {

namespace {

__device__ std::int32_t num_new_blocks(const PrepareArguments& a, int row) {
  if (row >= a.step.seqs.num_seqs) return 0;
  const RowPlan& plan = a.step.plan[row];
  return max(plan.length / kBlockTokens - plan.first_new_block, 0);
}

// Records of the rows [first_row, first_row + kThreads), of which each thread knows one's
// number of new blocks. `item` counts on through the records of one row after the other.
template <int B>
__device__ void build_records(const PrepareArguments& a, int first_row, std::int32_t new_blocks,
                              std::int64_t& item, int ctas, float* memory) {
  __shared__ std::int32_t counts[kThreads];
  counts[threadIdx.x] = new_blocks;
  __syncthreads();
  const int heads = a.step.attention.num_kv_heads;
  const int rows = min(a.step.seqs.num_seqs - first_row, kThreads);
  unsigned long long built = 0;
  for (int r = 0; r < rows; ++r) {
    const std::int64_t items = static_cast<std::int64_t>(counts[r]) * heads;
    for (; item < items; item += ctas) {
      const int row = first_row + r;
      const std::int64_t block = a.step.plan[row].first_new_block + item / heads;
      const int head = static_cast<int>(item % heads);
      write_keys_of_block(a.step, a.job, row, block, head);
      built += build_record<B, kWarps>(a.job, row, block, head, false, memory);
    }
    item -= items;
  }
  if (threadIdx.x == 0 && built != 0 && a.step.counters != nullptr) {
    atomicAdd(a.step.counters + kRecordsBuilt, built);
  }
  __syncthreads();
}

// Where (row, KV head) number `item` keeps the header of its incomplete block; null: nowhere. As
// summarise does, prepare clears it: a block whose tokens are being written has no valid record.
__device__ std::uint64_t* find_incomplete(const PrepareArguments& a, int item) {
  const int heads = a.step.attention.num_kv_heads;
  if (item >= a.step.seqs.num_seqs * heads) return nullptr;
  const int row = item / heads, length = a.step.plan[row].length;
  if (length <= 0 || length % kBlockTokens == 0) return nullptr;
  std::uint8_t* record =
      find_record(a.job.records, a.job.record_blocks, row, length / kBlockTokens, item % heads);
  if (record == nullptr) return nullptr;
  return reinterpret_cast<std::uint64_t*>(record + a.job.layout.header_offset);
}

// What (row, KV head) number `item` adds to the caches, a warp's share each.
__device__ TokenMove find_item_move(const PrepareArguments& a, int item) {
  const int heads = a.step.attention.num_kv_heads;
  if (a.step.added.slots == nullptr || item >= a.step.seqs.num_seqs * heads) return {};
  return find_move(a.step, item / heads, item % heads);
}

// The CTAs at the front.
template <class Shape>
__device__ __forceinline__ void prepare_groups(const PrepareArguments& a, const Shape& shape,
                                               float* memory) {
  const int num_groups = a.step.seqs.num_seqs * a.step.attention.num_kv_heads;
  int item = static_cast<int>(blockIdx.x);
  GroupItem group = find_item(a, item);
  // With records to come, the scorer begins only now: what it fetches would stand in front of the
  // instructions that this CTA is about to run.
  if (!group.is_scored) allow_next_kernel();
  wait_for_prior_kernel();
  allow_next_kernel();
  while (true) {
    if (group.is_scored) prepare_group(a, shape, group, memory);
    item += a.group_ctas;
    if (item >= num_groups) return;
    group = find_item(a, item);
  }
}

// The CTAs at the back: all else.
template <int B>
__device__ __forceinline__ void write_and_build(const PrepareArguments& a, float* memory) {
  allow_next_kernel();
  const int cta = static_cast<int>(blockIdx.x) - a.group_ctas;
  const int ctas = static_cast<int>(gridDim.x) - a.group_ctas;
  const int num_rows = a.step.seqs.num_seqs;
  std::int32_t new_blocks = num_new_blocks(a, static_cast<int>(threadIdx.x));
  bool builds = __syncthreads_or(new_blocks > 0 ? 1 : 0) != 0;
  // Nothing to write, and no record to build: leaves its multiprocessor to the scorer.
  const int num_groups = num_rows * a.step.attention.num_kv_heads;
  if (cta >= num_groups && !builds && num_rows <= kThreads) return;
  // From the last warp on: the first ones write tokens.
  int header = cta * kThreads + kThreads - 1 - static_cast<int>(threadIdx.x);
  std::uint64_t* const incomplete = find_incomplete(a, header);
  int token = cta + warp_index() * ctas;
  const TokenMove move = find_item_move(a, token);
  wait_for_prior_kernel();
  if (incomplete != nullptr) *incomplete = 0;
  move_token(move);
  // Mostly that was all. What follows is long and its code is cold, and the launch ends with its
  // last CTA.
  if (!builds && num_rows <= kThreads && num_groups <= ctas * kWarps) return;
  while ((header += ctas * kThreads) < num_groups) {
    std::uint64_t* const next = find_incomplete(a, header);
    if (next != nullptr) *next = 0;
  }
  while ((token += ctas * kWarps) < num_groups) move_token(find_item_move(a, token));
  std::int64_t record = cta;
  for (int first_row = 0; first_row < num_rows; first_row += kThreads) {
    if (first_row > 0) {
      new_blocks = num_new_blocks(a, first_row + static_cast<int>(threadIdx.x));
      builds = __syncthreads_or(new_blocks > 0 ? 1 : 0) != 0;
    }
    if (builds) build_records<B>(a, first_row, new_blocks, record, ctas, memory);
  }
}

template <int B>
__global__ void __launch_bounds__(kThreads, 1)
    prepare_kernel(const __grid_constant__ PrepareArguments a) {
  extern __shared__ float4 shared[];
  float* memory = reinterpret_cast<float*>(shared);
  __builtin_assume(threadIdx.x < kThreads);  // a shift instead of four instructions a division
  if (static_cast<int>(blockIdx.x) < a.group_ctas) {
    with_shape(a, [&](const auto& shape) { prepare_groups(a, shape, memory); });
  } else {
    write_and_build<B>(a, memory);
  }
}

template <int B>
cudaError_t launch(PrepareArguments arguments, cudaStream_t stream) {
  int num_sms = 0;
  if (const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, num_sms);
      error != cudaSuccess) {
    return error;
  }
  const RecordLayout& layout = arguments.job.layout;
  const int floats = std::max(GroupMemory::floats(arguments.group, layout.head_dim),
                              TeamMemory<B, kWarps>::floats(layout.format.rank, layout.head_dim));
  const int bytes = floats * static_cast<int>(sizeof(float));
  if (const cudaError_t error = cudaFuncSetAttribute(
          prepare_kernel<B>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      error != cudaSuccess) {
    return error;
  }
  const int groups = arguments.step.seqs.num_seqs * arguments.step.attention.num_kv_heads;
  arguments.group_ctas = std::min(groups, num_sms);
  const int others = arguments.group_ctas <= num_sms / 2 ? num_sms - arguments.group_ctas : num_sms;
  return launch_early(prepare_kernel<B>, arguments.group_ctas + others, kThreads,
                      static_cast<std::size_t>(bytes), stream, arguments);
}

}  // namespace

cudaError_t launch_prepare(const StepArguments& step, cudaStream_t stream) {
  if (step.seqs.num_seqs == 0) return cudaSuccess;
  const std::int64_t query_bytes = scalar_bytes(step.query.type);
  const RecordJob job = make_record_job(step.layout, step.format_code, step.reference_keys,
                                        step.keys, step.records, step.seqs);
  const int group = step.attention.group_size();
  const bool query_aligned = is_aligned_to(step.query.data, 16) &&
                             step.query.seq_stride * query_bytes % 16 == 0 &&
                             step.query.head_stride * query_bytes % 16 == 0;
  const PrepareArguments arguments{
      .step = step,
      .job = job,
      .group = group,
      .query_aligned = query_aligned,
      .is_operand = step.keys.type == step.query.type && step.keys.type != ScalarType::kFloat32 &&
                    query_aligned && job.keys_aligned,
      .fragment_words = fragment_words(step.layout.format, group, step.attention.head_dim),
      .group_ctas = 0};
  return for_page_tokens(step.layout.format.page_tokens,
                         [&](auto tokens) { return launch<tokens()>(arguments, stream); });
}

}  // namespace locks::detail
