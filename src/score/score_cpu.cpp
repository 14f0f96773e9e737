// Page scores of one run of blocks, for all query heads of a KV head.
//
// A batch is 16 pages, that is B records. Its rows are unpacked to 16 bits once for the whole group and stay
// in the first- or second-level cache ((1 + r) * 16 * d * 2 bytes: 8 KiB for `fine` at d = 128). Then, for two
// query heads at a time, exact integer dot products with every row, and the float epilogue with one page a
// lane. The limiting resource is the multiply-add of 16-bit pairs: (1 + r) * 16 / B * d a block and head.
#include <cstring>

#include "core/fast_math.h"
#include "core/scalar.h"
#include "score/int_dot.h"
#include "score/score_kernels.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {
namespace {

constexpr int kBatchPages = 16;
constexpr int kCacheLine = 64;
constexpr std::uint16_t kHalfNaN = 0x7E00;

// Unpacks `count` consecutive rows to rows of 16-bit codes that lie `out_stride` apart.
using UnpackRows = void (*)(const std::uint8_t* rows, int count, std::int16_t* out, int out_stride);

template <int kHeadDim>
void unpack_int4_rows(const std::uint8_t* rows, int count, std::int16_t* out, int out_stride) {
  constexpr int kHalf = kHeadDim / 2;
  for (int row = 0; row < count; ++row) {
    const auto* packed = reinterpret_cast<const signed char*>(rows + row * kHalf);
    std::int16_t* __restrict codes = out + row * out_stride;
    for (int b = 0; b < kHalf; ++b) {
      const auto byte = static_cast<std::int16_t>(packed[b]);
      codes[b] = static_cast<std::int16_t>((byte & 15) - 8);
      codes[b + kHalf] = static_cast<std::int16_t>(byte >> 4);
    }
    for (int c = kHeadDim; c < padded_channels(kHeadDim); ++c) codes[c] = 0;
  }
}

template <int kHeadDim>
void unpack_int8_rows(const std::uint8_t* rows, int count, std::int16_t* out, int out_stride) {
  for (int row = 0; row < count; ++row) {
    const auto* packed = reinterpret_cast<const signed char*>(rows + row * kHeadDim);
    std::int16_t* __restrict codes = out + row * out_stride;
    for (int c = 0; c < kHeadDim; ++c) codes[c] = packed[c];
    for (int c = kHeadDim; c < padded_channels(kHeadDim); ++c) codes[c] = 0;
  }
}

UnpackRows find_unpack_rows(int bits, int head_dim) {
  const bool is_int4 = bits == 4;
  switch (head_dim) {
    case 64: return is_int4 ? unpack_int4_rows<64> : unpack_int8_rows<64>;
    case 80: return is_int4 ? unpack_int4_rows<80> : unpack_int8_rows<80>;
    case 96: return is_int4 ? unpack_int4_rows<96> : unpack_int8_rows<96>;
    case 128: return is_int4 ? unpack_int4_rows<128> : unpack_int8_rows<128>;
    case 192: return is_int4 ? unpack_int4_rows<192> : unpack_int8_rows<192>;
    default: return is_int4 ? unpack_int4_rows<256> : unpack_int8_rows<256>;
  }
}

// Sixteen pages, unpacked. Arrays of pages are innermost: a lane is a page.
template <int kPageTokens, int kRank>
struct Batch {
  static constexpr int kPagesPerBlock = kBlockTokens / kPageTokens;
  static constexpr int kBlocks = kBatchPages / kPagesPerBlock;

  // [centroid, then basis rows][page][padded channels]
  alignas(64) std::int16_t rows[extent((1 + kRank) * kBatchPages * kMaxHeadDim)];
  alignas(64) float scales[extent(1 + kRank)][kBatchPages];
  alignas(64) float coefficients[extent(kRank)][extent(kPageTokens)][kBatchPages];
};

inline void prefetch_record(const std::uint8_t* record, int bytes) {
  for (int offset = 0; offset < bytes; offset += kCacheLine) __builtin_prefetch(record + offset);
}

// Fills a batch from blocks [first, first + kBlocks) of the run. Blocks past its end repeat the last one:
// their lanes are never stored. Returns the number of invalid records.
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

