// First launch of a decode step: what must be ready before records are scored.
//
// Grid: CTAs of 256 threads, one or two a multiprocessor. Those at the front take (row, KV head) of
// scored rows: the first half of the threads makes the group's queries ready, rotated and scaled,
// as floats and as fragments; the second half finds the base of the masses and the mass of the
// tokens that no record covers, from their keys. The others write the new keys and values to the
// caches, a warp a (row, KV head), build the records of blocks that the step completed, a CTA a
// record (build_lone.cuh, build_record.cuh), and clear the headers of blocks that it left
// incomplete. A step that completes no block finds so from the plan alone; a CTA with nothing to do
// leaves before its wait.
//
// Bytes: a group's queries and at most 16 keys for each (row, KV head) of scored rows; 4 * d *
// scalar_bytes a new token and KV head; 16 * d * scalar_bytes read and record_bytes written a new
// record. Bound by latency: plan, block tables and slots are read before the wait for the kernel in
// front; behind it lie one round of loads and, in registers, a rotation by exchanges on one side
// and a matrix product on the other. Half of the time are instructions on their way, which are cold
// in each launch, and come slowly once the scorer asks for records: no CTA runs through code that
// is not its own.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/launch_cuda.h"
#include "core/ptx.cuh"
#include "decode/prepare_group.cuh"
#include "decode/step_cuda.h"
#include "decode/write_tokens.cuh"
#include "summary/build_lone.cuh"
#include "summary/build_record.cuh"

namespace locks::detail {

namespace {

__device__ std::int32_t num_new_blocks(const PrepareArguments& a, int row) {
  if (row >= a.step.seqs.num_seqs) return 0;
  const RowPlan& plan = a.step.plan[row];
  return max(plan.length / kBlockTokens - plan.first_new_block, 0);
}

// A record that a step completed; row < 0: none.
struct RecordItem {
  int row = -1, head = 0;
  std::int64_t block = 0;
};

// The records of a step that one CTA builds: every `ctas`-th of them all, row by row. The whole CTA
// walks through them.
struct RecordQueue {
  std::int32_t* counts;  // shared: new blocks of the rows [first_row, first_row + kThreads)
  std::int64_t place;    // among the records of rows from `row` on
  int ctas;
  int first_row = 0, row = 0;

  // Tells whether these rows have new blocks; without, none of them is looked at.
  __device__ bool count(const PrepareArguments& a) {
    const std::int32_t blocks = num_new_blocks(a, first_row + static_cast<int>(threadIdx.x));
    counts[threadIdx.x] = blocks;
    const bool any = __syncthreads_or(blocks > 0 ? 1 : 0) != 0;
    row = any ? 0 : kThreads;
    return any;
  }

