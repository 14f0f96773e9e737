// The newest tokens of a fixture's rows as what a step adds: device copies of their keys and values
// in rows of their own, the slots they go to, and the caches as they were before the step.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "locks/cuda.h"
#include "support/device_array.h"
#include "support/paged_fixture.h"

namespace locks::testing {

class DeviceNewTokens {
 public:
  // Of 16-bit caches in aligned rows. Rows of no tokens have no slot; nor has every third one: its
  // token is in the caches.
  explicit DeviceNewTokens(const PagedFixture& fixture)
      : fixture_(fixture),
        slots_(host_slots(fixture)),
        keys_(gather(fixture.keys(), kKeyGap)),
        values_(gather(fixture.values(), kValueGap)),
        device_slots_(slots_.data(), static_cast<std::int64_t>(slots_.size())),
        device_keys_(keys_.data(), static_cast<std::int64_t>(keys_.size())),
        device_values_(values_.data(), static_cast<std::int64_t>(values_.size())) {}

  NewTokens view() const {
    const std::int64_t d = fixture_.edge().head_dim, heads = fixture_.edge().num_kv_heads;
    return {device_keys_.get(),      device_values_.get(), heads * (d + kKeyGap), d + kKeyGap,
            heads * (d + kValueGap), d + kValueGap,        device_slots_.get()};
  }
  // The memory of the fixture's keys or values, poisoned where a token is to come.
  std::vector<std::uint8_t> without(const PagedTensor& cache) const {
    const auto* data = static_cast<const std::uint8_t*>(cache.data);
    std::vector<std::uint8_t> pool(data, data + extent_bytes(cache));
    for (int row = 0; row < fixture_.num_seqs(); ++row) {
      if (slots_[static_cast<std::size_t>(row)] < 0) continue;
      for (int head = 0; head < cache.num_kv_heads; ++head) {
        std::memset(pool.data() + offset(cache, row, head), kPoison, row_bytes(cache));
      }
    }
    return pool;
  }

 private:
  static constexpr int kKeyGap = 8, kValueGap = 0;  // channels between heads

  static std::vector<std::int64_t> host_slots(const PagedFixture& fixture) {
    const BlockTable table = fixture.seqs().cache_blocks;
    const int block_tokens = fixture.keys().block_tokens;
    std::vector<std::int64_t> slots;
    for (int row = 0; row < fixture.num_seqs(); ++row) {
      const int newest = fixture.edge().lengths[static_cast<std::size_t>(row)] - 1;
      slots.push_back(-1);
      if (newest < 0 || row % 3 == 2) continue;
      const std::int64_t id = table.ids[row * table.seq_stride + newest / block_tokens];
      slots.back() = id * block_tokens + newest % block_tokens;
    }
    return slots;
  }
  static std::size_t row_bytes(const PagedTensor& cache) {
    return static_cast<std::size_t>(cache.head_dim * scalar_bytes(cache.type));
  }
  std::int64_t offset(const PagedTensor& cache, int row, int head) const {
    const std::int64_t slot = slots_[static_cast<std::size_t>(row)];
    return scalar_bytes(cache.type) *
           (slot / cache.block_tokens * cache.block_stride +
            slot % cache.block_tokens * cache.token_stride + head * cache.head_stride);
  }
  std::vector<std::uint8_t> gather(const PagedTensor& cache, int gap) const {
    const std::int64_t stride = (cache.head_dim + gap) * scalar_bytes(cache.type);
    std::vector<std::uint8_t> rows(
        static_cast<std::size_t>(fixture_.num_seqs() * cache.num_kv_heads * stride), kPoison);
    for (int row = 0; row < fixture_.num_seqs(); ++row) {
      if (slots_[static_cast<std::size_t>(row)] < 0) continue;
      for (int head = 0; head < cache.num_kv_heads; ++head) {
        std::memcpy(rows.data() + (row * cache.num_kv_heads + head) * stride,
                    static_cast<const std::uint8_t*>(cache.data) + offset(cache, row, head),
                    row_bytes(cache));
      }
    }
    return rows;
  }

  const PagedFixture& fixture_;
  std::vector<std::int64_t> slots_;
  std::vector<std::uint8_t> keys_, values_;
  DeviceArray<std::int64_t> device_slots_;
  DeviceArray<std::uint8_t> device_keys_, device_values_;
};

}  // namespace locks::testing
