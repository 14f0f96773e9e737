// Builds, or verifies and rebuilds, the records of a batch on the GPU, from keys in place in a
// paged cache.
//
// Grid: a fixed number of CTAs of kWarps warps, whatever the batch. A warp owns one record (block,
// KV head) at a time and walks the batch's blocks in steps of all warps, so that lengths stay on
// the device and a launch can be captured once and replayed. build_record.cuh does the work; the
// keys of a block live in shared memory as floats (64 * d bytes a warp).
//
// Bytes: 16 * d * scalar_bytes read and record_bytes written a record. Bound by instructions: what
// the CPU's order of sums asks for, a product and a sum apart.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/launch_cuda.h"
#include "core/message.h"
#include "locks/cuda.h"
#include "summary/build_pair.cuh"
#include "summary/build_record.cuh"
#include "summary/summary_kernels.h"

namespace locks {

using namespace detail;

namespace {

constexpr int kWarps = 4;
constexpr int kCtasPerSm = 4;
constexpr int kMostPairWarps = 12;  // of 168 registers a thread

struct SummariseArguments {
  RecordJob job;
  int num_rows;
  const std::int32_t* lengths;
  const std::int32_t* begin_tokens;  // null: verify all complete blocks
  const std::uint8_t* rows;          // of verification: 0: leave the row alone; null: all rows
  unsigned long long* num_records_built;
};

struct BlockRange {
  std::int64_t first, count;
};

__device__ BlockRange blocks_of(const SummariseArguments& a, int row) {
  const std::int64_t end = a.lengths[row] / kBlockTokens;
  if (a.begin_tokens == nullptr) {
    return {0, a.rows == nullptr || a.rows[row] != 0 ? end : 0};
  }
  const std::int64_t first = a.begin_tokens[row] / kBlockTokens;
  return {first, end - first};
}

// Clears the headers of blocks that the step leaves incomplete, one thread a (row, KV head).
__device__ void clear_incomplete(const SummariseArguments& a) {
  const int heads = a.job.keys.num_kv_heads;
  const std::int64_t num_items = static_cast<std::int64_t>(a.num_rows) * heads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       item < num_items; item += step) {
    const int row = static_cast<int>(item / heads), length = a.lengths[row];
    if (length % kBlockTokens == 0 || a.begin_tokens[row] >= length) continue;
    clear_header(a.job, row, length / kBlockTokens, static_cast<int>(item % heads));
  }
}

template <int B>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    summarise_blocks_kernel(const __grid_constant__ SummariseArguments a) {
  extern __shared__ float4 shared[];
  const int warp = warp_index();
  const RecordLayout& layout = a.job.layout;
  float* memory = reinterpret_cast<float*>(shared) +
                  warp * TeamMemory<B, 1>::floats(layout.format.rank, layout.head_dim);
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * kWarps;
  const int heads = a.job.keys.num_kv_heads;
  const bool only_stale = a.begin_tokens == nullptr;
  std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  std::int64_t built = 0;
  // `item` counts on through the blocks of one row after the other.
  for (int row = 0; row < a.num_rows; ++row) {
    const BlockRange blocks = blocks_of(a, row);
    const std::int64_t items = blocks.count * heads;
    for (; item < items; item += num_warps) {
      built += build_record<B, 1>(a.job, row, blocks.first + item / heads,
                                  static_cast<int>(item % heads), only_stale, memory);
    }
    item -= items > 0 ? items : 0;
  }
  if (lane_index() == 0 && built != 0 && a.num_records_built != nullptr) {
    atomicAdd(a.num_records_built, static_cast<unsigned long long>(built));
  }
  if (!only_stale) clear_incomplete(a);
}

// Items 2 pair and 2 pair + 1 of a row's `num_items` records, counted block by block.
__device__ void find_pair(const RecordJob& job, int row, const BlockRange& blocks,
                          std::int64_t pair, std::int64_t num_items, PairItem (&items)[2]) {
  const auto heads = static_cast<std::uint32_t>(job.keys.num_kv_heads);
  const auto item = static_cast<std::uint32_t>(2 * pair);
  std::int64_t block = blocks.first + item / heads;
  int head = static_cast<int>(item % heads);
  std::int64_t first = find_keys(job, row, block, 0);
  std::uint8_t* record = find_record(job.records, job.record_blocks, row, block, 0);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const bool exists = first >= 0 && record != nullptr && 2 * pair + n < num_items;
    // The pool's first key stands in for that of a record that is not built.
    items[n] = {exists ? first + head * job.keys.head_stride : 0,
                exists ? record + head * job.records.head_stride : nullptr, head};
    if (n == 0 && ++head == static_cast<int>(heads)) {
      head = 0;
      ++block;
      if (2 * pair + 1 < num_items) {
        first = find_keys(job, row, block, 0);
        record = find_record(job.records, job.record_blocks, row, block, 0);
      }
    }
  }
}