  __device__ RecordItem next(const PrepareArguments& a) {
    const int heads = a.step.attention.num_kv_heads, num_rows = a.step.seqs.num_seqs;
    while (true) {
      for (; row < min(num_rows - first_row, kThreads); ++row) {
        const std::int64_t items = static_cast<std::int64_t>(counts[row]) * heads;
        if (place < items) {
          const std::int64_t at = place;
          place += ctas;
          return {first_row + row, static_cast<int>(at % heads),
                  a.step.plan[first_row + row].first_new_block + at / heads};
        }
        place -= items;
      }
      first_row += kThreads;
      if (first_row >= num_rows) return {};
      __syncthreads();  // the counts have been read
      count(a);
    }
  }
};

__device__ bool builds_lone(const RecordJob& job) {
  return builds_fours(job.layout.format, job.layout.head_dim, job.keys.type, job.keys_aligned);
}

// Where a record and the keys of its block are. Keys that the step adds are read where the call
// brings them: the cache may not hold them yet. Reads tables and slots alone, and asks for the
// cached keys to come to L2; the whole CTA.
__device__ LoneItem find_lone(const PrepareArguments& a, const RecordItem& item) {
  __shared__ std::int32_t added_by[kBlockTokens];  // the row that adds a token; -1: none
  const NewTokens& added = a.step.added;
  const PagedTensor& keys = a.job.keys;
  const auto thread = static_cast<int>(threadIdx.x);
  const std::int64_t first = find_keys(a.job, item.row, item.block, item.head);
  std::uint8_t* record =
      find_record(a.job.records, a.job.record_blocks, item.row, item.block, item.head);
  if (first < 0 || record == nullptr) return {};
  const auto* cached = static_cast<const std::uint8_t*>(keys.data) + 2 * first;
  const std::int64_t stride = 2 * keys.token_stride;
  const int lines = keys.head_dim / 64;  // of a key
  if (thread < kBlockTokens * lines) {
    prefetch_line(cached + thread / lines * stride + thread % lines * 128);
  }
  if (thread < kBlockTokens) added_by[thread] = -1;
  __syncthreads();
  if (added.slots != nullptr) {
    const auto at = static_cast<std::uint32_t>(item.block) * kBlockTokens;
    const auto block_tokens = static_cast<std::uint32_t>(keys.block_tokens);
    const BlockTable& table = a.job.cache_blocks;
    const std::int64_t id = table.ids[item.row * table.seq_stride + at / block_tokens];
    const std::int64_t first_slot = id * keys.block_tokens + at % block_tokens;
    for (int row = thread; row < a.step.seqs.num_seqs; row += kThreads) {
      const std::int64_t token = added.slots[row] - first_slot;
      if (token >= 0 && token < kBlockTokens) added_by[token] = row;
    }
  }
  __syncthreads();
  LoneItem lone = make_lone_item(a.job, record, item.head);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int token = 4 * lone.page + t, row = added_by[token];
    const void* key = row < 0 ? static_cast<const void*>(cached + token * stride)
                              : find_new_key(a.step, row, item.head);
    lone.keys[t] = static_cast<const std::uint16_t*>(key) + lane_index();
  }
  return lone;
}

// Builds the records of a CTA's queue from `item` on, whatever the format; returns their number.
template <int B>
__device__ int build_records(const PrepareArguments& a, RecordQueue& queue, RecordItem item,
                             float* memory) {
  int built = 0;
  for (; item.row >= 0; item = queue.next(a)) {
    write_keys_of_block(a.step, a.job, item.row, item.block, item.head);
    built += build_record<B, kWarps>(a.job, item.row, item.block, item.head, false, memory);
  }
  return built;
}

// The same by build_lone, of records of which the first two were looked for before the wait: the
// launch ends with the CTAs that build. meanwhile(): what else to write while keys are on their
// way.
template <class Meanwhile>
__device__ __forceinline__ int build_lone_records(const PrepareArguments& a, RecordQueue& queue,
                                                  LoneItem lone, RecordItem next, float* memory,
                                                  const Meanwhile& meanwhile) {
  auto& shared = *reinterpret_cast<LoneMemory*>(memory);
  int built = 0;
  while (true) {
    if (lone.record == nullptr) {
      meanwhile();
    } else {
      ++built;
      const bool is_bf16 = a.job.keys.type == ScalarType::kBFloat16;
      if (a.job.layout.head_dim == 128) {
        is_bf16 ? build_lone<128, true>(a.job, lone, shared, meanwhile)
                : build_lone<128, false>(a.job, lone, shared, meanwhile);
      } else {
        is_bf16 ? build_lone<64, true>(a.job, lone, shared, meanwhile)
                : build_lone<64, false>(a.job, lone, shared, meanwhile);
      }
    }
    if (next.row < 0) return built;
    __syncthreads();  // the next record reuses the memory
    lone = find_lone(a, next);
    next = queue.next(a);
  }
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
  // Where the row is scored, the scorer begins only now: what it fetches would stand in front of
  // the instructions that this CTA is about to run.
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
  __shared__ std::int32_t counts[kThreads];
  allow_next_kernel();
  const int cta = static_cast<int>(blockIdx.x) - a.group_ctas;
  const int ctas = static_cast<int>(gridDim.x) - a.group_ctas;
  const int num_rows = a.step.seqs.num_seqs;
  RecordQueue queue{.counts = counts, .place = cta, .ctas = ctas};
  const bool builds = queue.count(a) || num_rows > kThreads;
  // Nothing to write, and no record to build: leaves its multiprocessor to the scorer.
  const int num_groups = num_rows * a.step.attention.num_kv_heads;
  if (cta >= num_groups && !builds) return;
  // From the last warp on: the first ones write tokens.
  int header = cta * kThreads + kThreads - 1 - static_cast<int>(threadIdx.x);
  std::uint64_t* incomplete = find_incomplete(a, header);
  int token = cta + warp_index() * ctas;
  TokenMove move = find_item_move(a, token);
  RecordItem item, next;
  LoneItem lone{};
  const bool is_lone = B == 4 && builds_lone(a.job);
  if (builds) {
    item = queue.next(a);
    if (is_lone && item.row >= 0) {
      next = queue.next(a);
      lone = find_lone(a, item);
    }
  }
  wait_for_prior_kernel();
  const auto write_first = [&] {
    if (incomplete != nullptr) *incomplete = 0;
    move_token(move);
  };
  if (!is_lone || item.row < 0) write_first();
  // Mostly that was all. What follows is long and its code is cold, and the launch ends with its
  // last CTA.
  if (!builds && num_groups <= ctas * kWarps) return;
  if (item.row >= 0) {
    int built = 0;
    if constexpr (B == 4) {
      static_assert(sizeof(LoneMemory) <= sizeof(float) * TeamMemory<B, kWarps>::floats(1, 64));
      if (is_lone) {
        built = build_lone_records(a, queue, lone, next, memory, [&] {
          write_first();
          incomplete = nullptr;
          move = {};
        });
      }
    }
    if (!is_lone) built = build_records<B>(a, queue, item, memory);
    if (threadIdx.x == 0 && built != 0 && a.step.counters != nullptr) {
      atomicAdd(a.step.counters + kRecordsBuilt, static_cast<unsigned long long>(built));
    }
  }
  while ((header += ctas * kThreads) < num_groups) {
    std::uint64_t* const other = find_incomplete(a, header);
    if (other != nullptr) *other = 0;
  }
  while ((token += ctas * kWarps) < num_groups) move_token(find_item_move(a, token));
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
