// The decode step: dense and scored rows in one batch, counters, workspace, errors.
#include "locks/decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "locks/locks.h"
#include "support/paged_fixture.h"

namespace {
std::atomic<int> g_allocations{0};
}  // namespace

// clang's thread sanitizer brings allocation functions of its own.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LOCKS_TEST_KEEPS_NEW
#endif
#endif

#ifndef LOCKS_TEST_KEEPS_NEW
// Counts every allocation of this executable. Not inline: g++ 12 would take free() for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes)) return memory;
  std::abort();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace locks::testing {
namespace {

std::int64_t as_i64(std::size_t value) { return static_cast<std::int64_t>(value); }

// A fixture with records built, and all that one decode call needs.
class DecodeCall {
 public:
  explicit DecodeCall(const EdgeCase& edge) : fixture(edge), pages(fixture.pages()) {
    const std::vector<std::int32_t> begin_tokens(static_cast<std::size_t>(fixture.num_seqs()), 0);
    EXPECT_TRUE(summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(),
                                 begin_tokens.data(), fixture.records(), nullptr, serial_executor())
                    .ok());
    plan = DecodePlan::create(fixture.attention(), fixture.summary()).value();
    const auto heads = static_cast<std::size_t>(edge.num_kv_heads);
    ids.resize(static_cast<std::size_t>(pages.begin[fixture.num_seqs()]) * heads);
    set_counts.resize(static_cast<std::size_t>(fixture.num_seqs()) * heads);
    output.resize(static_cast<std::size_t>(fixture.num_seqs() * row_elements()));
    lse.resize(static_cast<std::size_t>(fixture.num_seqs() * fixture.num_query_heads()));
    records = fixture.records();
    seqs = fixture.seqs();
    query = fixture.query();
  }

  int row_elements() const { return fixture.num_query_heads() * fixture.edge().head_dim; }

  AttentionOutput target() {
    return {output.data(), ScalarType::kFloat32, row_elements(), fixture.edge().head_dim,
            lse.data()};
  }

  Status run(const Budget& budget, const Executor& executor = serial_executor(),
             std::int64_t fewer_bytes = 0) {
    counters = {};
    std::fill(output.begin(), output.end(), 99.0f);
    std::fill(ids.begin(), ids.end(), -1);
    const std::size_t bytes =
        plan.workspace_bytes(seqs, executor.num_workers) - static_cast<std::size_t>(fewer_bytes);
    std::vector<std::uint8_t> workspace(bytes + 3, 0xFF);
    const PageSets selected{ids.data(), set_counts.data()};
    const int before = g_allocations.load();
    const Status status =
        decode(plan, query, fixture.keys(), fixture.values(), records, seqs, budget, target(),
               keep_sets ? &selected : nullptr, &counters, workspace.data() + 3, bytes, executor);
    allocations = g_allocations.load() - before;
    return status;
  }

  std::vector<float> row(int seq) const {
    const auto begin = output.begin() + seq * row_elements();
    return {begin, begin + row_elements()};
  }

  PagedFixture fixture;
  PageIndex pages;
  DecodePlan plan;
  RecordCache records;
  SequenceBatch seqs;
  QueryTensor query;
  bool keep_sets = true;
  std::vector<std::int32_t> ids, set_counts;
  std::vector<float> output, lse;
  DecodeCounters counters;
  int allocations = 0;
};

const EdgeCase kMixed{.name = "mixed", .lengths = {700, 0, 60, 433, 84, 2500, 16}};

TEST(DecodePlan, BadField_IsNamed) {
  const auto message = [](const AttentionParams& attention, const SummaryFormat& format) {
    return DecodePlan::create(attention, {format, nullptr}).status().message();
  };
  EXPECT_EQ(message({8, 2, 128, 0.1f}, kFine), "");
  EXPECT_NE(message({8, 3, 128, 0.1f}, kFine).find("num_query_heads = 8"), std::string::npos);
  EXPECT_NE(message({8, 2, 100, 0.1f}, kFine).find("head_dim = 100"), std::string::npos);
  EXPECT_NE(message({8, 2, 128, -1.0f}, kFine).find("scale = -1"), std::string::npos);
  SummaryFormat format = kFine;
  format.page_tokens = 5;
  EXPECT_NE(message({8, 2, 128, 0.1f}, format).find("5"), std::string::npos);
}

TEST(DecodePlan, KeepsLayout) {
  const auto plan = DecodePlan::create({8, 2, 128, 0.1f}, {kCompact, nullptr});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan.value().layout().record_bytes, 288);
}

