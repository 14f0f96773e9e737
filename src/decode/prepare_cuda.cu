// First launch of a decode step: what must be ready before records are scored.
//
// Grid: one CTA of kPrepareThreads threads a multiprocessor, whatever the batch. From the front,
// CTAs take (row, KV head) of scored rows: the group's queries, rotated and scaled, as floats and
// as fragments; the base of the masses, and the mass of the tokens that no record covers, from
// their keys. From the back, CTAs take the records of blocks that the step completed, a CTA a
// record (build_record.cuh), and clear the headers of blocks that it left incomplete. A step that
// completes no block finds so from the plan alone.
//
// Bytes: a group's queries and at most 17 keys for each (row, KV head) of scored rows; 16 * d *
// scalar_bytes read and record_bytes written a new record. Bound by latency: plan and block table
// are read before the wait for the kernel in front, queries and keys in one go after it.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/launch_cuda.h"
#include "core/ptx.cuh"
#include "decode/step_cuda.h"
#include "score/query_fragments.cuh"
#include "summary/build_record.cuh"

namespace locks::detail {

namespace {

constexpr int kWarps = kPrepareThreads / kWarpSize;
// Query heads in shared memory at a time: any group that has fragments.
constexpr int kHeadsAtOnce = kLargestTunedGroup;
// Keys in shared memory: token 0 and the incomplete block, or token 0 and the newest token.
constexpr int kLargestKeys = kBlockTokens;
constexpr float kLog2OfE = 1.4426950408889634f;
// Four floats: rows of keys then begin at different banks, and eight threads read one each.
constexpr int kKeyPadding = 4;

struct PrepareArguments {
  StepArguments step;
  RecordJob job;
  int group;           // query heads of a KV head
  bool query_aligned;  // rows of the queries begin at multiples of 16 bytes
};

// Shared memory of a (row, KV head), in floats.
struct GroupMemory {
  LOCKS_HD static constexpr int floats(int heads, int d) {
    const int at_once = heads < kHeadsAtOnce ? heads : kHeadsAtOnce;
    return at_once * (2 * d + kKeyPadding + row_floats(d)) + kLargestKeys * (d + kKeyPadding) +
           kHeadsAtOnce * kLargestKeys;
  }

  __device__ GroupMemory(float* memory, int heads, int d) {
    const int at_once = min(heads, kHeadsAtOnce);
    key_stride = d + kKeyPadding;
    rotated_stride = row_floats(d);
    rotated = memory;
    plain = rotated + at_once * rotated_stride;
    keys = plain + at_once * key_stride;
    logits = keys + kLargestKeys * key_stride;
    fragments_input = logits + kHeadsAtOnce * kLargestKeys;
  }

  int key_stride, rotated_stride;
  float* rotated;          // [heads][rotated_stride]: scaled and, if the format asks, rotated
  float* plain;            // [heads][key_stride]: scaled
  float* keys;             // [keys][key_stride]
  float* logits;           // [heads][kLargestKeys]
  float* fragments_input;  // [heads][d]: `rotated` without gaps
};

// The keys that a (row, KV head) looks at: of token 0, then those of the incomplete block, or of
// the newest token if there is none. The newest token is the last one either way.
struct GroupItem {
  int row, head;
  bool is_scored;
  int num_tail;                // tokens of the incomplete block
  std::int64_t first, newest;  // element of token 0's key, and of the first of the others; -1: none

