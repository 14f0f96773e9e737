// The plain scorer: every format, head size and group, from sm_80 on.
//
// Grid: a fixed number of CTAs; a warp owns one (tile of 16 blocks, KV head) at a time and walks
// the tiles of all scored rows in steps of all warps. A lane owns a page (two lanes half a page's
// rows each where a tile has 16 pages, two pages after each other where it has 64), so sums over
// channels need no shuffles: codes become floats in the lane, and queries are floats that all lanes
// read from the same place. Sums of a tile are taken within a lane, then over the lanes by a tree.
//
// Bytes: record_bytes a record, once, and 2 bytes a page and query head written. Bound by
// instructions: a multiply-add for each channel, row and query head.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/launch_cuda.h"
#include "core/ptx.cuh"
#include "score/score_cuda.h"

namespace locks::detail {

namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 4;
constexpr int kCtasPerSm = 4;
constexpr unsigned kEveryLane = 0xFFFFFFFFu;
constexpr int kChunkBytes = 8;  // of a row: its rows are whole multiples
// Beyond this many binary orders above base a mass is taken for infinite: a float's logit is then
// off by more than a hundred orders anyway.
constexpr float kLargestLog2Mass = 0x1p30f;

struct ScoreArguments {
  StepArguments step;
  int group;
  std::uint32_t header;  // first word of a valid record's header
};

// Lanes and turns of a tile, and query heads at a time: 32 logits a lane.
template <int B>
struct Shape {
  static constexpr int kPages = kBlockTokens / B;  // of a block
  static constexpr int kSlots = kTileBlocks * kPages;
  static constexpr int kTurns = kSlots > kWarpSize ? kSlots / kWarpSize : 1;
  static constexpr int kSplit = kSlots < kWarpSize ? kWarpSize / kSlots : 1;  // lanes of a page
  static constexpr int kHeads = 32 / B;
};

// The row of a tile (of all rows' tiles, in order).
__device__ int find_row(const RowPlan* plan, int num_rows, std::int64_t tile) {
  int low = 0, high = num_rows;  // plan[low].first_tile <= tile < plan[high].first_tile
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (plan[middle].first_tile <= tile ? low : high) = middle;
  }
  return low;
}

// Null if the table names a cache block that does not exist.
__device__ const std::uint8_t* find_record(const StepArguments& a, int row, std::int64_t block,
                                           int head) {
  const int blocks = a.records.block_tokens / kBlockTokens;
  const BlockTable& table = a.seqs.record_blocks;
  const std::int64_t id = table.ids[row * table.seq_stride + block / blocks];
  if (id < 0 || id >= a.records.num_blocks) return nullptr;
  return a.records.data + id * a.records.block_stride + head * a.records.head_stride +
         block % blocks * a.records.record_bytes;
}

__device__ float read_fp16(const std::uint8_t* p) {
  return __half2float(*reinterpret_cast<const __half*>(p));
}

