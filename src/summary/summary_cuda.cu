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
// A CTA: groups of kFourWarps warps, and two warps that solve for them, one in even and one in odd
// rounds. 20 warps of 96 registers a thread are all that a multiprocessor takes.
constexpr int kMostGroups = 3;
constexpr int kSolvers = 2;
constexpr int kMostFourWarps = kMostGroups * kFourWarps + kSolvers;

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
  Divider heads;  // KV heads
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

__device__ std::uint32_t num_items(const SummariseArguments& a, const BlockRange& blocks) {
  return static_cast<std::uint32_t>(max(blocks.count, std::int64_t{0})) * a.heads.divisor;
}

// Groups of this CTA.
__device__ int num_groups() { return static_cast<int>(blockDim.x) / (kFourWarps * kWarpSize); }

__device__ int num_chunks(std::uint32_t items) {
  return static_cast<int>((items + kFourWarps - 1) / kFourWarps);
}

// A group's place in the batch: chunk `chunk` of a row, a record a warp. Chunks count on through
// one row after the other.
struct ChunkCursor {
  int row = -1;
  int chunk = 0, chunks = 0;
  std::uint32_t first_block = 0, items = 0;

  __device__ bool is_within(const SummariseArguments& a) const { return row < a.num_rows; }
  // Goes on by `step` chunks; tells whether there is one.
  __device__ bool advance(const SummariseArguments& a, int step) {
    chunk += step;
    while (chunk >= chunks) {
      if (++row >= a.num_rows) return false;
      chunk -= chunks;
      const BlockRange blocks = blocks_of(a, row);
      first_block = static_cast<std::uint32_t>(blocks.first);
      items = num_items(a, blocks);
      chunks = num_chunks(items);
    }
    return true;
  }
  // The record of warp `warp` of the group.
  __device__ FourItem find_item(const SummariseArguments& a, int warp) const {
    const auto item = static_cast<std::uint32_t>(chunk * kFourWarps + warp);
    if (!is_within(a) || item >= items) return {nullptr, nullptr, 0};
    const std::uint32_t block = first_block + a.heads.quotient(item);
    const auto head = static_cast<int>(a.heads.rest(item));
    const std::int64_t first = find_keys(a.job, row, block, head);
    std::uint8_t* record = find_record(a.job.records, a.job.record_blocks, row, block, head);
    if (first < 0 || record == nullptr) return {nullptr, nullptr, 0};
    return {static_cast<const std::uint8_t*>(a.job.keys.data) + 2 * first, record, head};
  }
};

// The records of a warp's next 32 rounds, found a lane each. A lane's cursor goes 32 rounds a step.
__device__ int find_items(const SummariseArguments& a, int step, int warp, ChunkCursor& cursor,
                          FourItem* items) {
  __syncwarp();
  items[lane_index()] = cursor.find_item(a, warp);
  const unsigned exists = __ballot_sync(kEveryLane, cursor.is_within(a));
  if (cursor.is_within(a)) cursor.advance(a, kWarpSize * step);
  __syncwarp();
  return __popc(exists);
}

// The barriers in which a group and its solver meet, in even and in odd rounds: first the solver
// waits, for the Gram matrices, then the group, for the directions. Barrier 0 is the CTA's.
struct GroupBarriers {
  int gram, direction;
  __device__ GroupBarriers(int group, int round)
      : gram(1 + 2 * group + round % 2), direction(gram + 2 * kMostGroups) {}
};

// One round of a building warp: a record whose keys are on their way, and the copy of those of the
// next one (null: none). Tells whether the record was written.
template <class Shape, bool kBFloat16>
__device__ __forceinline__ bool build_four(const SummariseArguments& a, FourItem item,
                                           const FourItem* next,
                                           const LaneKeys<Shape::kDim>& lane_keys,
                                           const FourMemory<Shape::kDim>& memory,
                                           PageExchange& pages, const GroupBarriers& barriers) {
  constexpr int D = Shape::kDim;
  const RecordJob& job = a.job;
  const int warp = warp_index() % kFourWarps, page = lane_index() / kRowLanes;
  const bool only_stale = a.begin_tokens == nullptr;
  const std::uint32_t magic = kRecordMagic | static_cast<std::uint32_t>(kRecordVersion) << 16 |
                              static_cast<std::uint32_t>(job.format_code) << 24;
  wait_for_copies();
  __syncwarp();
  FourRows<D> rows;
  const std::uint64_t share = take_keys<D, kBFloat16>(memory.raw, lane_keys, rows);
  bool writes = item.record != nullptr;
  uint2 header = make_uint2(magic, 0);
  if (only_stale) {
    header.y = finish_hash(share, D);
    if (is_any(writes)) writes = !is_current<Shape>(header, item.record);
  }
  if (is_any(writes)) store_gram(rows, warp, pages);
  if (lane_index() == 0) pages.is_wanted[warp] = writes ? 1 : 0;
  arrive_at<kFourWarps + 1>(barriers.gram);
  __syncwarp();
  if (next != nullptr) start_copy<D>(job.keys, *next, memory.raw);
  std::uint8_t* centroid = memory.rows + page * (Shape::kPageRows + memory.kRowPadding);
  std::uint16_t centroid_scale = 0;
  if (is_any(writes)) {
    if (!only_stale) header.y = finish_hash(share, D);
    const float* reference = job.reference_keys;
    if (reference != nullptr) reference += item.head * D;
    centroid_scale = write_centroid<Shape>(reference, rows.y[0], memory.exchange, centroid);
  }
  wait_at<kFourWarps + 1>(barriers.direction);
  if (!is_any(writes)) return false;
  const float4 direction = pages.direction[warp * kFourPages + page];
  const PageTail tail = write_direction<Shape>(rows, direction, centroid_scale, memory.exchange,
                                               centroid + Shape::kCentroidBytes);
  clear_unscorable<Shape>(direction.w != 0, centroid);
  __syncwarp();
  store_record<Shape>(memory.rows, tail, header, item.record);
  return true;
}

