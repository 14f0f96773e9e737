// select_attend for heads of 96 channels.
#include "decode/select_attend_cuda_kernel.cuh"

namespace locks::detail {

SelectAttendKernel select_attend_kernel_d96(bool bf16, int threads) {
  return select_attend_kernel_of<96>(bf16, threads);
}

}  // namespace locks::detail
