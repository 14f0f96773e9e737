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

#include <bit>

#include "core/launch_cuda.h"
#include "core/message.h"
#include "locks/cuda.h"
#include "summary/build_fours.cuh"
#include "summary/build_record.cuh"
#include "summary/summary_kernels.h"

namespace locks {

using namespace detail;

namespace {

constexpr int kWarps = 4;
constexpr int kCtasPerSm = 4;
constexpr int kFourWarps = 8;  // 32 pages
constexpr int kFourCtasPerSm = 2;

// Divides numbers below 2^31 by a number that is the same for a launch.
struct Divider {
  std::uint32_t divisor = 1, factor = 1u << 31, shift = 0;

  __device__ std::uint32_t quotient(std::uint32_t n) const {
    return __umulhi(2 * n, factor) >> shift;
  }
  __device__ std::uint32_t rest(std::uint32_t n) const { return n - quotient(n) * divisor; }
};

// The factor is 2^(31 + shift) / divisor, rounded up: the quotient is too large by less than
// n / 2^31 / divisor.
Divider divide_by(int divisor) {
  const auto by = static_cast<std::uint32_t>(divisor);
  const auto shift = static_cast<std::uint32_t>(std::bit_width(by - 1));
  const std::uint64_t factor = ((std::uint64_t{1} << (31 + shift)) + by - 1) / by;
  return {by, static_cast<std::uint32_t>(factor), shift};
}

struct SummariseArguments {
  RecordJob job;
  Divider heads;          // KV heads
  Divider cache_blocks;   // blocks of a block of the cache
  Divider record_blocks;  // and of the records
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

// The place of a warp's record, with its entries of the tables: they are asked for a while before
// they are wanted.
struct PendingItem {
  int head;  // -1: none
  std::uint32_t block;
  std::int32_t cache_id, record_id;

  __device__ FourItem find(const SummariseArguments& a) const {
    const PagedTensor& keys = a.job.keys;
    const RecordCache& records = a.job.records;
    if (head < 0 || cache_id < 0 || cache_id >= keys.num_blocks || record_id < 0 ||
        record_id >= records.num_blocks) {
      return {nullptr, nullptr, 0};
    }
    const std::int64_t first = cache_id * keys.block_stride + head * keys.head_stride +
                               a.cache_blocks.rest(block) * kBlockTokens * keys.token_stride;
    return {static_cast<const std::uint8_t*>(keys.data) + 2 * first,
            records.data + record_id * records.block_stride + head * records.head_stride +
                a.record_blocks.rest(block) * records.record_bytes,
            head};
  }
};

// A CTA's place in the batch: chunk `chunk` of a row, a record a warp. Chunks count on through one
// row after the other.
struct ChunkCursor {
  int row = -1;
  int chunk, chunks = 0;
  std::uint32_t first_block = 0, items = 0;