template <int D, bool kBFloat16, bool kTogether>
__global__ void __launch_bounds__(kMostPairWarps* kWarpSize, 1)
    summarise_pairs_kernel(const __grid_constant__ SummariseArguments a) {
  extern __shared__ float4 shared[];
  const int warp = warp_index(), num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  float* memory = reinterpret_cast<float*>(shared) + warp * (pair_bytes(a.job.layout) / 4);
  const bool only_stale = a.begin_tokens == nullptr;
  const LaneSigns signs = find_signs<D>();
  // CTAs take chunks of a pair a warp; `chunk` counts on through one row after the other.
  std::int64_t chunk = blockIdx.x;
  std::int64_t built = 0;
  for (int row = 0; row < a.num_rows; ++row) {
    const BlockRange blocks = blocks_of(a, row);
    const std::int64_t items = blocks.count * a.job.keys.num_kv_heads;
    const std::int64_t pairs = (items + 1) / 2, chunks = (pairs + num_warps - 1) / num_warps;
    for (; chunk < chunks; chunk += gridDim.x) {
      PairItem both[2];
      const std::int64_t pair = chunk * num_warps + warp;
      const std::int64_t next = pair + static_cast<std::int64_t>(gridDim.x) * num_warps;
      if (next < pairs) {
        find_pair(a.job, row, blocks, next, items, both);
        prefetch_block<D>(a.job.keys, both[0].first);
        prefetch_block<D>(a.job.keys, both[1].first);
      }
      both[0].record = both[1].record = nullptr;
      if (pair < pairs) find_pair(a.job, row, blocks, pair, items, both);
      built += build_pair<D, kBFloat16, kTogether>(a.job, both, signs, only_stale, memory);
    }
    chunk -= chunks > 0 ? chunks : 0;
  }
  if (lane_index() == 0 && built != 0 && a.num_records_built != nullptr) {
    atomicAdd(a.num_records_built, static_cast<unsigned long long>(built));
  }
  if (!only_stale) clear_incomplete(a);
}

Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return unsupported(join("summarise_blocks_cuda: ", what, ": ", cudaGetErrorString(error)));
}

Result<int> device_attribute_of(cudaDeviceAttr attribute) {
  int value = 0;
  LOCKS_RETURN_IF_ERROR(cuda_status(device_attribute(attribute, value), "device attribute"));
  return value;
}

Status launch(void (*kernel)(SummariseArguments), int ctas_per_sm, int num_warps, int bytes,
              const SummariseArguments& arguments, cudaStream_t stream) {
  const Result<int> num_sms = device_attribute_of(cudaDevAttrMultiProcessorCount);
  if (!num_sms.ok()) return num_sms.status();
  LOCKS_RETURN_IF_ERROR(
      cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                  "shared memory"));
  kernel<<<static_cast<unsigned>(num_sms.value() * ctas_per_sm), num_warps * kWarpSize,
           static_cast<std::size_t>(bytes), stream>>>(arguments);
  return cuda_status(cudaGetLastError(), "launch");
}

