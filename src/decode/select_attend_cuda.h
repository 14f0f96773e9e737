// How one launch of select_attend is cut up. launch_select_attend (step_cuda.h) chooses; tests and
// benchmarks ask for a cut of their own.
#pragma once

#include <cuda_runtime.h>

#include "decode/step_cuda.h"

namespace locks::detail {

inline constexpr int kMostCtas = 16;      // of a cluster
inline constexpr int kMostSmallCtas = 8;  // of one whose CTAs have 256 threads
inline constexpr int kCandidates = 1024;  // pages of the cut's bin that a cluster may exchange
inline constexpr int kMaxima = 4096;      // key groups of a CTA whose largest key is kept

struct SelectAttendCut {
  int threads;  // a CTA: 512, one CTA on a multiprocessor, or 256, two
  int cluster;  // CTAs that share one (row, KV head): 1 to largest_cluster(threads)
};

constexpr int largest_cluster(int threads) { return threads == 512 ? kMostCtas : kMostSmallCtas; }

// The cut for so many (row, KV head) on the current device.
cudaError_t choose_select_attend_cut(const StepArguments& arguments, SelectAttendCut& cut);
// cudaErrorInvalidValue for caches that are not bf16 or fp16 and for cuts that are not listed
// above.
cudaError_t launch_select_attend(const StepArguments& arguments, const SelectAttendCut& cut,
                                 cudaStream_t stream);

// What the kernel is told besides the step: a kernel parameter.
struct SelectAttendShape {
  int cluster;          // CTAs
  int group;            // query heads of a KV head
  int page_shift;       // log2 of tokens a page
  int block_shift;      // log2 of tokens a cache block; -1: not a power of 2
  int key_groups;       // groups of 8 pages whose keys shared memory has room for
  bool rows_aligned;    // rows of keys and values begin at multiples of 16 bytes
  bool rows_together;   // a token's value row follows its key row, and tokens follow one another
  bool query_as_cache;  // queries are of the cache's type, and 8-byte aligned
};

// One instantiation of the kernel, for launches and for questions about residency.
struct SelectAttendKernel {
  using Function = void (*)(StepArguments, SelectAttendShape);
  Function function;
  int fixed_bytes;  // of shared memory, in front of the keys
};

// nullptr function: no such instantiation. One file a head_dim.
SelectAttendKernel select_attend_kernel_d64(bool bf16, int threads);
SelectAttendKernel select_attend_kernel_d80(bool bf16, int threads);
SelectAttendKernel select_attend_kernel_d96(bool bf16, int threads);
SelectAttendKernel select_attend_kernel_d128(bool bf16, int threads);
SelectAttendKernel select_attend_kernel_d192(bool bf16, int threads);
SelectAttendKernel select_attend_kernel_d256(bool bf16, int threads);

}  // namespace locks::detail
