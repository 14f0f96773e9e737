// select_attend for heads of 128 channels.
#include "decode/select_attend_cuda_kernel.cuh"

namespace locks::detail {

SelectAttendKernel select_attend_kernel_d128(bool bf16, int threads) {
  return select_attend_kernel_of<128>(bf16, threads);
}

}  // namespace locks::detail