template <int B>
Status launch_records(const SummariseArguments& arguments, cudaStream_t stream) {
  const RecordLayout& layout = arguments.job.layout;
  const int floats = TeamMemory<B, 1>::floats(layout.format.rank, layout.head_dim);
  return launch(summarise_blocks_kernel<B>, kCtasPerSm, kWarps,
                kWarps * floats * static_cast<int>(sizeof(float)), arguments, stream);
}

template <int D, bool kTogether>
Status launch_pairs(const SummariseArguments& arguments, cudaStream_t stream) {
  const Result<int> shared = device_attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (!shared.ok()) return shared.status();
  const int bytes = pair_bytes(arguments.job.layout);
  const int num_warps = std::min(kMostPairWarps, shared.value() / bytes);
  const bool is_bf16 = arguments.job.keys.type == ScalarType::kBFloat16;
  return launch(is_bf16 ? summarise_pairs_kernel<D, true, kTogether>
                        : summarise_pairs_kernel<D, false, kTogether>,
                1, num_warps, num_warps * bytes, arguments, stream);
}

Status launch_format(const SummariseArguments& arguments, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const RecordJob& job = arguments.job;
  const SummaryFormat& format = job.layout.format;
  if (builds_pairs(format, job.layout.head_dim, job.keys.type, job.keys_aligned)) {
    if (arguments.begin_tokens == nullptr) {
      return job.layout.head_dim == 64 ? launch_pairs<64, false>(arguments, on)
                                       : launch_pairs<128, false>(arguments, on);
    }
    return job.layout.head_dim == 64 ? launch_pairs<64, true>(arguments, on)
                                     : launch_pairs<128, true>(arguments, on);
  }
  return for_page_tokens(format.page_tokens,
                         [&](auto tokens) { return launch_records<tokens()>(arguments, on); });
}

SummariseArguments make_arguments(const SummaryParams& params, const PagedTensor& keys,
                                  const SequenceBatch& seqs, const RecordCache& records,
                                  std::int64_t* num_records_built) {
  SummariseArguments arguments{};
  arguments.job = make_record_job(
      record_layout(params.format, keys.head_dim), encode_format(params.format),
      params.format.improved ? params.reference_keys : nullptr, keys, records, seqs);
  arguments.num_rows = seqs.num_seqs;
  arguments.lengths = seqs.lengths;
  arguments.num_records_built = reinterpret_cast<unsigned long long*>(num_records_built);
  return arguments;
}

}  // namespace

Status summarise_blocks_cuda(const SummaryParams& params, const PagedTensor& keys,
                             const SequenceBatch& seqs, const std::int32_t* begin_tokens,
                             const RecordCache& records, std::int64_t* num_records_built,
                             void* stream) {
  LOCKS_RETURN_IF_ERROR(check_summary_shapes(params, keys, records));
  if (seqs.num_seqs == 0) return {};
  if (begin_tokens == nullptr) {
    return invalid_argument("summarise_blocks_cuda: begin_tokens is null");
  }
  SummariseArguments arguments = make_arguments(params, keys, seqs, records, num_records_built);
  arguments.begin_tokens = begin_tokens;
  return launch_format(arguments, stream);
}

Status verify_blocks_cuda(const SummaryParams& params, const PagedTensor& keys,
                          const SequenceBatch& seqs, const std::uint8_t* rows,
                          const RecordCache& records, std::int64_t* num_records_rebuilt,
                          void* stream) {
  LOCKS_RETURN_IF_ERROR(check_summary_shapes(params, keys, records));
  if (seqs.num_seqs == 0) return {};
  SummariseArguments arguments = make_arguments(params, keys, seqs, records, num_records_rebuilt);
  arguments.rows = rows;
  return launch_format(arguments, stream);
}

}  // namespace locks
