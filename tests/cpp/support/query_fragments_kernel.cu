#include "score/query_fragments.cuh"
#include "support/query_fragments_kernel.h"

namespace locks::testing {

namespace {

// Grid: (KV head, row).
__global__ void write_fragments_kernel(SummaryFormat format, int group_size, int head_dim,
                                       const float* rotated, std::uint32_t* fragments, int words) {
  extern __shared__ float heads[];
  const std::size_t idx = std::size_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const auto size = static_cast<std::size_t>(group_size * head_dim);
  for (std::size_t i = threadIdx.x; i < size; i += blockDim.x) heads[i] = rotated[idx * size + i];
  __syncthreads();
  detail::write_fragments(format, heads, group_size, head_dim,
                          fragments + idx * static_cast<std::size_t>(words));
}

}  // namespace

cudaError_t write_all_fragments(const SummaryFormat& format, const AttentionParams& attention,
                                int num_rows, const float* rotated, std::uint32_t* fragments) {
  const int group = attention.group_size();
  const dim3 grid(static_cast<unsigned>(attention.num_kv_heads), static_cast<unsigned>(num_rows));
  write_fragments_kernel<<<grid, detail::kPrepareThreads,
                           static_cast<std::size_t>(group * attention.head_dim) * sizeof(float)>>>(
      format, group, attention.head_dim, rotated, fragments,
      detail::fragment_words(format, group, attention.head_dim));
  return cudaGetLastError();
}

}  // namespace locks::testing
