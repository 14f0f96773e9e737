// What a scored (row, KV head) needs before its records are scored: rotated queries, fragments,
// base and tail. By one CTA, from the plan to the workspace.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/ptx.cuh"
#include "decode/step_cuda.h"
#include "decode/write_tokens.cuh"
#include "score/query_fragments.cuh"
#include "summary/record_job.cuh"
#include "summary/rotate_rows.cuh"
#include "summary/warp.cuh"

namespace locks::detail {

namespace {  // of one kernel file

// The first kPrepareThreads of a CTA's threads prepare queries, the others logits.
constexpr int kThreads = 2 * kPrepareThreads;
constexpr int kWarps = kThreads / kWarpSize;
// Query heads at a time: any group that has fragments.
constexpr int kHeadsAtOnce = kLargestTunedGroup;
// Token 0 and the incomplete block's tokens, or token 0 and the newest token.
constexpr int kLargestKeys = kBlockTokens;
constexpr float kLog2OfE = 1.4426950408889634f;
constexpr unsigned kLargestPieces = kMaxHeadDim / kPieceChannels;

struct PrepareArguments {
  StepArguments step;
  RecordJob job;
  int group;           // query heads of a KV head
  bool query_aligned;  // rows of the queries begin at multiples of 16 bytes
  int group_ctas;      // that many CTAs take (row, KV head)
};

// Shared memory of a (row, KV head), in floats.
struct GroupMemory {
  LOCKS_HD static constexpr int floats(int heads, int d) {
    const int at_once = heads < kHeadsAtOnce ? heads : kHeadsAtOnce;
    return at_once * d + kHeadsAtOnce * (kLargestKeys + static_cast<int>(kLargestPieces));
  }

  __device__ explicit GroupMemory(float* memory)
      : logits(memory),
        offsets(logits + kHeadsAtOnce * kLargestKeys),
        rotated(offsets + kHeadsAtOnce * kLargestPieces) {}

  float* logits;   // [heads][kLargestKeys]
  float* offsets;  // [heads][kLargestPieces]: shares of q.reference
  float* rotated;  // [heads][d]
};

// The keys that a (row, KV head) looks at: of token 0, then those of the incomplete block, or of
// the newest token if there is none. The newest token is the last one either way.
struct GroupItem {
  int row, head;
  bool is_scored;
  int num_tail;                // tokens of the incomplete block
  std::int64_t first, newest;  // element of token 0's key, and of the first of the others; -1: none
  const void* new_key;         // of the newest token, which the step adds; null: it is in the cache