  __device__ explicit ChunkCursor(int first) : chunk(first) {}
  // Goes on by `step` chunks; tells whether there is one.
  __device__ bool advance(const SummariseArguments& a, int step) {
    chunk += step;
    while (chunk >= chunks) {
      if (++row >= a.num_rows) return false;
      chunk -= chunks;
      const BlockRange blocks = blocks_of(a, row);
      first_block = static_cast<std::uint32_t>(blocks.first);
      items = static_cast<std::uint32_t>(max(blocks.count, std::int64_t{0})) * a.heads.divisor;
      chunks = static_cast<int>((items + kFourWarps - 1) / kFourWarps);
    }
    return true;
  }
  // The record of this warp.
  __device__ PendingItem look_up(const SummariseArguments& a) const {
    const auto item = static_cast<std::uint32_t>(chunk * kFourWarps + warp_index());
    if (item >= items) return {-1, 0, 0, 0};
    const std::uint32_t block = first_block + a.heads.quotient(item);
    const BlockTable &cache = a.job.cache_blocks, &record = a.job.record_blocks;
    return {static_cast<int>(a.heads.rest(item)), block,
            cache.ids[row * cache.seq_stride + a.cache_blocks.quotient(block)],
            record.ids[row * record.seq_stride + a.record_blocks.quotient(block)]};
  }
};

// One round of a CTA: a record a warp, whose keys are on their way. Replaces it by the next one,
// whose copy it starts. Tells whether this warp wrote its record.
template <int D, bool kBFloat16, int kBasisBits>
__device__ __forceinline__ bool build_fours(const SummariseArguments& a, FourItem& current,
                                            const PendingItem& pending,
                                            const LaneKeys<D>& lane_keys,
                                            const FourMemory<D>& memory, const PageExchange& pages,
                                            int solver) {
  const FourItem item = current;
  const RecordJob& job = a.job;
  const int warp = warp_index(), first_page = warp * kFourPages;
  const bool only_stale = a.begin_tokens == nullptr;
  wait_for_copies();
  __syncwarp();
  FourRows<D> rows;
  const std::uint64_t share = take_keys<D, kBFloat16>(memory.raw, lane_keys, rows);
  __syncwarp();
  current = pending.find(a);
  start_copy<D>(job.keys, current, memory.raw);
  const std::uint32_t magic = kRecordMagic | static_cast<std::uint32_t>(kRecordVersion) << 16 |
                              static_cast<std::uint32_t>(job.format_code) << 24;
  const uint2 header = make_uint2(magic, finish_hash(share, D));
  bool writes = item.record != nullptr;
  if (only_stale && is_any(writes)) writes = !is_current(job.layout, header, item.record);
  store_gram(rows, pages.gram + first_page * PageExchange::kGramFloats);
  if (__syncthreads_or(writes ? 1 : 0) == 0) return false;
  if (warp == solver) find_directions<D>(pages, kFourWarps * kFourPages);
  const int page = lane_index() / kRowLanes;
  std::uint8_t* centroid = memory.rows + page * (job.layout.page_rows_bytes + memory.kRowPadding);
  std::uint16_t centroid_scale = 0;
  if (is_any(writes)) {
    centroid_scale = write_centroid<D>(job, item.head, rows.y[0], memory.exchange, centroid);
  }
  __syncthreads();
  if (!is_any(writes)) return false;
  const float4 direction = pages.direction[first_page + page];
  const PageTail tail =
      write_direction<D, kBasisBits>(rows, direction, centroid_scale, memory.exchange,
                                     centroid + job.layout.centroid_row_bytes);
  clear_unscorable<D>(job.layout, direction.w != 0, centroid);
  __syncwarp();
  store_record<D>(job.layout, memory.rows, tail, header, item.record);
  return true;
}

template <int D, bool kBFloat16, int kBasisBits>
__global__ void __launch_bounds__(kFourWarps* kWarpSize, kFourCtasPerSm)
    summarise_fours_kernel(const __grid_constant__ SummariseArguments a) {
  extern __shared__ float4 shared[];
  auto* bytes = reinterpret_cast<std::uint8_t*>(shared);
  const PageExchange pages(bytes, kFourWarps);
  const FourMemory<D> memory(bytes + PageExchange::bytes(kFourWarps) +
                             warp_index() * FourMemory<D>::bytes(a.job.layout));
  const LaneKeys<D> lane_keys = find_lane_keys<D>();
  ChunkCursor cursor(static_cast<int>(blockIdx.x));
  bool has_work = cursor.advance(a, 0);
  PendingItem pending{-1, 0, 0, 0};
  if (has_work) pending = cursor.look_up(a);
  FourItem item = pending.find(a);
  start_copy<D>(a.job.keys, item, memory.raw);
  unsigned built = 0;
  for (int solver = 0; has_work; solver = (solver + 1) % kFourWarps) {
    has_work = cursor.advance(a, static_cast<int>(gridDim.x));
    pending.head = -1;
    if (has_work) pending = cursor.look_up(a);
    built += build_fours<D, kBFloat16, kBasisBits>(a, item, pending, lane_keys, memory, pages,
                                                   solver);
  }
  if (lane_index() == 0 && built != 0 && a.num_records_built != nullptr) {
    atomicAdd(a.num_records_built, static_cast<unsigned long long>(built));
  }
  if (a.begin_tokens != nullptr) clear_incomplete(a);
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

template <int D, int kBasisBits>
Status launch_fours(const SummariseArguments& arguments, cudaStream_t stream) {
  const int bytes =
      PageExchange::bytes(kFourWarps) + kFourWarps * FourMemory<D>::bytes(arguments.job.layout);
  const bool is_bf16 = arguments.job.keys.type == ScalarType::kBFloat16;
  return launch(is_bf16 ? summarise_fours_kernel<D, true, kBasisBits>
                        : summarise_fours_kernel<D, false, kBasisBits>,
                kFourCtasPerSm, kFourWarps, bytes, arguments, stream);
}

template <int D>
Status launch_fours(const SummariseArguments& arguments, cudaStream_t stream) {
  return arguments.job.layout.format.basis_bits == 4 ? launch_fours<D, 4>(arguments, stream)
                                                     : launch_fours<D, 8>(arguments, stream);
}

Status launch_format(const SummariseArguments& arguments, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const RecordJob& job = arguments.job;
  const SummaryFormat& format = job.layout.format;
  if (builds_fours(format, job.layout.head_dim, job.keys.type, job.keys_aligned)) {
    return job.layout.head_dim == 64 ? launch_fours<64>(arguments, on)
                                     : launch_fours<128>(arguments, on);
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
  arguments.heads = divide_by(keys.num_kv_heads);
  arguments.cache_blocks = divide_by(keys.block_tokens / kBlockTokens);
  arguments.record_blocks = divide_by(records.block_tokens / kBlockTokens);
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
