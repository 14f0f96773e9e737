// The merge of a pass: what the warps of a cluster attended to becomes outputs.
//
// A warp leaves its sums in its tile's place (head_at) and (largest logit, sum of weights) of each
// head in parts(). Each CTA adds up its warps and sends every unit of 4 channels to the CTA that
// owns it, and its largest logits and weights to all; the owner adds up the CTAs, divides and
// writes. Orders are fixed, so outputs are the same from run to run.
#pragma once

#include "core/ptx.cuh"
#include "core/scalar.h"
#include "decode/select_attend_cuda_shared.cuh"

namespace locks::detail {

inline constexpr float kLn2 = 0.693147180559945309f;

template <int kHeadDim, int kThreads>
struct Merge {
  using Memory = Layout<kHeadDim, kThreads>;

  const StepArguments& args;
  const RowHead& row;
  const Mail& mail;
  unsigned char* memory;
  Control& control;
  int lane, warp;
  int tile_warps = Memory::kAreaWarps;  // warps that attend

  __device__ float2* parts() const {  // [warp][head]
    return reinterpret_cast<float2*>(memory + Memory::kMergeAt);
  }

  // Where head h of a warp's output starts, in floats: pairs of heads are 2 floats apart in banks.
  __device__ static constexpr int head_at(int head) {
    return head / 2 * (2 * kHeadDim + 2) + head % 2 * kHeadDim;
  }
  static_assert(4 * (2 * kHeadDim + 2) * 4 <= Memory::kTileBytes);

  // Of a part with its largest logit against the largest of all; 0 for a part without tokens.
  __device__ static float merge_weight(float largest_of_part, float top) {
    return largest_of_part == kMinusInfinity ? 0.0f : exp2_fast(largest_of_part - top);
  }

  // Outputs of a pass in units of 4 channels, dealt out to the CTAs in equal runs.
  __device__ int pass_heads(int pass) const {
    return min(row.group - pass * kPassHeads, kPassHeads);
  }
  __device__ int num_units(int pass) const { return pass_heads(pass) * (kHeadDim / 4); }
  __device__ int cta_units(int pass) const {
    return quotient(num_units(pass) + row.cluster() - 1, row.cluster());
  }
  __device__ int own_units(int pass) const {
    const int each = cta_units(pass);
    return min(max(num_units(pass) - row.rank() * each, 0), each);
  }

  __device__ void expect_outputs(int pass) const {
    if (row.cluster() == 1 || opaque(static_cast<int>(threadIdx.x)) != 0) return;
    barrier_expect_bytes(Mail::barrier(control, kOutputs),
                         row.cluster() * (own_units(pass) * 16 + kPassHeads * 8));
  }

  // By all threads, once every warp that attends has left its part.
  __device__ void finish(int pass) const {
    const std::uint32_t barrier = Mail::barrier(control, kOutputs);
    __syncthreads();
    send_outputs(pass, barrier);
    if (warp == Memory::kWarps - 1) send_weights(barrier);
    mail.wait(barrier, pass & 1);
    write_outputs(pass);
  }

  __device__ float4* inbox() const {
    return reinterpret_cast<float4*>(memory + Memory::kFirstInboxAt);
  }
  __device__ float2* weight_inbox() const {
    return reinterpret_cast<float2*>(memory + Memory::kMergeInboxAt);
  }

