// What has to hold whatever the numbers are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "decode/decode_ref.h"
#include "support/compare.h"
#include "support/selection_check.h"
#include "support/stage_calls.h"

namespace locks::testing {
namespace {

using ref::PageSummary;
using ref::Vector;

constexpr std::uint64_t kSeeds[] = {1, 2, 3, 4, 5, 6, 7, 8};
constexpr int kDim = 64;
constexpr double kRounding = 1e-10;  // of a few thousand double operations on numbers near 1

std::size_t size(int n) { return static_cast<std::size_t>(n); }

Vector normal_vector(std::mt19937_64& random, int n, double scale = 1) {
  std::normal_distribution<double> normal(0, scale);
  Vector x(size(n));
  for (double& value : x) value = normal(random);
  return x;
}

Vector random_query(std::mt19937_64& random) {
  return normal_vector(random, kDim, 2 / std::sqrt(kDim));
}

Vector permute_tokens(const Vector& keys, const std::vector<int>& order) {
  Vector result;
  for (int token : order) {
    result.insert(result.end(), keys.begin() + token * kDim, keys.begin() + (token + 1) * kDim);
  }
  return result;
}

double unquantised_score(const Vector& keys, int page_tokens, int rank, const Vector& query) {
  return ref::score_page(ref::summarise_exact(keys.data(), page_tokens, kDim, rank), query, {});
}

double quantised_score(const SummaryFormat& format, const Vector& keys, const Vector& query) {
  const auto page =
      ref::dequantise(format, kDim, ref::summarise_page(format, keys.data(), kDim, {}));
  return ref::score_page(page, format.improved ? ref::rotate(query) : query, {});
}

TEST(Property, PermutedTokens_KeepTheScore) {
  for (std::uint64_t seed : kSeeds) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    for (const SummaryFormat& format : all_formats()) {
      SCOPED_TRACE(format_name(format));
      const Vector keys = normal_vector(random, format.page_tokens * kDim);
      const Vector query = random_query(random);
      std::vector<int> order(size(format.page_tokens));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      const Vector permuted = permute_tokens(keys, order);
      EXPECT_NEAR(unquantised_score(keys, format.page_tokens, format.rank, query),
                  unquantised_score(permuted, format.page_tokens, format.rank, query), kRounding);
      // The codes are those of the permuted tokens, unless double rounding meets a tie.
      EXPECT_NEAR(quantised_score(format, keys, query), quantised_score(format, permuted, query),
                  kRounding);
    }
  }
}

// The library on a cache whose tokens are permuted within each page.
TEST(Property, PermutedTokens_KeepTheLibrarysScores) {
  for (const SummaryFormat& format : all_formats()) {
    SCOPED_TRACE(format_name(format));
    std::vector<Scores> scores;
    for (const bool permuted : {false, true}) {
      PagedFixture fixture({.name = "", .format = format, .lengths = {512}, .num_kv_heads = 1});
      const PagedTensor keys = fixture.keys();
      auto* data = static_cast<float*>(const_cast<void*>(keys.data));
      const std::int32_t* table = fixture.seqs().cache_blocks.ids;
      for (int token = 0; permuted && token < 512; token += format.page_tokens) {
        float* page = data + table[token / 16] * keys.block_stride + token % 16 * keys.token_stride;
        for (int i = 0; i < format.page_tokens / 2; ++i) {  // reversed
          std::swap_ranges(page + i * kDim, page + (i + 1) * kDim,
                           page + (format.page_tokens - 1 - i) * kDim);
        }
      }
      const std::int32_t begin = 0;
      ASSERT_TRUE(summarise_blocks(fixture.summary(), keys, fixture.seqs(), &begin,
                                   fixture.records(), nullptr, serial_executor())
                      .ok());
      scores.push_back(call_score(fixture, false, serial_executor()));
    }
    double largest = 0, sum = 0;
    for (std::size_t i = 0; i < scores[0].values.size(); ++i) {
      const double difference = std::abs(static_cast<double>(scores[0].values[i]) -
                                         static_cast<double>(scores[1].values[i]));
      largest = std::max(largest, difference);
      sum += difference;
    }
    // Float sums in another order flip single codes. A 4-bit code is worth about a seventh of a
    // channel's largest value: a few hundredths of a nat on a page, nothing on most.
    EXPECT_LE(largest, 0.25);
    EXPECT_LE(sum / static_cast<double>(scores[0].values.size()), 0.005);
  }
}

TEST(Property, AddedVector_ShiftsAllScoresAlike) {
  for (std::uint64_t seed : kSeeds) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const Vector added = normal_vector(random, kDim, 3), query = random_query(random);
    for (const SummaryFormat& format : all_formats()) {
      const Vector keys = normal_vector(random, format.page_tokens * kDim);
      Vector moved = keys;
      for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += added[i % kDim];
      const double shift = ref::dot(query, added.data());
      EXPECT_NEAR(unquantised_score(moved, format.page_tokens, format.rank, query),
                  unquantised_score(keys, format.page_tokens, format.rank, query) + shift,
                  kRounding);
      // As a reference key it leaves the codes as they are.
      if (!format.improved) continue;
      const Vector reference = ref::rotate(added);
      const auto page =
          ref::dequantise(format, kDim, ref::summarise_page(format, moved.data(), kDim, reference));
      EXPECT_NEAR(ref::score_page(page, ref::rotate(query), reference),
                  quantised_score(format, keys, query) + shift, 1e-6);
    }
  }
}

