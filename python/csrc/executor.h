// LOCKS work on torch's own threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "locks/executor.h"

namespace locks::binding {

// As many workers as torch has threads for one operator (torch.set_num_threads).
Executor torch_executor();

// Calls body(item) for each item in [0, num_items), on torch's threads where an item's `cost`
// (elements moved) makes up for waking them. `body` must not throw.
template <class Body>
void for_each_parallel(std::int64_t num_items, std::int64_t cost, const Body& body) {
  constexpr std::int64_t kGrain = 32768;  // elements a thread should have, as in torch's own ops
  torch::stable::parallel_for(0, num_items, std::max<std::int64_t>(1, kGrain / cost),
                              [&](std::int64_t begin, std::int64_t end) noexcept {
                                for (std::int64_t item = begin; item < end; ++item) body(item);
                              });
}

}  // namespace locks::binding
