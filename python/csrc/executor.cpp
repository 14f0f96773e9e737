#include "executor.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace locks::binding {

namespace {

// noexcept: the core knows no exceptions, and one that left a worker would meet frames of torch and
// of OpenMP that cannot pass it on. No stage throws, so such an exception is a bug and ends the
// process here.
void run(void*, int num_workers, Executor::Work work, void* argument) noexcept {
  torch::stable::parallel_for(0, num_workers, 1,
                              [=](std::int64_t begin, std::int64_t end) noexcept {
                                for (std::int64_t worker = begin; worker < end; ++worker) {
                                  work(argument, static_cast<int>(worker));
                                }
                              });
}

}  // namespace

Executor torch_executor() {
  const auto num_threads = static_cast<int>(torch::stable::get_num_threads());
  return {std::max(1, num_threads), run, nullptr};
}

}  // namespace locks::binding
