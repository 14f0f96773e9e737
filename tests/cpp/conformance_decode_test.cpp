// The whole decode step: records by the library, then its own selection and output against the
// references, and the counters against what was read.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "decode/decode_ref.h"
#include "support/attention_check.h"
#include "support/head_input.h"
#include "support/selection_check.h"
#include "support/stage_calls.h"

namespace locks::testing {
namespace {

void summarise_all(const PagedFixture& fixture) {
  const std::vector<std::int32_t> begin(static_cast<std::size_t>(fixture.num_seqs()), 0);
  const Status status =
      summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(), begin.data(),
                       fixture.records(), nullptr, serial_executor());
  ASSERT_TRUE(status.ok()) << status.message();
}

struct Step {
  Output output;
  Sets sets;
  DecodeCounters counters;
};

Step call_decode(PagedFixture& fixture, const Budget& budget, const Executor& executor) {
  Step step{Output(fixture), poisoned_sets(fixture), {}};
  const auto plan = DecodePlan::create(fixture.attention(), fixture.summary());
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  const std::size_t bytes = plan.value().workspace_bytes(fixture.seqs(), executor.num_workers);
  const Workspace workspace(bytes);
  const PageSets selected = step.sets.view();
  const Status status = decode(plan.value(), fixture.query(), fixture.keys(), fixture.values(),
                               fixture.records(), fixture.seqs(), budget, step.output.view(),
                               &selected, &step.counters, workspace.data(), bytes, executor);
  EXPECT_TRUE(status.ok()) << status.message();
  return step;
}

bool is_dense(const EdgeCase& edge, int length, const Budget& budget) {
  return ref::budget_pages(budget, length, edge.format.page_tokens, nullptr) ==
         num_pages(length, edge.format.page_tokens);
}

// The sets follow from the step's own scores; a row that is read densely has all of its pages.
void check_sets(PagedFixture& fixture, const Budget& budget, const Step& step) {
  const EdgeCase& edge = fixture.edge();
  const PageIndex pages = fixture.pages();
  const Scores scores = call_score(fixture, true, serial_executor());
  std::int64_t nonfinite_pages = 0;
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    const int length = edge.lengths[static_cast<std::size_t>(i)];
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      SCOPED_TRACE(::testing::Message() << "sequence " << i << ", KV head " << h);
      const auto chosen = step.sets.of(pages, edge.num_kv_heads, i, h);
      if (is_dense(edge, length, budget)) {
        ASSERT_EQ(static_cast<std::int64_t>(chosen.size()), pages.pages(i));
        continue;
      }
      const auto begin = scores.values.begin() +
                         static_cast<std::ptrdiff_t>(pages.begin[i] * fixture.num_query_heads() +
                                                     h * edge.group_size * pages.pages(i));
      const std::vector<float> rows(
          begin, begin + static_cast<std::ptrdiff_t>(edge.group_size * pages.pages(i)));
      check_head_selection(chosen, rows, edge.group_size, length, edge.format.page_tokens, budget,
                           GroupRule::kMeanOfShares);
      nonfinite_pages += ref::select_pages(rows, edge.group_size, length, edge.format.page_tokens,
                                           budget, GroupRule::kMeanOfShares)
                             .nonfinite_pages;
    }
  }
  EXPECT_EQ(step.counters.nonfinite_pages, nonfinite_pages);
}

