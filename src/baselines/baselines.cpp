// Page scores of other selectors, straight from the keys. Evaluation only: plain code at the
// baseline instruction set, but each page is read and summarised once for eight query heads.
#include "locks/baselines.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "baselines/int3.h"
#include "baselines/page_keys.h"
#include "baselines/shadow_kv.h"
#include "baselines/shared_low_rank.h"
#include "core/message.h"
#include "core/scalar.h"
#include "core/work_queue.h"

namespace locks {

using detail::as_fp16;
using detail::dot;
using detail::join;
using detail::PageKeys;
using detail::SharedBasis;
using detail::sum_channels;

namespace {

constexpr int kHeadsAtOnce = 8;

constexpr Selector kSelectors[] = {
    Selector::kLocks,    Selector::kOracle, Selector::kQuest,         Selector::kMeanStd,
    Selector::kCentroid, Selector::kInt3,   Selector::kSharedLowRank, Selector::kShadowKv,
    Selector::kRocketKv, Selector::kSnapKv, Selector::kKvZip};

// A selector's view of a page: built once, then scored with each query, which carries the softmax
// scale. Exact log-sum-exp of the page's logits.
struct OraclePage {
  const PageKeys& keys;

  explicit OraclePage(const PageKeys& page) : keys(page) {}

  float score(const float* query) const { return detail::log_mass(keys, query); }
};

// Quest: Tang, Zhao, Zhu, Xiao, Kasikci, Han, "Quest: Query-Aware Sparsity for Efficient
// Long-Context LLM Inference", ICML 2024, arXiv 2406.10774. The largest logit that any key within
// the page's channel-wise bounds could have. Kept in fp16.
struct QuestPage {
  float low[kMaxHeadDim];
  float high[kMaxHeadDim];
  int head_dim;

  explicit QuestPage(const PageKeys& keys) : head_dim(keys.head_dim) {
    for (int c = 0; c < head_dim; ++c) {
      float least = keys.rows[0][c];
      float most = least;
      for (int t = 1; t < keys.num_tokens; ++t) {
        least = std::min(least, keys.rows[t][c]);
        most = std::max(most, keys.rows[t][c]);
      }
      low[c] = as_fp16(least);
      high[c] = as_fp16(most);
    }
  }

  float score(const float* query) const {
    return sum_channels(head_dim,
                        [&](int c) { return std::max(query[c] * low[c], query[c] * high[c]); });
  }
};

// The mean key alone, in fp16: the landmark of centroid-based retrieval, as in ShadowKV (Sun et al.
// 2024, arXiv 2410.21465).
struct CentroidPage {
  float mean[kMaxHeadDim];
  float log_tokens;
  int head_dim;

  explicit CentroidPage(const PageKeys& keys)
      : log_tokens(std::log(static_cast<float>(keys.num_tokens))), head_dim(keys.head_dim) {
    const float share = 1.0f / static_cast<float>(keys.num_tokens);
    for (int c = 0; c < head_dim; ++c) {
      float sum = 0;
      for (int t = 0; t < keys.num_tokens; ++t) sum += keys.rows[t][c];
      mean[c] = as_fp16(sum * share);
    }
  }

  float score(const float* query) const { return dot(query, mean, head_dim) + log_tokens; }
};

// The second-order cumulant estimate of log sum exp(q.k) for keys of that mean and diagonal
// covariance: exact for independent Gaussian channels. Both in fp16.
struct MeanStdPage {
  CentroidPage centroid;
  float half_variance[kMaxHeadDim];

  explicit MeanStdPage(const PageKeys& keys) : centroid(keys) {
    const float share = 1.0f / static_cast<float>(keys.num_tokens);
    for (int c = 0; c < keys.head_dim; ++c) {
      float mean = 0;
      for (int t = 0; t < keys.num_tokens; ++t) mean += keys.rows[t][c] * share;
      float variance = 0;
      for (int t = 0; t < keys.num_tokens; ++t) {
        const float residual = keys.rows[t][c] - mean;
        variance += residual * residual * share;
      }
      half_variance[c] = 0.5f * as_fp16(variance);
    }
  }

  float score(const float* query) const {
    return centroid.score(query) + sum_channels(centroid.head_dim, [&](int c) {
             return query[c] * query[c] * half_variance[c];
           });
  }
};

// Reads the pages of one sequence and KV head.
struct PageReader {
  const PagedTensor& keys;
  const SequenceBatch& seqs;
  const PageIndex& pages;
  int seq;
  int kv_head;
  bool rotated;  // as improved formats keep their keys

