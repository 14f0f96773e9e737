// Constants of the rotation that improved formats apply to keys and queries.
//
// x -> H (D x): D is a diagonal of random signs, H a Hadamard matrix of the largest power of two
// that divides head_dim, on each run of that many channels, scaled to be orthonormal. It keeps q.k
// and spreads outlier channels, which would set the scale of a whole int4 row, over their run.
#pragma once

#include <cstdint>

#include "core/cpu_namespace.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

inline constexpr std::uint64_t kRotationSeed = 0x10C5;

// Output `index` of the splitmix64 generator; its state is a counter, so any output is at hand.
LOCKS_HD constexpr std::uint64_t splitmix64(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

LOCKS_HD constexpr bool rotation_flips(int channel) {
  return splitmix64(kRotationSeed, static_cast<std::uint64_t>(channel)) >> 63 != 0;
}

// Channels of one Hadamard matrix: 80 = 5 runs of 16, 96 = 3 of 32, 192 = 3 of 64.
LOCKS_HD constexpr int rotation_run(int head_dim) { return head_dim & -head_dim; }

// run^-1/2, correctly rounded.
LOCKS_HD constexpr float rotation_scale(int head_dim) {
  switch (rotation_run(head_dim)) {
    case 16:
      return 0.25f;
    case 32:
      return 0.17677669529663688f;
    case 64:
      return 0.125f;
    case 128:
      return 0.08838834764831844f;
    default:
      return 0.0625f;  // 256
  }
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