  __device__ int num_keys() const { return 1 + max(num_tail, 1); }
};

__device__ std::int64_t find_token(const RecordJob& job, int row, std::int64_t token, int head) {
  const std::int64_t block = find_keys(job, row, token / kBlockTokens, head);
  return block < 0 ? -1 : block + token % kBlockTokens * job.keys.token_stride;
}

__device__ GroupItem find_item(const PrepareArguments& a, std::int64_t item) {
  const int heads = a.step.attention.num_kv_heads;
  GroupItem found{};
  found.row = static_cast<int>(item / heads);
  found.head = static_cast<int>(item % heads);
  if (found.row >= a.step.seqs.num_seqs) return found;
  const RowPlan& plan = a.step.plan[found.row];
  const int length = plan.length;
  found.is_scored = plan.scored_blocks > 0 && length > 0;
  if (!found.is_scored) return found;
  found.num_tail = length % kBlockTokens;
  found.first = find_token(a.job, found.row, 0, found.head);
  found.newest = find_token(a.job, found.row, length - max(found.num_tail, 1), found.head);
  return found;
}

// Queries [first_head, first_head + heads) of the group, and its keys, to shared memory as floats.
__device__ void load_group(const PrepareArguments& a, const GroupItem& item, int first_head,
                           int heads, const GroupMemory& m) {
  constexpr int kBatch = 2;  // loads of queries, and of keys, in flight
  const QueryTensor& query = a.step.query;
  const PagedTensor& keys = a.step.keys;
  const int d = a.step.attention.head_dim, row_pieces = d / kPieceChannels;
  const int group = a.group;
  const float scale = a.step.attention.scale * kLog2OfE;
  const bool improved = a.step.layout.format.improved;
  const std::int64_t query_start =
      item.row * query.seq_stride +
      (static_cast<std::int64_t>(item.head) * group + first_head) * query.head_stride;
  const int query_pieces = heads * row_pieces, key_pieces = item.num_keys() * row_pieces;
  const int most = max(query_pieces, key_pieces);
  for (int begin = static_cast<int>(threadIdx.x); begin < most; begin += kBatch * kPrepareThreads) {
    RawPiece raw_query[kBatch], raw_key[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int piece = begin + n * kPrepareThreads;
      const int r = piece / row_pieces, c = piece % row_pieces * kPieceChannels;
      raw_query[n] = raw_key[n] = {};
      if (piece < query_pieces) {
        raw_query[n] = load_raw(query.data, query.type, a.query_aligned,
                                query_start + r * query.head_stride + c);
      }
      const std::int64_t key = r == 0            ? item.first
                               : item.newest < 0 ? -1
                                                 : item.newest + (r - 1) * keys.token_stride;
      if (piece < key_pieces && key >= 0) {
        raw_key[n] = load_raw(keys.data, keys.type, a.job.keys_aligned, key + c);
      }
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int piece = begin + n * kPrepareThreads;
      const int r = piece / row_pieces, c = piece % row_pieces * kPieceChannels;
      float x[kPieceChannels];
      if (piece < query_pieces) {
        to_floats(raw_query[n], query.type, x);
#pragma unroll
        for (int i = 0; i < kPieceChannels; ++i) x[i] *= scale;
        store_piece(m.plain + r * m.key_stride + c, x);
        if (improved) begin_rotation(x, c);
        store_piece(m.rotated + r * m.rotated_stride + c, x);
      }
      if (piece < key_pieces) {
        to_floats(raw_key[n], keys.type, x);
        store_piece(m.keys + r * m.key_stride + c, x);
      }
    }
  }
}

// A thread a (query head, key).
__device__ void find_logits(const GroupMemory& m, int heads, int num_keys, int d) {
  for (int pair = static_cast<int>(threadIdx.x); pair < heads * num_keys; pair += kPrepareThreads) {
    const int g = pair / num_keys, r = pair % num_keys;
    const auto* q = reinterpret_cast<const float4*>(m.plain + g * m.key_stride);
    const auto* k = reinterpret_cast<const float4*>(m.keys + r * m.key_stride);
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int c = 0; c < d / 4; ++c) {
      sum.x = __fmaf_rn(q[c].x, k[c].x, sum.x);
      sum.y = __fmaf_rn(q[c].y, k[c].y, sum.y);
      sum.z = __fmaf_rn(q[c].z, k[c].z, sum.z);
      sum.w = __fmaf_rn(q[c].w, k[c].w, sum.w);
    }
    m.logits[g * kLargestKeys + r] = (sum.x + sum.y) + (sum.z + sum.w);
  }
}

__device__ float sum_warp(float x) {
#pragma unroll
  for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
    x += __shfl_xor_sync(kEveryLane, x, apart);
  }
  return x;
}

__device__ float max_warp(float x) {
#pragma unroll
  for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kEveryLane, x, apart));
  }
  return x;
}