  void load(std::int64_t page, PageKeys& out) const {
    const std::int64_t token = page * pages.page_tokens;
    const std::int64_t entry = token / keys.block_tokens;
    const std::int64_t block = seqs.cache_blocks.ids[seq * seqs.cache_blocks.seq_stride + entry];
    std::int64_t offset = block * keys.block_stride + kv_head * keys.head_stride +
                          (token - entry * keys.block_tokens) * keys.token_stride;
    out.num_tokens =
        static_cast<int>(std::min<std::int64_t>(pages.page_tokens, seqs.lengths[seq] - token));
    out.head_dim = keys.head_dim;
    for (float* row = out.rows[0]; row != out.rows[out.num_tokens]; row += kMaxHeadDim) {
      detail::load_floats(keys.data, keys.type, offset, keys.head_dim, row);
      if (rotated) rotate(row, keys.head_dim);
      offset += keys.token_stride;
    }
  }
};

// The pages of one run of kRunTokens tokens, for up to kHeadsAtOnce query heads of one KV head.
struct RunTask {
  const AttentionParams& attention;
  const QueryTensor& query;
  const PageReader& reader;
  float* scores;
  std::int64_t first_page;
  std::int64_t end_page;

  // Shared: what pages are summarised with besides their keys.
  template <class Page, class... Shared>
  void score_heads(int first_head, int num_heads, const Shared&... shared) const {
    const PageIndex& pages = reader.pages;
    const int seq = reader.seq;
    float scaled[kHeadsAtOnce][kMaxHeadDim];
    for (int h = 0; h < num_heads; ++h) {
      detail::load_floats(query.data, query.type,
                          seq * query.seq_stride + (first_head + h) * query.head_stride,
                          attention.head_dim, scaled[h]);
      for (int c = 0; c < attention.head_dim; ++c) scaled[h][c] *= attention.scale;
      if (reader.rotated) rotate(scaled[h], attention.head_dim);
    }
    PageKeys page_keys;
    float* run = scores + pages.begin[seq] * attention.num_query_heads;
    for (std::int64_t page = first_page; page < end_page; ++page) {
      reader.load(page, page_keys);
      const Page summary(page_keys, shared...);
      const float forced = detail::poison(page_keys);
      for (int h = 0; h < num_heads; ++h) {
        run[(first_head + h) * pages.pages(seq) + page] = summary.score(scaled[h]) + forced;
      }
    }
  }

  template <class Page, class... Shared>
  void score_group(const Shared&... shared) const {
    const int group = attention.group_size();
    for (int first = 0; first < group; first += kHeadsAtOnce) {
      score_heads<Page>(reader.kv_head * group + first, std::min(kHeadsAtOnce, group - first),
                        shared...);
    }
  }

