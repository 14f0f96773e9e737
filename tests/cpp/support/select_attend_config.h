// What a step of select_attend's tests is made from: shapes, where keys and values lie, masses.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "locks/page.h"

namespace locks::testing {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  std::uint32_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<std::uint32_t>(state_ >> 32);
  }
  float uniform() { return static_cast<float>(bits() >> 8) * 0x1p-24f; }
  float normal() {  // near enough: a sum of uniforms
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  std::uint64_t state_;
};

struct SceneRow {
  int length;
  int budget_pages;  // 0: read whole
};

enum class RowLayout { kTogether, kSeparate, kTokenMajor, kUnaligned };

// exp of a normal deviate: page shares as of random keys.
inline float scattered_mass(int, int, int, Random& random) {
  return std::exp(2.2f * random.normal());
}

struct SceneConfig {
  std::string name;
  std::vector<SceneRow> rows;
  int page_tokens = 4;
  int kv_heads = 2;
  int group = 7;
  int head_dim = 128;
  ScalarType cache = ScalarType::kBFloat16;
  ScalarType query = ScalarType::kBFloat16;
  ScalarType output = ScalarType::kFloat32;
  int block_tokens = 16;
  RowLayout layout = RowLayout::kTogether;
  int most_blocks = 600;  // of the pool; longer sequences use blocks again
  int first_block = 1;    // block 0 is the null block
  // Mass of (row, query head, page), and shift of (row, query head, tile).
  std::function<float(int, int, int, Random&)> mass = scattered_mass;
  std::function<int(int, int, int)> shift = {};
  std::uint64_t seed = 1;
  bool check_attention = true;
  bool has_lse = true;
  bool has_mask = true;

  int num_rows() const { return static_cast<int>(rows.size()); }
  int num_heads() const { return kv_heads * group; }
};

}  // namespace locks::testing
