// select_attend for heads of 128 channels.
#include "decode/select_attend_cuda_kernel.cuh"

namespace locks::detail {

SelectAttendKernel select_attend_kernel_d128(bool bf16, int threads) {
  return select_attend_kernel_of<128>(bf16, threads);
}

#ifdef LOCKS_SELECT_CLOCKS
void read_select_clocks(long long* host) {
  cudaMemcpyFromSymbol(host, select_clocks, sizeof select_clocks);
  const long long zero[32] = {};
  cudaMemcpyToSymbol(select_clocks, zero, sizeof zero);
}
#endif

}  // namespace locks::detail
