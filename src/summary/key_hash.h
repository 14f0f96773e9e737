// The hash of a block's keys that a record's header carries: which keys the record describes.
//
// Defined on the 16 keys in canonical order, whatever the strides of the cache: token by token,
// channels in order, as the bytes that the cache stores, read as little-endian 32-bit words, n of
// them. Words go in pairs; pair q of token t adds, mod 2^64,
//   (first + key(t % 4, q / 8, 0) + lane) * (second + key(t % 4, q / 8, 1) + lane),
// sums mod 2^32, lane = lane_key(t / 4, q % 8): the family NH of hash functions, with fixed keys.
// The sum has no order, so any number of lanes or threads may share it, and it costs a GPU three
// instructions a pair; its keys tie each word to its place. It finds stale records; it does not
// resist an adversary.
#pragma once

#include <cstdint>

#include "core/cpu_namespace.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

inline constexpr int kHashLanes = 8;   // pairs of words side by side
inline constexpr int kHashTokens = 4;  // tokens whose keys differ; groups of them differ in lanes

// Invertible in `word` for each index.
LOCKS_HD constexpr std::uint32_t mix_key_word(std::uint32_t word, std::uint32_t index) {
  std::uint32_t x = word ^ (index + 1u) * 0x9E3779B1u;  // 2^32 / golden ratio, odd
  x = (x ^ x >> 15) * 0x2C1B3C6Du;
  x = (x ^ x >> 12) * 0x297A2D39u;
  return x ^ x >> 15;
}

LOCKS_HD constexpr std::uint32_t hash_key(int token, int step, int place) {
  return mix_key_word(0, static_cast<std::uint32_t>((step * kHashTokens + token) * 2 + place));
}

LOCKS_HD constexpr std::uint32_t hash_lane_key(int group, int lane) {
  return mix_key_word(1, static_cast<std::uint32_t>(group * kHashLanes + lane));
}

LOCKS_HD constexpr std::uint64_t hash_pair(std::uint32_t first, std::uint32_t second) {
  return std::uint64_t{first} * second;
}

LOCKS_HD constexpr std::uint32_t finish_key_hash(std::uint64_t sum, std::uint32_t num_words) {
  const std::uint32_t high = mix_key_word(static_cast<std::uint32_t>(sum >> 32), num_words);
  return mix_key_word(static_cast<std::uint32_t>(sum) ^ high, num_words);
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