TEST(Property, RankOfPageSizeMinusOne_IsExact) {
  for (std::uint64_t seed : kSeeds) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    for (int page_tokens : {4, 8, 16}) {
      const Vector keys = normal_vector(random, page_tokens * kDim), query = random_query(random);
      EXPECT_NEAR(unquantised_score(keys, page_tokens, page_tokens - 1, query),
                  ref::log_mass(keys.data(), page_tokens, query), kRounding);
      EXPECT_GT(std::abs(unquantised_score(keys, page_tokens, 1, query) -
                         ref::log_mass(keys.data(), page_tokens, query)),
                1e-6);
    }
  }
}

TEST(Property, Rotation_KeepsDotProductsAndMatchesReference) {
  for (int d : {64, 80, 96, 128, 192, 256}) {
    std::mt19937_64 random(static_cast<std::uint64_t>(d));
    const Vector q = normal_vector(random, d), k = normal_vector(random, d);
    const Vector turned_q = ref::rotate(q), turned_k = ref::rotate(k);
    EXPECT_NEAR(ref::dot(turned_q, turned_k.data()), ref::dot(q, k.data()), kRounding * d);
    std::vector<float> x(q.begin(), q.end());
    rotate(x.data(), d);
    EXPECT_TRUE(arrays_near(x.data(), turned_q.data(), x.size(),
                            {12 * kFloatRoundoff * std::sqrt(ref::dot(q, q.data())), 0,
                             "at most 8 float additions and one product a channel"}));
  }
}

TEST(Property, Formats_RoundTripThroughCodeAndName) {
  for (const SummaryFormat& format : all_formats()) {
    EXPECT_TRUE(validate(format).ok());
    const auto decoded = decode_format(encode_format(format));
    ASSERT_TRUE(decoded.ok());
    EXPECT_TRUE(decoded.value() == format);
    const auto parsed = parse_format(format_name(format));
    ASSERT_TRUE(parsed.ok()) << format_name(format);
    EXPECT_TRUE(parsed.value() == format) << format_name(format);
  }
  // The published table of record sizes at d = 64, 128 and 256.
  struct Row {
    SummaryFormat format;
    int bytes[3];
  };
  for (const Row& row : {Row{kFine, {288, 544, 1056}}, Row{kFine8, {544, 1056, 2080}},
                         Row{kCompact, {160, 288, 544}}, Row{kWide, {416, 736, 1376}},
                         Row{kPaper, {480, 800, 1440}}}) {
    for (int n = 0; n < 3; ++n) {
      EXPECT_EQ(record_layout(row.format, 64 << n).record_bytes, row.bytes[n])
          << format_name(row.format) << " at d = " << (64 << n);
    }
  }
}

