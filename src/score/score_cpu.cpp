// Page scores of one run of blocks, for all query heads of a KV head.
//
// A batch is 16 pages, that is B records. Its rows are turned or unpacked once for the whole group
// and stay in the first- or second-level cache. Then, for some query heads at a time, exact integer
// dot products with every row (tile_dots.h at AVX-512, row_dots.h below: the same integers), and
// the float epilogue with one page a lane.
#include <cstring>

#include "core/fast_math.h"
#include "core/lanes.h"
#include "core/scalar.h"
#include "score/batch.h"
#include "score/score_kernels.h"

#if defined(__AVX512VNNI__)
#include "score/tile_dots.h"
#else
#include "score/row_dots.h"
#endif

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {
namespace {

constexpr int kCacheLine = 64;

#if defined(__AVX512VNNI__)
template <int kRank>
using Dots = TileDots<kRank>;
#else
template <int kRank>
using Dots = RowDots<kRank>;
#endif

// What else a batch of 16 pages has. A lane is a page.
template <int kPageTokens, int kRank>
struct Batch {
  static constexpr int kPagesPerBlock = kBlockTokens / kPageTokens;
  static constexpr int kBlocks = kBatchPages / kPagesPerBlock;
  static constexpr int kPageRows = 1 + kRank;

  alignas(64) float scales[extent(kPageRows)][kBatchPages];
  alignas(64) float coefficients[extent(kRank * kPageTokens)][kBatchPages];
};

// Fills batches from the blocks of a run.
template <int kPageTokens, int kRank>
class BatchLoader {
 public:
  using Pages = Batch<kPageTokens, kRank>;

  explicit BatchLoader(const ScoreRun& run) : run_(run), layout_(run.layout) {
    for (int block = 0; block < kAhead * Pages::kBlocks; ++block) prefetch(block);
  }

  // Blocks [first, first + kBlocks). Blocks past the end of the run repeat its last one: their
  // lanes are never stored. Returns the number of invalid records.
  std::int64_t load(int first, Pages& batch, Dots<kRank>& dots) {
    const std::uint8_t* records[Pages::kBlocks];
    std::int64_t num_invalid = 0;
    for (int i = 0; i < Pages::kBlocks; ++i) {
      const bool is_in_run = first + i < run_.num_blocks;
      records[i] = run_.records[is_in_run ? first + i : run_.num_blocks - 1];
      const bool is_valid = load_numbers(records[i], i * Pages::kPagesPerBlock);
      if (is_in_run && !is_valid) ++num_invalid;
    }
    prefetch_quarter(0, first);
    dots.load(records);
    prefetch_quarter(1, first);
    for (int j = 0; j < Pages::kPageRows; ++j) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        batch.scales[j][lane] = fp16_to_float(halves_[lane * Pages::kPageRows + j]);
      }
    }
    if (layout_.format.coefficient_bits == 8) {
      convert_int8_coefficients(batch);
    } else {
      convert_int4_coefficients(batch);
    }
    return num_invalid;
  }

  // A quarter of the records of a later batch. Spread over the work on the batch at `first`, since
  // a core waits once it has some dozens of lines on their way.
  void prefetch_quarter(int quarter, int first) const {
    constexpr int kRecords = Pages::kBlocks / 4;
    const int begin = first + kAhead * Pages::kBlocks + quarter * kRecords;
    for (int block = begin; block < begin + kRecords; ++block) prefetch(block);
  }

 private:
  static constexpr int kCodes = kRank * kPageTokens;  // coefficients of a page
  static constexpr int kAhead = 2;                    // batches

  void prefetch(int block) const {
    if (block >= run_.num_blocks) return;
    for (int offset = 0; offset < layout_.record_bytes; offset += kCacheLine) {
      __builtin_prefetch(run_.records[block] + offset);
    }
  }

  // Scales and coefficients of a record. False if its header does not match.
  bool load_numbers(const std::uint8_t* record, int first_lane) {
    std::uint32_t word;
    std::memcpy(&word, record + layout_.header_offset, sizeof(word));
    const bool is_valid = word == run_.header_word;
    std::uint16_t* halves = halves_ + first_lane * Pages::kPageRows;
    std::memcpy(halves, record + layout_.scales_offset,
                extent(Pages::kPagesPerBlock * Pages::kPageRows) * sizeof(*halves));
    if (!is_valid) {
      for (int p = 0; p < Pages::kPagesPerBlock; ++p) halves[p * Pages::kPageRows] = kFp16Nan;
    }
    const std::uint8_t* packed = record + layout_.coefficients_offset;
    if (layout_.format.coefficient_bits == 8) {
      std::memcpy(packed_ + first_lane * kCodes, packed, Pages::kPagesPerBlock * kCodes);
    } else {
      std::memcpy(packed_ + first_lane * kCodes / 2, packed, Pages::kPagesPerBlock * kCodes / 2);
    }
    return is_valid;
  }

  void convert_int8_coefficients(Pages& batch) const {
    for (int code = 0; code < kCodes; ++code) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        batch.coefficients[code][lane] = static_cast<float>(packed_[lane * kCodes + code] - 128);
      }
    }
  }

  void convert_int4_coefficients(Pages& batch) const {
    for (int code = 0; code < kCodes; code += 2) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        const int byte = packed_[(lane * kCodes + code) / 2];
        batch.coefficients[code][lane] = static_cast<float>((byte & 15) - 8);
        batch.coefficients[code + 1][lane] = static_cast<float>((byte >> 4) - 8);
      }
    }
  }

  const ScoreRun& run_;
  const RecordLayout& layout_;
  // As in the records, [page][...]: copied first, since the compiler then turns them in registers.
  std::uint16_t halves_[extent(kBatchPages * Pages::kPageRows)];
  std::uint8_t packed_[extent(kBatchPages * kCodes)];
};

