// A kernel around the device function that writes query fragments, for tests.
#pragma once

#include <cuda_runtime.h>

#include "decode/step_cuda.h"

namespace locks::testing {

// Fragments of every (row, KV head) from rotated queries [row, query head, d], device memory.
cudaError_t write_all_fragments(const SummaryFormat& format, const AttentionParams& attention,
                                int num_rows, const float* rotated, std::uint32_t* fragments);

}  // namespace locks::testing
