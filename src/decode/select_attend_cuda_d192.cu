// select_attend for heads of 192 channels.
#include "decode/select_attend_cuda_kernel.cuh"

namespace locks::detail {

SelectAttendKernel select_attend_kernel_d192(bool bf16, int threads) {
  return select_attend_kernel_of<192>(bf16, threads);
}

}  // namespace locks::detail