  void run(Selector selector, const SharedBasis* basis) const {
    switch (selector) {
      case Selector::kOracle:
        return score_group<OraclePage>();
      case Selector::kQuest:
        return score_group<QuestPage>();
      case Selector::kMeanStd:
        return score_group<MeanStdPage>();
      case Selector::kCentroid:
        return score_group<CentroidPage>();
      case Selector::kInt3:
        return score_group<detail::Int3Page>();
      case Selector::kSharedLowRank:
        return score_group<detail::SharedLowRankPage>(*basis);
      case Selector::kLocks:
      case Selector::kShadowKv:
      case Selector::kRocketKv:
      case Selector::kSnapKv:
      case Selector::kKvZip:
        return;  // score_baseline has refused them
    }
  }
};

SharedBasis fit_basis(const SummaryFormat& format, const PageReader& reader) {
  detail::SharedBasisFit fit(format, reader.keys.head_dim);
  PageKeys page_keys;
  for (std::int64_t page = 0; page < reader.pages.pages(reader.seq); ++page) {
    reader.load(page, page_keys);
    fit.add(page_keys);
  }
  return fit.finish();
}

}  // namespace

const char* selector_name(Selector selector) {
  switch (selector) {
    case Selector::kLocks:
      return "locks";
    case Selector::kOracle:
      return "oracle";
    case Selector::kQuest:
      return "quest";
    case Selector::kMeanStd:
      return "mean_std";
    case Selector::kCentroid:
      return "centroid";
    case Selector::kInt3:
      return "int3";
    case Selector::kSharedLowRank:
      return "shared_low_rank";
    case Selector::kShadowKv:
      return "shadowkv";
    case Selector::kRocketKv:
      return "rocketkv";
    case Selector::kSnapKv:
      return "snapkv";
    case Selector::kKvZip:
      return "kvzip";
  }
  return "unknown";
}

Result<Selector> parse_selector(std::string_view name) {
  for (Selector selector : kSelectors) {
    if (name == selector_name(selector)) return selector;
  }
  return invalid_argument(join("selector = \"", name, "\", expected locks, oracle, quest, ",
                               "mean_std, centroid, int3, shared_low_rank, shadowkv, rocketkv, ",
                               "snapkv or kvzip"));
}

bool selects_tokens(Selector selector) { return selector >= Selector::kShadowKv; }

bool needs_window(Selector selector) {
  return selector == Selector::kSnapKv || selector == Selector::kRocketKv;
}

bool needs_reconstruction(Selector selector) { return selector == Selector::kKvZip; }

GroupRule group_rule(Selector selector) {
  return selector == Selector::kQuest ? GroupRule::kMaxOfScores : GroupRule::kMeanOfShares;
}

std::int64_t selector_bytes_per_block(Selector selector, const SummaryFormat& format,
                                      int head_dim) {
  if (!validate(format).ok()) return 0;
  constexpr std::int64_t kFp16Bytes = 2;
  const std::int64_t row_bytes = kFp16Bytes * head_dim * format.pages_per_block();
  switch (selector) {
    case Selector::kLocks:
      return record_layout(format, head_dim).record_bytes;
    case Selector::kOracle:
      return 0;
    case Selector::kQuest:
    case Selector::kMeanStd:
      return 2 * row_bytes;
    case Selector::kCentroid:
      return row_bytes;
    case Selector::kInt3:
      return format.pages_per_block() * detail::int3_page_bytes(format.page_tokens, head_dim);
    case Selector::kSharedLowRank:
      return format.pages_per_block() * detail::shared_page_bytes(format, head_dim);
    case Selector::kShadowKv:
      return kFp16Bytes * head_dim * kBlockTokens / detail::kShadowKvChunk;
    case Selector::kRocketKv:
    case Selector::kSnapKv:
    case Selector::kKvZip:
      return 0;
  }
  return 0;
}

Status score_baseline(Selector selector, const SummaryFormat& format,
                      const AttentionParams& attention, const QueryTensor& query,
                      const PagedTensor& keys, const SequenceBatch& seqs, const PageIndex& pages,
                      float* scores, const Executor& executor) {
  if (selector == Selector::kLocks) {
    return invalid_argument("score_baseline: selector = locks, expected one of the others");
  }
  if (selects_tokens(selector)) {
    return invalid_argument(join("score_baseline: selector = ", selector_name(selector),
                                 ": it chooses tokens, expected one that ranks pages"));
  }
  LOCKS_RETURN_IF_ERROR(validate(format));
  LOCKS_RETURN_IF_ERROR(validate(attention));
  LOCKS_RETURN_IF_ERROR(validate(attention, query));
  LOCKS_RETURN_IF_ERROR(validate(attention, keys, "keys"));
  LOCKS_RETURN_IF_ERROR(validate(seqs, keys, nullptr));
  LOCKS_RETURN_IF_ERROR(validate(pages, seqs, "score_baseline: pages"));
  if (pages.page_tokens != format.page_tokens) {
    return invalid_argument(join("score_baseline: pages.page_tokens = ", pages.page_tokens,
                                 ", expected the format's ", format.page_tokens));
  }
  if (scores == nullptr && seqs.num_seqs > 0) {
    return invalid_argument("score_baseline: scores is null");
  }

  std::int64_t max_runs = 0;
  for (int i = 0; i < seqs.num_seqs; ++i) {
    max_runs = std::max<std::int64_t>(max_runs, num_pages(seqs.lengths[i], kRunTokens));
  }
  const std::int64_t pairs = static_cast<std::int64_t>(seqs.num_seqs) * attention.num_kv_heads;
  const bool shared = selector == Selector::kSharedLowRank;
  const auto reader_of = [&](std::int64_t pair) {
    const int seq = static_cast<int>(pair / attention.num_kv_heads);
    const int kv_head = static_cast<int>(pair % attention.num_kv_heads);
    return PageReader{keys, seqs, pages, seq, kv_head, shared && format.improved};
  };
  std::vector<SharedBasis> bases(static_cast<std::size_t>(shared ? pairs : 0));
  detail::for_each_item(executor, shared ? pairs : 0, [&](std::int64_t pair, int) {
    bases[static_cast<std::size_t>(pair)] = fit_basis(format, reader_of(pair));
  });
  const int run_pages = kRunTokens / pages.page_tokens;
  detail::for_each_item(executor, pairs * max_runs, [&](std::int64_t item, int) {
    const std::int64_t pair = item / max_runs;
    const PageReader reader = reader_of(pair);
    const std::int64_t first = item % max_runs * run_pages;
    const std::int64_t end = std::min(first + run_pages, pages.pages(reader.seq));
    if (first < end) {
      const SharedBasis* basis = shared ? &bases[static_cast<std::size_t>(pair)] : nullptr;
      RunTask{attention, query, reader, scores, first, end}.run(selector, basis);
    }
  });
  return {};
}

}  // namespace locks
