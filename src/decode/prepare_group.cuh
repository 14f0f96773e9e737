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
  bool is_operand;     // and those of the keys, of the same 16-bit type: operands as they lie
  int fragment_words;  // of a group, for the tuned scorer; 0: it does not serve this layer
  int group_ctas;      // that many CTAs take (row, KV head)
};

// What the code of a group may know of its layer when it is compiled. Nearly all layers are usual
// ones: without the branches and the arithmetic that others need their code is half as long, and
// instructions are what most of the time goes to.
template <int kHeadDim, ScalarType kType>
struct UsualShape {
  static constexpr int head_dim = kHeadDim;
  static constexpr ScalarType query_type = kType;
  static constexpr bool query_aligned = true, is_operand = true, has_fragments = true;
};

struct AnyShape {
  int head_dim;
  ScalarType query_type;
  bool query_aligned, is_operand, has_fragments;
};

// Calls call with the shape of a layer.
template <class Call>
__device__ __forceinline__ void with_shape(const PrepareArguments& a, const Call& call) {
  const int d = a.step.attention.head_dim;
  const ScalarType type = a.step.query.type;
  const bool is_bf16 = type == ScalarType::kBFloat16;
  if (!a.is_operand || a.fragment_words == 0) {
    call(AnyShape{d, type, a.query_aligned, a.is_operand, a.fragment_words > 0});
  } else if (d == 128) {
    is_bf16 ? call(UsualShape<128, ScalarType::kBFloat16>())
            : call(UsualShape<128, ScalarType::kFloat16>());
  } else {
    is_bf16 ? call(UsualShape<64, ScalarType::kBFloat16>())
            : call(UsualShape<64, ScalarType::kFloat16>());
  }
}

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

// What a (row, KV head) looks at: its queries, and the keys of token 0, then of the incomplete
// block, or of the newest token if there is none. The newest token is the last one either way.
struct GroupItem {
  int row, head;
  bool is_scored;
  int num_tail;                // tokens of the incomplete block
  std::int64_t first, newest;  // element of token 0's key, and of the first of the others; -1: none
  std::int64_t query;          // element of the group's first query
  std::int64_t first_query;    // the group's first query among those of all rows
  std::uint32_t* fragments;
  const void* new_key;     // of the newest token, which the step adds; null: it is in the cache
  const void *low, *high;  // the keys that this lane feeds to matrix products; null: none

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

__device__ GroupItem find_item(const PrepareArguments& a, int item) {
  const int heads = a.step.attention.num_kv_heads;
  GroupItem found{};
  found.row = item / heads;
  found.head = item % heads;
  const RowPlan& plan = a.step.plan[found.row];
  const int length = plan.length;
  found.is_scored = plan.scored_blocks > 0 && length > 0;
  if (!found.is_scored) return found;
  found.first_query = static_cast<std::int64_t>(item) * a.group;
  found.fragments = a.step.workspace.fragments + static_cast<std::int64_t>(item) * a.fragment_words;
  found.query = found.row * a.step.query.seq_stride +
                static_cast<std::int64_t>(found.head) * a.group * a.step.query.head_stride;
  found.num_tail = length % kBlockTokens;
  found.first = find_token(a.step, found.row, 0, found.head);
  found.newest = find_token(a.step, found.row, length - max(found.num_tail, 1), found.head);
  const bool is_added = a.step.added.slots != nullptr && a.step.added.slots[found.row] >= 0;
  found.new_key = is_added ? find_new_key(a.step, found.row, found.head) : nullptr;
  found.low = find_key(a, found, lane_index() / 4);
  found.high = find_key(a, found, lane_index() / 4 + 8);
  return found;
}

// The stages of the rotation beyond a piece, by exchanges between the lanes of a run: channels that
// are 8 n apart lie n lanes apart.
__device__ __forceinline__ void finish_rotation_by_lanes(float (&x)[kPieceChannels], int piece,
                                                         int head_dim) {
#pragma unroll 1
  for (int apart = 1; apart < rotation_run(head_dim) / kPieceChannels; apart *= 2) {
    const float sign = (piece & apart) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kPieceChannels; ++i) {
      // Exact but for the sum's rounding.
      x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(kEveryLane, x[i], apart));
    }
  }
  const float scale = rotation_scale(head_dim);
