// One sequence with fixed keys, and what else the tests of the summary stage share.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/scalar.h"
#include "locks/locks.h"
#include "support/executors.h"
#include "support/index.h"
#include "support/text.h"

namespace locks::testing {

inline constexpr int kHeadDims[] = {64, 80, 96, 128, 192, 256};
inline constexpr SummaryFormat kPresets[] = {kFine, kFine8, kCompact, kWide, kPaper};

inline std::vector<SummaryFormat> every_format() {
  std::vector<SummaryFormat> formats;
  for (int code = 0; code < 144; ++code) formats.push_back(decode_format(code).value());
  return formats;
}

// Key (head, token, channel) of all record tests: splitmix64, seed 2026, output number
// (head * 2^20 + token) * 256 + channel; its top byte as a signed number, over 32. So a key is a
// multiple of 1/32 in [-4, 4), exact in f32, bf16 and f16.
inline float test_key(int head, int token, int channel) {
  const std::uint64_t number =
      (static_cast<std::uint64_t>(head) << 20 | static_cast<std::uint64_t>(token)) * 256 +
      static_cast<std::uint64_t>(channel);
  std::uint64_t z = 2026 + (number + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return static_cast<float>(static_cast<std::int8_t>(z >> 56)) / 32;
}

struct Shape {
  int head_dim = 64;
  int num_kv_heads = 2;
  int num_tokens = 96;
  ScalarType type = ScalarType::kBFloat16;
  int block_tokens = 16;
  int record_block_tokens = 16;
  bool token_major = false;
};

inline constexpr std::uint8_t kOldContents = 0xA5;

// One sequence with its cache and records, both in cache blocks that are out of order.
class Sequence {
 public:
  explicit Sequence(const Shape& shape, const SummaryFormat& format = kFine)
      : shape_(shape), layout_(record_layout(format, shape.head_dim)) {
    const int d = shape.head_dim, heads = shape.num_kv_heads;
    key_ids_ = scattered(shape.num_tokens, shape.block_tokens);
    record_ids_ = scattered(shape.num_tokens, shape.record_block_tokens);
    keys_.type = shape.type;
    keys_.num_blocks = static_cast<std::int64_t>(key_ids_.size()) + 2;
    keys_.block_tokens = shape.block_tokens;
    keys_.num_kv_heads = heads;
    keys_.head_dim = d;
    keys_.token_stride = shape.token_major ? heads * d : d;
    keys_.head_stride = shape.token_major ? d : shape.block_tokens * d;
    keys_.block_stride =
        heads * shape.block_tokens * d + 32;  // a gap, as in a pool shared with values
    key_bytes_.assign(at(keys_.num_blocks * keys_.block_stride * scalar_bytes(shape.type)),
                      kOldContents);
    keys_.data = key_bytes_.data();
    for (int h = 0; h < heads; ++h) {
      for (int t = 0; t < shape.num_tokens; ++t) {
        for (int c = 0; c < d; ++c) set(h, t, c, test_key(h, t, c));
      }
    }
    records_.num_blocks = static_cast<std::int64_t>(record_ids_.size()) + 2;
    records_.block_tokens = shape.record_block_tokens;
    records_.num_kv_heads = heads;
    records_.record_bytes = layout_.record_bytes;
    records_.head_stride = shape.record_block_tokens / 16 * layout_.record_bytes;
    records_.block_stride = heads * records_.head_stride + 16;
    record_bytes_.resize(at(records_.num_blocks * records_.block_stride + 16));
    const auto address = reinterpret_cast<std::uintptr_t>(record_bytes_.data());
    records_.data = record_bytes_.data() + (16 - address % 16) % 16;
    poison();
  }

  void set(int head, int token, int channel, float value) {
    const int n = token / shape_.block_tokens, t = token % shape_.block_tokens;
    detail::store_scalar(key_bytes_.data(), shape_.type,
                         key_ids_[at(n)] * keys_.block_stride + head * keys_.head_stride +
                             t * keys_.token_stride + channel,
                         value);
  }

  // Every channel of tokens [begin, end) of both heads.
  void fill(int begin, int end, float value) {
    for (int h = 0; h < shape_.num_kv_heads; ++h) {
      for (int t = begin; t < end; ++t) {
        for (int c = 0; c < shape_.head_dim; ++c) set(h, t, c, value);
      }
    }
  }

  void poison() { std::fill(record_bytes_.begin(), record_bytes_.end(), kOldContents); }

  SequenceBatch batch(const std::int32_t* length) const {
    return {1, length, table(key_ids_), table(record_ids_)};
  }

  Status update(std::int32_t begin, std::int32_t length, const float* reference = nullptr,
                const Executor& executor = serial_executor()) {
    return summarise_blocks({layout_.format, reference}, keys_, batch(&length), &begin, records_,
                            &built_, executor);
  }

  std::uint8_t* record(int head, int block) {
    const int per_block = shape_.record_block_tokens / 16;
    return records_.data + record_ids_[at(block / per_block)] * records_.block_stride +
           head * records_.head_stride + block % per_block * records_.record_bytes;
  }

  // All complete records, heads first; without the key hash, which depends on the keys' type, if
  // asked.
  std::vector<std::uint8_t> bytes(bool with_hash = true) {
    std::vector<std::uint8_t> all;
    const int size = layout_.record_bytes - (with_hash ? 0 : 4);
    for (int h = 0; h < shape_.num_kv_heads; ++h) {
      for (int k = 0; k < shape_.num_tokens / 16; ++k) {
        all.insert(all.end(), record(h, k), record(h, k) + size);
      }
    }
    return all;
  }

  // Bits of scale `k` (0 centroid, then components) of a page.
  std::uint16_t scale_bits(int head, int block, int page, int k) {
    std::uint16_t bits;
    std::memcpy(
        &bits,
        record(head, block) + layout_.scales_offset + 2 * (page * (1 + layout_.format.rank) + k),
        2);
    return bits;
  }

  const Shape& shape() const { return shape_; }
  const RecordLayout& layout() const { return layout_; }
  const PagedTensor& keys() const { return keys_; }
  const RecordCache& records() const { return records_; }
  std::int64_t built() const { return built_; }
  const std::vector<std::uint8_t>& record_memory() const { return record_bytes_; }

 private:
  // Ids from the highest down, so that neighbours in the sequence are not neighbours in memory.
  static std::vector<std::int32_t> scattered(int num_tokens, int block_tokens) {
    std::vector<std::int32_t> ids(at((num_tokens + block_tokens - 1) / block_tokens));
    for (std::size_t n = 0; n < ids.size(); ++n) ids[n] = static_cast<std::int32_t>(ids.size() - n);
    return ids;
  }
  static BlockTable table(const std::vector<std::int32_t>& ids) {
    return {ids.data(), 0, static_cast<std::int64_t>(ids.size())};
  }

  Shape shape_;
  RecordLayout layout_;
  std::vector<std::uint8_t> key_bytes_, record_bytes_;
  std::vector<std::int32_t> key_ids_, record_ids_;
  PagedTensor keys_;
  RecordCache records_;
  std::int64_t built_ = 0;
};

}  // namespace locks::testing
