// One call of each stage with poisoned outputs and workspace, for tests.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "core/scalar.h"
#include "support/paged_fixture.h"

namespace locks::testing {

// Workspace of exactly the bytes that a stage asks for, poisoned.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes) : pool_(bytes, false) {}
  void* data() const { return pool_.data(); }

 private:
  Pool pool_;
};

struct Scores {
  std::vector<float>
      values;  // ragged [sequence, query head, page]; untouched entries stay poisoned
  std::int64_t invalid_records = 0;
};

inline float poison_float() {
  float value;
  std::memset(&value, kPoison, sizeof value);
  return value;
}

inline bool is_poison(float value) {
  const float poison = poison_float();
  return std::memcmp(&value, &poison, sizeof value) == 0;
}

// Scores from records; with_unrecorded adds the pages of the incomplete blocks.
inline Scores call_score(PagedFixture& fixture, bool with_unrecorded, const Executor& executor) {
  const AttentionParams attention = fixture.attention();
  const PageIndex pages = fixture.pages();
  const auto total = static_cast<std::size_t>(pages.begin[fixture.num_seqs()]);
  Scores scores{std::vector<float>(total * static_cast<std::size_t>(attention.num_query_heads),
                                   poison_float()),
                0};
  const Workspace prepared(prepared_query_bytes(attention, fixture.num_seqs()));
  Status status = prepare_queries(attention, fixture.summary(), fixture.query(), fixture.num_seqs(),
                                  prepared.data(), executor);
  EXPECT_TRUE(status.ok()) << status.message();
  status =
      score_pages(attention, fixture.summary(), prepared.data(), fixture.records(), fixture.seqs(),
                  pages, scores.values.data(), &scores.invalid_records, executor);
  EXPECT_TRUE(status.ok()) << status.message();
  if (with_unrecorded) {
    status = score_unrecorded_pages(attention, fixture.query(), fixture.keys(), fixture.seqs(),
                                    pages, scores.values.data(), executor);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  return scores;
}

struct Sets {
  std::vector<std::int32_t> ids;     // ragged [sequence, KV head, page]
  std::vector<std::int32_t> counts;  // [sequence, KV head]
  SelectCounters counters;

  PageSets view() { return {ids.data(), counts.data()}; }
  std::vector<std::int32_t> of(const PageIndex& pages, int num_kv_heads, int seq, int head) const {
    const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(pages.begin[seq] * num_kv_heads +
                                                                 head * pages.pages(seq));
    return {begin, begin + counts[static_cast<std::size_t>(seq * num_kv_heads + head)]};
  }
};

inline Sets poisoned_sets(PagedFixture& fixture) {
  const auto heads = static_cast<std::size_t>(fixture.edge().num_kv_heads);
  const auto total = static_cast<std::size_t>(fixture.pages().begin[fixture.num_seqs()]);
  return {std::vector<std::int32_t>(total * heads, -1),
          std::vector<std::int32_t>(static_cast<std::size_t>(fixture.num_seqs()) * heads, -1),
          {}};
}

inline Sets call_select(PagedFixture& fixture, const std::vector<float>& scores,
                        const Budget& budget, GroupRule rule, const Executor& executor) {
  Sets sets = poisoned_sets(fixture);
  const PageIndex pages = fixture.pages();
  const Workspace workspace(select_workspace_bytes(fixture.seqs(), pages, executor.num_workers));
  const Status status =
      select_pages(fixture.attention(), scores.data(), fixture.seqs(), pages, budget, rule,
                   sets.view(), &sets.counters, workspace.data(), executor);
  EXPECT_TRUE(status.ok()) << status.message();
  return sets;
}

// An output tensor of the query's type with padded strides and poison in it.
class Output {
 public:
  explicit Output(const PagedFixture& fixture)
      : head_dim_(fixture.edge().head_dim),
        num_heads_(fixture.num_query_heads()),
        num_seqs_(fixture.num_seqs()),
        type_(fixture.edge().type),
        head_stride_(head_dim_ + fixture.edge().padding),
        seq_stride_(num_heads_ * head_stride_ + fixture.edge().padding),
        pool_(static_cast<std::size_t>(num_seqs_ * seq_stride_ * scalar_bytes(type_)), false),
        lse_(static_cast<std::size_t>(num_seqs_ * num_heads_), poison_float()) {}

  AttentionOutput view() { return {pool_.data(), type_, seq_stride_, head_stride_, lse_.data()}; }
  float lse(int seq, int head) const {
    return lse_[static_cast<std::size_t>(seq * num_heads_ + head)];
  }
  std::vector<float> row(int seq, int head) const {
    std::vector<float> values(static_cast<std::size_t>(head_dim_));
    detail::load_floats(pool_.data(), type_, seq * seq_stride_ + head * head_stride_, head_dim_,
                        values.data());
    return values;
  }
  // True if no byte between the rows has changed.
  bool padding_is_untouched() const {
    const std::int64_t bytes = scalar_bytes(type_);
    std::vector<bool> inside(pool_.bytes(), false);
    for (int i = 0; i < num_seqs_; ++i) {
      for (int h = 0; h < num_heads_; ++h) {
        const std::int64_t begin = (i * seq_stride_ + h * head_stride_) * bytes;
        for (std::int64_t b = begin; b < begin + head_dim_ * bytes; ++b) {
          inside[static_cast<std::size_t>(b)] = true;
        }
      }
    }
    for (std::size_t b = 0; b < pool_.bytes(); ++b) {
      if (!inside[b] && pool_.data()[b] != kPoison) return false;
    }
    return true;
  }
  bool same_bytes(const Output& other) const {
    return std::memcmp(pool_.data(), other.pool_.data(), pool_.bytes()) == 0 &&
           std::memcmp(lse_.data(), other.lse_.data(), lse_.size() * sizeof(float)) == 0;
  }

 private:
  int head_dim_, num_heads_, num_seqs_;
  ScalarType type_;
  std::int64_t head_stride_, seq_stride_;
  Pool pool_;
  std::vector<float> lse_;
};

}  // namespace locks::testing
