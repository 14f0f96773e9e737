// The whole decode step on the GPU against the references and the CPU, over the shared table of
// edge cases. Needs a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "decode/decode_ref.h"
#include "locks/cuda.h"
#include "support/captured_step.h"
#include "support/device_step.h"
#include "support/device_step_check.h"
#include "support/head_input.h"
#include "support/stage_calls.h"

namespace locks::testing {
namespace {

enum Counter {
  kSparse,
  kDense,
  kRecordsRead,
  kPagesRead,
  kBytesRead,
  kBytesDense,
  kNonfinite,
  kInvalid,
  kRaised,
  kUnused,
  kBuilt
};

bool planned_whole(const EdgeCase& edge, int length, const Budget& budget) {
  return ref::budget_pages(budget, length, edge.format.page_tokens, nullptr) ==
         num_pages(length, edge.format.page_tokens);
}

// Always-read pages are in, the count is the budget's, and the kept mass is that of the reference's
// set but for near-ties (bf16 masses: 2^-8 of a share; one 4-bit code is worth more where logits
// are in the hundreds).
void check_set(const PagedFixture& fixture, int seq, int kv_head, const Budget& budget,
               const std::vector<std::int32_t>& chosen) {
  const EdgeCase& edge = fixture.edge();
  const int length = edge.lengths[static_cast<std::size_t>(seq)];
  const int page_tokens = edge.format.page_tokens;
  const ref::HeadInput input = head_input(fixture, seq, kv_head);
  const ref::HeadOutput expected = ref::decode_head(input, budget);
  const auto held = static_cast<std::int64_t>(num_pages(length, page_tokens));
  const auto allowed = ref::budget_pages(budget, length, page_tokens, nullptr);
  const bool overflows = static_cast<std::int64_t>(expected.selection.pages.size()) > allowed;
  ASSERT_EQ(static_cast<std::int64_t>(chosen.size()), overflows ? held : allowed);
  std::vector<bool> in(static_cast<std::size_t>(held), false);
  for (std::int32_t page : chosen) {
    ASSERT_LT(page, held);
    in[static_cast<std::size_t>(page)] = true;
  }
  for (std::size_t p = 0; p < in.size(); ++p) {
    if (expected.selection.forced[p]) {
      ASSERT_TRUE(in[p]) << "page " << p << " has to be read";
    }
  }
  if (length == 0 || edge.keys == KeyPattern::kNanKey || edge.keys == KeyPattern::kInfKey) return;
  const double actual_mass = kept_mass(input, chosen);
  const double expected_mass = kept_mass(input, expected.selection.pages);
  // A set that keeps more is no fault.
  EXPECT_GE(actual_mass, expected_mass - (edge.keys == KeyPattern::kHuge ? 0.1 : 0.01));
}

void check_counters(const PagedFixture& fixture, const DeviceStep& step, const Budget& budget,
                    const std::vector<std::int64_t>& before) {
  const EdgeCase& edge = fixture.edge();
  const std::int64_t token_bytes = 2 * edge.head_dim * scalar_bytes(edge.type);
  std::vector<std::int64_t> expected(kNumCudaCounters, 0);
  std::int64_t tokens_read = 0;
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    const int length = edge.lengths[static_cast<std::size_t>(i)];
    const bool whole = planned_whole(edge, length, budget);
    bool raised = false;
    ref::budget_pages(budget, length, edge.format.page_tokens, &raised);
    expected[kRaised] += raised && length > 0;
    expected[kBytesDense] += length * edge.num_kv_heads * token_bytes;
    if (!whole) expected[kRecordsRead] += length / kBlockTokens * edge.num_kv_heads;
    if (length > 0 && length % kBlockTokens == 0) expected[kBuilt] += edge.num_kv_heads;
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      const auto chosen = step.selected(i, h);
      expected[kPagesRead] += static_cast<std::int64_t>(chosen.size());
      for (bool token : ref::token_mask(chosen, edge.format.page_tokens, length)) {
        tokens_read += token;
      }
    }
  }
  expected[kBytesRead] = tokens_read * token_bytes +
                         expected[kRecordsRead] * ref::record_bytes(edge.format, edge.head_dim);
  std::vector<std::int64_t> actual = step.counters();
  for (std::size_t c = 0; c < actual.size(); ++c) actual[c] -= before[c];
  for (Counter c : {kRecordsRead, kPagesRead, kBytesRead, kBytesDense, kInvalid, kRaised, kBuilt}) {
    EXPECT_EQ(actual[c], expected[c]) << "counter " << c;
  }
  EXPECT_GE(actual[kUnused], 0);
  EXPECT_LE(actual[kUnused], expected[kBytesDense]);
}

