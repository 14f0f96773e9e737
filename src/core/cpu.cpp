#include "locks/cpu.h"

#include <atomic>

#include "core/message.h"
#include "locks/executor.h"
#include "locks/locks.h"

namespace locks {

namespace {

CpuLevel detect() {
#ifdef LOCKS_HAVE_X86_LEVELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return CpuLevel::kAvx512;
  if (avx2) return CpuLevel::kAvx2;
#endif
  return CpuLevel::kBaseline;
}

std::atomic<CpuLevel>& current() {
  static std::atomic<CpuLevel> level{detect()};
  return level;
}

}  // namespace

CpuLevel best_cpu_level() {
  static const CpuLevel level = detect();
  return level;
}

CpuLevel cpu_level() { return current().load(std::memory_order_relaxed); }

Status set_cpu_level(CpuLevel level) {
  if (level > best_cpu_level()) {
    return unsupported(detail::join("cpu level: ", cpu_level_name(level), " asked for, this machine has ",
                                    cpu_level_name(best_cpu_level())));
  }
  current().store(level, std::memory_order_relaxed);
  return {};
}

const char* cpu_level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kBaseline: return "baseline";
    case CpuLevel::kAvx2: return "avx2";
    case CpuLevel::kAvx512: return "avx512";
  }
  return "unknown";
}

Executor serial_executor() {
  return {1,
          [](void*, int num_workers, Executor::Work work, void* argument) {
            for (int worker = 0; worker < num_workers; ++worker) work(argument, worker);
          },
          nullptr};
}

const char* version() { return LOCKS_VERSION; }

}  // namespace locks
