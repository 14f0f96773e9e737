// Other page selectors behind one contract, for comparison: each turns keys into page scores, and
// the select and attend stages do the rest.
#pragma once

#include <cstdint>
#include <string_view>

#include "locks/executor.h"
#include "locks/page.h"
#include "locks/score.h"
#include "locks/select.h"
#include "locks/status.h"
#include "locks/summary.h"

namespace locks {

enum class Selector : std::uint8_t {
  kLocks,     // this project: records
  kOracle,    // exact log-sum-exp of each page: what no estimate can beat
  kQuest,     // Tang et al. 2024 (arXiv 2406.10774): channel-wise bounds, an upper bound of q.k
  kMeanStd,   // mean and diagonal variance: the second-order cumulant estimate of the log mass
  kCentroid,  // mean key only
  kInt3,      // keys of 3 bits about their page's mean: an int8 mean, an fp16 scale a token
  // The format's own record with one basis, the principal components of all keys of the sequence
  // about their pages' centroids, in place of each page's; its rank is the largest for which a page
  // takes no more bytes than in the format's record. The basis itself, rank * head_dim floats for a
  // sequence and KV head, is not counted.
  kSharedLowRank,
  // Those that choose tokens, not pages (locks/tokens.h).
  kShadowKv,  // landmarks of chunks of eight, and outlier chunks: Sun et al. 2024 (2410.21465)
  kRocketKv,  // eviction of the prompt, then pages by some channels: Behnam et al. 2025
              // (2502.14051)
  kSnapKv,    // eviction by the votes of a window of queries: Li et al. 2024 (2404.14469)
  kKvZip,     // eviction by a pass that repeats the context: Kim et al. 2025 (2505.23416)
};

Result<Selector> parse_selector(std::string_view name);
const char* selector_name(Selector selector);
// Whether it is run by select_tokens; score_baseline refuses it then.
bool selects_tokens(Selector selector);
bool needs_window(Selector selector);          // of queries before the judged ones
bool needs_reconstruction(Selector selector);  // a pass in which the model repeats its context
GroupRule group_rule(Selector selector);
// Bytes that the selector keeps for one block of 16 tokens and one KV head; 0 for the oracle. With
// pages of B tokens: kQuest and kMeanStd 64 d / B, kCentroid 32 d / B, kInt3 16 / B pages of
// d + 2 + B (3 d / 8 + 2), kSharedLowRank 16 / B pages of d m / 8 + 2 + rank (B c / 8 + 2) for the
// format's m and c bits of centroid and coefficients. Of the selectors of tokens kShadowKv 4 d, the
// others 0: what they keep hangs on the trace and the budget, and TokenSets tells it.
std::int64_t selector_bytes_per_block(Selector selector, const SummaryFormat& format, int head_dim);

// Page scores of a baseline (not kLocks, none of the selectors of tokens), computed from the keys
// of every page, the unfinished one included: an exact mass (score_unrecorded_pages) beside
// estimates that all fall short would shift the shares of heads against each other, to the
// baseline's loss. Same array as score_pages. Evaluation only: it reads all keys, and
// kSharedLowRank allocates. Keys' statistics are kept in the type that the method publishes (fp16
// here, or codes). A key that is NaN or infinite makes the scores of its page NaN, and no other's.
// Pages have the format's size; kSharedLowRank also takes its code widths, its bytes and whether it
// is improved (keys rotated, and the sequence's mean key taken off each centroid).
Status score_baseline(Selector selector, const SummaryFormat& format,
                      const AttentionParams& attention, const QueryTensor& query,
                      const PagedTensor& keys, const SequenceBatch& seqs, const PageIndex& pages,
                      float* scores, const Executor& executor);

}  // namespace locks
