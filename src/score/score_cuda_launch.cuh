// The launch of one tuned scorer.
#pragma once

#include <algorithm>

#include "core/launch_cuda.h"
#include "score/score_cuda.h"
#include "score/score_cuda_stream.cuh"

namespace locks::detail {

// The next kernel must not share an SM with a scorer still at work: it would wait there and hold up
// nothing but itself, while its CTAs crowd the SMs whose scorers are done (measured on an H200 in
// November 2026: 1.3 times the time of the chain). It takes more than 103 KiB of the SM's 227.
inline constexpr int kLeastStreamBytes = 124 * 1024;
// What a CTA of sm_90 may ask for.
inline constexpr int kMostStreamBytes = 227 * 1024;

// What the ring holds at least: enough bytes on their way to keep the memory busy. More of them
// stand in front of all other loads, the instructions of the launch behind among them: with 140 KB
// instead of 70 the chain of 131,072 tokens takes 0.6 us more (one run on an H200, December 2026).
inline constexpr int kLeastRingBytes = 64 * 1024;

template <class Consumer>
StreamPlan plan_stream(const AttentionParams& attention) {
  StreamPlan plan{};
  const int heads = attention.num_kv_heads;
  plan.num_chunks = (heads + kSlots - 1) / kSlots;
  plan.heads_per_unit = (heads + plan.num_chunks - 1) / plan.num_chunks;
  plan.tiles_per_unit = plan.num_chunks == 1 ? kSlots / plan.heads_per_unit : 1;
  plan.group_size = attention.group_size();
  plan.num_fragments = (plan.group_size + kFragmentHeads - 1) / kFragmentHeads;
  // A stage is always used by the same warps, so that none can be two rounds ahead of it.
  const int at_once = Consumer::kWarps / (kSlots * plan.num_fragments) * Consumer::kParts;
  const int round_bytes = at_once * Consumer::kStageBytes;
  const int rounds = (kLeastRingBytes + round_bytes - 1) / round_bytes;
  plan.num_stages = std::min(rounds, kMaxStages / at_once) * at_once;
  return plan;
}

template <class Consumer>
cudaError_t launch_stream(const StepArguments& args, int num_sms, cudaStream_t stream) {
  bool can_stream = false;
  if (const cudaError_t error = has_hopper_code(score_tiles_kernel<Consumer>, can_stream);
      error != cudaSuccess) {
    return error;
  }
  // The ring passes kLeastRingBytes by less than a round, and the largest is of one fragment.
  constexpr int kRoundBytes = Consumer::kWarps / kSlots * Consumer::kParts * Consumer::kStageBytes;
  static_assert(stream_layout<Consumer>(kMaxStreamRows, 0).bytes + kLeastRingBytes + kRoundBytes <=
                kMostStreamBytes);
  // A build without code of sm_90 has nothing in this kernel.
  if (!can_stream) return launch_score_any(args, stream);
  const StreamPlan plan = plan_stream<Consumer>(args.attention);
  const int bytes = std::max(stream_layout<Consumer>(args.seqs.num_seqs, plan.num_stages).bytes,
                             kLeastStreamBytes);
  if (const cudaError_t error = cudaFuncSetAttribute(
          score_tiles_kernel<Consumer>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      error != cudaSuccess) {
    return error;
  }
  return launch_early(score_tiles_kernel<Consumer>, num_sms,
                      (Consumer::kWarps + kProducerWarps) * 32, static_cast<std::size_t>(bytes),
                      stream, args, plan);
}

}  // namespace locks::detail