// Retained mass of each query head at growing budgets, from the library's own selections.
TEST(Property, MoreBudget_NeverLowersRetainedMass) {
  for (std::uint64_t seed : {1u, 2u, 3u}) {
    for (const SummaryFormat& format : {kFine, kCompact, kWide}) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << format_name(format));
      PagedFixture fixture({.name = "", .format = format, .lengths = {1203}}, seed);
      const EdgeCase& edge = fixture.edge();
      fixture.write_reference_records();
      const Scores scores = call_score(fixture, true, serial_executor());
      const PageIndex pages = fixture.pages();
      for (int head = 0; head < fixture.num_query_heads(); ++head) {
        double last = 0;
        std::vector<std::int32_t> last_set;
        for (int tokens : {1, 100, 128, 200, 400, 800, 1000, 1203, 5000}) {
          const Sets sets = call_select(fixture, scores.values, Budget::tokens(tokens),
                                        GroupRule::kMeanOfShares, serial_executor());
          const auto chosen = sets.of(pages, edge.num_kv_heads, 0, head / edge.group_size);
          EXPECT_TRUE(
              std::includes(chosen.begin(), chosen.end(), last_set.begin(), last_set.end()));
          const double mass =
              ref::retained_mass(ref::scaled(fixture.dense_query(0, head), 1 / std::sqrt(kDim)),
                                 fixture.dense_keys(0, head / edge.group_size).data(),
                                 ref::token_mask(chosen, format.page_tokens, 1203));
          EXPECT_GE(mass, last - kRounding);
          last = mass;
          last_set = chosen;
        }
        EXPECT_NEAR(last, 1, kRounding);
      }
    }
  }
}

// A page's bytes depend on its own keys: change all others and they stay.
TEST(Property, Summary_DoesNotDependOnNeighbours) {
  for (const SummaryFormat& format : all_formats()) {
    SCOPED_TRACE(format_name(format));
    PagedFixture a({.name = "", .format = format, .lengths = {64}, .num_kv_heads = 1}, 1);
    PagedFixture b({.name = "", .format = format, .lengths = {64}, .num_kv_heads = 1}, 2);
    const std::int32_t begin = 0;
    const std::int32_t* tables[] = {a.seqs().cache_blocks.ids, b.seqs().cache_blocks.ids};
    const int page = 17 / format.page_tokens;  // of the second block
    const std::ptrdiff_t token = page * format.page_tokens % 16;
    auto row = [&](const PagedFixture& fixture, int which) {
      return static_cast<float*>(const_cast<void*>(fixture.keys().data)) +
             tables[which][page * format.page_tokens / 16] * fixture.keys().block_stride +
             token * kDim;
    };
    std::copy(row(a, 0), row(a, 0) + format.page_tokens * kDim, row(b, 1));
    std::vector<ref::Record> records;
    for (const PagedFixture* fixture : {&a, &b}) {
      ASSERT_TRUE(summarise_blocks(fixture->summary(), fixture->keys(), fixture->seqs(), &begin,
                                   fixture->records(), nullptr, serial_executor())
                      .ok());
      records.push_back(ref::parse_record(format, kDim, fixture->record(0, 0, 1)));
    }
    const auto& mine = records[0].pages[static_cast<std::size_t>(page % format.pages_per_block())];
    const auto& same = records[1].pages[static_cast<std::size_t>(page % format.pages_per_block())];
    EXPECT_TRUE(mine.centroid == same.centroid && mine.basis == same.basis &&
                mine.coefficients == same.coefficients);
    EXPECT_TRUE(mine.centroid_scale == same.centroid_scale &&
                mine.component_scales == same.component_scales);
  }
}

struct Step {
  Output output;
  DecodeCounters counters;
};

Step decode_batch(PagedFixture& fixture, const SequenceBatch& seqs, const QueryTensor& query,
                  const Budget& budget, const Executor& executor) {
  Step step{Output(fixture), {}};
  const auto plan = DecodePlan::create(fixture.attention(), fixture.summary());
  EXPECT_TRUE(plan.ok());
  const std::size_t bytes = plan.value().workspace_bytes(seqs, executor.num_workers);
  const Workspace workspace(bytes);
  const Status status =
      decode(plan.value(), query, fixture.keys(), fixture.values(), fixture.records(), seqs, budget,
             step.output.view(), nullptr, &step.counters, workspace.data(), bytes, executor);
  EXPECT_TRUE(status.ok()) << status.message();
  return step;
}

void summarise_all(const PagedFixture& fixture) {
  const std::vector<std::int32_t> begin(size(fixture.num_seqs()), 0);
  ASSERT_TRUE(summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(), begin.data(),
                               fixture.records(), nullptr, serial_executor())
                  .ok());
}

