// select_attend for heads of 64 channels.
#include "decode/select_attend_cuda_kernel.cuh"

namespace locks::detail {

SelectAttendKernel select_attend_kernel_d64(bool bf16, int threads) {
  return select_attend_kernel_of<64>(bf16, threads);
}

}  // namespace locks::detail