void check_outputs(PagedFixture& fixture, const Step& step) {
  const EdgeCase& edge = fixture.edge();
  const PageIndex pages = fixture.pages();
  EXPECT_TRUE(step.output.padding_is_untouched());
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    for (int head = 0; head < fixture.num_query_heads(); ++head) {
      SCOPED_TRACE(::testing::Message() << "sequence " << i << ", query head " << head);
      const auto chosen = step.sets.of(pages, edge.num_kv_heads, i, head / edge.group_size);
      check_attention(step.output, i, head, fixture,
                      ref::token_mask(chosen, edge.format.page_tokens,
                                      edge.lengths[static_cast<std::size_t>(i)]));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

void check_counters(PagedFixture& fixture, const Budget& budget, const Step& step) {
  const EdgeCase& edge = fixture.edge();
  const PageIndex pages = fixture.pages();
  DecodeCounters expected;
  const std::int64_t token_bytes = 2 * edge.head_dim * scalar_bytes(edge.type);
  std::int64_t tokens_read = 0;
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    const int length = edge.lengths[static_cast<std::size_t>(i)];
    const bool dense = is_dense(edge, length, budget);
    bool raised = false;
    ref::budget_pages(budget, length, edge.format.page_tokens, &raised);
    expected.raised_budgets += raised;
    expected.bytes_dense += length * edge.num_kv_heads * token_bytes;
    if (!dense) expected.records_read += length / kBlockTokens * edge.num_kv_heads;
    bool all_heads_whole = true;
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      const auto chosen = step.sets.of(pages, edge.num_kv_heads, i, h);
      expected.pages_read += static_cast<std::int64_t>(chosen.size());
      all_heads_whole =
          all_heads_whole && static_cast<std::int64_t>(chosen.size()) == pages.pages(i);
      for (bool token : ref::token_mask(chosen, edge.format.page_tokens, length)) {
        tokens_read += token;
      }
    }
    if (length > 0) ++(all_heads_whole ? expected.dense_rows : expected.sparse_rows);
  }
  expected.bytes_read = tokens_read * token_bytes +
                        expected.records_read * ref::record_bytes(edge.format, edge.head_dim);
  const DecodeCounters& actual = step.counters;
  EXPECT_EQ(actual.sparse_rows, expected.sparse_rows);
  EXPECT_EQ(actual.dense_rows, expected.dense_rows);
  EXPECT_EQ(actual.records_read, expected.records_read);
  EXPECT_EQ(actual.pages_read, expected.pages_read);
  EXPECT_EQ(actual.bytes_read, expected.bytes_read);
  EXPECT_EQ(actual.bytes_dense, expected.bytes_dense);
  EXPECT_EQ(actual.raised_budgets, expected.raised_budgets);
  EXPECT_EQ(actual.invalid_records, 0);
}

class DecodeConformance : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(DecodeConformance, Step_MatchesReferences) {
  PagedFixture fixture(GetParam());
  summarise_all(fixture);
  for (const Budget& budget :
       {Budget::tokens(1), Budget::tokens(128), Budget::fraction(0.4), Budget::all()}) {
    SCOPED_TRACE(::testing::Message() << "budget " << budget.value);
    for_each_setting([&](const Executor& executor) {
      const Step step = call_decode(fixture, budget, executor);
      const Step serial = call_decode(fixture, budget, serial_executor());
      EXPECT_TRUE(step.output.same_bytes(serial.output)) << "the number of workers changed a bit";
      EXPECT_TRUE(step.sets.counts == serial.sets.counts);
      if (executor.num_workers > 1) return;  // equal to what was checked with one worker
      check_sets(fixture, budget, step);
      check_outputs(fixture, step);
      check_counters(fixture, budget, step);
    });
    if (HasFailure()) return;
  }
}

// Against the chain of references from keys to output, nothing of the library between: sets may
// differ where codes rounded the other way, so it is the retained mass that has to agree.
class DecodeChain : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(DecodeChain, RetainedMass_EqualsThatOfTheReferences) {
  const EdgeCase& edge = GetParam();
  PagedFixture fixture(edge);
  summarise_all(fixture);
  const Budget budget = Budget::tokens(112);
  const PageIndex pages = fixture.pages();
  const Step step = call_decode(fixture, budget, serial_executor());
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      const ref::HeadInput input = head_input(fixture, i, h);
      const ref::HeadOutput expected = ref::decode_head(input, budget);
      const auto chosen = step.sets.of(pages, edge.num_kv_heads, i, h);
      ASSERT_EQ(chosen.size(), expected.selection.pages.size());
      if (input.length == 0) continue;
      const double actual_mass = kept_mass(input, chosen);
      const double expected_mass = kept_mass(input, expected.selection.pages);
      // A few near-ties may swap, worth about one page of the smallest share each. One 4-bit code
      // is worth more where logits are in the hundreds and a single page can hold most of the mass.
      EXPECT_NEAR(actual_mass, expected_mass, edge.keys == KeyPattern::kHuge ? 0.1 : 0.01)
          << "sequence " << i << ", KV head " << h;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Edge, DecodeConformance, ::testing::ValuesIn(edge_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);
INSTANTIATE_TEST_SUITE_P(Edge, DecodeChain, ::testing::ValuesIn(finite_edge_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

}  // namespace
}  // namespace locks::testing
