#include "locks/cpu.h"

#ifdef LOCKS_HAVE_X86_LEVELS
#include <cpuid.h>
#endif

#include <atomic>

#include "core/message.h"
#include "locks/executor.h"
#include "locks/locks.h"

namespace locks {

namespace {

#ifdef LOCKS_HAVE_X86_LEVELS
// Asked of the processor, since clang 14's __builtin_cpu_supports does not know the name.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

CpuLevel detect() {
#ifdef LOCKS_HAVE_X86_LEVELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx2 && avx512) return CpuLevel::kAvx512;
  if (avx2) return CpuLevel::kAvx2;
#endif
  return CpuLevel::kBaseline;
}

std::atomic<CpuLevel>& current() {
  static std::atomic<CpuLevel> level{best_cpu_level()};
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
    return unsupported(detail::join("cpu level: ", cpu_level_name(level),
                                    " asked for, this machine has ",
                                    cpu_level_name(best_cpu_level())));
  }
  current().store(level, std::memory_order_relaxed);
  return {};
}

const char* cpu_level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kBaseline:
      return "baseline";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
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