// Base and tail, a warp a query head at a time. Logits are in log2 units; q.reference is taken off
// them, since the centroids do without it.
__device__ void write_base(const PrepareArguments& a, const GroupItem& item, int first_head,
                           int heads, const GroupMemory& m) {
  const int lane = lane_index(), warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int d = a.step.attention.head_dim, group = a.group;
  const float* reference = a.step.reference_keys == nullptr
                               ? nullptr
                               : a.step.reference_keys + std::int64_t{item.head} * d;
  const int num_keys = item.num_keys();
  const float none = __int_as_float(0xFF800000);  // -inf
  for (int g = warp; g < heads; g += kWarps) {
    float offset = 0;
    if (reference != nullptr) {
      for (int c = lane; c < d; c += kWarpSize) {
        offset = __fmaf_rn(m.rotated[g * m.rotated_stride + c], reference[c], offset);
      }
      offset = sum_warp(offset);
    }
    const float* logits = m.logits + g * kLargestKeys;
    const float base = fmaxf(logits[0], logits[num_keys - 1]) - offset;
    const bool is_tail = lane > 0 && lane <= item.num_tail;
    const float logit = is_tail ? logits[lane] : none;
    const float largest = max_warp(logit);
    const float mass = sum_warp(is_tail ? exp2f(logit - largest) : 0.0f);
    if (lane == 0) {
      const std::int64_t index =
          (static_cast<std::int64_t>(item.row) * a.step.attention.num_kv_heads + item.head) *
              group +
          first_head + g;
      a.step.workspace.base[index] = base;
      a.step.workspace.log2_tail[index] =
          item.num_tail == 0 ? none : largest + log2f(mass) - offset - base;
    }
  }
}

// Rotated queries to the workspace, and side by side for the fragments.
__device__ void write_rotated(const PrepareArguments& a, const GroupItem& item, int first_head,
                              int heads, const GroupMemory& m) {
  const int d = a.step.attention.head_dim, group = a.group;
  const std::int64_t kv_head =
      static_cast<std::int64_t>(item.row) * a.step.attention.num_kv_heads + item.head;
  float* out = a.step.workspace.rotated + (kv_head * group + first_head) * d;
  for (int i = static_cast<int>(threadIdx.x); i < heads * (d / 4); i += kPrepareThreads) {
    const int g = i / (d / 4), c = i % (d / 4) * 4;
    const float4 x = *reinterpret_cast<const float4*>(m.rotated + g * m.rotated_stride + c);
    *reinterpret_cast<float4*>(out + g * d + c) = x;
    *reinterpret_cast<float4*>(m.fragments_input + g * d + c) = x;
  }
  if (!has_fragments(a.step.layout.format, group, d)) return;
  __syncthreads();
  const int words =
      (group + kFragmentHeads - 1) / kFragmentHeads * one_fragment_words(a.step.layout.format, d);
  write_fragments(a.step.layout.format, m.fragments_input, group, d,
                  a.step.workspace.fragments + kv_head * words);
}

__device__ void prepare_group(const PrepareArguments& a, const GroupItem& item, float* memory) {
  const int d = a.step.attention.head_dim, group = a.group;
  const GroupMemory m(memory, group, d);
  for (int first_head = 0; first_head < group; first_head += kHeadsAtOnce) {
    const int heads = min(group - first_head, kHeadsAtOnce);
    load_group(a, item, first_head, heads, m);
    __syncthreads();
    if (a.step.layout.format.improved) {
      finish_rotation(m.rotated, heads, m.rotated_stride, d, static_cast<int>(threadIdx.x),
                      kPrepareThreads);
    }
    find_logits(m, heads, item.num_keys(), d);
    __syncthreads();
    write_base(a, item, first_head, heads, m);
    write_rotated(a, item, first_head, heads, m);
    __syncthreads();  // the memory is used again
  }
}

__device__ std::int32_t num_new_blocks(const PrepareArguments& a, int row) {
  if (row >= a.step.seqs.num_seqs) return 0;
  const RowPlan& plan = a.step.plan[row];
  return max(plan.length / kBlockTokens - plan.first_new_block, 0);
}

// Records of the rows [first_row, first_row + kPrepareThreads), of which each thread knows one's
// number of new blocks. `item` counts on through the records of one row after the other.
template <int B>
__device__ void build_records(const PrepareArguments& a, int first_row, std::int32_t new_blocks,
                              std::int64_t& item, float* memory) {
  __shared__ std::int32_t counts[kPrepareThreads];
  counts[threadIdx.x] = new_blocks;
  __syncthreads();
  const int heads = a.step.attention.num_kv_heads;
  const int rows = min(a.step.seqs.num_seqs - first_row, kPrepareThreads);
  unsigned long long built = 0;
  for (int r = 0; r < rows; ++r) {
    const std::int64_t items = static_cast<std::int64_t>(counts[r]) * heads;
    for (; item < items; item += gridDim.x) {
      const int row = first_row + r;
      const std::int64_t block = a.step.plan[row].first_new_block + item / heads;
      built +=
          build_record<B, kWarps>(a.job, row, block, static_cast<int>(item % heads), false, memory);
    }
    item -= items;
  }
  if (threadIdx.x == 0 && built != 0 && a.step.counters != nullptr) {
    atomicAdd(a.step.counters + kRecordsBuilt, built);
  }
  __syncthreads();
}