  // The sum of x over groups of `lanes` neighbouring lanes, in all of them.
  __device__ static float sum_over(float x, int lanes) {
#pragma unroll
    for (int apart = 1; apart < lanes; apart *= 2) x += __shfl_xor_sync(kAllLanes, x, apart);
    return x;
  }
  __device__ static float max_over(float x, int lanes) {
#pragma unroll
    for (int apart = 1; apart < lanes; apart *= 2) {
      x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, apart));
    }
    return x;
  }
  __device__ static float4 sum_over(float4 x, int lanes) {
    return {sum_over(x.x, lanes), sum_over(x.y, lanes), sum_over(x.z, lanes), sum_over(x.w, lanes)};
  }

  // Two lanes a unit, each for every other warp.
  __device__ void send_outputs(int pass, std::uint32_t barrier) const {
    const int each = cta_units(pass);
    const int units = num_units(pass);
#pragma unroll 1
    for (int begin = 0; begin < units; begin += kThreads / 2) {
      const int unit = begin + static_cast<int>(threadIdx.x) / 2;
      const int head = min(unit / (kHeadDim / 4), kPassHeads - 1);
      const int c = unit % (kHeadDim / 4) * 4;
      // Warps without tokens left zeros, and weigh nothing. Weights are made twice: kept, they
      // would cost the registers that the loops around need.
      float top = kMinusInfinity;
#pragma unroll 2
      for (int w = lane % 2; w < tile_warps; w += 2) {
        top = fmaxf(top, parts()[w * kPassHeads + head].x);
      }
      top = max_over(top, 2);
      float4 sum{0, 0, 0, 0};
#pragma unroll 2
      for (int w = lane % 2; w < tile_warps; w += 2) {
        const float weight = merge_weight(parts()[w * kPassHeads + head].x, top);
        const auto* out =
            reinterpret_cast<const float*>(Memory::tile(memory, w)) + head_at(head) + c;
        const float2 a = *reinterpret_cast<const float2*>(out);
        const float2 b = *reinterpret_cast<const float2*>(out + 2);
        sum.x += weight * a.x;
        sum.y += weight * a.y;
        sum.z += weight * b.x;
        sum.w += weight * b.y;
      }
      sum = sum_over(sum, 2);
      if (unit < units && lane % 2 == 0) {
        const int to = quotient(unit, each);
        mail.put(inbox() + row.rank() * each + unit - to * each,
                 make_uint4(__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z),
                            __float_as_uint(sum.w)),
                 to, barrier);
      }
    }
  }

  // One warp: the CTA's largest logit and weight sum of each head to all CTAs, 4 lanes a head.
  __device__ void send_weights(std::uint32_t barrier) const {
    const int lane = opaque(this->lane);
    const int head = lane / 4;
    float2 part[Memory::kWarps / 4];
    float top = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < Memory::kWarps / 4; ++i) {
      const int w = 4 * i + lane % 4;
      part[i] = w < tile_warps ? parts()[w * kPassHeads + head] : make_float2(kMinusInfinity, 0);
      top = fmaxf(top, part[i].x);
    }
    top = max_over(top, 4);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Memory::kWarps / 4; ++i) sum += part[i].y * merge_weight(part[i].x, top);
    sum = sum_over(sum, 4);
#pragma unroll 1
    for (int to = lane % 4; to < row.cluster(); to += 4) {
      mail.put(weight_inbox() + row.rank() * kPassHeads + head,
               make_uint2(__float_as_uint(top), __float_as_uint(sum)), to, barrier);
    }
  }

  // Eight lanes a unit, each for one or two CTAs.
  __device__ void write_outputs(int pass) const {
    const int each = cta_units(pass);
    const int units = own_units(pass);
    const int first_head = row.kv_head * row.group + pass * kPassHeads;
#pragma unroll 1
    for (int begin = 0; begin < units; begin += kThreads / 8) {
      const int unit = begin + static_cast<int>(threadIdx.x) / 8;
      if (__all_sync(kAllLanes, unit >= units)) return;
      const int at = (row.rank() * each + unit) * 4;
      const int head = min(at / kHeadDim, kPassHeads - 1);
      float2 part[2];
      float4 value[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int cta = lane % 8 + 8 * i;
        const bool there = cta < row.cluster() && unit < units;
        part[i] = there ? weight_inbox()[cta * kPassHeads + head] : make_float2(kMinusInfinity, 0);
        if (there) value[i] = inbox()[cta * each + unit];
      }
      const float top = max_over(fmaxf(part[0].x, part[1].x), 8);
      float weights = 0;
      float4 sum{0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float weight = merge_weight(part[i].x, top);
        weights += weight * part[i].y;
        sum.x += weight * value[i].x;
        sum.y += weight * value[i].y;
        sum.z += weight * value[i].z;
        sum.w += weight * value[i].w;
      }
      weights = sum_over(weights, 8);
      sum = sum_over(sum, 8);
      if (unit >= units) continue;
      const int i = lane % 8;
      const float mine = i == 0 ? sum.x : i == 1 ? sum.y : i == 2 ? sum.z : sum.w;
      if (i < 4) {
        store_scalar(args.output.data, args.output.type,
                     std::int64_t{row.row} * args.output.seq_stride +
                         (first_head + head) * args.output.head_stride + at % kHeadDim + i,
                     weights == 0 ? 0.0f : mine / weights);
      }
      if (i == 4 && at % kHeadDim == 0 && args.output.lse != nullptr) {
        args.output
            .lse[std::int64_t{row.row} * args.attention.num_query_heads + first_head + head] =
            weights == 0 ? kMinusInfinity : (top + log2f(weights)) * kLn2;
      }
    }
  }
};

}  // namespace locks::detail
