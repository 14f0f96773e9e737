// Page scores of one run of blocks, for all query heads of a KV head.
//
// A batch is 16 pages, that is B records. Its rows are unpacked to 16 bits once for the whole group
// and stay in the first- or second-level cache ((1 + r) * 16 * d * 2 bytes: 8 KiB for `fine` at d =
// 128). Then, for two query heads at a time, exact integer dot products with every row, and the
// float epilogue with one page a lane. The limiting resource is the multiply-add of 16-bit pairs:
// (1 + r) * 16 / B * d a block and head.
#include <cstring>

#include "core/fast_math.h"
#include "core/lanes.h"
#include "core/scalar.h"
#include "score/int_dot.h"
#include "score/score_kernels.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {
namespace {

constexpr int kBatchPages = 16;
constexpr int kCacheLine = 64;

// Unpacks `count` consecutive rows to consecutive rows of 16-bit codes, padded.
using UnpackRows = void (*)(const std::uint8_t* rows, int count, std::int16_t* out);

template <int kHeadDim>
void unpack_int4_rows(const std::uint8_t* rows, int count, std::int16_t* out) {
  constexpr int kHalf = kHeadDim / 2;
  for (int row = 0; row < count; ++row) {
    const auto* packed = reinterpret_cast<const signed char*>(rows + row * kHalf);
    std::int16_t* __restrict codes = out + row * padded_channels(kHeadDim);
    for (int b = 0; b < kHalf; ++b) {
      const auto byte = static_cast<std::int16_t>(packed[b]);
      codes[b] = static_cast<std::int16_t>((byte & 15) - 8);
      codes[b + kHalf] = static_cast<std::int16_t>(byte >> 4);
    }
    for (int c = kHeadDim; c < padded_channels(kHeadDim); ++c) codes[c] = 0;
  }
}

template <int kHeadDim>
void unpack_int8_rows(const std::uint8_t* rows, int count, std::int16_t* out) {
  for (int row = 0; row < count; ++row) {
    const auto* packed = reinterpret_cast<const signed char*>(rows + row * kHeadDim);
    std::int16_t* __restrict codes = out + row * padded_channels(kHeadDim);
    for (int c = 0; c < kHeadDim; ++c) codes[c] = packed[c];
    for (int c = kHeadDim; c < padded_channels(kHeadDim); ++c) codes[c] = 0;
  }
}

UnpackRows find_unpack_rows(int bits, int head_dim) {
  const bool is_int4 = bits == 4;
  switch (head_dim) {
    case 64:
      return is_int4 ? unpack_int4_rows<64> : unpack_int8_rows<64>;
    case 80:
      return is_int4 ? unpack_int4_rows<80> : unpack_int8_rows<80>;
    case 96:
      return is_int4 ? unpack_int4_rows<96> : unpack_int8_rows<96>;
    case 128:
      return is_int4 ? unpack_int4_rows<128> : unpack_int8_rows<128>;
    case 192:
      return is_int4 ? unpack_int4_rows<192> : unpack_int8_rows<192>;
    default:
      return is_int4 ? unpack_int4_rows<256> : unpack_int8_rows<256>;
  }
}

// Sixteen pages, unpacked. In the float arrays a lane is a page.
template <int kPageTokens, int kRank>
struct Batch {
  static constexpr int kPagesPerBlock = kBlockTokens / kPageTokens;
  static constexpr int kBlocks = kBatchPages / kPagesPerBlock;
  static constexpr int kPageRows = 1 + kRank;

  // [page][centroid, then basis rows][padded channels]: the order of the record.
  alignas(64) std::int16_t rows[extent(kBatchPages * kPageRows * kMaxHeadDim)];
  alignas(64) float scales[extent(kPageRows)][kBatchPages];
  alignas(64) float coefficients[extent(kRank * kPageTokens)][kBatchPages];
};

inline void prefetch_record(const std::uint8_t* record, int bytes) {
  for (int offset = 0; offset < bytes; offset += kCacheLine) __builtin_prefetch(record + offset);
}

// Fills batches from the blocks of a run.
template <int kPageTokens, int kRank>
class BatchLoader {
 public:
  using Pages = Batch<kPageTokens, kRank>;

  explicit BatchLoader(const ScoreRun& run)
      : run_(run),
        layout_(run.layout),
        channels_(padded_channels(layout_.head_dim)),
        unpack_centroid_(find_unpack_rows(layout_.format.centroid_bits, layout_.head_dim)),
        unpack_basis_(find_unpack_rows(layout_.format.basis_bits, layout_.head_dim)) {
    for (int i = 0; i < Pages::kBlocks && i < run.num_blocks; ++i) {
      prefetch_record(run.records[i], layout_.record_bytes);
    }
  }