// Adds the products of codes with the queries of kHeads heads, for chunks `split`, split + kSplit,
// ... of one row. q: the first head's query; heads past the group repeat the last one.
template <int B>
__device__ void multiply_row(const std::uint8_t* row, int bits, int d, const float* q,
                             const int (&head_offset)[Shape<B>::kHeads], int split,
                             float (&sum)[Shape<B>::kHeads]) {
  constexpr int kHeads = Shape<B>::kHeads;
  const int num_chunks = d * bits / 8 / kChunkBytes;
  for (int chunk = split; chunk < num_chunks; chunk += Shape<B>::kSplit) {
    const uint2 packed = *reinterpret_cast<const uint2*>(row + chunk * kChunkBytes);
    const std::uint32_t words[2] = {packed.x, packed.y};
    const int first = chunk * kChunkBytes;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      float low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto byte = static_cast<std::int8_t>(words[w] >> (8 * i) & 255u);
        // An int4 byte is 16 * high + low + 8; an int8 byte is a code.
        low[i] = static_cast<float>(bits == 4 ? (byte & 15) - 8 : byte);
        high[i] = bits == 4 ? static_cast<float>(byte >> 4) : 0.0f;
      }
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        const float* channels = q + head_offset[g] + first + 4 * w;
        const float4 a = *reinterpret_cast<const float4*>(channels);
        sum[g] = fmaf(a.x, low[0], fmaf(a.y, low[1], fmaf(a.z, low[2], fmaf(a.w, low[3], sum[g]))));
        if (bits == 4) {
          const float4 b = *reinterpret_cast<const float4*>(channels + d / 2);
          sum[g] = fmaf(b.x, high[0],
                        fmaf(b.y, high[1], fmaf(b.z, high[2], fmaf(b.w, high[3], sum[g]))));
        }
      }
    }
  }
  if constexpr (Shape<B>::kSplit == 2) {
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
      sum[g] += __shfl_xor_sync(kEveryLane, sum[g], kWarpSize / 2);
    }
  }
}

// Where the parts of a lane's page lie.
struct PageParts {
  const std::uint8_t *rows, *scales, *coefficients;
};

// logits[g][t] = q.k of the page's tokens, as the record has them.
template <int B>
__device__ void find_logits(const RecordLayout& layout, const PageParts& page, const float* q,
                            const int (&head_offset)[Shape<B>::kHeads], int split,
                            float (&logits)[Shape<B>::kHeads][B]) {
  constexpr int kHeads = Shape<B>::kHeads;
  const SummaryFormat& format = layout.format;
  const int d = layout.head_dim;
  {
    float sum[kHeads] = {};
    multiply_row<B>(page.rows, format.centroid_bits, d, q, head_offset, split, sum);
    const float scale = read_fp16(page.scales);
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
#pragma unroll
      for (int t = 0; t < B; ++t) logits[g][t] = sum[g] * scale;
    }
  }
  for (int k = 0; k < format.rank; ++k) {
    float sum[kHeads] = {};
    multiply_row<B>(page.rows + layout.centroid_row_bytes + k * layout.basis_row_bytes,
                    format.basis_bits, d, q, head_offset, split, sum);
    const float scale = read_fp16(page.scales + 2 * (1 + k));
#pragma unroll
    for (int g = 0; g < kHeads; ++g) sum[g] *= scale;
#pragma unroll
    for (int t = 0; t < B; ++t) {
      const int place = k * B + t;
      const int code = format.coefficient_bits == 8
                           ? page.coefficients[place] - 128
                           : (page.coefficients[place / 2] >> (place % 2 * 4) & 15) - 8;
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        logits[g][t] = fmaf(sum[g], static_cast<float>(code), logits[g][t]);
      }
    }
  }
}

// log2 of a page's mass; NaN if a logit is not finite.
template <int B>
__device__ float log2_mass(const float (&logits)[B]) {
  float largest = logits[0];
#pragma unroll
  for (int t = 1; t < B; ++t) largest = fmaxf(largest, logits[t]);
  float mass = 0;
#pragma unroll
  for (int t = 0; t < B; ++t) mass += exp2f(logits[t] - largest);
  const float result = largest + log2f(mass);  // infinity - infinity is NaN
  return isfinite(result) ? result : __int_as_float(0x7FC00000);
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

// 2^log2_mass of the pages that a lane owns (NaN: none to count), shifted down by kShiftUnit *
// shift binary orders, and their sum over the tile, the same on every lane.
template <int kTurns>
__device__ float find_masses(const float (&log2_masses)[kTurns], int shift, float (&mass)[kTurns]) {
  const auto down = static_cast<float>(shift) * kShiftUnit;
  float sum = 0;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    mass[turn] = exp2f(log2_masses[turn] - down);
    sum += isnan(log2_masses[turn]) ? 0.0f : mass[turn];
  }
  return sum_warp(sum);
}

