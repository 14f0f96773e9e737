// A step as select_attend finds it: plan, masses and sums made up here, caches, queries; and what
// it is to do with them. Selection is computed with the kernel's float arithmetic (the order of its
// sums is part of the contract), attention in double.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/scalar.h"
#include "decode/select_attend_cuda.h"
#include "support/device_array.h"

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
  std::function<float(int, int, int, Random&)> mass = {};
  std::function<int(int, int, int)> shift = {};
  std::uint64_t seed = 1;
  bool check_attention = true;
  bool has_lse = true;
};

// exp of a normal deviate: page shares as of random keys.
inline float scattered_mass(int, int, int, Random& random) {
  return std::exp(2.2f * random.normal());
}

struct SceneResult {
  std::vector<float> output;  // [row, query head, channel]
  std::vector<std::uint8_t> raw_output;
  std::vector<float> lse;
  std::vector<std::uint8_t> selected;
  std::vector<unsigned long long> counters;
};

class SelectAttendScene {
 public:
  explicit SelectAttendScene(SceneConfig config) : c_(std::move(config)), random_(c_.seed) {
    if (!c_.mass) c_.mass = scattered_mass;
    make_plan();
    make_masses();
    make_cache();
    make_queries();
    upload();
  }

  const SceneConfig& config() const { return c_; }
  const std::vector<RowPlan>& plan() const { return plan_; }
  int num_rows() const { return static_cast<int>(c_.rows.size()); }
  int num_heads() const { return c_.kv_heads * c_.group; }
  int pages_of(int row) const {
    return (plan_[static_cast<std::size_t>(row)].length + c_.page_tokens - 1) / c_.page_tokens;
  }
  std::int64_t mask_pages() const { return mask_pages_; }

  // New lengths and budgets within those of the configuration; masses stay, as those of the first
  // tiles do not move only if the rows keep their scored blocks: so only whole rows may change.
  void change_length(int row, int length) {
    plan_[static_cast<std::size_t>(row)].length = length;
    device_plan_->upload(plan_.data());
  }

  detail::StepArguments arguments() const {
    detail::StepArguments a{};
    a.attention = {num_heads(), c_.kv_heads, c_.head_dim,
                   1.0f / std::sqrt(static_cast<float>(c_.head_dim))};
    SummaryFormat format = kFine;
    format.page_tokens = c_.page_tokens;
    a.layout = record_layout(format, c_.head_dim);
    a.query = {device_query_->get(), c_.query, num_heads(),
               std::int64_t{num_heads()} * c_.head_dim + 8, c_.head_dim};
    a.keys = tensor(0);
    a.values = tensor(1);
    a.seqs.num_seqs = num_rows();
    a.seqs.cache_blocks = {device_table_->get(), table_stride_, table_stride_};
    a.plan = device_plan_->get();
    a.output = {device_output_->get(), c_.output, std::int64_t{num_heads()} * c_.head_dim + 16,
                c_.head_dim, c_.has_lse ? device_lse_->get() : nullptr};
    a.selected = device_selected_->get();
    a.selected_pages = mask_pages_;
    a.counters = device_counters_->get();
    a.workspace.masses = reinterpret_cast<__nv_bfloat16*>(device_masses_->get());
    a.workspace.tile_sums = device_sums_->get();
    a.workspace.tile_shifts = device_shifts_->get();
    a.workspace.log2_tail = device_tail_->get();
    return a;
  }

  void poison() {
    std::vector<std::uint8_t> bytes(output_bytes(), 0xFF);
    device_output_->upload(bytes.data());
    std::vector<float> lse(lse_count(), kNan);
    device_lse_->upload(lse.data());
    std::vector<std::uint8_t> mask(mask_count(), 0xAB);
    device_selected_->upload(mask.data());
    std::vector<unsigned long long> zero(kNumCudaCounters, 0);
    device_counters_->upload(zero.data());
  }

  SceneResult download() const {
    SceneResult r;
    r.raw_output = device_output_->download();
    r.lse = device_lse_->download();
    r.selected = device_selected_->download();
    r.counters = device_counters_->download();
    r.output.resize(static_cast<std::size_t>(num_rows()) * head_channels());
    for (int row = 0; row < num_rows(); ++row) {
      for (std::size_t i = 0; i < head_channels(); ++i) {
        r.output[static_cast<std::size_t>(row) * head_channels() + i] = detail::load_scalar(
            r.raw_output.data(), c_.output,
            row * (static_cast<std::int64_t>(head_channels()) + 16) + static_cast<std::int64_t>(i));
      }
    }
    return r;
  }