  // Blocks [first, first + kBlocks). Blocks past the end of the run repeat its last one: their
  // lanes are never stored. Returns the number of invalid records.
  std::int64_t load(int first, Pages& batch) {
    std::int64_t num_invalid = 0;
    for (int i = 0; i < Pages::kBlocks; ++i) {
      const bool is_in_run = first + i < run_.num_blocks;
      const std::uint8_t* record = run_.records[is_in_run ? first + i : run_.num_blocks - 1];
      const int next = first + i + Pages::kBlocks;
      if (next < run_.num_blocks) prefetch_record(run_.records[next], layout_.record_bytes);
      const bool is_valid = load_record(record, i * Pages::kPagesPerBlock, batch);
      if (is_in_run && !is_valid) ++num_invalid;
    }
    for (int j = 0; j < Pages::kPageRows; ++j) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        batch.scales[j][lane] = fp16_to_float(half_scales_[j][lane]);
      }
    }
    if (layout_.format.coefficient_bits == 8) {
      convert_int8_coefficients(batch);
    } else {
      convert_int4_coefficients(batch);
    }
    return num_invalid;
  }

 private:
  static constexpr int kCodes = kRank * kPageTokens;  // coefficients of a page

  bool load_record(const std::uint8_t* record, int first_lane, Pages& batch) {
    std::uint32_t word;
    std::memcpy(&word, record + layout_.header_offset, sizeof(word));
    const bool is_valid = word == run_.header_word;
    unpack_rows(record, batch.rows + first_lane * Pages::kPageRows * channels_);
    std::uint16_t halves[extent(Pages::kPagesPerBlock * Pages::kPageRows)];
    std::memcpy(halves, record + layout_.scales_offset, sizeof(halves));
    for (int p = 0; p < Pages::kPagesPerBlock; ++p) {
      for (int j = 0; j < Pages::kPageRows; ++j) {
        half_scales_[j][first_lane + p] = halves[p * Pages::kPageRows + j];
      }
      if (!is_valid) half_scales_[0][first_lane + p] = kFp16Nan;
    }
    const std::uint8_t* packed = record + layout_.coefficients_offset;
    if (layout_.format.coefficient_bits == 8) {
      load_coefficients<kCodes>(packed, first_lane);
    } else {
      load_coefficients<kCodes / 2>(packed, first_lane);
    }
    return is_valid;
  }

  void unpack_rows(const std::uint8_t* record, std::int16_t* out) const {
    if (unpack_centroid_ == unpack_basis_) {
      unpack_basis_(record, Pages::kPagesPerBlock * Pages::kPageRows, out);
      return;
    }
    for (int p = 0; p < Pages::kPagesPerBlock; ++p) {
      const std::uint8_t* rows = record + p * layout_.page_rows_bytes;
      unpack_centroid_(rows, 1, out);
      unpack_basis_(rows + layout_.centroid_row_bytes, kRank, out + channels_);
      out += Pages::kPageRows * channels_;
    }
  }

  template <int kPageBytes>
  void load_coefficients(const std::uint8_t* packed, int first_lane) {
    for (int p = 0; p < Pages::kPagesPerBlock; ++p) {
      for (int i = 0; i < kPageBytes; ++i) {
        packed_[i][first_lane + p] = packed[p * kPageBytes + i];
      }
    }
  }

  void convert_int8_coefficients(Pages& batch) const {
    for (int code = 0; code < kCodes; ++code) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        batch.coefficients[code][lane] = static_cast<float>(packed_[code][lane] - 128);
      }
    }
  }

  void convert_int4_coefficients(Pages& batch) const {
    for (int code = 0; code < kCodes; code += 2) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        const int byte = packed_[code / 2][lane];
        batch.coefficients[code][lane] = static_cast<float>((byte & 15) - 8);
        batch.coefficients[code + 1][lane] = static_cast<float>((byte >> 4) - 8);
      }
    }
  }

  const ScoreRun& run_;
  const RecordLayout& layout_;
  const int channels_;
  const UnpackRows unpack_centroid_;
  const UnpackRows unpack_basis_;
  std::uint16_t half_scales_[extent(Pages::kPageRows)][kBatchPages];
  std::uint8_t packed_[extent(kCodes)][kBatchPages];
};

// The sums of one query head: [centroid, then basis rows][page].
template <int kRank>
using HeadSums = std::int32_t[extent(1 + kRank)][kBatchPages];

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
  for (int t = 0; t < kPageTokens; ++t) {
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

template <int kPageTokens, int kRank, int kHeads>
void score_heads(const ScoreRun& run, const Batch<kPageTokens, kRank>& batch, DotRows dot_rows,
                 int head, int page, int num_pages) {
  const int channels = padded_channels(run.layout.head_dim);
  const std::int16_t* queries = run.query_codes + head * channels;
  alignas(64) HeadSums<kRank> sums[extent(kHeads)];
  for (int j = 0; j <= kRank; ++j) {
    dot_rows(batch.rows + j * channels, (1 + kRank) * channels, queries, sums[0][j],
             (1 + kRank) * kBatchPages);
  }
  float scores[extent(kHeads)][kBatchPages];
  finish_scores<kPageTokens, kRank, kHeads>(run, batch, sums, head, scores);
  for (int h = 0; h < kHeads; ++h) {
    float* out = run.scores + (head + h) * run.head_stride + page;
    if (num_pages == kBatchPages) {
      std::memcpy(out, scores[h], sizeof(scores[h]));
    } else {
      for (int lane = 0; lane < num_pages; ++lane) out[lane] = scores[h][lane];
    }
  }
}

template <int kPageTokens, int kRank>
std::int64_t score_run(const ScoreRun& run) {
  using Pages = Batch<kPageTokens, kRank>;
  Pages batch;
  BatchLoader<kPageTokens, kRank> loader(run);
  const int channels = padded_channels(run.layout.head_dim);
  const DotRows dot_two_heads = find_dot_rows<2>(channels);
  const DotRows dot_one_head = find_dot_rows<1>(channels);
  std::int64_t num_invalid = 0;
  const int num_pages = run.num_blocks * Pages::kPagesPerBlock;
  for (int page = 0; page < num_pages; page += kBatchPages) {
    num_invalid += loader.load(page / Pages::kPagesPerBlock, batch);
    const int count = num_pages - page < kBatchPages ? num_pages - page : kBatchPages;
    int head = 0;
    for (; head + 2 <= run.group_size; head += 2) {
      score_heads<kPageTokens, kRank, 2>(run, batch, dot_two_heads, head, page, count);
    }
    if (head < run.group_size) {
      score_heads<kPageTokens, kRank, 1>(run, batch, dot_one_head, head, page, count);
    }
  }
  return num_invalid;
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
