// Drives the real stages over a captured trace: its keys and values as one contiguous cache, its
// judged steps as sequences of growing length that share one block table row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "locks/attend.h"
#include "locks/page.h"
#include "locks/quality.h"
#include "locks/score.h"
#include "locks/trace.h"

namespace locks::detail {

// A trace that is whole, and long enough for a reference key.
Status check_for_run(const AttentionTrace& trace, int page_tokens);

class TraceRun {
 public:
  // Of pages of the format's size. The trace is valid, and outlives the run.
  TraceRun(const AttentionTrace& trace, const SummaryFormat& format, const Executor& executor);

  // The pages that one choice gives each step, ragged like PageIndex.
  struct Sets {
    std::vector<std::int32_t> ids;
    std::vector<std::int32_t> counts;
    PageSets view() { return {ids.data(), counts.data()}; }
  };

  std::size_t num_steps() const { return lengths_.size(); }
  std::size_t group() const { return static_cast<std::size_t>(attention_.num_query_heads); }
  std::size_t head_dim() const { return static_cast<std::size_t>(attention_.head_dim); }
  std::int32_t num_tokens() const { return num_tokens_; }  // in whole pages
  std::int32_t length(std::size_t step) const { return lengths_[step]; }
  std::size_t pages(std::size_t step) const {
    return static_cast<std::size_t>(begin_[step + 1] - begin_[step]);
  }
  // The first pages of a step, which have a record: those of its complete blocks.
  std::size_t recorded_pages(std::size_t step) const {
    return static_cast<std::size_t>(lengths_[step] / kBlockTokens * format_.pages_per_block());
  }
  const std::int32_t* chosen(const Sets& sets, std::size_t step) const {
    return sets.ids.data() + begin_[step];
  }
  // Scores of a step and head, one a page.
  const float* scores(const std::vector<float>& all, std::size_t step, std::size_t head) const {
    return all.data() + static_cast<std::size_t>(begin_[step]) * group() + head * pages(step);
  }
  const float* query(std::size_t step, std::size_t head) const;
  float scale() const { return attention_.scale; }

  Status score(Selector selector, std::vector<float>& scores) const;
  // Every record of the trace; a step reads those of its own complete blocks.
  Status build_records(std::vector<std::uint8_t>& memory,
                       const std::vector<float>& reference) const;
  // The mean of the trace's rotated keys 64 to 1087; empty for a format that takes none.
  std::vector<float> reference_key() const;
  Status select(const std::vector<float>& scores, GroupRule rule, const Budget& budget,
                Sets& sets) const;
  Sets all_pages() const;
  // output: [steps, group, d].
  Status attend(Sets& sets, std::vector<float>& output) const;
  // The share of the attention mass in the chosen pages, [steps, group], from the exact log masses
  // of all pages, in double.
  std::vector<double> retained_mass(const std::vector<float>& exact, const Sets& sets) const;
  // Tokens of the step that a page holds.
  std::int32_t page_length(std::size_t step, std::int32_t page) const;
  bool is_always_read(std::size_t step, std::int32_t page) const {
    return always_read(page, lengths_[step], format_.page_tokens);
  }

 private:
  PagedTensor contiguous_cache(const float* data) const;
  Status score_records(std::vector<float>& scores) const;
  Status score_keys(const SequenceBatch& seqs, Selector selector, std::vector<float>& scores) const;

  SummaryFormat format_;
  const Executor& executor_;
  std::int32_t num_tokens_;
  std::int64_t num_blocks_;
  std::vector<std::int32_t> lengths_;
  std::vector<std::int32_t> block_ids_;
  std::vector<std::int64_t> begin_;
  AttentionParams attention_;
  QueryTensor query_;
  PagedTensor keys_;
  PagedTensor values_;
  SequenceBatch seqs_;
  PageIndex pages_;
};

}  // namespace locks::detail
