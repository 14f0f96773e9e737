// Budgets, always-read pages, and the exact choice of the best ranks.
#include "locks/select.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>

#include "core/cpu_kernels.h"
#include "core/message.h"
#include "core/work_queue.h"
#include "core/workspace.h"
#include "select/budget.h"
#include "select/select_kernels.h"

namespace locks {

namespace detail {
LOCKS_DECLARE_CPU_KERNELS(SelectKernels, select_kernels)
}  // namespace detail

using detail::join;
using detail::kForcedRank;

namespace {

// Scratch of one worker, sized by the longest sequence.
struct Scratch {
  float* masses;
  float* values;
  std::uint32_t* ranks;
};

std::size_t most_pages(const PageIndex& pages, int num_seqs) {
  std::int64_t most = 0;
  for (int i = 0; i < num_seqs; ++i) most = std::max(most, pages.pages(i));
  return static_cast<std::size_t>(most);
}

Scratch cut_scratch(detail::WorkspaceCutter& cutter, std::size_t pages) {
  return {cutter.take<float>(pages), cutter.take<float>(pages), cutter.take<std::uint32_t>(pages)};
}

std::size_t scratch_bytes(std::size_t pages) {
  detail::WorkspaceCutter cutter(nullptr);
  cut_scratch(cutter, pages);
  return cutter.bytes();
}

// The rank of the last page taken, and how many pages of that very rank are.
struct Cut {
  std::uint32_t rank;
  std::int64_t num_equal;
};

// The `count` largest ranks, by a radix search from the high bits: three passes over the pages
// whatever their order or ties, and nothing is moved. 1 <= count <= num_pages.
Cut find_cut(const std::uint32_t* ranks, std::int64_t num_pages, std::int64_t count) {
  constexpr int kDigitBits = 11;
  constexpr std::uint32_t kDigits = 1u << kDigitBits;
  std::uint32_t prefix = 0;
  std::uint32_t prefix_mask = 0;
  std::int64_t left = count;  // to be found among the pages of this prefix
  for (int shift = 32; shift > 0;) {
    const int bits = std::min(kDigitBits, shift);
    shift -= bits;
    const std::uint32_t digit_mask = (1u << bits) - 1;
    std::array<std::int32_t, kDigits> histogram{};
    for (std::int64_t p = 0; p < num_pages; ++p) {
      if ((ranks[p] & prefix_mask) == prefix) ++histogram[(ranks[p] >> shift) & digit_mask];
    }
    std::uint32_t digit = digit_mask;
    while (histogram[digit] < left) left -= histogram[digit--];
    prefix |= digit << shift;
    prefix_mask |= digit_mask << shift;
  }
  return {prefix, left};
}

// Writes the pages above the cut and the first ones at it, ascending.
std::int32_t take_pages(const std::uint32_t* ranks, std::int64_t num_pages, const Cut& cut,
                        std::int32_t* ids) {
  std::int32_t taken = 0;
  std::int64_t equal_left = cut.num_equal;
  for (std::int64_t p = 0; p < num_pages; ++p) {
    const bool at_cut = ranks[p] == cut.rank;
    if (ranks[p] > cut.rank || (at_cut && equal_left > 0)) {
      ids[taken++] = static_cast<std::int32_t>(p);
      if (at_cut) --equal_left;
    }
  }
  return taken;
}

// Forces the pages that always_read() names, a run at either end, and counts all forced pages.
std::int64_t force_always_read(std::int64_t length, int page_tokens, std::int64_t num_pages,
                               std::uint32_t* ranks) {
  const std::int64_t first =
      std::min<std::int64_t>(kAlwaysReadFirstTokens / page_tokens, num_pages);
  const std::int64_t last =
      std::max<std::int64_t>(length / page_tokens - kAlwaysReadLastTokens / page_tokens, 0);
  std::fill(ranks, ranks + first, kForcedRank);
  std::fill(ranks + last, ranks + num_pages, kForcedRank);
  return std::count(ranks, ranks + num_pages, kForcedRank);
}

Status validate_rule(GroupRule rule) {
  if (rule != GroupRule::kMeanOfShares && rule != GroupRule::kMaxOfScores) {
    return invalid_argument(join("select_pages: rule = ", static_cast<int>(rule),
                                 ", expected mean of shares or max of scores"));
  }
  return {};
}

// Scores and workspace are for the sequences that a budget does not cover.
Status validate_arrays(const float* scores, const SequenceBatch& seqs, const PageIndex& pages,
                       const Budget& budget, const PageSets& sets, const void* workspace) {
  if (seqs.num_seqs == 0) return {};
  if (sets.counts == nullptr || (sets.ids == nullptr && pages.begin[seqs.num_seqs] > 0)) {
    return invalid_argument("select_pages: sets: ids or counts is null");
  }
  for (int i = 0; i < seqs.num_seqs; ++i) {
    if (budget_pages(budget, seqs.lengths[i], pages.page_tokens, nullptr) == pages.pages(i)) {
      continue;
    }
    if (scores == nullptr) return invalid_argument("select_pages: scores is null");
    if (workspace == nullptr) return invalid_argument("select_pages: workspace is null");
  }
  return {};
}

}  // namespace

Status validate(const Budget& budget) {
  switch (budget.kind) {
    case Budget::Kind::kAll:
      return {};
    case Budget::Kind::kTokens:
      if (std::isfinite(budget.value) && budget.value >= 1 &&
          budget.value == std::floor(budget.value)) {
        return {};
      }
      return invalid_argument(
          join("budget: tokens = ", budget.value, ", expected a whole number >= 1"));
    case Budget::Kind::kFraction:
      if (budget.value > 0 && budget.value < 1) return {};
      return invalid_argument(join("budget: fraction = ", budget.value,
                                   ", expected a value in (0, 1); all pages are Budget::all()"));
  }
  return invalid_argument(
      join("budget: kind = ", static_cast<int>(budget.kind), ", expected all, tokens or fraction"));
}

std::int64_t budget_pages(const Budget& budget, std::int64_t length, int page_tokens,
                          bool* raised) {
  const detail::BudgetedPages allowed = detail::pages_within(budget, length, page_tokens);
  if (raised != nullptr) *raised = allowed.raised;
  return allowed.pages;
}

bool always_read(std::int64_t page, std::int64_t length, int page_tokens) {
  // Pages without a record are among the last: fewer than 16 tokens have none.
  const std::int64_t complete_pages = length / page_tokens;
  return page < kAlwaysReadFirstTokens / page_tokens ||
         page >= complete_pages - kAlwaysReadLastTokens / page_tokens;
}

std::size_t select_workspace_bytes(const SequenceBatch& seqs, const PageIndex& pages,
                                   int num_workers) {
  return scratch_bytes(most_pages(pages, seqs.num_seqs)) *
         static_cast<std::size_t>(std::max(num_workers, 1));
}

Status select_pages(const AttentionParams& attention, const float* scores,
                    const SequenceBatch& seqs, const PageIndex& pages, const Budget& budget,
                    GroupRule rule, const PageSets& sets, SelectCounters* counters, void* workspace,
                    const Executor& executor) {
  LOCKS_RETURN_IF_ERROR(validate(attention));
  LOCKS_RETURN_IF_ERROR(validate(budget));
  LOCKS_RETURN_IF_ERROR(validate(pages, seqs, "select_pages: pages"));
  LOCKS_RETURN_IF_ERROR(validate_rule(rule));
  LOCKS_RETURN_IF_ERROR(validate_arrays(scores, seqs, pages, budget, sets, workspace));

  const detail::SelectKernels& kernels = LOCKS_CPU_KERNELS(select_kernels);
  const auto rank_pages = rule == GroupRule::kMeanOfShares ? kernels.rank_by_mean_of_shares
                                                           : kernels.rank_by_max_of_scores;
  const int kv_heads = attention.num_kv_heads;
  const std::size_t scratch_pages = most_pages(pages, seqs.num_seqs);
  const std::size_t worker_bytes = scratch_bytes(scratch_pages);
  std::atomic<std::int64_t> num_nonfinite{0};
  std::atomic<std::int64_t> num_raised{0};

  const std::int64_t num_items = static_cast<std::int64_t>(seqs.num_seqs) * kv_heads;
  detail::for_each_item(executor, num_items, [&](std::int64_t item, int worker) {
    const int seq = static_cast<int>(item / kv_heads);
    const int kv_head = static_cast<int>(item % kv_heads);
    const std::int64_t length = seqs.lengths[seq];
    const std::int64_t count = pages.pages(seq);
    std::int32_t* ids = sets.ids + pages.offset(seq, kv_head, kv_heads);
    bool raised = false;
    const std::int64_t allowed = budget_pages(budget, length, pages.page_tokens, &raised);
    if (raised && kv_head == 0) num_raised.fetch_add(1, std::memory_order_relaxed);
    if (allowed == count) {
      for (std::int64_t p = 0; p < count; ++p) ids[p] = static_cast<std::int32_t>(p);
      sets.counts[item] = static_cast<std::int32_t>(count);
      return;
    }
    detail::WorkspaceCutter cutter(static_cast<std::byte*>(workspace) +
                                   static_cast<std::size_t>(worker) * worker_bytes);
    const Scratch scratch = cut_scratch(cutter, scratch_pages);
    const int group = attention.group_size();
    const detail::PageRanking ranking{
        scores + pages.offset(seq, kv_head * group, attention.num_query_heads),
        group,
        count,
        kRunTokens / pages.page_tokens,
        scratch.masses,
        scratch.values,
        scratch.ranks};
    const std::int64_t nonfinite = rank_pages(ranking);
    if (nonfinite != 0) num_nonfinite.fetch_add(nonfinite, std::memory_order_relaxed);
    const std::int64_t forced = force_always_read(length, pages.page_tokens, count, scratch.ranks);
    const Cut cut = find_cut(scratch.ranks, count, std::max(allowed, forced));
    sets.counts[item] = take_pages(scratch.ranks, count, cut, ids);
  });
  if (counters != nullptr) {
    counters->nonfinite_pages += num_nonfinite.load(std::memory_order_relaxed);
    counters->raised_budgets += num_raised.load(std::memory_order_relaxed);
  }
  return {};
}

}  // namespace locks
