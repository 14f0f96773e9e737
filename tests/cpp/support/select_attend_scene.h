// A step as select_attend finds it on a device: plan and masses (select_attend_masses.h), caches
// and queries; what it left; and what attention it is to have done, in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "core/scalar.h"
#include "decode/select_attend_cuda.h"
#include "support/device_array.h"
#include "support/select_attend_config.h"
#include "support/select_attend_masses.h"

namespace locks::testing {

struct SceneResult {
  std::vector<float> output;  // [row, query head, channel]
  std::vector<std::uint8_t> raw_output;
  std::vector<float> lse;
  std::vector<std::uint8_t> selected;
  std::vector<unsigned long long> counters;
};

class SelectAttendScene {
 public:
  explicit SelectAttendScene(SceneConfig config)
      : c_(std::move(config)), random_(c_.seed), masses_(c_, random_) {
    for (int row = 0; row < c_.num_rows(); ++row) {
      mask_pages_ = std::max<std::int64_t>(mask_pages_, masses_.pages_of(row) + 5);
    }
    make_cache();
    make_queries();
    upload();
  }

  const SceneConfig& config() const { return c_; }
  const SceneMasses& masses() const { return masses_; }
  std::int64_t mask_pages() const { return mask_pages_; }

  // Of a row that is read whole, to at most its length in the configuration.
  void change_length(int row, int length) {
    masses_.change_length(row, length);
    device_plan_->upload(masses_.plan().data());
  }

  detail::StepArguments arguments() const {
    detail::StepArguments a{};
    a.attention = {c_.num_heads(), c_.kv_heads, c_.head_dim,
                   1.0f / std::sqrt(static_cast<float>(c_.head_dim))};
    SummaryFormat format = kFine;
    format.page_tokens = c_.page_tokens;
    a.layout = record_layout(format, c_.head_dim);
    a.query = {device_query_->get(), c_.query, c_.num_heads(),
               std::int64_t{c_.num_heads()} * c_.head_dim + 8, c_.head_dim};
    a.keys = tensor(0);
    a.values = tensor(1);
    a.seqs.num_seqs = c_.num_rows();
    a.seqs.cache_blocks = {device_table_->get(), table_stride_, table_stride_};
    a.plan = device_plan_->get();
    a.output = {device_output_->get(), c_.output, std::int64_t{c_.num_heads()} * c_.head_dim + 16,
                c_.head_dim, c_.has_lse ? device_lse_->get() : nullptr};
    a.selected = c_.has_mask ? device_selected_->get() : nullptr;
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
    r.output.resize(static_cast<std::size_t>(c_.num_rows()) * head_channels());
    for (int row = 0; row < c_.num_rows(); ++row) {
      for (std::size_t i = 0; i < head_channels(); ++i) {
        r.output[static_cast<std::size_t>(row) * head_channels() + i] = detail::load_scalar(
            r.raw_output.data(), c_.output,
            row * (static_cast<std::int64_t>(head_channels()) + 16) + static_cast<std::int64_t>(i));
      }
    }
    return r;
  }

  struct Exact {
    std::vector<double> output;
    double lse;
  };

  Exact attend(int row, int head, const std::vector<std::uint8_t>& taken) const {
    const int d = c_.head_dim;
    const int length = masses_.plan()[static_cast<std::size_t>(row)].length;
    std::vector<double> logits;
    std::vector<int> tokens;
    const std::int64_t q = row * (std::int64_t{c_.num_heads()} * d + 8) + std::int64_t{head} * d;
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
    return static_cast<std::size_t>(c_.num_heads()) * static_cast<std::size_t>(c_.head_dim);
  }

 private:
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
    table_.assign(static_cast<std::size_t>(table_stride_ * c_.num_rows()), 0);  // the null block
    pool_.resize(static_cast<std::size_t>(num_blocks_ * block_stride() + 8));
    std::vector<std::uint16_t> normals(8192);
    for (auto& n : normals) n = scalar(random_.normal());
    for (auto& x : pool_) x = normals[random_.bits() % 8192];
    // A permutation by a step that shares no factor with the number of blocks.
    std::int64_t step = num_blocks_ * 5 / 8 + 1;
    while (std::gcd(step, num_blocks_) != 1) ++step;
    std::int64_t next = 0;
    for (int row = 0; row < c_.num_rows(); ++row) {
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
    const std::int64_t count = c_.num_rows() * (static_cast<std::int64_t>(head_channels()) + 8);
    query_.assign(static_cast<std::size_t>(count * scalar_bytes(c_.query)), 0);
    for (std::int64_t i = 0; i < count; ++i) {
      detail::store_scalar(query_.data(), c_.query, i, random_.normal());
    }
  }

  std::size_t output_bytes() const {
    return static_cast<std::size_t>(c_.num_rows()) * (head_channels() + 16) *
           static_cast<std::size_t>(scalar_bytes(c_.output));
  }
  std::size_t lse_count() const { return static_cast<std::size_t>(c_.num_rows() * c_.num_heads()); }
  std::size_t mask_count() const {
    return static_cast<std::size_t>(c_.num_rows() * c_.kv_heads) *
           static_cast<std::size_t>(mask_pages_);
  }

  template <class T>
  static std::unique_ptr<DeviceArray<T>> copy(const std::vector<T>& host) {
    return std::make_unique<DeviceArray<T>>(host.data(), static_cast<std::int64_t>(host.size()));
  }

  void upload() {
    device_plan_ = copy(masses_.plan());
    device_masses_ = copy(masses_.masses());
    device_sums_ = copy(masses_.sums());
    device_shifts_ = copy(masses_.shifts());
    device_tail_ = copy(masses_.tail());
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
  SceneMasses masses_;
  std::int64_t mask_pages_ = 0;
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
