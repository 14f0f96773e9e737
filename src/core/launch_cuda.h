// Launches that may begin before the kernel in front of them has ended.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

namespace locks::detail {

// Attributes of the current device that a launch asks for.
inline cudaError_t device_attribute(cudaDeviceAttr attribute, int& value) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&value, attribute, device);
}

// Whether the code that runs has the instructions of sm_90 (core/ptx.cuh): code of compute_80 that
// was compiled for a later device when it was loaded has not.
template <class Kernel>
cudaError_t has_hopper_code(Kernel kernel, bool& has) {
  cudaFuncAttributes code{};
  const cudaError_t error = cudaFuncGetAttributes(&code, kernel);
  has = error == cudaSuccess && code.ptxVersion >= 90;
  return error;
}

// Programmatic dependent launch: only for code that can wait for the kernel in front.
inline cudaLaunchAttribute early_start() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Launches with an early start where the code can have one.
template <class... Parameters>
cudaError_t launch_early(void (*kernel)(Parameters...), int num_ctas, int num_threads,
                         std::size_t shared_bytes, cudaStream_t stream,
                         const std::type_identity_t<Parameters>&... arguments) {
  bool can_wait = false;
  if (const cudaError_t error = has_hopper_code(kernel, can_wait); error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attribute = early_start();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_ctas));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = can_wait ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Calls launch with std::integral_constant of a format's page size: 4, 8 or 16 tokens.
template <class Launch>
auto for_page_tokens(int page_tokens, const Launch& launch) {
  switch (page_tokens) {
    case 4:
      return launch(std::integral_constant<int, 4>());
    case 8:
      return launch(std::integral_constant<int, 8>());
    default:
      return launch(std::integral_constant<int, 16>());
  }
}

}  // namespace locks::detail