// s = q.ref + q.mu + log sum_i exp(z . c_i), for `kHeads` heads from `head` on, in powers of two.
// The largest exponent of a page's tokens is taken off first, so that the sum lies in [1, B]. Each
// step runs over all heads before the next one starts: their dependent operations overlap.
template <int kPageTokens, int kRank, int kHeads>
void finish_scores(const ScoreRun& run, const Batch<kPageTokens, kRank>& batch,
                   const HeadSums<kRank>* __restrict sums, int head,
                   float (*__restrict scores)[kBatchPages]) {
  float exponent[extent(kHeads)][extent(kPageTokens)][kBatchPages];
  float largest[extent(kHeads)][kBatchPages];
  float total[extent(kHeads)][kBatchPages];
  for (int h = 0; h < kHeads; ++h) {
    float z[extent(kRank)][kBatchPages];
    const float log2_scale = run.query_scales[head + h] * kLog2E;
    for (int j = 0; j < kRank; ++j) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        z[j][lane] =
            static_cast<float>(sums[h][1 + j][lane]) * log2_scale * batch.scales[1 + j][lane];
      }
    }
    for (int t = 0; t < kPageTokens; ++t) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        float sum = z[0][lane] * batch.coefficients[t][lane];
        for (int j = 1; j < kRank; ++j) {
          sum += z[j][lane] * batch.coefficients[j * kPageTokens + t][lane];
        }
        exponent[h][t][lane] = sum;
      }
    }
    // A NaN scale or query makes every token of its page NaN, the first included, which then stays
    // the largest: the score is NaN as well.
    for (int lane = 0; lane < kBatchPages; ++lane) {
      float most = exponent[h][0][lane];
      for (int t = 1; t < kPageTokens; ++t) {
        const float value = exponent[h][t][lane];
        most = value > most ? value : most;
      }
      largest[h][lane] = most;
      total[h][lane] = 0;
    }
  }
#pragma GCC unroll 16  // all of it: the totals then stay in registers
  for (int t = 0; t < kPageTokens; ++t) {
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        total[h][lane] += exp2_nonpositive(exponent[h][t][lane] - largest[h][lane]);
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    const float scale = run.query_scales[head + h];
    const float reference = run.query_references[head + h];
    for (int lane = 0; lane < kBatchPages; ++lane) {
      const float centroid = static_cast<float>(sums[h][0][lane]) * scale * batch.scales[0][lane];
      const float log_sum = largest[h][lane] * kLn2 + log_normal(total[h][lane]);
      scores[h][lane] = reference + (centroid + log_sum);
    }
  }
}

// One run of blocks: a batch at a time, and of that as many heads at a time as Dots takes.
template <int kPageTokens, int kRank>
class RunScorer {
 public:
  explicit RunScorer(const ScoreRun& run) : run_(run), dots_(run), loader_(run) {}

