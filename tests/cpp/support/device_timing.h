// Times a launch on the GPU: a graph of many, replayed.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <vector>

namespace locks::testing {

// Median of 11 replays of a graph of `count` launches; microseconds a launch.
inline double time_launch(int count, const std::function<void(int, cudaStream_t)>& launch) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cudaEvent_t start, end;
  EXPECT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  EXPECT_EQ(cudaEventCreate(&start), cudaSuccess);
  EXPECT_EQ(cudaEventCreate(&end), cudaSuccess);
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  for (int i = 0; i < count; ++i) launch(i, stream);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  std::vector<float> times;
  for (int i = 0; i < 13; ++i) {
    EXPECT_EQ(cudaEventRecord(start, stream), cudaSuccess);
    EXPECT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(end, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    float milliseconds = 0;
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaSuccess);
    if (i >= 2) times.push_back(milliseconds);
  }
  std::sort(times.begin(), times.end());
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return static_cast<double>(times[times.size() / 2]) * 1000 / count;
}

}  // namespace locks::testing