void check_step(const EdgeCase& edge, const std::vector<Budget>& budgets) {
  PagedFixture fixture(edge);
  DeviceStep step(fixture);
  step.summarise_all();
  for (const Budget& budget : budgets) {
    SCOPED_TRACE(::testing::Message() << "budget " << budget.value);
    const auto before = step.counters();
    step.run(budget);
    step.fetch();
    for (int i = 0; i < fixture.num_seqs(); ++i) {
      const int length = edge.lengths[static_cast<std::size_t>(i)];
      for (int h = 0; h < edge.num_kv_heads; ++h) {
        SCOPED_TRACE(::testing::Message() << "sequence " << i << ", KV head " << h);
        const std::vector<std::int32_t> chosen = step.selected(i, h);
        check_set(fixture, i, h, budget, chosen);
        const auto mask = ref::token_mask(chosen, edge.format.page_tokens, length);
        for (int g = 0; g < edge.group_size; ++g) {
          check_output(fixture, step, i, h * edge.group_size + g, mask);
        }
        if (::testing::Test::HasFailure()) return;
      }
    }
    check_counters(fixture, step, budget, before);
    if (::testing::Test::HasFailure()) return;
  }
}

class DecodeCuda : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(DecodeCuda, Step_MatchesReferences) {
  check_step(GetParam(),
             {Budget::tokens(1), Budget::tokens(128), Budget::fraction(0.4), Budget::all()});
}

TEST_P(DecodeCuda, Records_OfTheStepEqualTheCpus) {
  const EdgeCase& edge = GetParam();
  if (edge.top_of_big_pool) GTEST_SKIP() << "the pool is compared in summary_cuda_test";
  PagedFixture fixture(edge);
  DeviceStep step(fixture);
  const std::vector<std::uint8_t> flags(edge.lengths.size(), kRowIsRebuilt);
  const DeviceArray<std::uint8_t> device_flags(flags.data(),
                                               static_cast<std::int64_t>(flags.size()));
  step.run(Budget::tokens(128), 0, device_flags.get());
  summarise_on_host(fixture);
  const std::vector<std::uint8_t> actual = step.record_pool();
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(int{actual[i]}, int{fixture.records().data[i]}) << "byte " << i << " of the pool";
  }
}

TEST_P(DecodeCuda, Rows_AreReadWholeOnRequest) {
  const EdgeCase& edge = GetParam();
  PagedFixture fixture(edge);
  DeviceStep step(fixture);
  step.summarise_all();
  const std::vector<std::uint8_t> flags(edge.lengths.size(), kRowIsExact);
  const DeviceArray<std::uint8_t> exact(flags.data(), static_cast<std::int64_t>(flags.size()));
  const auto all_whole = [&](const char* why) {
    step.fetch();
    for (int i = 0; i < fixture.num_seqs(); ++i) {
      for (int h = 0; h < edge.num_kv_heads; ++h) {
        EXPECT_EQ(static_cast<std::int64_t>(step.selected(i, h).size()),
                  num_pages(edge.lengths[static_cast<std::size_t>(i)], edge.format.page_tokens))
            << why << ", sequence " << i;
      }
    }
  };
  step.run(Budget::tokens(128), 0, exact.get());
  all_whole("flagged exact");
  step.run(Budget::tokens(128), 1 << 20);
  all_whole("below the crossover length");
  step.set_max_tiles(0);
  step.run(Budget::tokens(128));
  all_whole("no room for scores");
}

