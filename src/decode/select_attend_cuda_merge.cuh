// The merge of a pass: what the warps of a cluster attended to becomes outputs.
//
// A warp leaves its sums in its tile's place (place) and (largest logit, sum of weights) of each
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

  // The lane, as in opaque(): nothing made of it waits in a register for the end of a pass.
  __device__ int opaque_lane() const { return opaque(lane) & (kWarpLanes - 1); }

  __device__ float2* parts() const {  // [warp][head]
    return reinterpret_cast<float2*>(memory + Memory::kMergeAt);
  }

  // Where channel c of a head lies in a warp's output, in floats. Pairs of channels change places
  // within 8 channels, so that the heads that a warp stores at once lie in different banks, and
  // channels 4 n to 4 n + 3 stay one vector (vector_at).
  __device__ static constexpr int place(int head, int c) {
    return head * kHeadDim + (c ^ (head & 6));
  }
  static_assert(kPassHeads * kHeadDim * 4 <= Memory::kTileBytes && kHeadDim % 8 == 0);

  // The vector of channels c to c + 3, whose halves have changed places for every other two heads.
  __device__ static constexpr int vector_at(int head, int c) {
    return head * kHeadDim + (c ^ (head & 4));
  }
  __device__ static bool is_swapped(int head) { return (head & 2) != 0; }

  // What the largest logits of parts are weighed against, from the largest of all: parts without
  // tokens weigh nothing, and where there are no others that is 0 too.
  __device__ static float base_of(float top) { return top == kMinusInfinity ? 0.0f : top; }

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
  // The sums over 8 neighbouring lanes, one channel a lane: lane l has channel channel_of(l). Half
  // of what a lane holds goes to its neighbour at each step.
  __device__ static float scatter_sums(float4 x, int lane) {
    const bool odd = (lane & 1) != 0;
    const bool upper = (lane & 2) != 0;
    const float first = (odd ? x.z : x.x) + __shfl_xor_sync(kAllLanes, odd ? x.x : x.z, 1);
    const float second = (odd ? x.w : x.y) + __shfl_xor_sync(kAllLanes, odd ? x.y : x.w, 1);
    const float sum =
        (upper ? second : first) + __shfl_xor_sync(kAllLanes, upper ? first : second, 2);
    return sum + __shfl_xor_sync(kAllLanes, sum, 4);
  }
  __device__ static int channel_of(int lane) { return (lane & 1) * 2 + (lane >> 1 & 1); }

  // By all threads, once every warp has left its part. Two lanes a unit, each for every other warp;
  // lanes that read at once read neighbouring units.
  __device__ void send(int pass) const {
    constexpr int kHalf = kWarpLanes / 2;
    const std::uint32_t barrier = Mail::barrier(control, kOutputs);
    const int each = cta_units(pass);
    const int units = num_units(pass);
    const int lane = opaque_lane();
    int first = warp * kHalf;
    int to = opaque(quotient(first + lane % kHalf, each));  // takes its time: before the barrier
    __syncthreads();
#pragma unroll 1
    while (first < units) {
      const int unit = first + lane % kHalf;
      const int head = min(unit / (kHeadDim / 4), kPassHeads - 1);
      const float4 sum = sum_of_warps(head, unit % (kHeadDim / 4) * 4, lane / kHalf);
      if (unit < units && lane < kHalf) {
        mail.put(inbox() + row.rank() * each + unit - to * each,
                 make_uint4(__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z),
                            __float_as_uint(sum.w)),
                 to, barrier);
      }
      first += kThreads / 2;
      to = quotient(first + lane % kHalf, each);
    }
    if (warp == Memory::kWarps - 1) send_weights(barrier);
  }

  // Channels c to c + 3 of a head: this lane adds up every other warp, and both lanes get the sum.
  // All loads are issued at once.
  __device__ float4 sum_of_warps(int head, int c, int odd) const {
    constexpr int kEach = Memory::kWarps / 2;
    const int vector = vector_at(head, c);
    const int attending = (tile_warps + 1 - odd) / 2;
    float2 part[kEach];
    float4 output[kEach];
    float top = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int w = 2 * i + odd;
      part[i] = parts()[w * kPassHeads + head];
      output[i] = {0, 0, 0, 0};
      if (i < attending) {
        output[i] = reinterpret_cast<const float4*>(Memory::tile(memory, w))[vector / 4];
      }
      top = fmaxf(top, part[i].x);
    }
    const float base = base_of(fmaxf(top, __shfl_xor_sync(kAllLanes, top, kWarpLanes / 2)));
    float4 sum{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kEach; ++i) add_weighted(sum, output[i], exp2_fast(part[i].x - base));
    sum.x += __shfl_xor_sync(kAllLanes, sum.x, kWarpLanes / 2);
    sum.y += __shfl_xor_sync(kAllLanes, sum.y, kWarpLanes / 2);
    sum.z += __shfl_xor_sync(kAllLanes, sum.z, kWarpLanes / 2);
    sum.w += __shfl_xor_sync(kAllLanes, sum.w, kWarpLanes / 2);
    return is_swapped(head) ? float4{sum.z, sum.w, sum.x, sum.y} : sum;
  }

  __device__ static void add_weighted(float4& sum, float4 x, float weight) {
    sum.x += weight * x.x;
    sum.y += weight * x.y;
    sum.z += weight * x.z;
    sum.w += weight * x.w;
  }

  // One warp: the CTA's largest logit and weight sum of each head to all CTAs, 4 lanes a head.
  __device__ void send_weights(std::uint32_t barrier) const {
    const int lane = opaque_lane();
    const int head = lane / 4;
    float2 part[Memory::kWarps / 4];
    float top = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < Memory::kWarps / 4; ++i) {
      const int w = 4 * i + lane % 4;
      part[i] = parts()[w * kPassHeads + head];
      top = fmaxf(top, part[i].x);
    }
    top = max_over(top, 4);
    const float base = base_of(top);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Memory::kWarps / 4; ++i) sum += part[i].y * exp2_fast(part[i].x - base);
    sum = sum_over(sum, 4);
