// Executors and instruction-set levels to run a stage with.
#pragma once

#include <functional>
#include <vector>

#include "locks/cpu.h"
#include "locks/executor.h"

namespace locks::testing {

// `num_workers` threads at once.
Executor thread_executor(int num_workers);
// The workers one after the other, the last one first: the contract allows any order.
Executor reversed_executor(int num_workers);

// The levels that this machine has.
std::vector<CpuLevel> cpu_levels();

// Runs `body` at each of them under a SCOPED_TRACE, then returns to the level before.
void at_each_level(const std::function<void()>& body);

// Runs `body` at every CPU level of this machine with 1 and 3 workers, under a SCOPED_TRACE; stops
// after the first setting that fails.
void for_each_setting(const std::function<void(const Executor&)>& body);

}  // namespace locks::testing