// A decode loop: one capture, then steps in which sequences grow by a token, tables and contents as
// they are in the cache.
TEST_P(DecodeCuda, CapturedOnce_ReplaysWithNewLengths) {
  const EdgeCase& edge = GetParam();
  if (edge.top_of_big_pool) GTEST_SKIP() << "copies of the pool take long";
  PagedFixture fixture(edge);
  DeviceStep step(fixture), fresh(fixture);
  step.summarise_all();
  fresh.summarise_all();
  const Budget budget = Budget::tokens(96);
  CapturedStep replay(step);
  const std::vector<std::int32_t> full(edge.lengths.begin(), edge.lengths.end());
  for (const int shorter : {33, 1, 0, 17}) {
    std::vector<std::int32_t> lengths = full;
    for (std::int32_t& length : lengths) length = std::max(length - shorter, 0);
    step.set_lengths(lengths);
    replay.run(budget);
    fresh.set_lengths(lengths);
    fresh.run(budget);
    fresh.fetch();
    ASSERT_TRUE(step.mask_bytes() == fresh.mask_bytes()) << shorter << " tokens shorter";
    ASSERT_TRUE(step.output_bytes() == fresh.output_bytes()) << shorter << " tokens shorter";
  }
}

// A step that writes its new tokens does what one does whose caches hold them: every byte. Where
// keys are NaN, outputs are NaN too and compare as bytes.
TEST_P(DecodeCuda, NewTokens_AreWrittenAndSeen) {
  const EdgeCase& edge = GetParam();
  if (edge.top_of_big_pool) GTEST_SKIP() << "copies of the pool take long";
  PagedFixture fixture(edge);
  const DeviceNewTokens tokens(fixture);
  for (const Budget& budget : {Budget::tokens(1), Budget::tokens(128), Budget::all()}) {
    DeviceStep expected(fixture), step(fixture);
    expected.summarise_all();
    step.set_added(tokens);
    step.summarise_all();  // of blocks that are poisoned where a token is to come
    expected.run(budget);
    step.run(budget);
    expected.fetch();
    step.fetch();
    ASSERT_TRUE(step.key_pool() == expected.key_pool());
    ASSERT_TRUE(step.value_pool() == expected.value_pool());
    ASSERT_TRUE(step.record_pool() == expected.record_pool());
    ASSERT_TRUE(step.mask_bytes() == expected.mask_bytes()) << "budget " << budget.value;
    ASSERT_TRUE(step.output_bytes() == expected.output_bytes()) << "budget " << budget.value;
    ASSERT_EQ(std::memcmp(step.lses().data(), expected.lses().data(), 4 * step.lses().size()), 0);
    ASSERT_EQ(step.counters()[kBuilt], expected.counters()[kBuilt]);
  }
}