  // --- references -------------------------------------------------------------------------------

  struct Choice {
    std::vector<std::uint8_t> taken;  // [page]
    bool whole = false;
    std::int64_t bad_pages = 0;
  };

  Choice choose(int row, int kv_head) const {
    const RowPlan& plan = plan_[static_cast<std::size_t>(row)];
    const int pages = pages_of(row);
    Choice choice;
    choice.taken.assign(static_cast<std::size_t>(pages), 1);
    choice.whole = plan.scored_blocks == 0;
    if (choice.whole) return choice;
    const int per_block = 16 / c_.page_tokens;
    const int scored = plan.scored_blocks * per_block;
    const int first = 16 / c_.page_tokens;
    const int last = plan.length / c_.page_tokens - 64 / c_.page_tokens;
    std::vector<Sum> total(static_cast<std::size_t>(c_.group));
    std::vector<float> weight(static_cast<std::size_t>(c_.group));
    for (int g = 0; g < c_.group; ++g) {
      const auto at = static_cast<std::size_t>(g);
      total[at] = head_sum(row, kv_head * c_.group + g);
      weight[at] = total[at].sum > 0 ? 1.0f / (total[at].sum * static_cast<float>(c_.group)) : 0;
    }
    std::vector<std::pair<float, int>> choices;
    int forced = first + pages - last;
    std::fill(choice.taken.begin(), choice.taken.end(), 0);
    for (int p = 0; p < pages; ++p) {
      const bool always = p < first || p >= last;
      if (p >= scored) {
        choice.taken[static_cast<std::size_t>(p)] = 1;
        continue;
      }
      float share = 0;
      for (int g = 0; g < c_.group; ++g) {
        const std::int64_t run = head_tiles(row, kv_head * c_.group + g);
        const int tile = p / per_block / detail::kTileBlocks;
        const int shift = shifts_at(run + tile);
        const float mass = bf16_to_float(masses_[static_cast<std::size_t>(
            run * detail::kTileBlocks * per_block +
            detail::mass_offset(p / per_block, p % per_block, per_block))]);
        share = std::fmaf(down(mass, total[static_cast<std::size_t>(g)].shift - shift),
                          weight[static_cast<std::size_t>(g)], share);
      }
      const bool bad = !(share < kInfinity);
      choice.bad_pages += bad ? 1 : 0;
      if (bad || always) choice.taken[static_cast<std::size_t>(p)] = 1;
      if (bad && !always) ++forced;
      if (!bad && !always) choices.emplace_back(-share, p);
    }
    const int wanted = plan.budget_pages - forced;
    if (wanted < 0) {
      std::fill(choice.taken.begin(), choice.taken.end(), 1);
      choice.whole = true;
      return choice;
    }
    std::sort(choices.begin(), choices.end());
    for (int i = 0; i < std::min<int>(wanted, static_cast<int>(choices.size())); ++i) {
      choice.taken[static_cast<std::size_t>(choices[static_cast<std::size_t>(i)].second)] = 1;
    }
    return choice;
  }

  struct Exact {
    std::vector<double> output;
    double lse;
  };