  std::int64_t load(int first, Pages& batch) {
    std::int64_t num_invalid = 0;
    for (int i = 0; i < Pages::kBlocks; ++i) {
      const int block = first + i < run_.num_blocks ? first + i : run_.num_blocks - 1;
      if (first + i + Pages::kBlocks < run_.num_blocks) {
        prefetch_record(run_.records[first + i + Pages::kBlocks], layout_.record_bytes);
      }
      const std::uint8_t* record = run_.records[block];
      std::uint32_t word;
      std::memcpy(&word, record + layout_.header_offset, sizeof(word));
      const bool is_valid = word == run_.header_word;
      if (!is_valid && first + i < run_.num_blocks) ++num_invalid;
      for (int p = 0; p < Pages::kPagesPerBlock; ++p) {
        load_page(record, p, is_valid, i * Pages::kPagesPerBlock + p, batch);
      }
    }
    for (int j = 0; j <= kRank; ++j) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        batch.scales[j][lane] = fp16_to_float(half_scales_[j][lane]);
      }
    }
    convert_coefficients(batch);
    return num_invalid;
  }

 private:
  void load_page(const std::uint8_t* record, int page, bool is_valid, int lane, Pages& batch) {
    const std::uint8_t* rows = record + page * layout_.page_rows_bytes;
    std::int16_t* out = batch.rows + lane * channels_;
    const int row_stride = kBatchPages * channels_;
    unpack_centroid_(rows, 1, out, row_stride);
    unpack_basis_(rows + layout_.centroid_row_bytes, kRank, out + row_stride, row_stride);

    std::uint16_t halves[extent(1 + kRank)];
    std::memcpy(halves, record + layout_.scales_offset + page * static_cast<int>(sizeof(halves)),
                sizeof(halves));
    for (int j = 0; j <= kRank; ++j) half_scales_[j][lane] = halves[j];
    if (!is_valid) half_scales_[0][lane] = kHalfNaN;

    const std::uint8_t* packed =
        record + layout_.coefficients_offset + page * layout_.page_coefficient_bytes;
    const int bytes = kRank * kPageTokens * layout_.format.coefficient_bits / 8;
    for (int i = 0; i < bytes; ++i) packed_[i][lane] = packed[i];
  }

  void convert_coefficients(Pages& batch) const {
    for (int j = 0; j < kRank; ++j) {
      for (int t = 0; t < kPageTokens; ++t) {
        const int code = j * kPageTokens + t;
        float* __restrict out = batch.coefficients[j][t];
        if (layout_.format.coefficient_bits == 8) {
          const std::uint8_t* bytes = packed_[code];
          for (int lane = 0; lane < kBatchPages; ++lane) {
            out[lane] = static_cast<float>(static_cast<int>(bytes[lane]) - 128);
          }
        } else {
          const std::uint8_t* bytes = packed_[code / 2];
          const int shift = code % 2 * 4;
          for (int lane = 0; lane < kBatchPages; ++lane) {
            out[lane] = static_cast<float>(((static_cast<int>(bytes[lane]) >> shift) & 15) - 8);
          }
        }
      }
    }
  }

  const ScoreRun& run_;
  const RecordLayout& layout_;
  const int channels_;
  const UnpackRows unpack_centroid_;
  const UnpackRows unpack_basis_;
  std::uint16_t half_scales_[extent(1 + kRank)][kBatchPages];
  std::uint8_t packed_[extent(kRank * kPageTokens)][kBatchPages];
};