  // Returns the number of invalid records.
  std::int64_t run() {
    std::int64_t num_invalid = 0;
    num_pages_ = run_.num_blocks * Pages::kPagesPerBlock;
    for (int page = 0; page < num_pages_; page += kBatchPages) {
      num_invalid += loader_.load(page / Pages::kPagesPerBlock, batch_, dots_);
      score_heads<Dots<kRank>::kMostHeads>(0, page);
      loader_.prefetch_quarter(3, page / Pages::kPagesPerBlock);
    }
    return num_invalid;
  }

 private:
  using Pages = Batch<kPageTokens, kRank>;

  template <int kHeads>
  void score_heads(int head, int page) {
    for (; head + kHeads <= run_.group_size; head += kHeads) {
      alignas(64) HeadSums<kRank> sums[extent(kHeads)];
      float scores[extent(kHeads)][kBatchPages];
      dots_.template dot<kHeads>(head, sums);
      if (head == 0) loader_.prefetch_quarter(2, page / Pages::kPagesPerBlock);
      finish_scores<kPageTokens, kRank, kHeads>(run_, batch_, sums, head, scores);
      for (int h = 0; h < kHeads; ++h) store(scores[h], head + h, page);
    }
    if constexpr (kHeads > 1) score_heads<kHeads / 2>(head, page);
  }

  void store(const float (&scores)[kBatchPages], int head, int page) {
    float* out = run_.scores + head * run_.head_stride + page;
    if (num_pages_ - page >= kBatchPages) {
      std::memcpy(out, scores, sizeof(scores));
    } else {
      for (int lane = 0; lane < num_pages_ - page; ++lane) out[lane] = scores[lane];
    }
  }

  const ScoreRun& run_;
  int num_pages_ = 0;
  Dots<kRank> dots_;
  BatchLoader<kPageTokens, kRank> loader_;
  Pages batch_;
};

template <int kPageTokens, int kRank>
std::int64_t score_run(const ScoreRun& run) {
  RunScorer<kPageTokens, kRank> scorer(run);
  return scorer.run();
}

ScoreRunFunction find_score_run(const SummaryFormat& format) {
  switch (format.page_tokens * 16 + format.rank) {
    case 4 * 16 + 1:
      return score_run<4, 1>;
    case 4 * 16 + 2:
      return score_run<4, 2>;
    case 8 * 16 + 1:
      return score_run<8, 1>;
    case 8 * 16 + 2:
      return score_run<8, 2>;
    case 8 * 16 + 4:
      return score_run<8, 4>;
    case 16 * 16 + 1:
      return score_run<16, 1>;
    case 16 * 16 + 2:
      return score_run<16, 2>;
    case 16 * 16 + 4:
      return score_run<16, 4>;
    case 16 * 16 + 8:
      return score_run<16, 8>;
    default:
      return nullptr;
  }
}

float log_sum_exp(const float* logits, int count) {
  float largest = logits[0];
  for (int i = 1; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
  float total = 0;
  for (int i = 0; i < count; ++i) total += fast_exp(logits[i] - largest);
  return largest + fast_log(total);
}

void score_unrecorded(const UnrecordedTokens& tokens) {
  float keys[kBlockTokens][kMaxHeadDim];
  for (int t = 0; t < tokens.num_tokens; ++t) {
    load_floats(tokens.keys, tokens.key_type, t * tokens.token_stride, tokens.head_dim, keys[t]);
  }
  for (int h = 0; h < tokens.group_size; ++h) {
    float query[kMaxHeadDim];
    float logits[kBlockTokens];
    load_floats(tokens.queries, tokens.query_type, h * tokens.query_stride, tokens.head_dim, query);
    for (int t = 0; t < tokens.num_tokens; ++t) {
      logits[t] = tokens.scale * dot(query, keys[t], tokens.head_dim);
    }
    float* scores = tokens.scores + h * tokens.head_stride;
    for (int t = 0; t < tokens.num_tokens; t += tokens.page_tokens) {
      const int rest = tokens.num_tokens - t;
      *scores++ = log_sum_exp(logits + t, rest < tokens.page_tokens ? rest : tokens.page_tokens);
    }
  }
}

}  // namespace

const ScoreKernels& score_kernels() {
  static constexpr ScoreKernels kKernels{find_score_run, score_unrecorded};
  return kKernels;
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