TEST(Decode, AllBudget_ReadsEverythingAndNoRecord) {
  DecodeCall call(kMixed);
  call.records = {};  // not even looked at
  ASSERT_TRUE(call.run(Budget::all()).ok());
  for (int seq = 0; seq < call.fixture.num_seqs(); ++seq) {
    for (int head = 0; head < 2; ++head) {
      const std::int64_t held = call.pages.pages(seq);
      EXPECT_EQ(call.set_counts[static_cast<std::size_t>(seq * 2 + head)], held);
    }
  }
  std::vector<float> dense(call.output.size());
  std::vector<std::uint8_t> workspace(
      attend_workspace_bytes(call.fixture.attention(), call.seqs, call.pages, 1));
  ASSERT_TRUE(attend_pages(call.fixture.attention(), call.query, call.fixture.keys(),
                           call.fixture.values(), call.seqs, call.pages,
                           {call.ids.data(), call.set_counts.data()},
                           {dense.data(), ScalarType::kFloat32, call.row_elements(), 64, nullptr},
                           workspace.data(), serial_executor())
                  .ok());
  EXPECT_EQ(call.output, dense);
  EXPECT_EQ(call.counters.dense_rows, 6);  // the padded row is none
  EXPECT_EQ(call.counters.sparse_rows, 0);
  EXPECT_EQ(call.counters.records_read, 0);
  EXPECT_EQ(call.counters.bytes_read, call.counters.bytes_dense);
  EXPECT_EQ(call.counters.bytes_dense, (700 + 60 + 433 + 84 + 2500 + 16) * 2 * 64 * 4 * 2);
}

TEST(Decode, ScoredRow_IsTheChainOfStages) {
  for (const SummaryFormat& format : {kFine, kFine8, kCompact, kWide, kPaper}) {
    SCOPED_TRACE(format_name(format));
    DecodeCall call({.name = "chain", .format = format, .lengths = {701, 433}});
    const Budget budget = Budget::tokens(160);
    ASSERT_TRUE(call.run(budget).ok());

    const AttentionParams attention = call.fixture.attention();
    const SummaryParams summary = call.fixture.summary();
    const Executor serial = serial_executor();
    std::vector<std::byte> prepared(prepared_query_bytes(attention, 2));
    ASSERT_TRUE(prepare_queries(attention, summary, call.query, 2, prepared.data(), serial).ok());
    std::vector<float> scores(static_cast<std::size_t>(call.pages.begin[2] * 6));
    std::int64_t invalid = 0;
    ASSERT_TRUE(score_pages(attention, summary, prepared.data(), call.records, call.seqs,
                            call.pages, scores.data(), &invalid, serial)
                    .ok());
    ASSERT_TRUE(score_unrecorded_pages(attention, call.query, call.fixture.keys(), call.seqs,
                                       call.pages, scores.data(), serial)
                    .ok());
    std::vector<std::int32_t> ids(call.ids.size(), -1), counts(4);
    std::vector<std::byte> workspace(select_workspace_bytes(call.seqs, call.pages, 1));
    ASSERT_TRUE(select_pages(attention, scores.data(), call.seqs, call.pages, budget,
                             GroupRule::kMeanOfShares, {ids.data(), counts.data()}, nullptr,
                             workspace.data(), serial)
                    .ok());
    EXPECT_EQ(call.set_counts, counts);
    for (int pair = 0; pair < 4; ++pair) {
      const std::int64_t begin =
          call.pages.begin[pair / 2] * 2 + pair % 2 * call.pages.pages(pair / 2);
      for (int k = 0; k < counts[static_cast<std::size_t>(pair)]; ++k) {
        EXPECT_EQ(call.ids[static_cast<std::size_t>(begin + k)],
                  ids[static_cast<std::size_t>(begin + k)]);
      }
    }
    workspace.resize(attend_workspace_bytes(attention, call.seqs, call.pages, 1));
    std::vector<float> output(call.output.size());
    ASSERT_TRUE(
        attend_pages(attention, call.query, call.fixture.keys(), call.fixture.values(), call.seqs,
                     call.pages, {ids.data(), counts.data()},
                     {output.data(), ScalarType::kFloat32, call.row_elements(), 64, nullptr},
                     workspace.data(), serial)
            .ok());
    EXPECT_EQ(call.output, output);
  }
}

