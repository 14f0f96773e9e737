// Exact attention of up to 8 query heads over the pages of one CTA. Each warp ends with its part of
// the outputs, which select_attend_cuda_merge.cuh puts together.
//
// A warp takes tiles of 16 tokens, 4 quads of 4 tokens each, from its source in turn: a tile is
// copied to the warp's place in shared memory while other warps compute. Bytes are 4 * head_dim a
// token, once for all heads of a pass; the limit is how many copies are on their way.
//
// Both products use m16n8k16. Scores: A holds the queries, heads in rows 0 to 7, and in rows 8 to
// 15 what rounding to the cache's type lost of them; B holds keys. Outputs: A holds values
// transposed (rows are channels), B holds the softmax weights, which lie where the scores left
// them. Channels are permuted so that keys and values are read 16 bytes a lane.
//
// Token i of the 16 (i = 8 y + 2 j + x) is token x + 2 y of quad (j + 2 x) % 4. Lanes that read at
// once then read quads whose places differ by 32 bytes (values) or 64 bytes (keys): no two lanes
// share a bank.
#pragma once

#include "decode/select_attend_cuda_merge.cuh"
#include "decode/select_attend_cuda_tiles.cuh"

namespace locks::detail {

inline constexpr int kTileQuads = 4;
inline constexpr float kLog2E = 1.44269504088896341f;

template <bool kBf16>
__device__ inline void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  if constexpr (kBf16) {
    mma_bf16(d, a, b0, b1);
  } else {
    mma_f16(d, a, b0, b1);
  }
}

// One quad of a warp's tile, held by its 8 lanes.
struct Quad {
  int token;        // its first, within the cache block
  int tokens;       // valid ones, 0 to 4
  std::int32_t id;  // of the cache block; may be on its way
};

template <int kHeadDim, bool kBf16, int kThreads>
struct Attention {
  using Memory = Layout<kHeadDim, kThreads>;
  static constexpr int kSteps = kHeadDim / 16;  // of 16 channels
  static constexpr int kWide = kHeadDim / 64;   // runs of 64 channels of values
  static constexpr int kRest = kHeadDim % 64;   // 0, 16 (of 80) or 32 (of 96)
  static_assert(kRest == 0 || kRest == 16 || kRest == 32, "add_values has no code for this rest");

  const StepArguments& args;
  const SelectAttendShape& shape;
  const RowHead& row;
  unsigned char* memory;
  Control& control;
  int lane, warp;
  Merge<kHeadDim, kThreads> merge;
  std::uint32_t parity = 0;  // of the warp's barrier
  float largest;             // logit so far, of head lane / 4
  float weight_sum;          // this lane's part
  float output[kSteps][4];

  __device__ Attention(const StepArguments& a, const SelectAttendShape& s, const RowHead& r,
                       unsigned char* m, Control& c, const Mail& mail)
      : args(a),
        shape(s),
        row(r),
        memory(m),
        control(c),
        lane(static_cast<int>(threadIdx.x % kWarpLanes)),
        warp(static_cast<int>(threadIdx.x / kWarpLanes)),
        merge{a, r, mail, m, c, lane, warp} {}

  __device__ unsigned char* tile() const { return Memory::tile(memory, warp); }

  // As many warps attend as there are tiles. More than the area has places for only where the keys
  // are not needed any more: a decision of all threads.
  __device__ void set_warps(int tiles, bool have_place_of_keys) {
    merge.tile_warps = min(max(tiles, 1), Memory::kAreaWarps);
    if constexpr (Memory::kAreaWarps < Memory::kWarps) {
      if (tiles <= Memory::kAreaWarps || !have_place_of_keys) return;
      fence_before_bulk_copies();
      __syncthreads();
      const int places = Memory::kAreaWarps + shape.key_groups * 32 / Memory::kTileBytes;
      merge.tile_warps = min(min(places, Memory::kWarps), tiles);
    }
  }

