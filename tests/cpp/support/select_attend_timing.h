// Times select_attend alone: a graph of 28 launches, as 28 layers would be.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/scalar.h"
#include "decode/select_attend_cuda.h"
#include "support/device_array.h"
#include "support/select_attend_config.h"

namespace locks::testing {

struct TimedCase {
  const char* name;
  int rows, length, budget_pages, kv_heads, group;
};

// Masses stay in L2, as the scorer leaves them; keys and values are cold: each launch has block
// tables of its own, into a pool of several GB.
class TimedStep {
 public:
  static constexpr int kLaunches = 28;

  explicit TimedStep(const TimedCase& c) : c_(c) {
    const int heads = c.kv_heads * c.group;
    const int blocks = c.length / 16;
    const bool scored = c.budget_pages > 0;
    const int tiles = scored ? detail::num_tiles(blocks) : 0;
    std::vector<RowPlan> plan(static_cast<std::size_t>(c.rows) + 1);
    for (int r = 0; r <= c.rows; ++r) {
      plan[static_cast<std::size_t>(r)] = {c.length,       blocks,    scored ? blocks : 0,
                                           c.budget_pages, r * tiles, 0};
    }
    Random random(7);
    std::vector<std::uint16_t> draws(65536);
    for (auto& x : draws) x = detail::float_to_bf16(std::exp(2.2f * random.normal()));
    const std::int64_t runs = std::int64_t{c.rows} * heads * tiles;
    std::vector<std::uint16_t> masses(static_cast<std::size_t>(runs) * 64 + 8);
    std::vector<float> sums(static_cast<std::size_t>(runs) + 8);
    for (std::size_t i = 0; i + 8 < masses.size(); ++i) {
      masses[i] = draws[random.bits() & 65535];
      sums[i / 64] += detail::bf16_to_float(masses[i]);
    }
    num_blocks_ = std::max<std::int64_t>(std::int64_t{c.rows} * blocks, 150000);
    std::vector<std::int32_t> table(static_cast<std::size_t>(c.rows * blocks * kLaunches));
    for (auto& id : table)
      id = static_cast<std::int32_t>(random.bits() % static_cast<std::uint64_t>(num_blocks_));
    const std::vector<float> tail(static_cast<std::size_t>(c.rows * heads), -kInfinity);
    plan_ = copy(plan);
    masses_ = copy(masses);
    sums_ = copy(sums);
    table_ = copy(table);
    tail_ = copy(tail);
    pool_ = std::make_unique<DeviceArray<std::uint16_t>>(num_blocks_ * block_stride(), 0x3C);
    query_ = std::make_unique<DeviceArray<std::uint16_t>>(std::int64_t{c.rows} * heads * 128, 0x3C);
    output_ = std::make_unique<DeviceArray<std::uint16_t>>(std::int64_t{c.rows} * heads * 128, 0);
    counters_ = std::make_unique<DeviceArray<unsigned long long>>(kNumCudaCounters, 0);
  }

  std::int64_t block_stride() const { return std::int64_t{c_.kv_heads} * 16 * 256; }

  detail::StepArguments arguments(int launch) const {
    const int heads = c_.kv_heads * c_.group;
    detail::StepArguments a{};
    a.attention = {heads, c_.kv_heads, 128, 0.0884f};
    a.layout = record_layout(kFine, 128);
    a.query = {query_->get(), ScalarType::kBFloat16, heads, std::int64_t{heads} * 128, 128};
    a.keys = {pool_->get(), ScalarType::kBFloat16, num_blocks_, 16, c_.kv_heads,
              128,          block_stride(),        16 * 256,    256};
    a.values = a.keys;
    a.values.data = pool_->get() + 128;
    a.seqs.num_seqs = c_.rows;
    a.seqs.cache_blocks = {table_->get() + std::int64_t{launch} * c_.rows * (c_.length / 16),
                           c_.length / 16, c_.length / 16};
    a.plan = plan_->get();
    a.output = {output_->get(), ScalarType::kBFloat16, std::int64_t{heads} * 128, 128, nullptr};
    a.counters = counters_->get();
    a.workspace.masses = reinterpret_cast<__nv_bfloat16*>(masses_->get());
    a.workspace.tile_sums = sums_->get();
    a.workspace.log2_tail = tail_->get();
    return a;
  }

  // Median microseconds a launch; negative: it failed.
  double time(const detail::SelectAttendCut& cut) const {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    cudaStreamCreate(&stream);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    for (int i = 0; i < kLaunches; ++i) {
      if (detail::launch_select_attend(arguments(i), cut, stream) != cudaSuccess) break;
    }
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess ||
        cudaGraphInstantiate(&replay, graph, 0) != cudaSuccess) {
      cudaGetLastError();
      return -1;
    }
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    std::vector<float> times;
    for (int i = 0; i < 14; ++i) {
      cudaEventRecord(begin, stream);
      cudaGraphLaunch(replay, stream);
      cudaEventRecord(end, stream);
      if (cudaStreamSynchronize(stream) != cudaSuccess) return -2;
      float ms = 0;
      cudaEventElapsedTime(&ms, begin, end);
      if (i >= 3) times.push_back(ms * 1000 / kLaunches);
    }
    std::sort(times.begin(), times.end());
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return times[times.size() / 2];
  }

 private:
  template <class T>
  static std::unique_ptr<DeviceArray<T>> copy(const std::vector<T>& host) {
    return std::make_unique<DeviceArray<T>>(host.data(), static_cast<std::int64_t>(host.size()));
  }

  TimedCase c_;
  std::int64_t num_blocks_ = 0;
  std::unique_ptr<DeviceArray<RowPlan>> plan_;
  std::unique_ptr<DeviceArray<std::uint16_t>> masses_, pool_, query_, output_;
  std::unique_ptr<DeviceArray<float>> sums_, tail_;
  std::unique_ptr<DeviceArray<std::int32_t>> table_;
  std::unique_ptr<DeviceArray<unsigned long long>> counters_;
};

}  // namespace locks::testing