// s = q.ref + q.mu + log sum_i exp(z . c_i). Works in powers of two, where the exponent of a page's largest
// token is taken off first: the sum lies in [1, B].
template <int kPageTokens, int kRank>
void finish_scores(const Batch<kPageTokens, kRank>& batch,
                   const std::int32_t (*__restrict sums)[kBatchPages], float query_scale,
                   float query_reference, float* __restrict scores) {
  float exponent[extent(kPageTokens)][kBatchPages];
  float largest[kBatchPages];
  float total[kBatchPages];
  const float log2_scale = query_scale * kLog2E;
  for (int j = 0; j < kRank; ++j) {
    float z[kBatchPages];
    for (int lane = 0; lane < kBatchPages; ++lane) {
      z[lane] = static_cast<float>(sums[1 + j][lane]) * log2_scale * batch.scales[1 + j][lane];
    }
    for (int t = 0; t < kPageTokens; ++t) {
      for (int lane = 0; lane < kBatchPages; ++lane) {
        const float product = z[lane] * batch.coefficients[j][t][lane];
        exponent[t][lane] = j == 0 ? product : exponent[t][lane] + product;
      }
    }
  }
  // A NaN scale or query makes every token of its page NaN, the first included, which then stays the
  // largest: the score is NaN as well.
  for (int lane = 0; lane < kBatchPages; ++lane) {
    float most = exponent[0][lane];
    for (int t = 1; t < kPageTokens; ++t) {
      const float value = exponent[t][lane];
      most = value > most ? value : most;
    }
    largest[lane] = most;
  }
  for (int lane = 0; lane < kBatchPages; ++lane) total[lane] = 0;
  for (int t = 0; t < kPageTokens; ++t) {
    for (int lane = 0; lane < kBatchPages; ++lane) {
      total[lane] += fast_exp2(exponent[t][lane] - largest[lane]);
    }
  }
  for (int lane = 0; lane < kBatchPages; ++lane) {
    const float centroid = static_cast<float>(sums[0][lane]) * query_scale * batch.scales[0][lane];
    const float log_sum = largest[lane] * kLn2 + fast_log(total[lane]);
    scores[lane] = query_reference + (centroid + log_sum);
  }
}

template <int kPageTokens, int kRank, int kHeads>
void score_heads(const ScoreRun& run, const Batch<kPageTokens, kRank>& batch, DotRows dot_rows,
                 int head, int page, int num_pages) {
  const std::int16_t* queries = run.query_codes + head * padded_channels(run.layout.head_dim);
  alignas(64) std::int32_t sums[extent(kHeads)][extent(1 + kRank)][kBatchPages];
  dot_rows(batch.rows, (1 + kRank) * kBatchPages, queries, &sums[0][0][0]);
  for (int h = 0; h < kHeads; ++h) {
    float scores[kBatchPages];
    finish_scores<kPageTokens, kRank>(batch, sums[h], run.query_scales[head + h],
                                      run.query_references[head + h], scores);
    float* out = run.scores + (head + h) * run.head_stride + page;
    if (num_pages == kBatchPages) {
      std::memcpy(out, scores, sizeof(scores));
    } else {
      for (int lane = 0; lane < num_pages; ++lane) out[lane] = scores[lane];
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
    case 4 * 16 + 1: return score_run<4, 1>;
    case 4 * 16 + 2: return score_run<4, 2>;
    case 8 * 16 + 1: return score_run<8, 1>;
    case 8 * 16 + 2: return score_run<8, 2>;
    case 8 * 16 + 4: return score_run<8, 4>;
    case 16 * 16 + 1: return score_run<16, 1>;
    case 16 * 16 + 2: return score_run<16, 2>;
    case 16 * 16 + 4: return score_run<16, 4>;
    case 16 * 16 + 8: return score_run<16, 8>;
    default: return nullptr;
  }
}

// Sixteen partial sums, one a lane, then their sum in order: the same bits at every level.
float dot_floats(const float* __restrict a, const float* __restrict b, int count) {
  constexpr int kLanes = 16;  // divides every head_dim
  float partial[kLanes] = {};
  for (int c = 0; c < count; c += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) partial[lane] += a[c + lane] * b[c + lane];
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) partial[lane] += partial[lane + width];
  }
  return partial[0];
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
      logits[t] = tokens.scale * dot_floats(query, keys[t], tokens.head_dim);
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
