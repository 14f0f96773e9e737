// Deals items out to the workers of an Executor. Which worker takes an item is a matter of timing,
// so an item must not depend on the worker except for its scratch memory.
#pragma once

#include <atomic>
#include <cstdint>

#include "locks/executor.h"

namespace locks::detail {

// Calls body(item, worker) for each item in [0, num_items).
template <class Body>
void for_each_item(const Executor& executor, std::int64_t num_items, Body&& body) {
  if (num_items <= 0) return;
  if (executor.num_workers <= 1 || executor.run == nullptr || num_items == 1) {
    for (std::int64_t item = 0; item < num_items; ++item) body(item, 0);
    return;
  }
  struct Shared {
    std::atomic<std::int64_t> next{0};
    std::int64_t num_items;
    Body* body;
  } shared{{0}, num_items, &body};
  executor.run(
      executor.context, executor.num_workers,
      [](void* argument, int worker) {
        auto* work = static_cast<Shared*>(argument);
        for (std::int64_t item;
             (item = work->next.fetch_add(1, std::memory_order_relaxed)) < work->num_items;) {
          (*work->body)(item, worker);
        }
      },
      &shared);
}

}  // namespace locks::detail