// The least shift that brings the tile's sum down to kLargestTileSum.
template <int kTurns>
__device__ int find_shift(const float (&log2_masses)[kTurns], float (&mass)[kTurns], float& sum) {
  sum = find_masses<kTurns>(log2_masses, 0, mass);
  if (sum <= kLargestTileSum) return 0;
  float largest = log2_masses[0];
#pragma unroll
  for (int turn = 1; turn < kTurns; ++turn) largest = fmaxf(largest, log2_masses[turn]);
  largest = max_warp(largest);
  // The largest page alone asks for this much, all pages of the tile for one more at most.
  constexpr float kLog2LargestSum = 100;
  const float asked = ceilf((largest - kLog2LargestSum) / kShiftUnit);
  int shift = static_cast<int>(fmaxf(asked, 1.0f));
  sum = find_masses<kTurns>(log2_masses, shift, mass);
  if (!(sum <= kLargestTileSum)) sum = find_masses<kTurns>(log2_masses, ++shift, mass);
  return shift;
}

template <int B>
__device__ void score_tile(const ScoreArguments& arguments, const RowPlan& plan, int row, int head,
                           std::int64_t tile) {
  using S = Shape<B>;
  const StepArguments& a = arguments.step;
  const RecordLayout& layout = a.layout;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int d = layout.head_dim, group = arguments.group;
  const int query_heads = a.attention.num_query_heads;
  const int split = S::kSplit == 1 ? 0 : lane / S::kSlots;

  // The lane's pages: null where the record is invalid or the row has no such block.
  PageParts pages[S::kTurns];
  bool exists[S::kTurns];
  int num_invalid = 0;
#pragma unroll
  for (int turn = 0; turn < S::kTurns; ++turn) {
    const int slot = lane % S::kSlots + turn * kWarpSize;
    const int page = slot / kMassBlocks % S::kPages;
    const std::int64_t block =
        tile * kTileBlocks + slot / (kMassBlocks * S::kPages) * kMassBlocks + slot % kMassBlocks;
    exists[turn] = block < plan.scored_blocks;
    const std::uint8_t* record = exists[turn] ? find_record(a, row, block, head) : nullptr;
    if (record != nullptr && *reinterpret_cast<const std::uint32_t*>(
                                 record + layout.header_offset) != arguments.header) {
      record = nullptr;
    }
    if (exists[turn] && record == nullptr && page == 0 && split == 0) ++num_invalid;
    pages[turn] = {nullptr, nullptr, nullptr};
    if (record != nullptr) {
      pages[turn] = {record + page * layout.page_rows_bytes,
                     record + layout.scales_offset + page * (1 + layout.format.rank) * 2,
                     record + layout.coefficients_offset + page * layout.page_coefficient_bytes};
    }
  }
  num_invalid = __reduce_add_sync(kEveryLane, num_invalid);
  if (lane == 0 && num_invalid != 0 && a.counters != nullptr) {
    atomicAdd(a.counters + kInvalidRecords, static_cast<unsigned long long>(num_invalid));
  }

  for (int first = 0; first < group; first += S::kHeads) {
    const std::int64_t query_head =
        static_cast<std::int64_t>(row) * query_heads + head * group + first;
    int head_offset[S::kHeads];
#pragma unroll
    for (int g = 0; g < S::kHeads; ++g) head_offset[g] = min(g, group - 1 - first) * d;
    float log2_masses[S::kHeads][S::kTurns];
#pragma unroll
    for (int turn = 0; turn < S::kTurns; ++turn) {
      float logits[S::kHeads][B];
      const bool is_valid = pages[turn].rows != nullptr;
      // A page of lanes that have none must still take part in the shuffles.
      const unsigned valid_lanes = __ballot_sync(kEveryLane, is_valid);
      if (valid_lanes == 0) {
#pragma unroll
        for (int g = 0; g < S::kHeads; ++g) log2_masses[g][turn] = __int_as_float(0x7FC00000);
        continue;
      }
      const int lender = __ffs(static_cast<int>(valid_lanes)) - 1;
      const auto borrow = [&](const std::uint8_t* mine) {
        const auto address = reinterpret_cast<unsigned long long>(mine);
        const unsigned long long other = __shfl_sync(kEveryLane, address, lender);
        return reinterpret_cast<const std::uint8_t*>(is_valid ? address : other);
      };
      const PageParts& own = pages[turn];
      const PageParts page{borrow(own.rows), borrow(own.scales), borrow(own.coefficients)};
      find_logits<B>(layout, page, a.workspace.rotated + query_head * d, head_offset, split,
                     logits);
#pragma unroll
      for (int g = 0; g < S::kHeads; ++g) {
        const float base = a.workspace.base[query_head + min(g, group - 1 - first)];
        const float mass = log2_mass<B>(logits[g]) - base;
        const bool is_scorable = is_valid && isfinite(mass) && mass < kLargestLog2Mass;
        log2_masses[g][turn] = is_scorable ? mass : __int_as_float(0x7FC00000);
      }
    }
#pragma unroll
    for (int g = 0; g < S::kHeads; ++g) {
      if (first + g >= group) break;
      float counted[S::kTurns], mass[S::kTurns], sum;
#pragma unroll
      for (int turn = 0; turn < S::kTurns; ++turn) {
        counted[turn] = split == 0 ? log2_masses[g][turn] : __int_as_float(0x7FC00000);
      }
      const int shift = find_shift<S::kTurns>(counted, mass, sum);
      const std::int64_t at = tile_index(plan, query_heads, head * group + first + g) + tile;
      if (split == 0) {
#pragma unroll
        for (int turn = 0; turn < S::kTurns; ++turn) {
          a.workspace.masses[at * S::kSlots + turn * kWarpSize + lane] =
              __float2bfloat16_rn(exists[turn] ? mass[turn] : 0.0f);
        }
      }
      if (lane == 0) {
        a.workspace.tile_sums[at] = shift > 0 ? -sum : sum;
        if (shift > 0) a.workspace.tile_shifts[at] = shift;
      }
    }
  }
}

