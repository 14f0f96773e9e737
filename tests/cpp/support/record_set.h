// Random records, packed from RecordLayout alone, beside the numbers that they stand for, and a
// call of the score stage over them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/scalar.h"
#include "locks/locks.h"
#include "support/executors.h"
#include "support/index.h"

namespace locks::testing {

constexpr float kPoisonScore = -12345.5f;

// The numbers that a page of a record stands for.
struct Page {
  std::vector<double> centroid;                   // [d]
  std::vector<std::vector<double>> basis;         // [r][d], codes
  std::vector<std::vector<double>> coefficients;  // [r][B], times their scale
};

inline void pack_row(const std::vector<int>& codes, int bits, std::uint8_t* out) {
  const std::size_t half = codes.size() / 2;
  for (std::size_t b = 0; b < (bits == 4 ? half : codes.size()); ++b) {
    const int byte = bits == 4 ? 16 * codes[b + half] + codes[b] + 8 : codes[b];
    out[b] = static_cast<std::uint8_t>(byte & 0xFF);
  }
}

class RecordSet {
 public:
  // `num_blocks` records a KV head in cache blocks of 32 tokens, shuffled over a pool with holes.
  RecordSet(const SummaryFormat& format, int head_dim, int kv_heads, int num_blocks, unsigned seed)
      : format_(format), layout_(record_layout(format, head_dim)), random_(seed) {
    const int cache_blocks = (num_blocks + 1) / 2;
    ids_.resize(at(cache_blocks) * 2);
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<std::int32_t>(i);
    std::shuffle(ids_.begin(), ids_.end(), random_);
    const std::int64_t head_stride = 2 * layout_.record_bytes + 32;
    storage_.assign(ids_.size() * at(kv_heads * head_stride) + 64, 0xFF);
    auto* data =
        storage_.data() + (64 - reinterpret_cast<std::uintptr_t>(storage_.data()) % 64) % 64;
    cache_ = {data,
              static_cast<std::int64_t>(ids_.size()),
              32,
              kv_heads,
              layout_.record_bytes,
              kv_heads * head_stride,
              head_stride};
    pages_.resize(at(kv_heads));
    for (int h = 0; h < kv_heads; ++h) {
      for (int block = 0; block < num_blocks; ++block) pack(record(h, block), pages_[at(h)]);
    }
  }

  std::uint8_t* record(int head, int block) {
    return cache_.data + ids_[at(block / 2)] * cache_.block_stride + head * cache_.head_stride +
           block % 2 * cache_.record_bytes;
  }
  const Page& page(int head, std::int64_t index) const { return pages_[at(head)][at(index)]; }
  const RecordCache& cache() const { return cache_; }
  const RecordLayout& layout() const { return layout_; }
  BlockTable table() const { return {ids_.data(), 0, static_cast<std::int64_t>(ids_.size())}; }

 private:
  int code(int bits) {
    // The whole signed range: what no quantiser writes is still read as what it says.
    const int limit = 1 << (bits - 1);
    return std::uniform_int_distribution<int>(-limit, limit - 1)(random_);
  }
  std::uint16_t scale() {
    return detail::float_to_fp16(std::uniform_real_distribution<float>(0.002f, 0.02f)(random_));
  }

  void pack(std::uint8_t* record, std::vector<Page>& pages) {
    std::memset(record, 0, at(layout_.record_bytes));
    for (int p = 0; p < format_.pages_per_block(); ++p) pages.push_back(pack_page(record, p));
    const std::uint16_t magic = kRecordMagic;
    std::uint8_t* header = record + layout_.header_offset;
    std::memcpy(header, &magic, 2);
    header[2] = kRecordVersion;
    header[3] = encode_format(format_);
  }

  Page pack_page(std::uint8_t* record, int p) {
    Page page;
    const int d = layout_.head_dim;
    std::uint8_t* rows = record + p * layout_.page_rows_bytes;
    std::uint8_t* scales = record + layout_.scales_offset + 2 * p * (1 + format_.rank);
    std::vector<double> component_scales;
    for (int row = 0; row <= format_.rank; ++row) {
      const int bits = row == 0 ? format_.centroid_bits : format_.basis_bits;
      std::vector<int> codes(at(d));
      for (int& c : codes) c = code(bits);
      pack_row(codes, bits, rows);
      rows += row == 0 ? layout_.centroid_row_bytes : layout_.basis_row_bytes;
      const std::uint16_t half = scale();
      std::memcpy(scales + 2 * row, &half, 2);
      const double value = static_cast<double>(detail::fp16_to_float(half));
      std::vector<double> numbers(codes.begin(), codes.end());
      if (row == 0) {
        for (double& x : numbers) x *= value;
        page.centroid = numbers;
      } else {
        page.basis.push_back(numbers);
        component_scales.push_back(value);
      }
    }
    std::uint8_t* packed =
        record + layout_.coefficients_offset + p * layout_.page_coefficient_bytes;
    const int bits = format_.coefficient_bits;
    for (int j = 0; j < format_.rank; ++j) {
      std::vector<double> numbers;
      for (int t = 0; t < format_.page_tokens; ++t) {
        const int c = code(bits);
        const int place = j * format_.page_tokens + t;
        const int stored = c + (1 << (bits - 1));
        std::uint8_t& byte = packed[bits == 8 ? place : place / 2];
        byte = static_cast<std::uint8_t>(byte | (bits == 8 ? stored : stored << (place % 2 * 4)));
        numbers.push_back(c * component_scales[at(j)]);
      }
      page.coefficients.push_back(numbers);
    }
    return page;
  }