#pragma unroll
  for (int i = 0; i < kPieceChannels; ++i) x[i] *= scale;
}

// Queries [first_head, first_head + heads) of the group, a piece a thread: scaled, rotated if the
// format asks, to the workspace and to shared memory. The first kPrepareThreads threads.
template <class Shape>
__device__ __forceinline__ void write_rotated(const PrepareArguments& a, const Shape& shape,
                                              const GroupItem& item, int first_head, int heads,
                                              const GroupMemory& m) {
  const QueryTensor& query = a.step.query;
  const int d = shape.head_dim, row_pieces = d / kPieceChannels;
  const float scale = a.step.attention.scale * kLog2OfE;
  const int pieces = heads * row_pieces;
  // Whole warps, since lanes exchange; runs are whole groups of lanes.
#pragma unroll 1
  for (int begin = 0; begin < pieces; begin += kPrepareThreads) {
    const int piece = begin + static_cast<int>(threadIdx.x);
    const bool exists = piece < pieces;
    const int g = piece / row_pieces, p = piece % row_pieces, c = p * kPieceChannels;
    RawPiece raw{};
    if (exists) {
      raw = load_raw(query.data, shape.query_type, shape.query_aligned,
                     item.query + (first_head + g) * query.head_stride + c);
    }
    float x[kPieceChannels] = {}, reference[kPieceChannels] = {};
    if (exists && a.step.reference_keys != nullptr) {
      const float* from = a.step.reference_keys + std::int64_t{item.head} * d + c;
#pragma unroll
      for (int i = 0; i < kPieceChannels; ++i) reference[i] = from[i];
    }
    to_floats(raw, shape.query_type, x);
#pragma unroll
    for (int i = 0; i < kPieceChannels; ++i) x[i] *= scale;
    if (a.step.layout.format.improved) {
      begin_rotation(x, c);
      finish_rotation_by_lanes(x, p, d);
    }
    float offset = 0;
#pragma unroll
    for (int i = 0; i < kPieceChannels; ++i) offset = __fmaf_rn(x[i], reference[i], offset);
    if (!exists) continue;
    m.offsets[g * kLargestPieces + p] = offset;
    store_piece(m.rotated + g * d + c, x);
    store_piece(a.step.workspace.rotated + (item.first_query + first_head + g) * d + c, x);
  }
}

// The channels of one row that a lane feeds to matrix products: pieces j, j + 4, ... of it, each
// the operand of two products of rank 16. Queries and keys lie the same way, so the order of
// channels does not matter. Pieces past the row's end, and rows that do not exist, are zero.
__device__ __forceinline__ uint4 load_operand(const void* row, int piece, int row_pieces) {
  if (row == nullptr || piece >= row_pieces) return make_uint4(0, 0, 0, 0);
  return static_cast<const uint4*>(row)[piece];
}