TEST(Decode, MixedBatch_EachRowAsAlone) {
  DecodeCall batch(kMixed);
  ASSERT_TRUE(batch.run(Budget::tokens(120)).ok());
  const std::vector<float> expected = batch.output;
  const std::vector<std::int32_t> expected_ids = batch.ids;
  for (const Executor& executor : {thread_executor(3), reversed_executor(5)}) {
    ASSERT_TRUE(batch.run(Budget::tokens(120), executor).ok());
    EXPECT_EQ(batch.output, expected);
    EXPECT_EQ(batch.ids, expected_ids);
  }
  batch.keep_sets = false;
  ASSERT_TRUE(batch.run(Budget::tokens(120)).ok());
  EXPECT_EQ(batch.output, expected);

  const SequenceBatch all = batch.seqs;
  const QueryTensor query = batch.query;
  for (int seq = 0; seq < batch.fixture.num_seqs(); ++seq) {
    batch.seqs = all;
    batch.seqs.num_seqs = 1;
    batch.seqs.lengths += seq;
    batch.seqs.cache_blocks.ids += seq * all.cache_blocks.seq_stride;
    batch.seqs.record_blocks.ids += seq * all.record_blocks.seq_stride;
    batch.query.data = static_cast<const float*>(query.data) + seq * query.seq_stride;
    ASSERT_TRUE(batch.run(Budget::tokens(120)).ok());
    const std::vector<float> alone = batch.row(0);
    EXPECT_EQ(std::memcmp(alone.data(), expected.data() + seq * batch.row_elements(),
                          alone.size() * sizeof(float)),
              0)
        << "sequence " << seq;
  }
}

TEST(Decode, Counters_AreExact) {
  // 433 tokens: 27 records a KV head, 109 pages, budget 30 pages, the last page holds one token.
  // 84 tokens: 21 pages, which the budget covers. 0: padded.
  DecodeCall call({.name = "count", .lengths = {433, 84, 0}, .type = ScalarType::kBFloat16});
  ASSERT_TRUE(call.run(Budget::tokens(120)).ok());
  const DecodeCounters& got = call.counters;
  EXPECT_EQ(got.sparse_rows, 1);
  EXPECT_EQ(got.dense_rows, 1);
  EXPECT_EQ(got.records_read, 2 * 27);
  EXPECT_EQ(got.pages_read, 2 * (30 + 21));
  const std::int64_t token_bytes = 2 * 64 * 2;
  EXPECT_EQ(got.bytes_read, 2 * 27 * 288 + 2 * (30 * 4 - 3 + 84) * token_bytes);
  EXPECT_EQ(got.bytes_dense, 2 * (433 + 84) * token_bytes);
  EXPECT_EQ(got.nonfinite_pages, 0);
  EXPECT_EQ(got.invalid_records, 0);
  EXPECT_EQ(got.raised_budgets, 0);

  ASSERT_TRUE(call.run(Budget::tokens(16)).ok());
  EXPECT_EQ(call.counters.pages_read, 2 * (21 + 21));
  EXPECT_EQ(call.counters.raised_budgets, 2);
}

TEST(Decode, CountersAdd_NullIsFine) {
  DecodeCall call(kMixed);
  ASSERT_TRUE(call.run(Budget::fraction(0.25)).ok());
  const std::int64_t once = call.counters.pages_read;
  std::vector<std::uint8_t> workspace(call.plan.workspace_bytes(call.seqs, 1));
  for (DecodeCounters* counters : {&call.counters, static_cast<DecodeCounters*>(nullptr)}) {
    ASSERT_TRUE(decode(call.plan, call.query, call.fixture.keys(), call.fixture.values(),
                       call.records, call.seqs, Budget::fraction(0.25), call.target(), nullptr,
                       counters, workspace.data(), workspace.size(), serial_executor())
                    .ok());
  }
  EXPECT_EQ(call.counters.pages_read, 2 * once);
}

TEST(Decode, InvalidRecord_ItsPagesAreRead) {
  DecodeCall call({.name = "invalid", .lengths = {800}});
  std::uint8_t* record = call.fixture.record(0, 1, 20);
  std::memset(record + call.plan.layout().header_offset, 0, 8);
  ASSERT_TRUE(call.run(Budget::tokens(100)).ok());
  EXPECT_EQ(call.counters.invalid_records, 1);
  EXPECT_EQ(call.counters.nonfinite_pages, 4);
  const auto* ids = call.ids.data() + call.pages.pages(0);
  for (std::int32_t page = 80; page < 84; ++page) {
    EXPECT_NE(std::find(ids, ids + call.set_counts[1], page), ids + call.set_counts[1]);
  }
}

