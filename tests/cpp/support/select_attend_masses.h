// What the launches in front of select_attend leave, made up here: the plan, masses and their sums.
// And the pages to be taken by them, with the kernel's float arithmetic: the order of its sums is
// part of the contract.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/scalar.h"
#include "decode/select_attend_cuda.h"
#include "support/select_attend_config.h"

namespace locks::testing {

class SceneMasses {
 public:
  SceneMasses(const SceneConfig& config, Random& random) : c_(config) {
    make_plan();
    make_masses(random);
  }

  const std::vector<RowPlan>& plan() const { return plan_; }
  const std::vector<std::uint16_t>& masses() const { return masses_; }  // bits of bf16
  const std::vector<float>& sums() const { return sums_; }
  const std::vector<std::int32_t>& shifts() const { return shifts_; }
  const std::vector<float>& tail() const { return tail_; }
  int pages_of(int row) const {
    return (plan_[static_cast<std::size_t>(row)].length + c_.page_tokens - 1) / c_.page_tokens;
  }

  // Of a row that is read whole: masses stay where they are only if scored rows keep their blocks.
  void change_length(int row, int length) { plan_[static_cast<std::size_t>(row)].length = length; }

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
    return detail::tile_index(plan_[static_cast<std::size_t>(row)], c_.num_heads(), head);
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
    const float tail = tail_[static_cast<std::size_t>(row * c_.num_heads() + head)];
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
    }
    RowPlan end{};
    end.first_tile = tile;
    plan_.push_back(end);
  }

  void make_masses(Random& random) {
    const int per_block = 16 / c_.page_tokens;
    const std::int64_t tiles = std::int64_t{plan_.back().first_tile} * c_.num_heads();
    masses_.assign(static_cast<std::size_t>(tiles * detail::kTileBlocks * per_block + 8), 0xFFFF);
    sums_.assign(static_cast<std::size_t>(tiles + 8), 0);
    shifts_.assign(static_cast<std::size_t>(tiles + 8), 99);
    tail_.assign(static_cast<std::size_t>(c_.num_rows() * c_.num_heads()), -kInfinity);
    for (int row = 0; row < c_.num_rows(); ++row) {
      const RowPlan& plan = plan_[static_cast<std::size_t>(row)];
      for (int head = 0; head < c_.num_heads(); ++head) {
        const std::int64_t begin = head_tiles(row, head);
        if (plan.length % 16 != 0) tail_[static_cast<std::size_t>(row * c_.num_heads() + head)] = 2;
        for (int t = 0; t < detail::num_tiles(plan.scored_blocks); ++t) {
          float sum = 0;
          const int shift = c_.shift ? c_.shift(row, head, t) : 0;
          const int blocks =
              std::min(detail::kTileBlocks, plan.scored_blocks - t * detail::kTileBlocks);
          for (int p = 0; p < blocks * per_block; ++p) {
            const int page = t * detail::kTileBlocks * per_block + p;
            const float mass = c_.mass(row, head, page, random);
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

  SceneConfig c_;
  std::vector<RowPlan> plan_;
  std::vector<std::uint16_t> masses_;
  std::vector<float> sums_;
  std::vector<std::int32_t> shifts_;
  std::vector<float> tail_;
};

}  // namespace locks::testing