INSTANTIATE_TEST_SUITE_P(Edge, DecodeCuda, ::testing::ValuesIn(gpu_edge_cases(edge_cases())),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

// A batch whose CTAs, few to a row, have more tiles of a scored row than warps that may attend
// while the keys are in place: with heads of 128 channels the step without the mask has more warps
// at it. Rows that the budget leaves whole, and padding.
EdgeCase busy_batch(const SummaryFormat& format, int head_dim, int group_size) {
  return {.name = format_name(format) + "_" + std::to_string(head_dim) + "_" +
                  std::to_string(group_size),
          .format = format,
          .lengths = {3000, 700, 0, 2049, 96, 1111, 33, 0, 0, 0},
          .head_dim = head_dim,
          .num_kv_heads = 4,
          .group_size = group_size,
          .type = ScalarType::kBFloat16};
}

// More (row, KV head) than a GPU has multiprocessors, so that each has one CTA. 0.4 of a long row
// are 600 pages, more than a CTA's list holds: attention walks over the keys, which no tile may lie
// upon, and does so again for the ninth head.
EdgeCase walked_batch() {
  EdgeCase edge = busy_batch(kFine, 128, 9);
  edge.name = "walk";
  edge.lengths.assign(40, 40);
  edge.lengths[0] = 6000;
  edge.lengths[20] = 5999;
  return edge;
}

std::vector<EdgeCase> cases_without_mask() {
  std::vector<EdgeCase> cases = gpu_edge_cases(edge_cases());
  std::erase_if(cases, [](const EdgeCase& edge) {
    return edge.top_of_big_pool || (edge.head_dim != 64 && edge.head_dim != 128) ||
           (edge.format != kFine && edge.format != kPaper);
  });
  cases.insert(cases.end(),
               {busy_batch(kFine, 64, 1), busy_batch(kFine, 128, 4), busy_batch(kFine, 128, 7),
                busy_batch(kPaper, 64, 7), busy_batch(kPaper, 128, 1), busy_batch(kPaper, 128, 4),
                walked_batch()});
  return cases;
}

class DecodeCudaWithoutMask : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(DecodeCudaWithoutMask, Step_IsNearTheOneWithIt) {
  check_without_mask(GetParam(), {Budget::tokens(128), Budget::fraction(0.4), Budget::all()});
}

INSTANTIATE_TEST_SUITE_P(Edge, DecodeCudaWithoutMask, ::testing::ValuesIn(cases_without_mask()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

// Masses that a step has dropped are written anew by the next: replays behind one another, at two
// sets of lengths in turn, give the bytes of a fresh step. A mass read after its drop, or not
// written again, would be poison or one of the other lengths.
TEST(DecodeCudaReplays, WithoutMask_AreTheSameFromRunToRun) {
  const EdgeCase edge = busy_batch(kFine, 128, 4);
  const Budget budget = Budget::fraction(0.4);
  PagedFixture fixture(edge);
  summarise_on_host(fixture);
  DeviceStep step(fixture), fresh(fixture), with(fixture);
  step.set_wants_mask(false);
  fresh.set_wants_mask(false);
  flood_l2();
  CapturedStep replay(step);
  for (const int shorter : {300, 0, 300, 0, 300, 0, 300, 0}) {
    std::vector<std::int32_t> lengths(edge.lengths.begin(), edge.lengths.end());
    for (std::int32_t& length : lengths) length = std::max(length - shorter, 0);
    fresh.set_lengths(lengths);
    fresh.poison_results();
    fresh.run(budget);
    fresh.fetch();
    step.set_lengths(lengths);
    step.poison_results();
    replay.run(budget, 5);
    ASSERT_TRUE(step.output_bytes() == fresh.output_bytes()) << shorter << " tokens shorter";
    ASSERT_EQ(std::memcmp(step.lses().data(), fresh.lses().data(), 4 * fresh.lses().size()), 0);
  }
  with.run(budget);
  with.fetch();
  EXPECT_FALSE(step.output_bytes() == with.output_bytes()) << "no more warps attend: see the batch";
}

// Few launches of few CTAs, for tools that slow a kernel down a thousand times: rows that are
// scored, complete a block, are read whole, and padding.
EdgeCase small_batch(int head_dim) {
  return {.name = "small",
          .format = kFine,
          .lengths = {613, 304, 40, 0},
          .head_dim = head_dim,
          .num_kv_heads = 1,
          .group_size = 2,
          .type = ScalarType::kBFloat16};
}

TEST(DecodeCudaSmall, Step_MatchesReferences) {
  check_step(small_batch(64), {Budget::tokens(128)});
}

TEST(DecodeCudaSmall, Step_WithoutMask) {
  check_without_mask(small_batch(128), {Budget::tokens(128)});
}

// The set of a sequence does not hang on what else is in the batch; nor does its output but for the
// order in which parts are merged.
TEST(DecodeCudaBatch, Selection_IsTheSameInAnyBatch) {
  EdgeCase edge{.name = "batch",
                .format = kFine,
                .lengths = {3000, 700, 0, 2049, 5000, 96, 1111, 4096, 33, 2500},
                .head_dim = 128,
                .num_kv_heads = 4,
                .group_size = 7,
                .type = ScalarType::kBFloat16};
  PagedFixture fixture(edge);
  DeviceStep step(fixture);
  step.summarise_all();
  step.run(Budget::tokens(512));
  step.fetch();
  for (int alone = 0; alone < fixture.num_seqs(); ++alone) {
    DeviceStep single(fixture);
    single.summarise_all();
    std::vector<std::int32_t> lengths(edge.lengths.size(), 0);
    lengths[static_cast<std::size_t>(alone)] = edge.lengths[static_cast<std::size_t>(alone)];
    single.set_lengths(lengths);
    single.run(Budget::tokens(512));
    single.fetch();
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      ASSERT_TRUE(single.selected(alone, h) == step.selected(alone, h)) << "sequence " << alone;
    }
    for (int head = 0; head < fixture.num_query_heads(); ++head) {
      ASSERT_TRUE(single.output_row(alone, head) == step.output_row(alone, head));
    }
  }
}

// Told before any launch: this one needs no device.
TEST(DecodeCudaArguments, NullCounters_AreRefused) {
  const PagedFixture fixture(
      {.name = "null_counters", .lengths = {100}, .type = ScalarType::kBFloat16});
  const DecodePlan plan = DecodePlan::create(fixture.attention(), fixture.summary()).value();
  const RowPlan rows[2] = {};
  std::vector<std::uint8_t> workspace(decode_workspace_bytes_cuda(plan, 1, 1));
  Output output(fixture);
  const Status status = decode_cuda(plan, fixture.query(), fixture.keys(), fixture.values(), {},
                                    fixture.records(), fixture.seqs(), rows, 1, output.view(), {},
                                    nullptr, workspace.data(), workspace.size(), nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "decode_cuda: counters is null");
}

TEST(DecodeCudaArguments, RowsAndTypes_AreRefusedBeforeAnyWork) {
  const PagedFixture fixture({.name = "rows", .lengths = {100}, .type = ScalarType::kBFloat16});
  const DecodePlan plan = DecodePlan::create(fixture.attention(), fixture.summary()).value();
  const RowPlan rows[2] = {};
  Output output(fixture);
  std::int64_t counters[kNumCudaCounters] = {};
  const auto message = [&](int num_seqs, ScalarType values_type) {
    SequenceBatch seqs = fixture.seqs();
    seqs.num_seqs = num_seqs;
    PagedTensor values = fixture.values();
    values.type = values_type;
    const Status status =
        decode_cuda(plan, fixture.query(), fixture.keys(), values, {}, fixture.records(), seqs,
                    rows, 1, output.view(), {}, counters, nullptr, 0, nullptr);
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  };
  for (const int num_seqs : {-1, 65536}) {
    EXPECT_EQ(message(num_seqs, ScalarType::kBFloat16),
              "decode_cuda: seqs.num_seqs = " + std::to_string(num_seqs) + ", expected 0 to 65535");
  }
  EXPECT_NE(message(65535, ScalarType::kBFloat16).find("workspace_bytes = 0"), std::string::npos);
  EXPECT_EQ(message(1, ScalarType::kFloat16),
            "decode_cuda: keys and values of different types, expected both bf16 or both fp16");
}

TEST(DecodeCudaArguments, NewTokens_AreRefusedInPartOrMisaligned) {
  const PagedFixture fixture(
      {.name = "new_tokens", .lengths = {100}, .type = ScalarType::kBFloat16});
  const DecodePlan plan = DecodePlan::create(fixture.attention(), fixture.summary()).value();
  const RowPlan rows[2] = {};
  Output output(fixture);
  std::int64_t counters[kNumCudaCounters] = {};
  alignas(16) static std::uint8_t memory[64];
  const std::int64_t slots[1] = {};
  const auto message = [&](const NewTokens& added) {
    const Status status = decode_cuda(plan, fixture.query(), fixture.keys(), fixture.values(),
                                      added, fixture.records(), fixture.seqs(), rows, 1,
                                      output.view(), {}, counters, memory, 0, nullptr);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const NewTokens all{memory, memory + 16, 64, 64, 64, 64, slots};
  EXPECT_NE(message(all).find("workspace_bytes = 0"), std::string::npos) << "taken";
  const std::string in_part =
      "decode_cuda: expected all of added.keys, added.values and added.slots, or none";
  NewTokens wrong = all;
  wrong.values = nullptr;
  EXPECT_EQ(message(wrong), in_part);
  wrong = all;
  wrong.slots = nullptr;
  EXPECT_EQ(message(wrong), in_part);
  wrong = all;
  wrong.values = memory + 8;
  EXPECT_NE(message(wrong).find("aligned to 16 bytes, got address"), std::string::npos);
  wrong = all;
  wrong.value_head_stride = 60;
  EXPECT_NE(message(wrong).find("aligned to 16 bytes, got a stride of 60 elements"),
            std::string::npos);
}

// plan_rows against the host's arithmetic, over budgets, limits and batch sizes.
TEST(PlanRowsCuda, Plans_EqualTheHosts) {
  for (const int num_rows : {1, 7, 300, 1025, 2500}) {
    for (const Budget& budget : {Budget::all(), Budget::tokens(2048), Budget::fraction(0.02),
                                 Budget::fraction(0.3333), Budget::tokens(1)}) {
      for (const std::int32_t max_tiles : {0, 50, 1000000}) {
        const ScoreLimits limits{1000, max_tiles};
        std::vector<std::int32_t> lengths;
        std::vector<std::uint8_t> flags;
        for (int i = 0; i < num_rows; ++i) {
          lengths.push_back(i % 5 == 3 ? 0 : (i * 7919) % 100003);
          flags.push_back(i % 11 == 4 ? kRowIsExact : i % 13 == 2 ? kRowIsRebuilt : 0);
        }
        const DeviceArray<std::int32_t> device_lengths(lengths.data(), num_rows);
        const DeviceArray<std::uint8_t> device_flags(flags.data(), num_rows);
        const DeviceArray<RowPlan> plan(num_rows + 1, kPoison);
        ASSERT_TRUE(plan_rows_cuda(device_lengths.get(), device_flags.get(), num_rows, budget, 8,
                                   limits, plan.get(), nullptr)
                        .ok());
        const std::vector<RowPlan> rows = plan.download();
        std::int64_t asked = 0, taken = 0;
        for (int i = 0; i < num_rows; ++i) {
          const auto at = static_cast<std::size_t>(i);
          bool raised = false;
          const std::int64_t pages = budget_pages(budget, lengths[at], 8, &raised);
          const bool sparse =
              flags[at] != kRowIsExact && lengths[at] > 1000 && pages < num_pages(lengths[at], 8);
          const std::int32_t blocks = sparse ? lengths[at] / 16 : 0;
          asked += (blocks + 15) / 16;
          const bool fits = asked <= max_tiles;
          ASSERT_EQ(rows[at].length, lengths[at]);
          ASSERT_EQ(rows[at].scored_blocks, fits ? blocks : 0) << "row " << i;
          ASSERT_EQ(rows[at].budget_pages, pages);
          ASSERT_EQ(rows[at].first_tile, taken) << "row " << i;
          ASSERT_EQ(rows[at].raised, raised && lengths[at] > 0 ? 1 : 0);
          ASSERT_EQ(rows[at].first_new_block,
                    flags[at] == kRowIsRebuilt ? 0 : std::max(lengths[at] - 1, 0) / 16);
          if (fits) taken += (blocks + 15) / 16;
        }
        ASSERT_EQ(rows.back().first_tile, taken);
      }
    }
  }
}

}  // namespace
}  // namespace locks::testing