#pragma unroll 1
    for (int to = lane % 4; to < row.cluster(); to += 4) {
      mail.put(weight_inbox() + row.rank() * kPassHeads + head,
               make_uint2(__float_as_uint(top), __float_as_uint(sum)), to, barrier);
    }
  }

  // Eight lanes a unit, each for one or two CTAs. What hangs on no message is made while they come.
  __device__ void receive(int pass) const {
    const int each = cta_units(pass);
    const int units = own_units(pass);
    const int first_head = row.kv_head * row.group + pass * kPassHeads;
    const int at_once = kThreads / 8;
    const int lane = opaque_lane();
    Place place = place_of(warp * 4 + lane / 8, lane, each, first_head);
    mail.wait(Mail::barrier(control, kOutputs), pass & 1);
#pragma unroll 1
    for (int first = warp * 4; first < units; first += at_once) {
      write_unit(first + lane / 8, lane, units, each, place);
      place = place_of(first + at_once + lane / 8, lane, each, first_head);
    }
  }

  // Of a unit of this CTA.
  struct Place {
    int head;  // of the pass
    std::int64_t output;
    float* lse;  // null: another lane's, or not wanted
  };
  __device__ Place place_of(int unit, int lane, int each, int first_head) const {
    const int at = (row.rank() * each + unit) * 4;
    const int head = min(at / kHeadDim, kPassHeads - 1);
    Place place{head,
                row.row * args.output.seq_stride + (first_head + head) * args.output.head_stride +
                    at % kHeadDim + channel_of(lane),
                nullptr};
    if (args.output.lse != nullptr && at % kHeadDim == 0 && lane % 8 == 4) {
      place.lse = args.output.lse + std::int64_t{row.row} * args.attention.num_query_heads +
                  first_head + head;
    }
    return place;
  }

  __device__ void write_unit(int unit, int lane, int units, int each, const Place& place) const {
    float2 part[2];
    float4 value[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int cta = lane % 8 + 8 * i;
      const bool there = cta < row.cluster() && unit < units;
      part[i] =
          there ? weight_inbox()[cta * kPassHeads + place.head] : make_float2(kMinusInfinity, 0);
      if (there) value[i] = inbox()[cta * each + unit];
    }
    const float top = max_over(fmaxf(part[0].x, part[1].x), 8);
    const float base = base_of(top);
    float weights = 0;
    float4 sum{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float weight = exp2_fast(part[i].x - base);
      weights += weight * part[i].y;
      add_weighted(sum, value[i], weight);
    }
    weights = sum_over(weights, 8);
    const float mine = scatter_sums(sum, lane);
    if (unit >= units) return;
    if (lane % 8 < 4) {
      store_scalar(args.output.data, args.output.type, place.output,
                   weights == 0 ? 0.0f : mine / weights);
    }
    if (place.lse != nullptr) {
      *place.lse = weights == 0 ? kMinusInfinity : (top + log2f(weights)) * kLn2;
    }
  }
};

}  // namespace locks::detail