  __device__ int num_keys() const { return 1 + max(num_tail, 1); }
};

__device__ std::int64_t find_token(const StepArguments& step, int row, int token, int head) {
  const PagedTensor& keys = step.keys;
  const BlockTable& table = step.seqs.cache_blocks;
  const auto at = static_cast<std::uint32_t>(token);
  const auto block_tokens = static_cast<std::uint32_t>(keys.block_tokens);
  const std::int64_t id = table.ids[row * table.seq_stride + at / block_tokens];
  if (id < 0 || id >= keys.num_blocks) return -1;
  return id * keys.block_stride + head * keys.head_stride + at % block_tokens * keys.token_stride;
}

__device__ GroupItem find_item(const PrepareArguments& a, int item) {
  const int heads = a.step.attention.num_kv_heads;
  GroupItem found{};
  found.row = item / heads;
  found.head = item % heads;
  const RowPlan& plan = a.step.plan[found.row];
  const int length = plan.length;
  found.is_scored = plan.scored_blocks > 0 && length > 0;
  if (!found.is_scored) return found;
  found.num_tail = length % kBlockTokens;
  found.first = find_token(a.step, found.row, 0, found.head);
  found.newest = find_token(a.step, found.row, length - max(found.num_tail, 1), found.head);
  const bool is_added = a.step.added.slots != nullptr && a.step.added.slots[found.row] >= 0;
  found.new_key = is_added ? find_new_key(a.step, found.row, found.head) : nullptr;
  return found;
}

// The stages of the rotation beyond a piece, by exchanges between the lanes of a run: channels that
// are 8 n apart lie n lanes apart.
__device__ __forceinline__ void finish_rotation_by_lanes(float (&x)[kPieceChannels], int piece,
                                                         int head_dim) {
  for (int apart = 1; apart < rotation_run(head_dim) / kPieceChannels; apart *= 2) {
    const bool is_high = (piece & apart) != 0;
#pragma unroll
    for (int i = 0; i < kPieceChannels; ++i) {
      const float other = __shfl_xor_sync(kEveryLane, x[i], apart);
      x[i] = is_high ? other - x[i] : x[i] + other;
    }
  }
  const float scale = rotation_scale(head_dim);
#pragma unroll
  for (int i = 0; i < kPieceChannels; ++i) x[i] *= scale;
}

// Queries [first_head, first_head + heads) of the group, a piece a thread: scaled, rotated if the
// format asks, to the workspace and to shared memory. The first kPrepareThreads threads.
__device__ void write_rotated(const PrepareArguments& a, const GroupItem& item, int first_head,
                              int heads, const GroupMemory& m) {
  const QueryTensor& query = a.step.query;
  const int d = a.step.attention.head_dim, row_pieces = d / kPieceChannels;
  const std::int64_t query_head =
      (static_cast<std::int64_t>(item.row) * a.step.attention.num_kv_heads + item.head) * a.group +
      first_head;
  const std::int64_t query_start =
      item.row * query.seq_stride +
      (static_cast<std::int64_t>(item.head) * a.group + first_head) * query.head_stride;
  const float scale = a.step.attention.scale * kLog2OfE;
  const int pieces = heads * row_pieces;
  float* out = a.step.workspace.rotated + query_head * d;
  // Whole warps, since lanes exchange; runs are whole groups of lanes.
  for (int begin = 0; begin < pieces; begin += kPrepareThreads) {
    const int piece = begin + static_cast<int>(threadIdx.x);
    const bool exists = piece < pieces;
    const int g = piece / row_pieces, p = piece % row_pieces, c = p * kPieceChannels;
    float x[kPieceChannels] = {}, reference[kPieceChannels] = {};
    if (exists && a.step.reference_keys != nullptr) {
      const float* from = a.step.reference_keys + std::int64_t{item.head} * d + c;
#pragma unroll
      for (int i = 0; i < kPieceChannels; ++i) reference[i] = from[i];
    }
    if (exists) {
      to_floats(load_raw(query.data, query.type, a.query_aligned,
                         query_start + g * query.head_stride + c),
                query.type, x);
    }
#pragma unroll
    for (int i = 0; i < kPieceChannels; ++i) x[i] *= scale;
    if (a.step.layout.format.improved) {
      begin_rotation(x, c);
      finish_rotation_by_lanes(x, p, d);
    }
    if (!exists) continue;
    store_piece(out + g * d + c, x);
    store_piece(m.rotated + g * d + c, x);
    float offset = 0;
#pragma unroll
    for (int i = 0; i < kPieceChannels; ++i) offset = __fmaf_rn(x[i], reference[i], offset);
    m.offsets[g * kLargestPieces + p] = offset;
  }
}

// The channels of one row that a lane feeds to matrix products: pieces j, j + 4, ... of it, each
// the operand of two products of rank 16. Queries and keys lie the same way, so the order of
// channels does not matter. Pieces past the row's end, and rows that do not exist, are zero.
__device__ __forceinline__ uint4 load_operand(const void* row, int piece, int row_pieces) {
  if (row == nullptr || piece >= row_pieces) return make_uint4(0, 0, 0, 0);
  return static_cast<const uint4*>(row)[piece];
}

// Key r of an item, null if there is none.
__device__ __forceinline__ const void* find_key(const PrepareArguments& a, const GroupItem& item,
                                                int r) {
  const PagedTensor& keys = a.step.keys;
  if (r >= item.num_keys()) return nullptr;
  if (item.new_key != nullptr && r == item.num_keys() - 1) return item.new_key;
  const std::int64_t begin = r == 0 ? item.first : item.newest;
  const std::int64_t element = begin + max(r - 1, 0) * keys.token_stride;
  return begin < 0
             ? nullptr
             : static_cast<const std::uint8_t*>(keys.data) + element * scalar_bytes(keys.type);
}

// Logits of eight query heads by one warp: keys are rows of A, queries columns of B.
template <bool kBFloat16>
__device__ void find_logits_mma(const PrepareArguments& a, const GroupItem& item, int first_head,
                                int head, int heads, float* logits) {
  constexpr int kMostSteps = kMaxHeadDim / 32;
  const int lane = lane_index(), g = lane / 4, j = lane % 4;
  const QueryTensor& query = a.step.query;
  const int row_pieces = a.step.attention.head_dim / kPieceChannels;
  const void* const low = find_key(a, item, g);
  const void* const high = find_key(a, item, g + 8);
  const std::int64_t column =
      item.row * query.seq_stride +
      (static_cast<std::int64_t>(item.head) * a.group + first_head + head + g) * query.head_stride;
  const void* const q_row =
      head + g < heads ? static_cast<const std::uint16_t*>(query.data) + column : nullptr;
  float sum[4] = {};
  uint4 key_low[kMostSteps / 2], key_high[kMostSteps / 2], q[kMostSteps / 2];
  for (int begin = 0; begin < row_pieces; begin += 4 * (kMostSteps / 2)) {
#pragma unroll
    for (int s = 0; s < kMostSteps / 2; ++s) {
      const int piece = begin + 4 * s + j;
      key_low[s] = load_operand(low, piece, row_pieces);
      key_high[s] = load_operand(high, piece, row_pieces);
      q[s] = load_operand(q_row, piece, row_pieces);
    }
#pragma unroll
    for (int s = 0; s < kMostSteps / 2; ++s) {
      const std::uint32_t first[4] = {key_low[s].x, key_high[s].x, key_low[s].y, key_high[s].y};
      const std::uint32_t second[4] = {key_low[s].z, key_high[s].z, key_low[s].w, key_high[s].w};
      if constexpr (kBFloat16) {
        mma_bf16(sum, first, q[s].x, q[s].y);
        mma_bf16(sum, second, q[s].z, q[s].w);
      } else {
        mma_f16(sum, first, q[s].x, q[s].y);
        mma_f16(sum, second, q[s].z, q[s].w);
      }
    }
  }
  const float scale = a.step.attention.scale * kLog2OfE;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int to = head + 2 * j + e % 2;
    if (to < heads) logits[to * kLargestKeys + g + e / 2 * 8] = sum[e] * scale;
  }
}

// The same for any types and strides: a warp a query head, lanes over the channels.
__device__ void find_logits_any(const PrepareArguments& a, const GroupItem& item, int first_head,
                                int head, float* logits) {
  const QueryTensor& query = a.step.query;
  const ScalarType type = a.step.keys.type;
  const std::int64_t from =
      item.row * query.seq_stride +
      (static_cast<std::int64_t>(item.head) * a.group + first_head + head) * query.head_stride;
  const float scale = a.step.attention.scale * kLog2OfE;
  for (int r = 0; r < item.num_keys(); ++r) {
    const void* const key = find_key(a, item, r);
    float sum = 0;
    for (int c = lane_index(); key != nullptr && c < a.step.attention.head_dim; c += kWarpSize) {
      sum = __fmaf_rn(load_scalar(query.data, query.type, from + c) * scale,
                      load_scalar(key, type, c), sum);
    }
#pragma unroll
    for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(kEveryLane, sum, apart);
    }
    if (lane_index() == 0) logits[head * kLargestKeys + r] = sum;
  }
}

