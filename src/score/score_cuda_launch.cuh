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

// stage_budget: bytes of shared memory that the ring may take.
template <class Consumer>
StreamPlan plan_stream(const AttentionParams& attention, int stage_budget) {
  StreamPlan plan{};
  const int heads = attention.num_kv_heads;
  plan.num_chunks = (heads + kSlots - 1) / kSlots;
  plan.heads_per_unit = (heads + plan.num_chunks - 1) / plan.num_chunks;
  plan.tiles_per_unit = plan.num_chunks == 1 ? kSlots / plan.heads_per_unit : 1;
  plan.group_size = attention.group_size();
  plan.num_fragments = (plan.group_size + kFragmentHeads - 1) / kFragmentHeads;
  // A stage is always used by the same warps, so that none can be two rounds ahead of it.
  const int at_once = Consumer::kWarps / (kSlots * plan.num_fragments) * Consumer::kParts;
  const int rounds = std::min(stage_budget / Consumer::kStageBytes, kMaxStages) / at_once;
  plan.num_stages = std::max(rounds, 1) * at_once;
  return plan;
}

template <class Consumer>
cudaError_t launch_stream(const StepArguments& args, int num_sms, int stage_budget,
                          cudaStream_t stream) {
  bool can_stream = false;
  if (const cudaError_t error = has_hopper_code(score_tiles_kernel<Consumer>, can_stream);
      error != cudaSuccess) {
    return error;
  }
  // A build without code of sm_90 has nothing in this kernel.
  if (!can_stream) return launch_score_any(args, stream);
  const StreamPlan plan = plan_stream<Consumer>(args.attention, stage_budget);
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
