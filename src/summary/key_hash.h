// The hash of a block's keys that a record's header carries: which keys the record describes.
//
// Defined on the 16 keys in canonical order, whatever the strides of the cache: token by token,
// channels in order, as the bytes that the cache stores, read as little-endian 32-bit words w_0 ..
// w_(n-1) with n = 16 * head_dim * scalar_bytes / 4. Then
//   hash = finish(sum over i of mix(w_i, i) mod 2^32, n).
// The sum has no order, so any number of lanes or threads may share it; `mix` ties each word to its
// place, so that moved or swapped words change it. It finds stale records; it does not resist an
// adversary.
#pragma once

#include <cstdint>

#include "core/cpu_namespace.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

// Invertible in `word` for each index: a change of a single word always changes the sum.
LOCKS_HD constexpr std::uint32_t mix_key_word(std::uint32_t word, std::uint32_t index) {
  std::uint32_t x = word ^ (index + 1u) * 0x9E3779B1u;  // 2^32 / golden ratio, odd
  x = (x ^ x >> 15) * 0x2C1B3C6Du;
  x = (x ^ x >> 12) * 0x297A2D39u;
  return x ^ x >> 15;
}

LOCKS_HD constexpr std::uint32_t finish_key_hash(std::uint32_t sum, std::uint32_t num_words) {
  return mix_key_word(sum, num_words);
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