  Exact attend(int row, int head, const std::vector<std::uint8_t>& taken) const {
    const int d = c_.head_dim;
    const int length = plan_[static_cast<std::size_t>(row)].length;
    std::vector<double> logits;
    std::vector<int> tokens;
    const std::int64_t q = row * (std::int64_t{num_heads()} * d + 8) + std::int64_t{head} * d;
    double top = -kInfinity;
    for (int t = 0; t < length; ++t) {
      if (taken[static_cast<std::size_t>(t / c_.page_tokens)] == 0) continue;
      double dot = 0;
      const std::int64_t at = element(0, row, head / c_.group, t);
      for (int i = 0; i < d; ++i) {
        dot += static_cast<double>(detail::load_scalar(query_.data(), c_.query, q + i)) *
               value_at(0, at + i);
      }
      dot *= 1.0f / std::sqrt(static_cast<float>(d));
      logits.push_back(dot);
      tokens.push_back(t);
      top = std::max(top, dot);
    }
    Exact exact{std::vector<double>(static_cast<std::size_t>(d), 0), -kInfinity};
    double sum = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const double weight = std::exp(logits[i] - top);
      sum += weight;
      const std::int64_t at = element(1, row, head / c_.group, tokens[i]);
      for (int k = 0; k < d; ++k) {
        exact.output[static_cast<std::size_t>(k)] += weight * value_at(1, at + k);
      }
    }
    if (tokens.empty()) return exact;
    for (double& x : exact.output) x /= sum;
    exact.lse = top + std::log(sum);
    return exact;
  }

  std::size_t head_channels() const {
    return static_cast<std::size_t>(num_heads()) * static_cast<std::size_t>(c_.head_dim);
  }

 private:
  struct Sum {
    float sum = 0;
    int shift = 0;
  };

  static float bf16_to_float(std::uint16_t bits) { return detail::bf16_to_float(bits); }

  static float down(float x, int units) {
    units = std::min(std::max(units, 0), 4);
    const float once[] = {1, 0x1p-64f, 0x1p-64f, 0x1p-96f, 0};
    const float twice[] = {1, 1, 0x1p-64f, 0x1p-96f, 0};
    return units > 3 ? 0.0f : x * once[units] * twice[units];
  }

  static Sum plus(Sum a, Sum b) {
    const int shift = std::max(a.shift, b.shift);
    return {down(a.sum, shift - a.shift) + down(b.sum, shift - b.shift), shift};
  }

  int shifts_at(std::int64_t tile) const {
    const auto at = static_cast<std::size_t>(tile);
    return sums_[at] < 0 ? shifts_[at] : 0;
  }

  std::int64_t head_tiles(int row, int head) const {
    return detail::tile_index(plan_[static_cast<std::size_t>(row)], num_heads(), head);
  }

  // Tiles in runs of 8; runs r, r + 16, ... are a slot; in a slot every eighth run in order, then a
  // tree of 8; slots in order; the tail last.
  Sum head_sum(int row, int head) const {
    const std::int64_t begin = head_tiles(row, head);
    const int tiles = detail::num_tiles(plan_[static_cast<std::size_t>(row)].scored_blocks);
    const int runs = (tiles + 7) / 8;
    Sum total;
    for (int slot = 0; slot < 16; ++slot) {
      Sum lane[8];
      for (int l = 0; l < 8; ++l) {
        for (int r = slot + 16 * l; r < runs; r += 128) {
          Sum run;
          for (int t = r * 8; t < std::min(tiles, r * 8 + 8); ++t) {
            const auto at = static_cast<std::size_t>(begin + t);
            const Sum tile{std::abs(sums_[at]), shifts_at(begin + t)};
            run = t == r * 8 ? tile : plus(run, tile);
          }
          lane[l] = plus(lane[l], run);
        }
      }
      for (int apart = 1; apart < 8; apart *= 2) {
        for (int l = 0; l < 8; l += 2 * apart) lane[l] = plus(lane[l], lane[l + apart]);
      }
      total = plus(total, lane[0]);
    }
    const float tail = tail_[static_cast<std::size_t>(row * num_heads() + head)];
    return plus(total, {std::exp2(tail), 0});  // tails here are whole numbers, or -inf
  }

  void make_plan() {
    int tile = 0;
    for (const SceneRow& row : c_.rows) {
      RowPlan plan{};
      plan.length = row.length;
      plan.scored_blocks = row.budget_pages > 0 ? row.length / 16 : 0;
      plan.budget_pages = row.budget_pages;
      plan.first_tile = tile;
      plan.raised = row.length % 2;
      tile += detail::num_tiles(plan.scored_blocks);
      plan_.push_back(plan);
      mask_pages_ =
          std::max<std::int64_t>(mask_pages_, (row.length + c_.page_tokens - 1) / c_.page_tokens);
    }
    RowPlan end{};
    end.first_tile = tile;
    plan_.push_back(end);
    mask_pages_ += 5;
    num_tiles_ = tile;
  }

  void make_masses() {
    const int per_block = 16 / c_.page_tokens;
    const std::int64_t tiles = std::int64_t{num_tiles_} * num_heads();
    masses_.assign(static_cast<std::size_t>(tiles * detail::kTileBlocks * per_block + 8), 0xFFFF);
    sums_.assign(static_cast<std::size_t>(tiles + 8), 0);
    shifts_.assign(static_cast<std::size_t>(tiles + 8), 99);
    tail_.assign(static_cast<std::size_t>(num_rows() * num_heads()), -kInfinity);
    for (int row = 0; row < num_rows(); ++row) {
      const RowPlan& plan = plan_[static_cast<std::size_t>(row)];
      for (int head = 0; head < num_heads(); ++head) {
        const std::int64_t begin = head_tiles(row, head);
        if (plan.length % 16 != 0) tail_[static_cast<std::size_t>(row * num_heads() + head)] = 2;
        for (int t = 0; t < detail::num_tiles(plan.scored_blocks); ++t) {
          float sum = 0;
          const int shift = c_.shift ? c_.shift(row, head, t) : 0;
          const int blocks =
              std::min(detail::kTileBlocks, plan.scored_blocks - t * detail::kTileBlocks);
          for (int p = 0; p < blocks * per_block; ++p) {
            const int page = t * detail::kTileBlocks * per_block + p;
            const float mass = c_.mass(row, head, page, random_);
            const std::uint16_t bits = detail::float_to_bf16(mass);
            if (std::isfinite(mass)) sum += detail::bf16_to_float(bits);
            masses_[static_cast<std::size_t>(
                begin * detail::kTileBlocks * per_block +
                detail::mass_offset(page / per_block, page % per_block, per_block))] = bits;
          }
          const auto at = static_cast<std::size_t>(begin + t);
          sums_[at] = shift > 0 ? -sum : sum;
          if (shift > 0) shifts_[at] = shift;
        }
      }
    }
  }

  // Strides in elements of tensor 0 (keys) or 1 (values); both lie in one pool.
  std::int64_t token_stride() const {
    switch (c_.layout) {
      case RowLayout::kTogether:
        return 2 * c_.head_dim;
      case RowLayout::kSeparate:
        return c_.head_dim;
      case RowLayout::kTokenMajor:
        return std::int64_t{c_.kv_heads} * c_.head_dim;
      case RowLayout::kUnaligned:
        return c_.head_dim + 5;
    }
    return 0;
  }
  std::int64_t head_stride() const {
    return c_.layout == RowLayout::kTokenMajor ? c_.head_dim : token_stride() * c_.block_tokens;
  }
  std::int64_t tensor_stride() const {  // from keys to values
    return c_.layout == RowLayout::kTogether ? c_.head_dim : block_stride() / 2;
  }
  std::int64_t block_stride() const {
    const std::int64_t one =
        token_stride() * c_.block_tokens * (c_.layout == RowLayout::kTokenMajor ? 1 : c_.kv_heads);
    return c_.layout == RowLayout::kTogether ? one : 2 * one;
  }

  PagedTensor tensor(int which) const {
    PagedTensor t;
    t.data = reinterpret_cast<const std::uint16_t*>(device_pool_->get()) -
             c_.first_block * block_stride() + pool_offset() + which * tensor_stride();
    t.type = c_.cache;
    t.num_blocks = c_.first_block + num_blocks_;
    t.block_tokens = c_.block_tokens;
    t.num_kv_heads = c_.kv_heads;
    t.head_dim = c_.head_dim;
    t.block_stride = block_stride();
    t.head_stride = head_stride();
    t.token_stride = token_stride();
    return t;
  }
  std::int64_t pool_offset() const { return c_.layout == RowLayout::kUnaligned ? 3 : 0; }

  std::int64_t element(int which, int row, int kv_head, int token) const {
    const std::int32_t id =
        table_[static_cast<std::size_t>(row * table_stride_ + token / c_.block_tokens)];
    return pool_offset() + which * tensor_stride() + (id - c_.first_block) * block_stride() +
           kv_head * head_stride() + token % c_.block_tokens * token_stride();
  }

  double value_at(int, std::int64_t at) const {
    return detail::load_scalar(pool_.data(), c_.cache, at);
  }

  std::uint16_t scalar(float x) const {
    return c_.cache == ScalarType::kBFloat16 ? detail::float_to_bf16(x) : detail::float_to_fp16(x);
  }

  void make_cache() {
    table_stride_ = 1;
    std::int64_t needed = 0;
    for (const SceneRow& row : c_.rows) {
      const int blocks = (row.length + c_.block_tokens - 1) / c_.block_tokens;
      table_stride_ = std::max<std::int64_t>(table_stride_, blocks + 1);
      needed += blocks;
    }
    const bool again = needed > c_.most_blocks;
    num_blocks_ = std::max<std::int64_t>(again ? c_.most_blocks : needed, 1);
    table_.assign(static_cast<std::size_t>(table_stride_ * num_rows()), 0);  // the null block
    pool_.resize(static_cast<std::size_t>(num_blocks_ * block_stride() + 8));
    std::vector<std::uint16_t> normals(8192);
    for (auto& n : normals) n = scalar(random_.normal());
    for (auto& x : pool_) x = normals[random_.bits() % 8192];
    // A permutation by a step that shares no factor with the number of blocks.
    std::int64_t step = num_blocks_ * 5 / 8 + 1;
    while (std::gcd(step, num_blocks_) != 1) ++step;
    std::int64_t next = 0;
    for (int row = 0; row < num_rows(); ++row) {
      const int length = c_.rows[static_cast<std::size_t>(row)].length;
      for (int b = 0; b * c_.block_tokens < length; ++b) {
        table_[static_cast<std::size_t>(row * table_stride_ + b)] =
            static_cast<std::int32_t>(c_.first_block + next++ * step % num_blocks_);
      }
      if (again) continue;
      // What lies behind the last token must not be read into anything.
      for (int t = length; t % c_.block_tokens != 0; ++t) {
        for (int head = 0; head < c_.kv_heads; ++head) {
          for (int i = 0; i < c_.head_dim; ++i) {
            pool_[static_cast<std::size_t>(element(0, row, head, t) + i)] = 0x7FFF;
            pool_[static_cast<std::size_t>(element(1, row, head, t) + i)] = 0x7FFF;
          }
        }
      }
    }
  }

  void make_queries() {
    const std::int64_t count = num_rows() * (static_cast<std::int64_t>(head_channels()) + 8);
    query_.assign(static_cast<std::size_t>(count * scalar_bytes(c_.query)), 0);
    for (std::int64_t i = 0; i < count; ++i) {
      detail::store_scalar(query_.data(), c_.query, i, random_.normal());
    }
  }

  std::size_t output_bytes() const {
    return static_cast<std::size_t>(num_rows()) * (head_channels() + 16) *
           static_cast<std::size_t>(scalar_bytes(c_.output));
  }
  std::size_t lse_count() const { return static_cast<std::size_t>(num_rows() * num_heads()); }
  std::size_t mask_count() const {
    return static_cast<std::size_t>(num_rows() * c_.kv_heads) *
           static_cast<std::size_t>(mask_pages_);
  }

  template <class T>
  static std::unique_ptr<DeviceArray<T>> copy(const std::vector<T>& host) {
    return std::make_unique<DeviceArray<T>>(host.data(), static_cast<std::int64_t>(host.size()));
  }

  void upload() {
    device_plan_ = copy(plan_);
    device_masses_ = copy(masses_);
    device_sums_ = copy(sums_);
    device_shifts_ = copy(shifts_);
    device_tail_ = copy(tail_);
    device_pool_ = copy(pool_);
    device_table_ = copy(table_);
    device_query_ = copy(query_);
    device_output_ = copy(std::vector<std::uint8_t>(output_bytes()));
    device_lse_ = copy(std::vector<float>(lse_count()));
    device_selected_ = copy(std::vector<std::uint8_t>(mask_count()));
    device_counters_ = copy(std::vector<unsigned long long>(kNumCudaCounters));
    poison();
  }

  SceneConfig c_;
  Random random_;
  std::vector<RowPlan> plan_;
  int num_tiles_ = 0;
  std::int64_t mask_pages_ = 0;
  std::vector<std::uint16_t> masses_;
  std::vector<float> sums_;
  std::vector<std::int32_t> shifts_;
  std::vector<float> tail_;
  std::vector<std::uint16_t> pool_;
  std::int64_t num_blocks_ = 0;
  std::vector<std::int32_t> table_;
  std::int64_t table_stride_ = 0;
  std::vector<std::uint8_t> query_;

  std::unique_ptr<DeviceArray<RowPlan>> device_plan_;
  std::unique_ptr<DeviceArray<std::uint16_t>> device_masses_, device_pool_;
  std::unique_ptr<DeviceArray<float>> device_sums_, device_tail_, device_lse_;
  std::unique_ptr<DeviceArray<std::int32_t>> device_shifts_, device_table_;
  std::unique_ptr<DeviceArray<std::uint8_t>> device_query_, device_output_, device_selected_;
  std::unique_ptr<DeviceArray<unsigned long long>> device_counters_;
};

}  // namespace locks::testing
