// The CUDA device and stream that torch would use for a call.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstdint>

// Weak: a torch without CUDA lacks it, and the library has to load there as well. No call gets here
// then, since such a torch has no CUDA tensors.
extern "C" [[gnu::weak]] AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace locks::binding {

// Makes `device` the current one while it lives.
class CudaCall {
 public:
  explicit CudaCall(std::int32_t device) : guard_(device) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream_));
  }

  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace locks::binding