// Logits of eight query heads by one warp: keys are rows of A, queries columns of B.
template <bool kBFloat16>
__device__ __forceinline__ void find_logits_mma(const PrepareArguments& a, int head_dim,
                                                const GroupItem& item, int first_head, int head,
                                                int heads, float* logits) {
  constexpr int kSteps = kMaxHeadDim / 64;  // at a time
  const int lane = lane_index(), g = lane / 4, j = lane % 4;
  const QueryTensor& query = a.step.query;
  const int row_pieces = head_dim / kPieceChannels;
  const std::int64_t column = item.query + (first_head + head + g) * query.head_stride;
  const void* const q_row =
      head + g < heads ? static_cast<const std::uint16_t*>(query.data) + column : nullptr;
  float sum[4] = {};
  uint4 key_low[kSteps], key_high[kSteps], q[kSteps];
  for (int begin = 0; begin < row_pieces; begin += 4 * kSteps) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int piece = begin + 4 * s + j;
      key_low[s] = load_operand(item.low, piece, row_pieces);
      key_high[s] = load_operand(item.high, piece, row_pieces);
      q[s] = load_operand(q_row, piece, row_pieces);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
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
  const std::int64_t from = item.query + (first_head + head) * query.head_stride;
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
template <class Shape>
__device__ __forceinline__ void find_logits(const PrepareArguments& a, const Shape& shape,
                                            const GroupItem& item, int first_head, int heads,
                                            int warp, float* logits) {
  const int step = shape.is_operand ? 8 : 1;
#pragma unroll 1
  for (int head = warp * step; head < heads; head += kWarps / 2 * step) {
    if (!shape.is_operand) {
      find_logits_any(a, item, first_head, head, logits);
    } else if (shape.query_type == ScalarType::kBFloat16) {
      find_logits_mma<true>(a, shape.head_dim, item, first_head, head, heads, logits);
    } else {
      find_logits_mma<false>(a, shape.head_dim, item, first_head, head, heads, logits);
    }
  }
}

// Base and tail, 16 lanes a query head. Logits are in log2 units; q.reference is taken off them,
// since the centroids do without it. `warp` as above.
__device__ __forceinline__ void write_base(const PrepareArguments& a, int head_dim,
                                           const GroupItem& item, int first_head, int heads,
                                           int warp, const GroupMemory& m) {
  const int lane = lane_index() % kLargestKeys;
  const int row_pieces = head_dim / kPieceChannels;
  const float none = __int_as_float(0xFF800000);  // -inf
#pragma unroll 1
  for (int first = warp * 2; first < heads; first += kWarps) {
    const int g = first + lane_index() / kLargestKeys;
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
    const float base = fmaxf(logits[0], logits[item.num_keys() - 1]) - offset;
    const float tail = item.num_tail == 0 ? none : largest + log2f(mass) - offset - base;
    if (lane != 0 || g >= heads) continue;
    a.step.workspace.base[item.first_query + first_head + g] = base;
    a.step.workspace.log2_tail[item.first_query + first_head + g] = tail;
  }
}

// Both halves of the threads at once, each through code of its own. The half that finds logits
// waits for the queries' products with the reference; the other half goes on to its fragments. A
// head's fragment is made by the threads that have rotated it, which are of one warp, but for the
// later heads of 64 channels: for those the half meets.
template <class Shape>
__device__ __forceinline__ void prepare_group(const PrepareArguments& a, const Shape& shape,
                                              const GroupItem& item, float* memory) {
  const int d = shape.head_dim;
  const GroupMemory m(memory);
  const int warp = warp_index();
  constexpr int kProducts = 1, kQueries = 2;          // barriers
  const int end = shape.has_fragments ? 1 : a.group;  // all heads of such a group at once
  for (int first_head = 0; first_head < end; first_head += kHeadsAtOnce) {
    const int heads = min(a.group - first_head, kHeadsAtOnce);
    if (warp < kWarps / 2) {
      write_rotated(a, shape, item, first_head, heads, m);
      arrive_at<kWarps>(kProducts);
      if (shape.has_fragments) {
        if (d < 128 && a.group > kFragmentHeads) wait_at<kWarps / 2>(kQueries);
        write_fragments(a.step.layout.format, m.rotated, a.group, d, item.fragments);
      }
    } else {
      find_logits(a, shape, item, first_head, heads, warp - kWarps / 2, m.logits);
      wait_at<kWarps>(kProducts);
      write_base(a, d, item, first_head, heads, warp - kWarps / 2, m);
    }
    __syncthreads();  // the memory is used again
  }
}

}  // namespace

}  // namespace locks::detail
