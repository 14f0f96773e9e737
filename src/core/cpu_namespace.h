// One source, several instruction sets.
//
// Each `*_cpu.cpp` is compiled once a level, with LOCKS_CPU_NAMESPACE set to its name. A function
// that the linker may merge across those copies (any inline function or template with one mangled
// name) could hand AVX-512 code to a machine without it. Hence the rule: what a `*_cpu.cpp`
// includes and calls inline lives in the inline namespace locks::detail::LOCKS_CPU_NAMESPACE, and
// no standard container or algorithm is used there.
#pragma once

#ifndef LOCKS_CPU_NAMESPACE
#define LOCKS_CPU_NAMESPACE portable
#endif

// Math shared by host and device: the CPU tests and sanitizers then cover what the GPU runs.
#ifdef __CUDACC__
#define LOCKS_HD __host__ __device__
#else
#define LOCKS_HD
#endif