TEST(Property, BudgetOfAllPages_IsDenseAttentionBitForBit) {
  for (const SummaryFormat& format : {kFine, kCompact, kWide, kPaper}) {
    SCOPED_TRACE(format_name(format));
    PagedFixture fixture({.name = "", .format = format, .lengths = {2500, 700, 31, 0}});
    summarise_all(fixture);
    const Step all =
        decode_batch(fixture, fixture.seqs(), fixture.query(), Budget::all(), serial_executor());
    const Step tokens = decode_batch(fixture, fixture.seqs(), fixture.query(),
                                     Budget::tokens(2500 + 15), serial_executor());
    EXPECT_TRUE(all.output.same_bytes(tokens.output));
    EXPECT_EQ(all.counters.records_read, 0);
    EXPECT_EQ(all.counters.sparse_rows, 0);
    EXPECT_EQ(all.counters.bytes_read, all.counters.bytes_dense);
    for (int head = 0; head < fixture.num_query_heads(); ++head) {
      const int kv_head = head / fixture.edge().group_size;
      const auto expected =
          ref::attend(ref::scaled(fixture.dense_query(0, head), 1 / std::sqrt(kDim)),
                      fixture.dense_keys(0, kv_head).data(),
                      fixture.dense_values(0, kv_head).data(), std::vector<bool>(2500, true));
      EXPECT_TRUE(arrays_near(all.output.row(0, head).data(), expected.output.data(), size(kDim),
                              {3e-5, 0, "float sums over 2,500 tokens of unit values"}));
    }
  }
}

// Each sequence alone, and in a batch in another order with padded rows between, with any number of
// workers in any order: the same bits.
TEST(Property, BatchAndWorkers_DoNotChangeABit) {
  for (const SummaryFormat& format : {kFine, kCompact, kWide}) {
    SCOPED_TRACE(format_name(format));
    const std::vector<int> lengths = {4100, 0, 517, 2048, 33};
    PagedFixture fixture(
        {.name = "", .format = format, .lengths = lengths, .type = ScalarType::kBFloat16});
    summarise_all(fixture);
    const SequenceBatch whole = fixture.seqs();
    const Budget budget = Budget::tokens(256);
    const Step batch = decode_batch(fixture, whole, fixture.query(), budget, serial_executor());
    for (const Executor& executor : {thread_executor(3), reversed_executor(5)}) {
      const Step other = decode_batch(fixture, whole, fixture.query(), budget, executor);
      EXPECT_TRUE(batch.output.same_bytes(other.output)) << executor.num_workers << " workers";
      EXPECT_EQ(std::memcmp(&batch.counters, &other.counters, sizeof batch.counters), 0);
    }
    for (int i = 0; i < fixture.num_seqs(); ++i) {
      SequenceBatch one = whole;
      one.num_seqs = 1;
      one.lengths += i;
      one.cache_blocks.ids += i * one.cache_blocks.seq_stride;
      one.record_blocks.ids += i * one.record_blocks.seq_stride;
      QueryTensor query = fixture.query();
      query.data = static_cast<const char*>(query.data) + i * query.seq_stride * 2;
      const Step alone = decode_batch(fixture, one, query, budget, serial_executor());
      for (int head = 0; head < fixture.num_query_heads(); ++head) {
        const auto mine = alone.output.row(0, head), batched = batch.output.row(i, head);
        EXPECT_EQ(std::memcmp(mine.data(), batched.data(), mine.size() * sizeof(float)), 0)
            << "sequence " << i << ", head " << head;
        const float lse[] = {alone.output.lse(0, head), batch.output.lse(i, head)};
        EXPECT_EQ(std::memcmp(&lse[0], &lse[1], sizeof(float)), 0);
      }
    }
  }
}

// The engine never rewrites history, but a rejected draft token is written again: the rebuilt
// record is that of the new keys.
TEST(Property, RewrittenLastToken_RebuildsItsRecord) {
  PagedFixture fixture({.name = "", .lengths = {64}, .num_kv_heads = 1});
  summarise_all(fixture);
  const std::vector<std::uint8_t> before(fixture.record(0, 0, 3), fixture.record(0, 0, 3) + 288);
  const PagedTensor keys = fixture.keys();
  float* last = static_cast<float*>(const_cast<void*>(keys.data)) +
                fixture.seqs().cache_blocks.ids[3] * keys.block_stride + 15 * keys.token_stride;
  const float old = last[7];
  std::int64_t built = 0;
  for (const float value : {old + 3, old}) {
    last[7] = value;
    const std::int32_t begin = 63;
    ASSERT_TRUE(summarise_blocks(fixture.summary(), keys, fixture.seqs(), &begin, fixture.records(),
                                 &built, serial_executor())
                    .ok());
    const bool same = std::equal(before.begin(), before.end(), fixture.record(0, 0, 3));
    EXPECT_EQ(same, value == old);
  }
  EXPECT_EQ(built, 2);
}

}  // namespace
}  // namespace locks::testing
