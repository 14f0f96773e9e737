// Picks a stage's kernels for the level in use. A stage's header has a struct of functions,
//
//   struct ScoreKernels { void (*score_run)(...); };
//
// its `score_cpu.cpp`, compiled once a level, defines `const ScoreKernels& score_kernels()` in
// namespace locks::detail::LOCKS_CPU_NAMESPACE, and its front end `score.cpp` says, in namespace
// locks::detail,
//
//   LOCKS_DECLARE_CPU_KERNELS(ScoreKernels, score_kernels)
//
// and then uses LOCKS_CPU_KERNELS(score_kernels). The declaration cannot stand in a header that a
// `*_cpu.cpp` includes: there the level's namespace is an inline one.
#pragma once

#include "locks/cpu.h"

#ifdef LOCKS_HAVE_X86_LEVELS
#define LOCKS_DECLARE_CPU_KERNELS(type, function) \
  namespace baseline {                            \
  const type& function();                         \
  }                                               \
  namespace avx2 {                                \
  const type& function();                         \
  }                                               \
  namespace avx512 {                              \
  const type& function();                         \
  }
#define LOCKS_CPU_KERNELS(function)                                                         \
  (::locks::cpu_level() == ::locks::CpuLevel::kAvx512 ? ::locks::detail::avx512::function() \
   : ::locks::cpu_level() == ::locks::CpuLevel::kAvx2 ? ::locks::detail::avx2::function()   \
                                                      : ::locks::detail::baseline::function())
#else
#define LOCKS_DECLARE_CPU_KERNELS(type, function) \
  namespace baseline {                            \
  const type& function();                         \
  }
#define LOCKS_CPU_KERNELS(function) (::locks::detail::baseline::function())
#endif
