// Which instruction-set level the CPU kernels run at.
#pragma once

#include <cstdint>

#include "locks/status.h"

namespace locks {

enum class CpuLevel : std::uint8_t { kBaseline, kAvx2, kAvx512 };

// The highest level that this machine and this build have; found once, at first use.
CpuLevel best_cpu_level();
// The level in use: the best one unless set_cpu_level chose another.
CpuLevel cpu_level();
// For tests and benchmarks, not while kernels run. kUnsupported if the machine or build lacks the
// level.
Status set_cpu_level(CpuLevel level);
const char* cpu_level_name(CpuLevel level);

}  // namespace locks
