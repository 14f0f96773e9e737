// A decode step captured into a CUDA graph, on a stream of its own.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "support/device_step.h"

namespace locks::testing {

class CapturedStep {
 public:
  explicit CapturedStep(DeviceStep& step) : step_(step) {
    EXPECT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    const Status status = step.decode(stream_);
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph_), cudaSuccess);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(cudaGraphInstantiate(&replay_, graph_, 0), cudaSuccess);
  }
  ~CapturedStep() {
    cudaGraphExecDestroy(replay_);
    cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  // Plans the rows, replays the step so often, one behind the other, and fetches the results.
  void run(const Budget& budget, int times = 1) {
    const Status status = step_.plan_rows(budget, 0, nullptr, stream_);
    ASSERT_TRUE(status.ok()) << status.message();
    for (int i = 0; i < times; ++i) ASSERT_CUDA(cudaGraphLaunch(replay_, stream_));
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    step_.fetch();
  }

 private:
  DeviceStep& step_;
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

}  // namespace locks::testing
