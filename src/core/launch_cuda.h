// Launches that may begin before the kernel in front of them has ended.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace locks::detail {

// Attributes of the current device that a launch asks for.
inline cudaError_t device_attribute(cudaDeviceAttr attribute, int& value) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&value, attribute, device);
}

// Programmatic dependent launch, where the code that runs can wait for the kernel in front
// (core/ptx.cuh: wait_for_prior_kernel): code of compute_80 that was compiled for a later device when
// it was loaded cannot.
template <class Arguments>
cudaError_t launch_early(void (*kernel)(Arguments), int num_ctas, int num_threads,
                         std::size_t shared_bytes, cudaStream_t stream,
                         const Arguments& arguments) {
  cudaFuncAttributes code{};
  if (const cudaError_t error = cudaFuncGetAttributes(&code, kernel); error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_ctas));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = code.ptxVersion >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace locks::detail
