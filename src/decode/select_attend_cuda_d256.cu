// select_attend for heads of 256 channels.
#include "decode/select_attend_cuda_kernel.cuh"

namespace locks::detail {

SelectAttendKernel select_attend_kernel_d256(bool bf16, int threads) {
  return select_attend_kernel_of<256>(bf16, threads);
}

}  // namespace locks::detail
