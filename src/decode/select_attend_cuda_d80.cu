// select_attend for heads of 80 channels.
#include "decode/select_attend_cuda_kernel.cuh"

namespace locks::detail {

SelectAttendKernel select_attend_kernel_d80(bool bf16, int threads) {
  return select_attend_kernel_of<80>(bf16, threads);
}

}  // namespace locks::detail
