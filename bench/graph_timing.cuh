// Times of launches on this GPU, from replays of a CUDA graph, and buffers to launch them on.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "locks/status.h"

namespace locks::bench {
namespace {  // of one program

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}
void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t count) : count_(count) {
    check(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)), "cudaMalloc");
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }
  T* get() const { return static_cast<T*>(data_); }
  std::size_t size() const { return count_; }
  void upload(const std::vector<T>& host) {
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  std::vector<T> download() const {
    std::vector<T> host(count_);
    check(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "copy");
    return host;
  }

 private:
  std::size_t count_;
  void* data_ = nullptr;
};

__global__ void read_kernel(const uint4* from, std::size_t count, unsigned* sink) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  unsigned sum = 0;
  std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = __ldcs(from + i), b = __ldcs(from + i + step);
    const uint4 c = __ldcs(from + i + 2 * step), d = __ldcs(from + i + 3 * step);
    sum += (a.x ^ b.y) + (c.z ^ d.w);
  }
  if (sum == 0x12345678u) *sink = sum;
}

struct Timing {
  double median_us, p10_us, p90_us;
};

Timing summary(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[times.size() / 10],
          times[times.size() - 1 - times.size() / 10]};
}

// Microseconds of one launch of `layer(i)`, from replays of a graph of `layers` of them.
Timing time_graph(int layers, int replays, const std::function<void(int, cudaStream_t)>& layer) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t begin, end;
  check(cudaStreamCreate(&stream), "stream");
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < layers; ++i) layer(i, stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  std::vector<double> times;
  for (int replay = -3; replay < replays; ++replay) {  // the first ones warm up
    check(cudaEventRecord(begin, stream), "record");
    check(cudaGraphLaunch(executable, stream), "launch");
    check(cudaEventRecord(end, stream), "record");
    check(cudaStreamSynchronize(stream), "replay");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "time");
    if (replay >= 0) times.push_back(1e3 * static_cast<double>(ms) / layers);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return summary(times);
}

// A layer's weights: what a model reads between two of its attentions.
constexpr std::size_t kWeightBytes = std::size_t{256} << 20;

__global__ void read_weights_kernel(const uint4* from, std::size_t count, unsigned* sink) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  unsigned sum = 0;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    const uint4 weights = __ldg(from + i);
    sum += (weights.x ^ weights.y) + (weights.z ^ weights.w);
  }
  if (sum == 0x12345678u) *sink = sum;
}

// Microseconds of one launch of `layer(i)` behind a kernel that reads a layer's weights, which
// leaves neither its code nor what it wrote before in the caches. That kernel's own time hangs on
// more than its bytes, so that layers are timed by events of their own and not by a difference.
Timing time_behind_weights(int layers, int replays,
                           const std::function<void(int, cudaStream_t)>& layer) {
  const DeviceBuffer<uint4> weights(kWeightBytes / sizeof(uint4));
  const DeviceBuffer<unsigned> sink(1);
  check(cudaMemset(weights.get(), 1, kWeightBytes), "memset");
  std::vector<cudaEvent_t> begin(static_cast<std::size_t>(layers)), end(begin.size());
  std::vector<double> times;
  for (std::size_t i = 0; i < begin.size(); ++i) {
    check(cudaEventCreate(&begin[i]), "event");
    check(cudaEventCreate(&end[i]), "event");
  }
  time_graph(layers, replays, [&](int i, cudaStream_t stream) {
    read_weights_kernel<<<132 * 8, 256, 0, stream>>>(weights.get(), weights.size(), sink.get());
    const auto at = static_cast<std::size_t>(i);
    check(cudaEventRecordWithFlags(begin[at], stream, cudaEventRecordExternal), "record");
    layer(i, stream);
    check(cudaEventRecordWithFlags(end[at], stream, cudaEventRecordExternal), "record");
  });
  for (std::size_t i = 0; i < begin.size(); ++i) {  // of the last replay
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin[i], end[i]), "time");
    times.push_back(1e3 * static_cast<double>(ms));
    cudaEventDestroy(begin[i]);
    cudaEventDestroy(end[i]);
  }
  return summary(times);
}

// The best rate of a plain read of 8 GB, bytes a second.
double read_ceiling() {
  constexpr std::size_t kBytes = std::size_t{8} << 30;
  const DeviceBuffer<uint4> buffer(kBytes / sizeof(uint4));
  const DeviceBuffer<unsigned> sink(1);
  check(cudaMemset(buffer.get(), 1, kBytes), "memset");
  const Timing timing = time_graph(1, 9, [&](int, cudaStream_t stream) {
    read_kernel<<<132 * 16, 512, 0, stream>>>(buffer.get(), buffer.size(), sink.get());
  });
  return kBytes / (timing.p10_us * 1e-6);
}

}  // namespace
}  // namespace locks::bench
