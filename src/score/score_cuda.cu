// The tuned scorer of a decode step: streams the records of all scored rows once and writes the
// mass of every page (score_cuda_stream.cuh: grid, ownership; score_cuda_rank1.cuh and _rank8.cuh:
// the arithmetic; score_cuda_careful.cuh: what is rare).
//
// Bytes: record_bytes a block and KV head read, 2 bytes a page and query head written; for fine at
// d = 128 with 7 heads a group 544 and 56. It is bound by the read of the records.
#include <cuda_runtime.h>

#include "core/launch_cuda.h"
#include "score/score_cuda.h"
#include "score/score_cuda_launch.cuh"
#include "score/score_cuda_rank1.cuh"
#include "score/score_cuda_rank8.cuh"

namespace locks::detail {

namespace {

constexpr int kConsumerWarps = 8;

// Half a tile a stage, so that work begins early and little is left behind the last bytes; a whole
// one where 32 pages, which a warp unpacks at a time, are as much.
template <int kHeadDim>
cudaError_t launch_tuned(const StepArguments& args, int num_sms, cudaStream_t stream) {
  using Fine = RecordShape<kHeadDim, 4, 1, 4, 4, 4>;
  using Fine8 = RecordShape<kHeadDim, 4, 1, 8, 8, 4>;
  using Compact = RecordShape<kHeadDim, 8, 1, 4, 4, 4>;
  using Wide = RecordShape<kHeadDim, 16, 8, 8, 4, 4>;
  using Paper = RecordShape<kHeadDim, 16, 8, 8, 4, 8>;
  const SummaryFormat& f = args.layout.format;
  const auto launch = [&]<class Consumer>() {
    if (args.layout.record_bytes != Consumer::Shape::kRecordBytes) return cudaErrorInvalidValue;
    return launch_stream<Consumer>(args, num_sms, stream);
  };
  if (f.page_tokens == 8) {
    return launch.template operator()<RankOneConsumer<Compact, 16, kConsumerWarps>>();
  }
  if (f.page_tokens == 4 && f.basis_bits == 4) {
    return launch.template operator()<RankOneConsumer<Fine, 8, kConsumerWarps>>();
  }
  if (f.page_tokens == 4) {
    return launch.template operator()<RankOneConsumer<Fine8, 8, kConsumerWarps>>();
  }
  if (f.coefficient_bits == 4) {
    return launch.template operator()<RankEightConsumer<Wide, 8, kConsumerWarps>>();
  }
  return launch.template operator()<RankEightConsumer<Paper, 8, kConsumerWarps>>();
}

}  // namespace

int fragment_words(const SummaryFormat& format, int group_size, int head_dim) {
  if (!has_fragments(format, group_size, head_dim)) return 0;
  const int fragments = (group_size + kFragmentHeads - 1) / kFragmentHeads;
  return fragments * one_fragment_words(format, head_dim);
}

cudaError_t launch_score(const StepArguments& args, cudaStream_t stream) {
  const AttentionParams& attention = args.attention;
  int num_sms = 0, major = 0;
  cudaError_t error = device_attribute(cudaDevAttrComputeCapabilityMajor, major);
  if (error == cudaSuccess) error = device_attribute(cudaDevAttrMultiProcessorCount, num_sms);
  if (error != cudaSuccess) return error;
  if (major != 9 ||
      !has_fragments(args.layout.format, attention.group_size(), attention.head_dim) ||
      args.seqs.num_seqs > kMaxStreamRows) {
    return launch_score_any(args, stream);
  }
  return attention.head_dim == 64 ? launch_tuned<64>(args, num_sms, stream)
                                  : launch_tuned<128>(args, num_sms, stream);
}

}  // namespace locks::detail