template <int B>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    score_any_kernel(const __grid_constant__ ScoreArguments arguments) {
  wait_for_prior_kernel();
  allow_next_kernel();
  const StepArguments& a = arguments.step;
  const int heads = a.attention.num_kv_heads;
  const std::int64_t num_items =
      static_cast<std::int64_t>(a.plan[a.seqs.num_seqs].first_tile) * heads;
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * kWarps;
  for (std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
       item < num_items; item += num_warps) {
    const std::int64_t tile = item / heads;
    const int row = find_row(a.plan, a.seqs.num_seqs, tile);
    const RowPlan plan = a.plan[row];
    score_tile<B>(arguments, plan, row, static_cast<int>(item % heads), tile - plan.first_tile);
  }
}

template <int B>
cudaError_t launch(const ScoreArguments& arguments, cudaStream_t stream) {
  int num_sms = 0;
  if (const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, num_sms);
      error != cudaSuccess) {
    return error;
  }
  return launch_early(score_any_kernel<B>, num_sms * kCtasPerSm, kWarps * kWarpSize, 0, stream,
                      arguments);
}

}  // namespace

cudaError_t launch_score_any(const StepArguments& step, cudaStream_t stream) {
  if (step.seqs.num_seqs == 0) return cudaSuccess;
  const ScoreArguments arguments{step, step.attention.group_size(),
                                 kRecordMagic | static_cast<std::uint32_t>(kRecordVersion) << 16 |
                                     static_cast<std::uint32_t>(step.format_code) << 24};
  return for_page_tokens(step.layout.format.page_tokens,
                         [&](auto tokens) { return launch<tokens()>(arguments, stream); });
}

}  // namespace locks::detail