// The other half of the threads; `warp` counts from its first one.
__device__ void find_logits(const PrepareArguments& a, const GroupItem& item, int first_head,
                            int heads, int warp, float* logits) {
  const ScalarType type = a.step.keys.type;
  const bool is_operand = type == a.step.query.type && type != ScalarType::kFloat32 &&
                          a.query_aligned && a.job.keys_aligned;
  const int step = is_operand ? 8 : 1;
  for (int head = warp * step; head < heads; head += kWarps / 2 * step) {
    if (!is_operand) {
      find_logits_any(a, item, first_head, head, logits);
    } else if (type == ScalarType::kBFloat16) {
      find_logits_mma<true>(a, item, first_head, head, heads, logits);
    } else {
      find_logits_mma<false>(a, item, first_head, head, heads, logits);
    }
  }
}

// Base and tail, 16 lanes a query head. Logits are in log2 units; q.reference is taken off them,
// since the centroids do without it. `warp` as above.
__device__ void write_base(const PrepareArguments& a, const GroupItem& item, int first_head,
                           int heads, int warp, const GroupMemory& m) {
  const int lane = lane_index() % kLargestKeys;
  const int row_pieces = a.step.attention.head_dim / kPieceChannels;
  const float none = __int_as_float(0xFF800000);  // -inf
  for (int first = warp * 2; first < heads; first += kWarps) {
    const int g = first + lane_index() / kLargestKeys;
    const bool exists = g < heads;
    const float* logits = m.logits + min(g, heads - 1) * kLargestKeys;
    float offset = 0;
    if (a.step.reference_keys != nullptr) {
      const float* shares = m.offsets + min(g, heads - 1) * kLargestPieces;
      for (int p = lane; p < row_pieces; p += kLargestKeys) offset += shares[p];
    }
    const bool is_tail = lane > 0 && lane <= item.num_tail;
    const float logit = is_tail ? logits[lane] : none;
    float largest = logit;
#pragma unroll
    for (int apart = kLargestKeys / 2; apart > 0; apart /= 2) {
      offset += __shfl_xor_sync(kEveryLane, offset, apart);
      largest = fmaxf(largest, __shfl_xor_sync(kEveryLane, largest, apart));
    }
    float mass = is_tail ? exp2f(logit - largest) : 0.0f;
#pragma unroll
    for (int apart = kLargestKeys / 2; apart > 0; apart /= 2) {
      mass += __shfl_xor_sync(kEveryLane, mass, apart);
    }
    if (lane != 0 || !exists) continue;
    const float base = fmaxf(logits[0], logits[item.num_keys() - 1]) - offset;
    const std::int64_t index =
        (static_cast<std::int64_t>(item.row) * a.step.attention.num_kv_heads + item.head) *
            a.group +
        first_head + g;
    a.step.workspace.base[index] = base;
    a.step.workspace.log2_tail[index] =
        item.num_tail == 0 ? none : largest + log2f(mass) - offset - base;
  }
}