  __device__ void reset() {
    lane = merge.opaque_lane();
    largest = kMinusInfinity;
    weight_sum = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[s][i] = 0;
    }
  }

  __device__ void load_query(int pass) const {
    const int first = row.kv_head * row.group + pass * kPassHeads;
    const int end = min(first + kPassHeads, (row.kv_head + 1) * row.group);
    detail::load_query<kHeadDim, kBf16, kThreads>(
        args.query, shape.query_as_cache, reinterpret_cast<uint4*>(memory + Memory::kQueryAt),
        row.row, first, end);
  }

  // Its block id is on its way.
  __device__ Quad look_up(int token, int tokens) const {
    Quad quad{token, tokens, -1};
    if (tokens == 0) return quad;
    const int block_tokens = args.keys.block_tokens;
    const int cache_block =
        shape.block_shift >= 0 ? token >> shape.block_shift : token / block_tokens;
    quad.token = token - cache_block * block_tokens;
    quad.id = args.seqs.cache_blocks
                  .ids[static_cast<std::uint32_t>(row.row) * args.seqs.cache_blocks.seq_stride +
                       cache_block];
    return quad;
  }

  // A block id outside the cache is skipped.
  __device__ void check(Quad& quad) const {
    if (quad.id < 0 || quad.id >= args.keys.num_blocks) quad.tokens = 0;
  }

  // The quad's first row of keys or values. Factors are not negative, which saves instructions.
  __device__ const unsigned char* first_row(const PagedTensor& rows, const Quad& quad) const {
    const std::int64_t at = static_cast<std::uint32_t>(row.kv_head) * rows.head_stride +
                            static_cast<std::uint32_t>(quad.token) * rows.token_stride;
    return static_cast<const unsigned char*>(rows.data) +
           2 * (at + static_cast<std::uint32_t>(quad.id) * rows.block_stride);
  }

  __device__ bool next(Tiles& tiles, Quad& quad) const {
    int token = 0;
    int tokens = 0;
    if (!tiles.fill(token, tokens)) return false;
    quad = look_up(token, tokens);
    return true;
  }

  // Starts the copies of a tile, all lanes.
  __device__ void fetch(const Quad& quad) const {
    if (kHasHopper && shape.rows_aligned) {
      fetch_bulk(quad);
    } else {
      fetch_rows(quad);
    }
  }

  // Each quad's first lane tells the barrier what the quad brings: kTileQuads arrivals.
  __device__ void fetch_bulk(const Quad& quad) const {
    const std::uint32_t barrier = shared_address(&control.tile[warp]);
    const std::uint64_t policy = policy_evict_first();
    const std::uint32_t to = shared_address(tile()) + lane / 8 * Memory::kQuadBytes;
    if (lane % 8 == 0) {
      barrier_expect_bytes(barrier, quad.tokens * Memory::kTokenBytes);
      if (shape.rows_together && quad.tokens > 0) {
        copy_bulk(to, first_row(args.keys, quad), quad.tokens * Memory::kTokenBytes, barrier,
                  policy);
      }
    }
    if (shape.rows_together) return;
    __syncwarp();
    const int token = lane % 4;
    if (token >= quad.tokens) return;
    const bool is_key = lane % 8 < 4;
    const PagedTensor& rows = is_key ? args.keys : args.values;
    copy_bulk(to + token * Memory::kTokenBytes + (is_key ? 0 : Memory::kRowBytes),
              first_row(rows, quad) + 2 * token * rows.token_stride, Memory::kRowBytes, barrier,
              policy);
  }

  // A warp has room for one tile: the next comes as far as L2 while this one is attended to.
  __device__ void prefetch(const Quad& quad) const {
    if constexpr (kHasHopper) {
      if (shape.rows_aligned && shape.rows_together && lane % 8 == 0 && quad.tokens > 0) {
        prefetch_bulk(first_row(args.keys, quad), quad.tokens * Memory::kTokenBytes);
      }
    }
  }

  // Rows by the lanes themselves: devices without bulk copies, and rows that are not aligned.
  __device__ void fetch_rows(const Quad& quad) const {
    constexpr int kPieces = Memory::kRowBytes / 16;
    const auto own_keys = reinterpret_cast<std::uintptr_t>(first_row(args.keys, quad));
    const auto own_values = reinterpret_cast<std::uintptr_t>(first_row(args.values, quad));
#pragma unroll 1
    for (int r = 0; r < kBlockTokens; ++r) {
      const int from_lane = r / 4 * 8;
      const int tokens = __shfl_sync(kAllLanes, quad.tokens, from_lane);
      const std::uintptr_t keys = __shfl_sync(kAllLanes, own_keys, from_lane);
      const std::uintptr_t values = __shfl_sync(kAllLanes, own_values, from_lane);
      if (r % 4 >= tokens) continue;
      unsigned char* to = tile() + r / 4 * Memory::kQuadBytes + r % 4 * Memory::kTokenBytes;
#pragma unroll 1
      for (int piece = lane; piece < 2 * kPieces; piece += kWarpLanes) {
        const unsigned char* from =
            piece < kPieces ? reinterpret_cast<const unsigned char*>(keys) +
                                  2 * (r % 4) * args.keys.token_stride + piece * 16
                            : reinterpret_cast<const unsigned char*>(values) +
                                  2 * (r % 4) * args.values.token_stride + (piece - kPieces) * 16;
        if (shape.rows_aligned) {
          copy_async_16(shared_address(to + piece * 16), from);
        } else {
#pragma unroll 1
          for (int e = 0; e < 8; ++e) {
            reinterpret_cast<std::uint16_t*>(to + piece * 16)[e] =
                reinterpret_cast<const std::uint16_t*>(from)[e];
          }
        }
      }
    }
    copy_async_commit();
  }

  __device__ void wait_for_tile() {
    if (kHasHopper && shape.rows_aligned) {
      barrier_wait(shared_address(&control.tile[warp]), parity);
      parity ^= 1;
    } else {
      copy_async_wait<0>();
      __syncwarp();
    }
  }

  // Attends to all tiles of the source. `fetched`: one tile is on its way already, and `keep` tells
  // this lane how many tokens of its quad of it are wanted after all.
  __device__ void attend(Tiles& tiles, bool fetched, int keep) {
    if (warp >= merge.tile_warps) return;
#pragma unroll 1
    for (;;) {
      Quad quad{0, 0, -1};
      const bool more = next(tiles, quad);
      if (fetched) wait_for_tile();
      if (more) check(quad);
      if (fetched) {
        // Whole rows ask for enough as it is: prefetches make them 10 % slower.
        if (more && tiles.source != Source::kDense) prefetch(quad);
        if (__any_sync(kAllLanes, keep > 0)) attend_tile(keep);
        __syncwarp();
      }
      if (!more) return;
      fetch(quad);
      fetched = true;
      keep = quad.tokens;
    }
  }

  __device__ const unsigned char* token_row(int quad, int token) const {
    return tile() + quad * Memory::kQuadBytes + token * Memory::kTokenBytes;
  }

  __device__ void attend_tile(int tokens) {
    const int g = lane / 4;
    const int j = lane % 4;
    float score[2][4] = {};
    score_tile(score, g, j);

    // Valid tokens of the quads that this lane's tokens lie in, x = 0 and x = 1.
    const int valid[2] = {__shfl_sync(kAllLanes, tokens, j * 8),
                          __shfl_sync(kAllLanes, tokens, (j + 2) % 4 * 8)};
    const bool full = __all_sync(kAllLanes, tokens == 4);
    const float scale = args.attention.scale * kLog2E;
    float logit[2][2];
    float top = kMinusInfinity;
#pragma unroll
    for (int y = 0; y < 2; ++y) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        // The lower rows hold what rounding took off the queries: nothing if they are as the cache,
        // but an infinite key would make NaN of it.
        const float rest = shape.query_as_cache ? 0.0f : score[y][x + 2];
        const float value = (score[y][x] + rest) * scale;
        logit[y][x] = x + 2 * y < valid[x] ? value : kMinusInfinity;
        top = fmaxf(top, logit[y][x]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    const float now = fmaxf(largest, top);
    const float base = now == kMinusInfinity ? 0.0f : now;
    const float fade = exp2_fast(largest - base);
    // Not with the first tile, which finds zeros.
    const bool fades = __any_sync(kAllLanes, largest != kMinusInfinity && now != largest);
    largest = now;
    float weight[2][2];
#pragma unroll
    for (int y = 0; y < 2; ++y) {
#pragma unroll
      for (int x = 0; x < 2; ++x) weight[y][x] = exp2_fast(logit[y][x] - base);
    }
    weight_sum =
        weight_sum * fade + ((weight[0][0] + weight[0][1]) + (weight[1][0] + weight[1][1]));
    const std::uint32_t b0 = pack_pair<kBf16>(weight[0][0], weight[0][1]);
    const std::uint32_t b1 = pack_pair<kBf16>(weight[1][0], weight[1][1]);
    if (fades) fade_outputs(fade, j);
    if (full) {
      add_values<true>(b0, b1, g, j, valid);
    } else {
      add_values<false>(b0, b1, g, j, valid);
    }
  }

  // To a larger base; `fade` is of head g. Output columns are heads 2 j and 2 j + 1.
  __device__ void fade_outputs(float fade, int j) {
    const float fade0 = __shfl_sync(kAllLanes, fade, j * 8);
    const float fade1 = __shfl_sync(kAllLanes, fade, j * 8 + 4);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      output[s][0] *= fade0;
      output[s][1] *= fade1;
      output[s][2] *= fade0;
      output[s][3] *= fade1;
    }
  }

  __device__ void score_tile(float (&score)[2][4], int g, int j) const {
    const auto* query = reinterpret_cast<const uint4*>(memory + Memory::kQueryAt) + lane;
    const int quad = (g / 2 + 2 * (g % 2)) % 4;
    const unsigned char* key[2] = {token_row(quad, g % 2), token_row(quad, g % 2 + 2)};
#pragma unroll
    for (int run = 0; run < kHeadDim / 32; ++run) {
      const uint4 q0 = query[2 * run * kWarpLanes];
      const uint4 q1 = query[(2 * run + 1) * kWarpLanes];
      const std::uint32_t a0[4] = {q0.x, q0.y, q0.z, q0.w};
      const std::uint32_t a1[4] = {q1.x, q1.y, q1.z, q1.w};
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const uint4 k = *reinterpret_cast<const uint4*>(key[y] + run * 64 + j * 16);
        multiply<kBf16>(score[y], a0, k.x, k.y);
        multiply<kBf16>(score[y], a1, k.z, k.w);
      }
    }
    if constexpr (kHeadDim % 32 != 0) {
      const uint4 q = query[(kSteps - 1) * kWarpLanes];
      const std::uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const uint2 k = *reinterpret_cast<const uint2*>(key[y] + kHeadDim / 32 * 64 + j * 8);
        multiply<kBf16>(score[y], a, k.x, k.y);
      }
    }
  }

  // Words of values: [y][x] of this lane's 4 tokens; invalid tokens give zeros, since what lies
  // there may be NaN.
  template <bool kFull, class Word>
  __device__ void load_values(Word (&word)[2][2], int offset, int j, const int (&valid)[2]) const {
#pragma unroll
    for (int y = 0; y < 2; ++y) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        word[y][x] = *reinterpret_cast<const Word*>(token_row((j + 2 * x) % 4, x + 2 * y) +
                                                    Memory::kRowBytes + offset);
        if (!kFull && x + 2 * y >= valid[x]) word[y][x] = Word{};
      }
    }
  }

  // Channels 2 w and 2 w + 1 of the lane's run, as rows g and g + 8 of a step.
  __device__ void add_step(int step, std::uint32_t v00, std::uint32_t v01, std::uint32_t v10,
                           std::uint32_t v11, std::uint32_t b0, std::uint32_t b1) {
    const std::uint32_t a[4] = {__byte_perm(v00, v01, 0x5410), __byte_perm(v00, v01, 0x7632),
                                __byte_perm(v10, v11, 0x5410), __byte_perm(v10, v11, 0x7632)};
    multiply<kBf16>(output[step], a, b0, b1);
  }

  template <bool kFull>
  __device__ void add_values(std::uint32_t b0, std::uint32_t b1, int g, int j,
                             const int (&valid)[2]) {
#pragma unroll
    for (int run = 0; run < kWide; ++run) {
      uint4 v[2][2];
      load_values<kFull>(v, run * 128 + g * 16, j, valid);
      add_step(4 * run, v[0][0].x, v[0][1].x, v[1][0].x, v[1][1].x, b0, b1);
      add_step(4 * run + 1, v[0][0].y, v[0][1].y, v[1][0].y, v[1][1].y, b0, b1);
      add_step(4 * run + 2, v[0][0].z, v[0][1].z, v[1][0].z, v[1][1].z, b0, b1);
      add_step(4 * run + 3, v[0][0].w, v[0][1].w, v[1][0].w, v[1][1].w, b0, b1);
    }
    if constexpr (kRest == 32) {
      uint2 v[2][2];
      load_values<kFull>(v, kWide * 128 + g * 8, j, valid);
      add_step(4 * kWide, v[0][0].x, v[0][1].x, v[1][0].x, v[1][1].x, b0, b1);
      add_step(4 * kWide + 1, v[0][0].y, v[0][1].y, v[1][0].y, v[1][1].y, b0, b1);
    } else if constexpr (kRest == 16) {
      std::uint32_t v[2][2];
      load_values<kFull>(v, kWide * 128 + g * 4, j, valid);
      add_step(4 * kWide, v[0][0], v[0][1], v[1][0], v[1][1], b0, b1);
    }
  }

  // First of the two neighbouring channels that rows g and g + 8 of a step are.
  __device__ static int channel(int step, int g) {
    const int run = step / 4;
    if (run < kWide) return run * 64 + g * 8 + step % 4 * 2;
    return kWide * 64 + (kRest == 32 ? g * 4 + step % 4 * 2 : g * 2);
  }

  // Leaves the warp's part for the merge; nothing, if it did not attend.
  __device__ void store_partial() {
    const int lane = merge.opaque_lane();
    if (warp >= merge.tile_warps) {
      if (lane < kPassHeads) {
        merge.parts()[warp * kPassHeads + lane] = make_float2(kMinusInfinity, 0);
      }
      return;
    }
    const int g = lane / 4;
    const int j = lane % 4;
    weight_sum += __shfl_xor_sync(kAllLanes, weight_sum, 1);
    weight_sum += __shfl_xor_sync(kAllLanes, weight_sum, 2);
    // Nothing but NaN logits: let them through.
    if (weight_sum != 0 && largest == kMinusInfinity) largest = 0;
    if (j == 0) merge.parts()[warp * kPassHeads + g] = make_float2(largest, weight_sum);
    __syncwarp();
    auto* out = reinterpret_cast<float*>(tile());
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      // Addresses differ by constants but within the first run of 64 channels.
      const int run = s / 4 < kWide ? s / 4 : 0;
      float* to = out + merge.place(2 * j, channel(s - 4 * run, g)) + 64 * run;
      *reinterpret_cast<float2*>(to) = make_float2(output[s][0], output[s][2]);
      *reinterpret_cast<float2*>(to + kHeadDim) = make_float2(output[s][1], output[s][3]);
    }
  }
};

}  // namespace locks::detail
