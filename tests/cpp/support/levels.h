// Small things that the tests of several stages use.
#pragma once

#include <cstddef>
#include <vector>

#include "locks/cpu.h"

namespace locks::testing {

// The levels that this machine has.
inline std::vector<CpuLevel> cpu_levels() {
  std::vector<CpuLevel> all;
  for (CpuLevel level : {CpuLevel::kBaseline, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (level <= best_cpu_level()) all.push_back(level);
  }
  return all;
}

template <class T>
std::size_t at(T index) {
  return static_cast<std::size_t>(index);
}

}  // namespace locks::testing