template <class Shape, bool kBFloat16>
__device__ void build_fours(const SummariseArguments& a, const LaneKeys<Shape::kDim>& lane_keys,
                            const FourMemory<Shape::kDim>& memory, PageExchange& pages, int group) {
  const int warp = warp_index() % kFourWarps, step = static_cast<int>(gridDim.x) * num_groups();
  ChunkCursor cursor{.chunk = static_cast<int>(blockIdx.x) * num_groups() + group};
  cursor.advance(a, lane_index() * step);
  int left = find_items(a, step, warp, cursor, memory.items), at = 0;
  if (left > 0) start_copy<Shape::kDim>(a.job.keys, memory.items[0], memory.raw);
  unsigned built = 0;
  for (int round = 0; left > 0; ++round) {
    const FourItem item = memory.items[at];
    --left;
    if (++at == kWarpSize) {
      left = find_items(a, step, warp, cursor, memory.items);
      at = 0;
    }
    const FourItem* next = left > 0 ? memory.items + at : nullptr;
    built += build_four<Shape, kBFloat16>(a, item, next, lane_keys, memory, pages,
                                          GroupBarriers(group, round));
  }
  if (lane_index() == 0 && built != 0 && a.num_records_built != nullptr) {
    atomicAdd(a.num_records_built, static_cast<unsigned long long>(built));
  }
}

// A warp that solves the eigenproblems of the groups: solver s those of group g in rounds r with
// (g + r) % 2 = s.
template <int D>
__device__ void solve_fours(const SummariseArguments& a, PageExchange* pages, int solver) {
  const int step = static_cast<int>(gridDim.x) * num_groups();
  int chunks = 0;
  for (int row = lane_index(); row < a.num_rows; row += kWarpSize) {
    chunks += num_chunks(num_items(a, blocks_of(a, row)));
  }
  chunks = __reduce_add_sync(kEveryLane, chunks);
  int first = static_cast<int>(blockIdx.x) * num_groups();
  for (int round = 0; first < chunks; ++round, first += step) {
    const int groups = min(num_groups(), chunks - first);
#pragma unroll 1
    for (int group = (solver + round) % kSolvers; group < groups; group += kSolvers) {
      const GroupBarriers barriers(group, round);
      wait_at<kFourWarps + 1>(barriers.gram);
      find_directions<D>(pages[group]);
      arrive_at<kFourWarps + 1>(barriers.direction);
    }
  }
}

template <class Shape, bool kBFloat16>
__global__ void __launch_bounds__(kMostFourWarps* kWarpSize, 1)
    summarise_fours_kernel(const __grid_constant__ SummariseArguments a) {
  extern __shared__ float4 shared[];
  __shared__ LaneKeys<Shape::kDim> lane_keys;
  auto* pages = reinterpret_cast<PageExchange*>(shared);
  const int warp = warp_index(), group = warp / kFourWarps;
  const bool is_solver = group == num_groups();
  if (warp == 0) lane_keys.fill();
  __syncthreads();
  if (is_solver) {
    solve_fours<Shape::kDim>(a, pages, warp % kFourWarps);
  } else {
    const FourMemory<Shape::kDim> memory(reinterpret_cast<std::uint8_t*>(pages + num_groups()) +
                                         warp * FourMemory<Shape::kDim>::bytes(Shape::kPageRows));
    build_fours<Shape, kBFloat16>(a, lane_keys, memory, pages[group], group);
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

template <class Shape>
Status launch_fours(const SummariseArguments& arguments, cudaStream_t stream) {
  const Result<int> shared = device_attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (!shared.ok()) return shared.status();
  constexpr int kGroupBytes = static_cast<int>(sizeof(PageExchange)) +
                              kFourWarps * FourMemory<Shape::kDim>::bytes(Shape::kPageRows);
  // 227 KiB take all groups, 99 KiB, of GPUs that are not for data centres, one.
  const int room = shared.value() - static_cast<int>(sizeof(LaneKeys<Shape::kDim>));
  const int groups = std::clamp(room / kGroupBytes, 1, kMostGroups);
  const bool is_bf16 = arguments.job.keys.type == ScalarType::kBFloat16;
  return launch(
      is_bf16 ? summarise_fours_kernel<Shape, true> : summarise_fours_kernel<Shape, false>, 1,
      groups * kFourWarps + kSolvers, groups * kGroupBytes, arguments, stream);
}

template <int D>
Status launch_fours(const SummariseArguments& arguments, cudaStream_t stream) {
  const SummaryFormat& format = arguments.job.layout.format;
  const bool short_basis = format.basis_bits == 4;
  if (format.centroid_bits == 4) {
    return short_basis ? launch_fours<FourShape<D, 4, 4>>(arguments, stream)
                       : launch_fours<FourShape<D, 4, 8>>(arguments, stream);
  }
  return short_basis ? launch_fours<FourShape<D, 8, 4>>(arguments, stream)
                     : launch_fours<FourShape<D, 8, 8>>(arguments, stream);
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
