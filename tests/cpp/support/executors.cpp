#include "support/executors.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

namespace locks::testing {

Executor thread_executor(int num_workers) {
  return {num_workers,
          [](void*, int n, Executor::Work work, void* argument) {
            std::vector<std::thread> threads;
            for (int w = 0; w < n; ++w) threads.emplace_back(work, argument, w);
            for (std::thread& thread : threads) thread.join();
          },
          nullptr};
}

Executor reversed_executor(int num_workers) {
  return {num_workers,
          [](void*, int n, Executor::Work work, void* argument) {
            for (int w = n; w-- > 0;) work(argument, w);
          },
          nullptr};
}

std::vector<CpuLevel> cpu_levels() {
  std::vector<CpuLevel> all;
  for (CpuLevel level : {CpuLevel::kBaseline, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (level <= best_cpu_level()) all.push_back(level);
  }
  return all;
}

void at_each_level(const std::function<void()>& body) {
  const CpuLevel before = cpu_level();
  for (CpuLevel level : cpu_levels()) {
    ASSERT_TRUE(set_cpu_level(level).ok());
    SCOPED_TRACE(cpu_level_name(level));
    body();
  }
  ASSERT_TRUE(set_cpu_level(before).ok());
}

void for_each_setting(const std::function<void(const Executor&)>& body) {
  at_each_level([&] {
    for (int workers : {1, 3}) {
      if (::testing::Test::HasFailure()) break;
      SCOPED_TRACE(std::to_string(workers) + " workers");
      body(workers == 1 ? serial_executor() : thread_executor(workers));
    }
  });
}

}  // namespace locks::testing