  SummaryFormat format_;
  RecordLayout layout_;
  std::mt19937 random_;
  std::vector<std::int32_t> ids_;
  std::vector<std::uint8_t> storage_;
  RecordCache cache_;
  std::vector<std::vector<Page>> pages_;
};

inline std::vector<float> random_floats(std::size_t count, unsigned seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> x(count);
  for (float& value : x) value = normal(random);
  return x;
}

// A batch, its queries, and one call of prepare_queries and score_pages.
struct Scorer {
  AttentionParams attention;
  SummaryParams summary;
  std::vector<std::int32_t> lengths;
  std::vector<float> queries;  // [sequence, head, d]
  std::vector<std::int64_t> begin;
  std::int64_t num_invalid = 0;

  SequenceBatch batch(const BlockTable& table) const {
    return {static_cast<int>(lengths.size()), lengths.data(), table, table};
  }
  QueryTensor query() const {
    return {queries.data(), ScalarType::kFloat32, attention.num_query_heads,
            static_cast<std::int64_t>(attention.num_query_heads) * attention.head_dim,
            attention.head_dim};
  }
  std::vector<float> run(const RecordSet& records, const Executor& executor = serial_executor()) {
    const SequenceBatch seqs = batch(records.table());
    begin.assign(lengths.size() + 1, 0);
    const PageIndex pages = build_page_index(seqs, summary.format.page_tokens, begin.data());
    std::vector<float> scores(at(begin.back() * attention.num_query_heads) + 1, kPoisonScore);
    std::vector<std::byte> prepared(prepared_query_bytes(attention, seqs.num_seqs));
    Status status =
        prepare_queries(attention, summary, query(), seqs.num_seqs, prepared.data(), executor);
    EXPECT_TRUE(status.ok()) << status.message();
    num_invalid = 0;
    status = score_pages(attention, summary, prepared.data(), records.cache(), seqs, pages,
                         scores.data(), &num_invalid, executor);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(scores.back(), kPoisonScore);
    return scores;
  }
  std::size_t place(int seq, int head, std::int64_t page) const {
    const std::int64_t count = begin[at(seq) + 1] - begin[at(seq)];
    return at(begin[at(seq)] * attention.num_query_heads + head * count + page);
  }
  // The query of a head as the formula wants it.
  std::vector<float> ready_query(int seq, int head) const {
    const auto first =
        queries.begin() + (seq * attention.num_query_heads + head) * attention.head_dim;
    std::vector<float> x(first, first + attention.head_dim);
    for (float& value : x) value *= attention.scale;
    if (summary.format.improved) rotate(x.data(), attention.head_dim);
    return x;
  }
};

inline double dot(const std::vector<float>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t c = 0; c < b.size(); ++c) sum += static_cast<double>(a[c]) * b[c];
  return sum;
}
inline double norm2(const std::vector<double>& x) {
  double sum = 0;
  for (double value : x) sum += value * value;
  return std::sqrt(sum);
}
inline double norm1(const std::vector<double>& x) {
  double sum = 0;
  for (double value : x) sum += std::fabs(value);
  return sum;
}

struct Expected {
  double score;
  double tolerance;
  double typical;  // root mean square of the score's logits over all directions of the query
};

// Tolerance: half a step of the 16-bit query, max |q| / 65024, in every channel at its worst: times
// the 1-norm of what the query meets. On top a few float roundings of numbers as large as those
// that occur.
inline Expected expected_score(const Page& page, const std::vector<float>& q,
                               const float* reference) {
  double ref = 0;
  if (reference != nullptr) ref = dot(q, std::vector<double>(reference, reference + q.size()));
  const double centroid = dot(q, page.centroid);
  float largest_channel = 0;
  for (float x : q) largest_channel = std::max(largest_channel, std::fabs(x));
  const double step = static_cast<double>(largest_channel) / 65024;

  double largest = -INFINITY;
  double worst_error = 0;
  double worst_logit = 0;
  double worst_norm = 0;
  std::vector<double> logits(page.coefficients[0].size(), 0.0);
  for (std::size_t t = 0; t < logits.size(); ++t) {
    double error = 0;
    double norm = 0;
    for (std::size_t j = 0; j < page.basis.size(); ++j) {
      logits[t] += dot(q, page.basis[j]) * page.coefficients[j][t];
      error += norm1(page.basis[j]) * std::fabs(page.coefficients[j][t]) * step;
      norm += norm2(page.basis[j]) * std::fabs(page.coefficients[j][t]);
    }
    largest = std::max(largest, logits[t]);
    worst_error = std::max(worst_error, error);
    worst_norm = std::max(worst_norm, norm);
    worst_logit = std::max(worst_logit, std::fabs(logits[t]));
  }
  double sum = 0;
  for (double logit : logits) sum += std::exp(logit - largest);
  const double magnitude = 4 + std::fabs(ref) + std::fabs(centroid) + 4 * worst_logit;
  const double query_norm = norm2(std::vector<double>(q.begin(), q.end()));
  return {ref + centroid + largest + std::log(sum),
          norm1(page.centroid) * step + worst_error + magnitude * 0x1p-22,
          1 + query_norm * (norm2(page.centroid) + worst_norm) /
                  std::sqrt(static_cast<double>(q.size()))};
}

}  // namespace locks::testing