// As summarise does: a block whose tokens are being written has no valid record.
__device__ void clear_incomplete(const PrepareArguments& a, int cta) {
  const int heads = a.step.attention.num_kv_heads;
  const std::int64_t items = static_cast<std::int64_t>(a.step.seqs.num_seqs) * heads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kPrepareThreads;
  for (std::int64_t item = static_cast<std::int64_t>(cta) * kPrepareThreads + threadIdx.x;
       item < items; item += step) {
    const int row = static_cast<int>(item / heads), length = a.step.plan[row].length;
    if (length <= 0 || length % kBlockTokens == 0) continue;
    clear_header(a.job, row, length / kBlockTokens, static_cast<int>(item % heads));
  }
}

template <int B>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ PrepareArguments a) {
  extern __shared__ float4 shared[];
  float* memory = reinterpret_cast<float*>(shared);
  allow_next_kernel();
  const int cta = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  std::int32_t new_blocks = num_new_blocks(a, static_cast<int>(threadIdx.x));
  GroupItem group = find_item(a, blockIdx.x);
  bool builds = __syncthreads_or(new_blocks > 0 ? 1 : 0) != 0;
  wait_for_prior_kernel();

  const std::int64_t num_groups =
      static_cast<std::int64_t>(a.step.seqs.num_seqs) * a.step.attention.num_kv_heads;
  for (std::int64_t item = blockIdx.x; item < num_groups; item += gridDim.x) {
    if (item != blockIdx.x) group = find_item(a, item);
    if (group.is_scored) prepare_group(a, group, memory);
  }
  clear_incomplete(a, cta);
  std::int64_t record = cta;
  for (int first_row = 0; first_row < a.step.seqs.num_seqs; first_row += kPrepareThreads) {
    if (first_row > 0) {
      new_blocks = num_new_blocks(a, first_row + static_cast<int>(threadIdx.x));
      builds = __syncthreads_or(new_blocks > 0 ? 1 : 0) != 0;
    }
    if (builds) build_records<B>(a, first_row, new_blocks, record, memory);
  }
}

template <int B>
cudaError_t launch(const PrepareArguments& arguments, cudaStream_t stream) {
  int num_sms = 0;
  if (const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, num_sms);
      error != cudaSuccess) {
    return error;
  }
  const AttentionParams& attention = arguments.step.attention;
  const int d = attention.head_dim;
  const int floats = std::max(GroupMemory::floats(attention.group_size(), d),
                              TeamMemory<B, kWarps>::floats(arguments.job.layout.format.rank, d));
  const int bytes = floats * static_cast<int>(sizeof(float));
  if (const cudaError_t error = cudaFuncSetAttribute(
          prepare_kernel<B>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      error != cudaSuccess) {
    return error;
  }
  return launch_early(prepare_kernel<B>, num_sms, kPrepareThreads, static_cast<std::size_t>(bytes),
                      stream, arguments);
}

}  // namespace

cudaError_t launch_prepare(const StepArguments& step, cudaStream_t stream) {
  if (step.seqs.num_seqs == 0) return cudaSuccess;
  const std::int64_t query_bytes = scalar_bytes(step.query.type);
  const PrepareArguments arguments{
      step,
      make_record_job(step.layout, step.format_code, step.reference_keys, step.keys, step.records,
                      step.seqs),
      step.attention.group_size(),
      is_aligned_to(step.query.data, 16) && step.query.seq_stride * query_bytes % 16 == 0 &&
          step.query.head_stride * query_bytes % 16 == 0};
  switch (step.layout.format.page_tokens) {
    case 4:
      return launch<4>(arguments, stream);
    case 8:
      return launch<8>(arguments, stream);
    default:
      return launch<16>(arguments, stream);
  }
}

}  // namespace locks::detail