TEST(Decode, NoAllocation) {
  DecodeCall call(kMixed);
  for (const Budget& budget : {Budget::tokens(120), Budget::all()}) {
    ASSERT_TRUE(call.run(budget).ok());
    EXPECT_EQ(call.allocations, 0);
  }
}

TEST(Decode, WorkspaceTooSmall_NamesBoth) {
  DecodeCall call(kMixed);
  ASSERT_TRUE(call.run(Budget::tokens(120)).ok());
  const std::size_t needed = call.plan.workspace_bytes(call.seqs, 1);
  const Status status = call.run(Budget::tokens(120), serial_executor(), 1);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "decode: workspace_bytes = " + std::to_string(needed - 1) +
                                  ", expected at least " + std::to_string(needed));
  const Status tiny = call.run(Budget::all(), serial_executor(), as_i64(needed) - 8);
  EXPECT_NE(tiny.message().find("workspace_bytes = 8, expected"), std::string::npos);
}

TEST(Decode, BadInput_LeavesEverythingAsItWas) {
  DecodeCall call(kMixed);
  const auto expect_error = [&](const Budget& budget, const char* part) {
    const Status status = call.run(budget);
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    EXPECT_EQ(std::count(call.output.begin(), call.output.end(), 99.0f),
              static_cast<std::ptrdiff_t>(call.output.size()));
    EXPECT_EQ(std::count(call.ids.begin(), call.ids.end(), -1),
              static_cast<std::ptrdiff_t>(call.ids.size()));
    EXPECT_EQ(call.counters.pages_read + call.counters.raised_budgets + call.counters.dense_rows,
              0);
  };
  expect_error(Budget::fraction(1.0), "budget: fraction = 1");
  expect_error(Budget::tokens(0), "budget: tokens = 0");
  call.records.record_bytes = 256;
  expect_error(Budget::tokens(120), "record_bytes = 256, expected 288");
  call.records = {};
  expect_error(Budget::tokens(120), "records: data is null");
  call.records = call.fixture.records();

  // Only the record table of the last row is wrong.
  std::vector<std::int32_t> table(
      call.seqs.record_blocks.ids,
      call.seqs.record_blocks.ids + call.seqs.num_seqs * call.seqs.record_blocks.seq_stride);
  table[static_cast<std::size_t>(5 * call.seqs.record_blocks.seq_stride + 3)] = -7;
  call.seqs.record_blocks.ids = table.data();
  expect_error(Budget::tokens(120), "record block table: sequence 5, entry 3 = -7");
  EXPECT_TRUE(call.run(Budget::all()).ok());

  call.plan = {};
  const Status status = decode(call.plan, call.query, call.fixture.keys(), call.fixture.values(),
                               call.records, call.seqs, Budget::all(), call.target(), nullptr,
                               nullptr, &call, 0, serial_executor());
  EXPECT_NE(status.message().find("plan is empty"), std::string::npos);
}

TEST(Decode, NullTables_AreNamed) {
  DecodeCall call(kMixed);
  const SequenceBatch good = call.seqs;
  call.seqs.lengths = nullptr;
  EXPECT_EQ(call.plan.workspace_bytes(call.seqs, 1), 0u);
  EXPECT_EQ(call.run(Budget::tokens(120)).message(), "lengths: null");
  call.seqs = good;
  call.seqs.cache_blocks.ids = nullptr;
  EXPECT_EQ(call.run(Budget::tokens(120)).message(), "block table: ids is null");
  call.seqs = good;
  call.seqs.record_blocks.ids = nullptr;
  EXPECT_EQ(call.run(Budget::tokens(120)).message(), "record block table: ids is null");
  EXPECT_EQ(DecodePlan().workspace_bytes(good, 1), 0u);
}

TEST(Decode, NoSequences_IsFine) {
  DecodeCall call(kMixed);
  call.seqs.num_seqs = 0;
  EXPECT_TRUE(decode(call.plan, {}, call.fixture.keys(), call.fixture.values(), {}, call.seqs,
                     Budget::tokens(120), {}, nullptr, nullptr, nullptr, 0, serial_executor())
                  .ok());
}

}  // namespace
}  // namespace locks::testing
