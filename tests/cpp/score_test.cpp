// The score stage against plain double loops over random records, at every CPU level.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/fast_math.h"
#include "core/scalar.h"
#include "locks/locks.h"

namespace locks {
namespace {

constexpr float kPoison = -12345.5f;

std::vector<CpuLevel> levels() {
  std::vector<CpuLevel> all;
  for (CpuLevel level : {CpuLevel::kBaseline, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (level <= best_cpu_level()) all.push_back(level);
  }
  return all;
}

Executor threads(int count) {
  return {count,
          [](void*, int n, Executor::Work work, void* argument) {
            std::vector<std::thread> pool;
            for (int w = 0; w < n; ++w) pool.emplace_back(work, argument, w);
            for (auto& thread : pool) thread.join();
          },
          nullptr};
}

template <class T>
std::size_t at(T index) {
  return static_cast<std::size_t>(index);
}

// Random codes for every page, packed here from RecordLayout alone, beside the numbers they stand
// for.
struct Page {
  std::vector<double> centroid;                   // [d]
  std::vector<std::vector<double>> basis;         // [r][d], codes
  std::vector<std::vector<double>> coefficients;  // [r][B], times their scale
};

void pack_row(const std::vector<int>& codes, int bits, std::uint8_t* out) {
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

std::vector<float> random_floats(std::size_t count, unsigned seed, float scale = 1) {
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
    std::vector<float> scores(at(begin.back() * attention.num_query_heads) + 1, kPoison);
    std::vector<std::byte> prepared(prepared_query_bytes(attention, seqs.num_seqs));
    Status status =
        prepare_queries(attention, summary, query(), seqs.num_seqs, prepared.data(), executor);
    EXPECT_TRUE(status.ok()) << status.message();
    num_invalid = 0;
    status = score_pages(attention, summary, prepared.data(), records.cache(), seqs, pages,
                         scores.data(), &num_invalid, executor);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(scores.back(), kPoison);
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

double dot(const std::vector<float>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t c = 0; c < b.size(); ++c) sum += static_cast<double>(a[c]) * b[c];
  return sum;
}
double norm2(const std::vector<double>& x) {
  double sum = 0;
  for (double value : x) sum += value * value;
  return std::sqrt(sum);
}
double norm1(const std::vector<double>& x) {
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
Expected expected_score(const Page& page, const std::vector<float>& q, const float* reference) {
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

struct ScoreCase {
  SummaryFormat format;
  int head_dim;
  int group_size;
};

std::vector<ScoreCase> score_cases() {
  const int shapes[][2] = {{4, 1},  {4, 2},  {8, 1},  {8, 2}, {8, 4},
                           {16, 1}, {16, 2}, {16, 4}, {16, 8}};
  const int dims[] = {64, 80, 96, 128, 192, 256};
  const int groups[] = {1, 3, 5, 7, 8, 16, 71, 4, 2};
  std::vector<ScoreCase> cases;
  int n = 0;
  for (const auto& shape : shapes) {
    for (int widths = 0; widths < 8; ++widths, ++n) {
      const auto bits = [&](int bit) { return (widths >> bit & 1) != 0 ? 8 : 4; };
      cases.push_back({{shape[0], shape[1], bits(0), bits(1), bits(2), n % 3 != 0},
                       dims[n % 6],
                       groups[n % 9]});
    }
  }
  for (int d : dims) cases.push_back({kFine, d, 4});
  for (int g : groups) cases.push_back({kFine, 128, g});
  return cases;
}

TEST(ScorePages, EveryFormat_MatchesDoubleAndIsTheSameAtEveryLevel) {
  double worst = 0;
  for (const ScoreCase& tested : score_cases()) {
    SCOPED_TRACE(format_name(tested.format) + " d " + std::to_string(tested.head_dim) + " group " +
                 std::to_string(tested.group_size));
    const int kv_heads = 2;
    RecordSet records(tested.format, tested.head_dim, kv_heads, 21, 7);
    const auto references = random_floats(at(kv_heads * tested.head_dim), 3);
    Scorer scorer;
    scorer.attention = {kv_heads * tested.group_size, kv_heads, tested.head_dim, 0.1f};
    scorer.summary = {tested.format, references.data()};
    scorer.lengths = {21 * 16, 19 * 16 + 5};
    scorer.queries = random_floats(at(2 * scorer.attention.num_query_heads * tested.head_dim), 11);
    std::vector<float> first;
    for (CpuLevel level : levels()) {
      ASSERT_TRUE(set_cpu_level(level).ok());
      const auto scores = scorer.run(records);
      EXPECT_EQ(scorer.num_invalid, 0);
      if (first.empty()) first = scores;
      ASSERT_EQ(std::memcmp(scores.data(), first.data(), scores.size() * sizeof(float)), 0)
          << cpu_level_name(level);
    }
    for (int seq = 0; seq < 2; ++seq) {
      const std::int64_t pages = scorer.lengths[at(seq)] / 16 * tested.format.pages_per_block();
      for (int head = 0; head < scorer.attention.num_query_heads; ++head) {
        const auto q = scorer.ready_query(seq, head);
        const int kv_head = head / tested.group_size;
        const float* reference =
            tested.format.improved ? references.data() + kv_head * tested.head_dim : nullptr;
        for (std::int64_t p = 0; p < pages; ++p) {
          const Expected expected = expected_score(records.page(kv_head, p), q, reference);
          const double actual = static_cast<double>(first[scorer.place(seq, head, p)]);
          const double error = std::fabs(actual - expected.score);
          worst = std::max(worst, error / expected.typical);
          ASSERT_LE(error, expected.tolerance)
              << "sequence " << seq << " head " << head << " page " << p;
        }
        // Pages of the incomplete block belong to score_unrecorded_pages.
        for (std::int64_t p = pages; scorer.place(seq, head, p) < scorer.place(seq, head + 1, 0);
             ++p) {
          ASSERT_EQ(first[scorer.place(seq, head, p)], kPoison);
        }
      }
    }
  }
  // Far inside the worst case: rounding errors of the channels are independent. One standard
  // deviation is max |q| / rms(q) * 0.29 / 32512, about 3e-5, of a typical logit; this is the worst
  // of 200,000 scores.
  EXPECT_LT(worst, 2e-4);
}

Scorer small_scorer(const SummaryFormat& format, std::vector<std::int32_t> lengths, int group = 3) {
  Scorer scorer;
  scorer.attention = {2 * group, 2, 64, 0.125f};
  scorer.summary = {format, nullptr};
  scorer.lengths = std::move(lengths);
  scorer.queries =
      random_floats(scorer.lengths.size() * at(scorer.attention.num_query_heads) * 64, 5);
  return scorer;
}

TEST(ScorePages, Batch_MatchesEachSequenceAloneWithAnyWorkers) {
  RecordSet records(kFine, 64, 2, 300, 1);
  const std::vector<std::int32_t> lengths = {0, 1, 15, 16, 17, 2047, 2048, 2049, 4800, 0, 4100};
  for (CpuLevel level : levels()) {
    ASSERT_TRUE(set_cpu_level(level).ok());
    Scorer all = small_scorer(kFine, lengths);
    const auto together = all.run(records);
    EXPECT_EQ(all.run(records, threads(4)), together);
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      Scorer one = all;
      one.lengths = {lengths[i]};
      const std::size_t row = at(one.attention.num_query_heads) * 64;
      one.queries.assign(all.queries.begin() + static_cast<std::ptrdiff_t>(i * row),
                         all.queries.begin() + static_cast<std::ptrdiff_t>((i + 1) * row));
      const auto alone = one.run(records);
      ASSERT_EQ(
          std::memcmp(alone.data(), together.data() + all.begin[i] * all.attention.num_query_heads,
                      (alone.size() - 1) * sizeof(float)),
          0)
          << "sequence " << i;
    }
  }
}

TEST(ScorePages, CorruptHeader_GivesNaNForItsPagesAndIsCounted) {
  for (const SummaryFormat& format : {kFine, kCompact, kWide}) {
    for (int byte = 0; byte < 4; ++byte) {
      RecordSet records(format, 64, 2, 40, 2);
      std::uint8_t* record = records.record(1, 17);
      record[records.layout().header_offset + byte] ^= 0x10;
      ASSERT_FALSE(header_matches(records.layout(), record));
      ASSERT_TRUE(header_matches(records.layout(), records.record(0, 17)));
      for (CpuLevel level : levels()) {
        ASSERT_TRUE(set_cpu_level(level).ok());
        Scorer scorer = small_scorer(format, {40 * 16});
        const auto scores = scorer.run(records, threads(3));
        EXPECT_EQ(scorer.num_invalid, 1);
        const std::int64_t pages = scorer.begin[1];
        for (int head = 0; head < 6; ++head) {
          for (std::int64_t p = 0; p < pages; ++p) {
            const bool corrupt = head >= 3 && p / format.pages_per_block() == 17;
            ASSERT_EQ(std::isnan(scores[scorer.place(0, head, p)]), corrupt) << head << " " << p;
          }
        }
      }
    }
  }
}

TEST(ScorePages, InvalidLastRecord_IsCountedOnce) {
  RecordSet records(kPaper, 64, 2, 3, 2);  // the kernel fills its batch of 16 with the last block
  records.record(0, 2)[records.layout().header_offset] = 0;
  Scorer scorer = small_scorer(kPaper, {3 * 16});
  scorer.run(records);
  EXPECT_EQ(scorer.num_invalid, 1);
}

TEST(ScorePages, NonfiniteQuery_GivesNonfiniteScoresForItsHeadOnly) {
  RecordSet records(kFine, 64, 2, 20, 2);
  RecordSet plain(kPaper, 64, 2, 20, 2);
  for (float bad : {NAN, INFINITY, -INFINITY, 3e38f}) {
    for (CpuLevel level : levels()) {
      ASSERT_TRUE(set_cpu_level(level).ok());
      for (RecordSet* set : {&records, &plain}) {
        Scorer scorer = small_scorer(set->layout().format, {20 * 16});
        scorer.attention.scale = 2;  // takes 3e38 to infinity
        scorer.queries[4 * 64 + 9] = bad;
        const auto scores = scorer.run(*set);
        for (int head = 0; head < 6; ++head) {
          for (std::int64_t p = 0; p < scorer.begin[1]; ++p) {
            ASSERT_EQ(std::isfinite(scores[scorer.place(0, head, p)]), head != 4);
          }
        }
      }
    }
  }
}

TEST(ScorePages, NonfiniteScale_GivesNonfiniteScoresForItsPageOnly) {
  for (int row = 0; row < 2; ++row) {
    for (std::uint16_t bits :
         {std::uint16_t{0x7E00}, std::uint16_t{0x7C00}, std::uint16_t{0xFE00}}) {
      RecordSet records(kFine, 64, 2, 20, 2);
      std::memcpy(records.record(0, 6) + records.layout().scales_offset + 2 * (2 * 3 + row), &bits,
                  2);
      for (CpuLevel level : levels()) {
        ASSERT_TRUE(set_cpu_level(level).ok());
        Scorer scorer = small_scorer(kFine, {20 * 16});
        const auto scores = scorer.run(records);
        for (int head = 0; head < 6; ++head) {
          for (std::int64_t p = 0; p < 80; ++p) {
            ASSERT_EQ(std::isfinite(scores[scorer.place(0, head, p)]), head >= 3 || p != 6 * 4 + 3);
          }
        }
      }
    }
  }
}

TEST(ScorePages, ZeroAndTinyQueries_GiveTheLogOfThePageSize) {
  RecordSet records(kFine, 64, 2, 20, 2);
  for (float value : {0.0f, 1e-39f, -1e-38f}) {
    Scorer scorer = small_scorer(kFine, {20 * 16});
    std::fill(scorer.queries.begin(), scorer.queries.end(), value);
    const auto scores = scorer.run(records);
    for (std::size_t i = 0; i + 1 < scores.size(); ++i)
      ASSERT_NEAR(scores[i], std::log(4.0f), 1e-6f);
  }
}

TEST(ScorePages, LargestCodes_DoNotOverflow) {
  RecordSet records({16, 8, 8, 8, 8, false}, 256, 1, 1, 2);
  for (int b = 0; b < records.layout().scales_offset; ++b) records.record(0, 0)[b] = 0x80;
  Scorer scorer;
  scorer.attention = {1, 1, 256, 1.0f};
  scorer.summary = {records.layout().format, nullptr};
  scorer.lengths = {16};
  scorer.queries.assign(256, 1.0f);
  const auto scores = scorer.run(records);
  std::uint16_t half;
  std::memcpy(&half, records.record(0, 0) + records.layout().scales_offset, 2);
  Page page = records.page(0, 0);
  std::fill(page.centroid.begin(), page.centroid.end(),
            -128.0 * static_cast<double>(detail::fp16_to_float(half)));
  for (auto& row : page.basis) std::fill(row.begin(), row.end(), -128.0);
  const Expected expected = expected_score(page, scorer.queries, nullptr);
  EXPECT_NEAR(static_cast<double>(scores[0]), expected.score, expected.tolerance);
}

TEST(ScorePages, BuiltRecords_ScoreAsUnpackRecordSays) {
  const int d = 96;
  const int blocks = 9;
  const auto keys = random_floats(at(2 * blocks * 16 * d), 21);
  std::vector<std::int32_t> ids(blocks);
  for (int i = 0; i < blocks; ++i) ids[at(i)] = blocks - 1 - i;
  const PagedTensor tensor{keys.data(), ScalarType::kFloat32, blocks, 16, 2,
                           d,           2 * 16 * d,           16 * d, d};
  for (const SummaryFormat& format : {kFine, kFine8, kCompact, kWide, kPaper}) {
    const RecordLayout layout = record_layout(format, d);
    std::vector<std::uint8_t> storage(at(2 * blocks * layout.record_bytes) + 64);
    auto* data = storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
    const RecordCache cache{
        data, blocks, 16, 2, layout.record_bytes, 2 * layout.record_bytes, layout.record_bytes};
    const std::int32_t length = blocks * 16;
    const std::int32_t begin_token = 0;
    const BlockTable table{ids.data(), 0, blocks};
    const SequenceBatch seqs{1, &length, table, table};
    const SummaryParams summary{format, nullptr};
    ASSERT_TRUE(
        summarise_blocks(summary, tensor, seqs, &begin_token, cache, nullptr, serial_executor())
            .ok());

    const AttentionParams attention{2, 2, d, 0.1f};
    const auto queries = random_floats(at(2 * d), 4);
    std::int64_t begin[2];
    const PageIndex pages = build_page_index(seqs, format.page_tokens, begin);
    std::vector<std::byte> prepared(prepared_query_bytes(attention, 1));
    std::vector<float> scores(at(2 * begin[1]));
    ASSERT_TRUE(prepare_queries(attention, summary, {queries.data(), ScalarType::kFloat32, 2, 0, d},
                                1, prepared.data(), serial_executor())
                    .ok());
    ASSERT_TRUE(score_pages(attention, summary, prepared.data(), cache, seqs, pages, scores.data(),
                            nullptr, serial_executor())
                    .ok());
    const int per_block = format.pages_per_block();
    std::vector<float> centroid(at(per_block * d)), basis(at(per_block * format.rank * d)),
        coefficients(at(per_block * format.rank * format.page_tokens));
    for (int head = 0; head < 2; ++head) {
      std::vector<float> q(queries.begin() + head * d, queries.begin() + (head + 1) * d);
      for (float& x : q) x *= attention.scale;
      if (format.improved) rotate(q.data(), d);
      for (int block = 0; block < blocks; ++block) {
        const std::uint8_t* record =
            data + ids[at(block)] * cache.block_stride + head * cache.head_stride;
        ASSERT_TRUE(
            unpack_record(layout, record, centroid.data(), basis.data(), coefficients.data()).ok());
        for (int p = 0; p < per_block; ++p) {
          Page page;
          page.centroid.assign(centroid.begin() + p * d, centroid.begin() + (p + 1) * d);
          for (int j = 0; j < format.rank; ++j) {
            const int row = p * format.rank + j;
            page.basis.emplace_back(basis.begin() + row * d, basis.begin() + (row + 1) * d);
            page.coefficients.emplace_back(coefficients.begin() + row * format.page_tokens,
                                           coefficients.begin() + (row + 1) * format.page_tokens);
          }
          const Expected expected = expected_score(page, q, nullptr);
          const float actual = scores[at(head * begin[1] + block * per_block + p)];
          ASSERT_NEAR(static_cast<double>(actual), expected.score, expected.tolerance);
        }
      }
    }
  }
}

class Unrecorded : public ::testing::TestWithParam<ScalarType> {};

TEST_P(Unrecorded, IncompleteBlock_MatchesDoubleAtEveryLevel) {
  const ScalarType type = GetParam();
  const int d = 80, kv_heads = 2, group = 5, blocks = 4, block_tokens = 32;
  const auto draw = [&](std::size_t count, unsigned seed, std::vector<std::uint8_t>& bytes) {
    auto x = random_floats(count, seed, 2);
    bytes.resize(count * at(scalar_bytes(type)));
    for (std::size_t i = 0; i < count; ++i) {
      detail::store_scalar(bytes.data(), type, static_cast<std::int64_t>(i), x[i]);
      x[i] = detail::load_scalar(bytes.data(), type, static_cast<std::int64_t>(i));
    }
    return x;
  };
  std::vector<std::uint8_t> key_bytes, query_bytes;
  // Token-major: [block, token, head, channel].
  const auto keys = draw(at(blocks * block_tokens * kv_heads * d), 1, key_bytes);
  const PagedTensor tensor{
      key_bytes.data(), type, blocks, block_tokens, kv_heads, d, block_tokens * kv_heads * d, d,
      kv_heads * d};
  const std::vector<std::int32_t> lengths = {0, 1, 16, 17, 31, 64, 71, 109};
  const auto num_seqs = static_cast<int>(lengths.size());
  const auto queries = draw(lengths.size() * at(kv_heads * group * d), 2, query_bytes);
  const std::int32_t ids[] = {2, 0, 3, 1};
  const BlockTable table{ids, 0, blocks};
  const SequenceBatch seqs{num_seqs, lengths.data(), table, {}};
  const AttentionParams attention{kv_heads * group, kv_heads, d, 0.2f};
  const QueryTensor query{query_bytes.data(), type, kv_heads * group, kv_heads * group * d, d};
  for (int page_tokens : {4, 8, 16}) {
    std::vector<std::int64_t> begin(lengths.size() + 1);
    const PageIndex pages = build_page_index(seqs, page_tokens, begin.data());
    std::vector<float> first;
    for (CpuLevel level : levels()) {
      ASSERT_TRUE(set_cpu_level(level).ok());
      std::vector<float> scores(at(begin.back() * attention.num_query_heads), kPoison);
      ASSERT_TRUE(
          score_unrecorded_pages(attention, query, tensor, seqs, pages, scores.data(), threads(2))
              .ok());
      if (first.empty()) first = scores;
      ASSERT_EQ(scores, first) << cpu_level_name(level);
    }
    for (int seq = 0; seq < num_seqs; ++seq) {
      const std::int64_t length = lengths[at(seq)];
      for (int head = 0; head < attention.num_query_heads; ++head) {
        for (std::int64_t p = 0; p < pages.pages(seq); ++p) {
          const float actual =
              first[at(begin[at(seq)] * attention.num_query_heads + head * pages.pages(seq) + p)];
          if (p * page_tokens < length / 16 * 16) {
            ASSERT_EQ(actual, kPoison);
            continue;
          }
          double sum = 0;
          for (std::int64_t t = p * page_tokens;
               t < std::min<std::int64_t>(length, (p + 1) * page_tokens); ++t) {
            double logit = 0;
            for (int c = 0; c < d; ++c) {
              logit +=
                  static_cast<double>(queries[at((seq * kv_heads * group + head) * d + c)]) *
                  static_cast<double>(
                      keys[at(((ids[t / 32] * 32 + t % 32) * kv_heads + head / group) * d + c)]);
            }
            sum += std::exp(logit * static_cast<double>(attention.scale));
          }
          // Float accumulation over 80 channels in 16 lanes, logits up to about 40.
          ASSERT_NEAR(static_cast<double>(actual), std::log(sum), 2e-5);
        }
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Types, Unrecorded,
                         ::testing::Values(ScalarType::kFloat32, ScalarType::kBFloat16,
                                           ScalarType::kFloat16));

TEST(UnrecordedPages, NonfiniteKey_GivesNonfiniteScoreForItsPage) {
  std::vector<float> keys = random_floats(16 * 64, 1);
  const std::int32_t id = 0;
  const std::int32_t length = 14;
  const BlockTable table{&id, 0, 1};
  const SequenceBatch seqs{1, &length, table, {}};
  const AttentionParams attention{3, 1, 64, 1.0f};
  const auto queries = random_floats(3 * 64, 9);
  std::int64_t begin[2];
  const PageIndex pages = build_page_index(seqs, 4, begin);
  for (float bad : {NAN, INFINITY}) {
    for (int token = 0; token < 14; ++token) {
      std::vector<float> with_bad = keys;
      with_bad[at(token * 64 + 33)] = bad;
      std::vector<float> scores(12, 0);
      const PagedTensor tensor{
          with_bad.data(), ScalarType::kFloat32, 1, 16, 1, 64, 16 * 64, 16 * 64, 64};
      ASSERT_TRUE(score_unrecorded_pages(attention,
                                         {queries.data(), ScalarType::kFloat32, 3, 0, 64}, tensor,
                                         seqs, pages, scores.data(), serial_executor())
                      .ok());
      for (int head = 0; head < 3; ++head) {
        const float q = queries[at(head * 64 + 33)];
        for (int p = 0; p < 4; ++p) {
          // exp(-inf) = 0 leaves the page's other tokens: the mass is right without the bad one.
          if (p == token / 4 && bad > 0 && q < 0) continue;
          ASSERT_EQ(std::isfinite(scores[at(head * 4 + p)]), p != token / 4)
              << token << " " << head;
        }
      }
    }
  }
}

TEST(ScoreValidation, BadArguments_AreNamed) {
  const AttentionParams good{8, 2, 64, 0.1f};
  EXPECT_TRUE(validate(good).ok());
  const auto message = [](AttentionParams attention) { return validate(attention).message(); };
  EXPECT_EQ(message({8, 0, 64, 0.1f}), "attention: num_kv_heads = 0, expected >= 1");
  EXPECT_EQ(message({7, 2, 64, 0.1f}),
            "attention: num_query_heads = 7, expected 1 to 71 times num_kv_heads = 2");
  EXPECT_FALSE(validate(AttentionParams{144, 2, 64, 0.1f}).ok());
  EXPECT_TRUE(validate(AttentionParams{142, 2, 64, 0.1f}).ok());
  EXPECT_EQ(message({8, 2, 100, 0.1f}),
            "attention: head_dim = 100, expected 64, 80, 96, 128, 192 or 256");
  EXPECT_FALSE(validate(AttentionParams{8, 2, 64, 0.0f}).ok());
  EXPECT_FALSE(validate(AttentionParams{8, 2, 64, NAN}).ok());

  RecordSet records(kFine, 64, 2, 2, 1);
  Scorer scorer = small_scorer(kFine, {32});
  scorer.run(records);
  const SequenceBatch seqs = scorer.batch(records.table());
  const auto status = [&](const RecordCache& cache, const SummaryFormat& format, int page_tokens) {
    return score_pages(scorer.attention, {format, nullptr}, nullptr, cache, seqs,
                       {scorer.begin.data(), page_tokens}, nullptr, nullptr, serial_executor());
  };
  RecordCache cache = records.cache();
  EXPECT_EQ(status(cache, kFine8, 4).message(),
            "score_pages: records: record_bytes = 288, expected 544 for fine8");
  EXPECT_EQ(status(cache, kFine, 8).message(),
            "score_pages: page_tokens = 8, expected the format's 4");
  cache.num_kv_heads = 1;
  EXPECT_EQ(status(cache, kFine, 4).message(),
            "score_pages: records: num_kv_heads = 1, expected 2");
}

// fast_math.h, in the copy that this file compiles; its bits are those of every level.
TEST(FastMath, ExpAndLog_MatchDouble) {
  using detail::fast_exp;
  using detail::fast_exp2;
  using detail::fast_log;
  double exp2_error = 0, exp_error = 0, log_error = 0;
  for (std::uint32_t i = 0; i < 2000000; ++i) {
    const float x = -126.0f + static_cast<float>(i) * (253.0f / 2000000);
    exp2_error = std::max(
        exp2_error,
        std::fabs(static_cast<double>(fast_exp2(x)) / std::exp2(static_cast<double>(x)) - 1));
    const float y = x * 0.69f;
    exp_error = std::max(
        exp_error,
        std::fabs(static_cast<double>(fast_exp(y)) / std::exp(static_cast<double>(y)) - 1));
    const float z = std::bit_cast<float>(0x00800000u + i * 1065u);  // normal numbers, to 3e38
    const double expected = std::log(static_cast<double>(z));
    const double near_one = std::max(std::fabs(expected), 1e-30);
    log_error =
        std::max(log_error, std::fabs(static_cast<double>(fast_log(z)) - expected) / near_one);
  }
  EXPECT_LT(exp2_error, 2e-7);
  EXPECT_LT(exp_error, 2.5e-7);
  EXPECT_LT(log_error, 3e-7);
  for (std::uint32_t i = 0; i < 200000; ++i) {  // around 1, where ln is small
    const float z = std::bit_cast<float>(0x3F800000u - 100000u + i);
    const double expected = std::log(static_cast<double>(z));
    ASSERT_LE(std::fabs(static_cast<double>(fast_log(z)) - expected), 3e-7 * std::fabs(expected))
        << z;
  }
}

TEST(FastMath, SpecialValues_AreAsDocumented) {
  using detail::fast_exp;
  using detail::fast_exp2;
  using detail::fast_log;
  for (auto* f : {fast_exp, fast_exp2}) {
    EXPECT_EQ(f(0.0f), 1.0f);
    EXPECT_EQ(f(-INFINITY), 0.0f);
    EXPECT_EQ(f(-3e38f), 0.0f);
    EXPECT_EQ(f(INFINITY), INFINITY);
    EXPECT_EQ(f(3e38f), INFINITY);
    EXPECT_TRUE(std::isnan(f(NAN)));
  }
  EXPECT_EQ(fast_exp2(-127.0f), 0.0f);
  EXPECT_EQ(fast_exp2(10.0f), 1024.0f);
  EXPECT_EQ(fast_log(1.0f), 0.0f);
  EXPECT_EQ(fast_log(INFINITY), INFINITY);
  EXPECT_EQ(fast_log(0.0f), -INFINITY);
  EXPECT_EQ(fast_log(-0.0f), -INFINITY);
  EXPECT_EQ(fast_log(1e-40f), -INFINITY);
  EXPECT_TRUE(std::isnan(fast_log(-1.0f)));
  EXPECT_TRUE(std::isnan(fast_log(-INFINITY)));
  EXPECT_TRUE(std::isnan(fast_log(NAN)));
}

}  // namespace
}  // namespace locks
