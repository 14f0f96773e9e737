// Device memory for tests: host arrays up and down, failures told by GoogleTest.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace locks::testing {

#define ASSERT_CUDA(call) ASSERT_EQ((call), cudaSuccess)

// A device copy of host memory.
template <class T>
class DeviceArray {
 public:
  DeviceArray(const T* host, std::int64_t count)
      : bytes_(static_cast<std::size_t>(count) * sizeof(T)) {
    EXPECT_EQ(cudaMalloc(&data_, bytes_ + 1), cudaSuccess);
    upload(host);
  }
  // Memory of `count` elements, every byte of it `byte`.
  DeviceArray(std::int64_t count, int byte) : bytes_(static_cast<std::size_t>(count) * sizeof(T)) {
    EXPECT_EQ(cudaMalloc(&data_, bytes_ + 1), cudaSuccess);
    fill(byte);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void upload(const T* host) {
    EXPECT_EQ(cudaMemcpy(data_, host, bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  void fill(int byte) { EXPECT_EQ(cudaMemset(data_, byte, bytes_), cudaSuccess); }
  std::vector<T> download() const {
    std::vector<T> host(bytes_ / sizeof(T));
    EXPECT_EQ(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  }
  T* get() const { return static_cast<T*>(data_); }

 private:
  std::size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace locks::testing