// Both halves of the threads at once, each through code of its own. A head's fragment is made by
// the threads that have rotated it, which are of one warp.
__device__ void prepare_group(const PrepareArguments& a, const GroupItem& item, float* memory) {
  const SummaryFormat& format = a.step.layout.format;
  const int d = a.step.attention.head_dim;
  const GroupMemory m(memory);
  const int warp = warp_index();
  for (int first_head = 0; first_head < a.group; first_head += kHeadsAtOnce) {
    const int heads = min(a.group - first_head, kHeadsAtOnce);
    if (warp < kWarps / 2) {
      write_rotated(a, item, first_head, heads, m);
      if (has_fragments(format, a.group, d)) {
        __syncwarp();
        const std::int64_t kv_head =
            static_cast<std::int64_t>(item.row) * a.step.attention.num_kv_heads + item.head;
        const int words =
            (a.group + kFragmentHeads - 1) / kFragmentHeads * one_fragment_words(format, d);
        write_fragments(format, m.rotated, a.group, d,
                        a.step.workspace.fragments + kv_head * words);
      }
    } else {
      find_logits(a, item, first_head, heads, warp - kWarps / 2, m.logits);
    }
    __syncthreads();  // the queries' products with the reference, which the base needs
    if (warp >= kWarps / 2) write_base(a, item, first_head, heads, warp - kWarps / 2, m);
    __syncthreads();  // the memory is used again
  }
}

}  // namespace

}  // namespace locks::detail
