// The score stage against plain double loops over random records, at every CPU level.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/scalar.h"
#include "locks/locks.h"
#include "support/record_set.h"

namespace locks {
namespace {

using namespace testing;

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
    for (CpuLevel level : cpu_levels()) {
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
          ASSERT_EQ(first[scorer.place(seq, head, p)], kPoisonScore);
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
  for (CpuLevel level : cpu_levels()) {
    ASSERT_TRUE(set_cpu_level(level).ok());
    Scorer all = small_scorer(kFine, lengths);
    const auto together = all.run(records);
    EXPECT_EQ(all.run(records, thread_executor(4)), together);
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
      for (CpuLevel level : cpu_levels()) {
        ASSERT_TRUE(set_cpu_level(level).ok());
        Scorer scorer = small_scorer(format, {40 * 16});
        const auto scores = scorer.run(records, thread_executor(3));
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
    for (CpuLevel level : cpu_levels()) {
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
      for (CpuLevel level : cpu_levels()) {
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
  EXPECT_EQ(
      status(cache, kFine8, 4).message(),
      "score_pages: records: record_bytes = 288, expected 544 for format fine8 at head_dim = 64");
  EXPECT_EQ(status(cache, kFine, 8).message(),
            "score_pages: pages: page_tokens = 8, expected the format's 4");
  cache.num_kv_heads = 1;
  EXPECT_EQ(status(cache, kFine, 4).message(),
            "score_pages: records: num_kv_heads = 1, expected 2");
  cache = records.cache();
  EXPECT_EQ(status(cache, kFine, 4).message(), "score_pages: prepared is null");
  cache.num_blocks = 1;
  EXPECT_NE(status(cache, kFine, 4).message().find("record block table: sequence 0, entry "),
            std::string::npos);
  cache.block_stride = -16;
  EXPECT_NE(status(cache, kFine, 4).message().find("block_stride = -16"), std::string::npos);
  cache.record_bytes = std::int64_t{1} << 62;
  EXPECT_NE(status(cache, kFine, 4).message().find("expected a multiple of 32"), std::string::npos);
}

}  // namespace
}  // namespace locks
