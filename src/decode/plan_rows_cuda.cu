// Plans the rows of a step on the device. One CTA; a thread a row, in turns of kThreads rows, with
// a running sum over tiles. A few microseconds, once a step for all layers.
#include <cuda_runtime.h>

#include "decode/step_cuda.h"
#include "select/budget.h"

namespace locks::detail {

namespace {

constexpr int kThreads = 1024;
constexpr int kWarpLanes = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Sum {
  std::int64_t before;  // of the threads in front
  std::int64_t all;
};

__device__ Sum sum_over_threads(std::int64_t value, std::int64_t* warp_sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  std::int64_t running = value;
  for (int apart = 1; apart < kWarpLanes; apart *= 2) {
    const std::int64_t other = __shfl_up_sync(kAllLanes, running, apart);
    if (lane >= apart) running += other;
  }
  if (lane == kWarpLanes - 1) warp_sums[warp] = running;
  __syncthreads();
  Sum sum{running - value, 0};
  for (int w = 0; w < kThreads / kWarpLanes; ++w) {
    if (w < warp) sum.before += warp_sums[w];
    sum.all += warp_sums[w];
  }
  __syncthreads();
  return sum;
}

// All but first_tile; scored_blocks as if there were room.
__device__ RowPlan plan_row(const PlanArguments& a, int row) {
  RowPlan plan{};
  plan.length = max(a.lengths[row], 0);
  const int flags = a.row_flags == nullptr ? 0 : a.row_flags[row];
  const std::int32_t newest = max(plan.length - 1, 0);
  plan.first_new_block = (flags & kRowIsRebuilt) != 0 ? 0 : newest / kBlockTokens;
  const BudgetedPages allowed = pages_within(a.budget, plan.length, a.page_tokens);
  plan.budget_pages = static_cast<std::int32_t>(allowed.pages);
  plan.raised = plan.length > 0 && allowed.raised;
  const bool whole = (flags & kRowIsExact) != 0 || plan.length <= a.limits.dense_tokens ||
                     allowed.pages >= num_pages(plan.length, a.page_tokens);
  plan.scored_blocks = whole ? 0 : plan.length / kBlockTokens;
  return plan;
}

__global__ void __launch_bounds__(kThreads)
    plan_rows_kernel(const __grid_constant__ PlanArguments a) {
  __shared__ std::int64_t warp_sums[kThreads / kWarpLanes];
  std::int64_t asked = 0;  // tiles that the rows so far ask for
  std::int64_t taken = 0;  // and get: rows in front have the first claim on the room
  for (int begin = 0; begin < a.num_rows; begin += kThreads) {
    const int row = begin + static_cast<int>(threadIdx.x);
    RowPlan plan = row < a.num_rows ? plan_row(a, row) : RowPlan{};
    const std::int32_t tiles = num_tiles(plan.scored_blocks);
    const Sum sum = sum_over_threads(tiles, warp_sums);
    const std::int64_t end = asked + sum.before + tiles;
    const bool fits = end <= a.limits.max_tiles;
    // Claims rise from row to row, so the rows that fit come first.
    const Sum fitting = sum_over_threads(fits ? tiles : 0, warp_sums);
    if (row < a.num_rows) {
      if (!fits) plan.scored_blocks = 0;
      plan.first_tile = static_cast<std::int32_t>(taken + fitting.before);
      a.plan[row] = plan;
    }
    asked += sum.all;
    taken += fitting.all;
  }
  if (threadIdx.x == 0) {
    RowPlan end{};
    end.first_tile = static_cast<std::int32_t>(taken);
    a.plan[a.num_rows] = end;
  }
  // `prepare`, launched right behind, reads the plan before it waits for us.
  __threadfence();
}

}  // namespace

cudaError_t launch_plan_rows(const PlanArguments& arguments, cudaStream_t stream) {
  plan_rows_kernel<<<1, kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace locks::detail
