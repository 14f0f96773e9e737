// The select stage: one set of pages for each KV head of each sequence.
#pragma once

#include <cstddef>
#include <cstdint>

#include "locks/executor.h"
#include "locks/page.h"
#include "locks/score.h"
#include "locks/status.h"

namespace locks {

inline constexpr int kAlwaysReadFirstTokens = 16;
inline constexpr int kAlwaysReadLastTokens = 64;  // in complete pages
// Sums over pages are taken within runs of this many tokens, then over the runs in order, so that a
// result does not depend on what else is in the batch or on how work is split.
inline constexpr int kRunTokens = 2048;

// How much of the context a step may read.
struct Budget {
  enum class Kind : std::uint8_t { kAll, kTokens, kFraction };
  Kind kind = Kind::kAll;
  double value = 0;  // tokens (a whole number >= 1), or a fraction in (0, 1) of the length

  static Budget all() { return {}; }
  static Budget tokens(std::int64_t count) { return {Kind::kTokens, static_cast<double>(count)}; }
  static Budget fraction(double share) { return {Kind::kFraction, share}; }
};

Status validate(const Budget& budget);

// Pages that `budget` allows a sequence of `length` tokens: tokens / B rounded down, or fraction *
// length / B rounded to the nearest (ties to even); never below (16 + 64) / B + 1, the most that
// are always read, nor above the pages there are. *raised (if not null) tells whether the
// always-read set lifted it.
std::int64_t budget_pages(const Budget& budget, std::int64_t length, int page_tokens, bool* raised);

// Pages that are always read: those of the first 16 tokens, those of the last 64 tokens in complete
// pages, and those without a record, which includes the unfinished page.
bool always_read(std::int64_t page, std::int64_t length, int page_tokens);

// How the scores of a group's query heads become one ranking.
enum class GroupRule : std::uint8_t {
  kMeanOfShares,  // softmax over the pages for each head, averaged over the heads (LOCKS)
  kMaxOfScores,   // the largest raw score over the heads (Quest)
};

// Chosen pages, ragged [sequence, KV head, page] as PageIndex says: the run of (sequence i, KV head
// h) begins with counts[i * num_kv_heads + h] page numbers of the sequence, ascending.
struct PageSets {
  std::int32_t* ids = nullptr;
  std::int32_t* counts = nullptr;
};

struct SelectCounters {
  std::int64_t nonfinite_pages = 0;  // pages read because their score is NaN or infinite
  std::int64_t raised_budgets = 0;   // sequences whose budget was below the always-read set
};

// Takes the always-read pages, then the best of the others, until budget_pages are taken; equal
// shares go to the lower page. A page with a NaN or infinite score for any head of the group is
// taken as well, stays out of the sums, and is counted; if such pages exceed the budget the set
// grows with them. A budget of all pages takes them without a look at the scores. Linear in pages.
// *counters (if not null) grow. workspace: select_workspace_bytes, any content and alignment.
std::size_t select_workspace_bytes(const SequenceBatch& seqs, const PageIndex& pages,
                                   int num_workers);
Status select_pages(const AttentionParams& attention, const float* scores,
                    const SequenceBatch& seqs, const PageIndex& pages, const Budget& budget,
                    GroupRule rule, const PageSets& sets, SelectCounters* counters, void* workspace,
                    const Executor& executor);

}  // namespace locks
