// The operators of `locks quality`. Shapes and meanings are in python/locks/ops.py.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "checks.h"
#include "executor.h"
#include "locks/locks.h"

namespace locks::binding {

namespace {

// Of a row of `rows` and `steps`, as locks.ops tells them.
constexpr int kRowValues = 3;
constexpr int kStepValues = 4;
constexpr int kChainPageValues = 6;
constexpr int kChainStepValues = 7;

AttentionTrace trace_of(const Checks& checks, const Tensor& queries, const Tensor& keys,
                        const Tensor& values, const Tensor& positions, double scale,
                        std::int64_t window) {
  checks.tensor("keys", keys, {"num_tokens", "head_dim"}, kFloat32, Strides::kContiguous);
  checks.tensor("values", values, {keys.size(0), keys.size(1)}, kFloat32, Strides::kContiguous);
  checks.tensor("queries", queries, {"group", "steps", keys.size(1)}, kFloat32,
                Strides::kContiguous);
  checks.tensor("positions", positions, {queries.size(1)}, kInt32, Strides::kContiguous);
  AttentionTrace trace;
  trace.queries = const_data<float>(queries);
  trace.keys = const_data<float>(keys);
  trace.values = const_data<float>(values);
  trace.positions = const_data<std::int32_t>(positions);
  trace.group_size = checks.to_int("queries", queries.size(0));
  trace.num_steps = checks.to_int("queries", queries.size(1));
  trace.num_tokens = checks.to_int("keys", keys.size(0));
  trace.head_dim = checks.to_int("keys", keys.size(1));
  trace.scale = static_cast<float>(scale);
  trace.window = checks.to_int("window", window);
  return trace;
}

// The pass that repeats the context, if the trace has one.
Reconstruction reconstruction_of(const Checks& checks, const AttentionTrace& trace,
                                 const std::optional<Tensor>& queries,
                                 const std::optional<Tensor>& keys,
                                 const std::optional<Tensor>& chunks) {
  if (!queries.has_value() || !keys.has_value() || !chunks.has_value()) {
    if (queries.has_value() || keys.has_value() || chunks.has_value()) {
      checks.fail("repeat_queries, repeat_keys and repeat_chunks: expected all of them, or none");
    }
    return {};
  }
  checks.tensor("repeat_keys", *keys, {"rows", trace.head_dim}, kFloat32, Strides::kContiguous);
  checks.tensor("repeat_queries", *queries, {trace.group_size, keys->size(0), trace.head_dim},
                kFloat32, Strides::kContiguous);
  checks.tensor("repeat_chunks", *chunks, {"chunks", 4}, kInt32, Strides::kContiguous);
  return {const_data<float>(*queries), const_data<float>(*keys), const_data<std::int32_t>(*chunks),
          checks.to_int("repeat_keys", keys->size(0)),
          checks.to_int("repeat_chunks", chunks->size(0))};
}

void write_rows(const StepQuality& quality, double* rows) {
  for (std::size_t i = 0; i < quality.retained.size(); ++i) {
    *rows++ = quality.retained_oracle[i];
    *rows++ = quality.retained[i];
    *rows++ = quality.output_error[i];
  }
}

void write_steps(const StepQuality& quality, double* steps) {
  const std::size_t num_spans = quality.carriers_read.size() / quality.recall.size();
  const std::uint8_t* read = quality.carriers_read.data();
  const std::uint8_t* wanted = quality.carriers_wanted.data();
  for (std::size_t i = 0; i < quality.recall.size(); ++i) {
    *steps++ = quality.recall[i];
    *steps++ = quality.tokens_read[i];
    *steps++ = quality.bytes_read[i];
    *steps++ = quality.resident_bytes[i];
    for (std::size_t span = 0; span < num_spans; ++span) *steps++ = *read++;
    for (std::size_t span = 0; span < num_spans; ++span) *steps++ = *wanted++;
  }
}

void measure_quality_op(const Tensor& queries, const Tensor& keys, const Tensor& values,
                        const Tensor& positions, double scale, std::int64_t window,
                        const std::string& selector, std::int64_t format, const Tensor& budgets,
                        const Tensor& spans, const Tensor& rows, const Tensor& steps,
                        const std::optional<Tensor>& repeat_queries,
                        const std::optional<Tensor>& repeat_keys,
                        const std::optional<Tensor>& repeat_chunks) {
  const Checks checks("measure_quality");
  AttentionTrace trace = trace_of(checks, queries, keys, values, positions, scale, window);
  trace.reconstruction =
      reconstruction_of(checks, trace, repeat_queries, repeat_keys, repeat_chunks);
  const SummaryFormat summary_format = format_of(checks, format);
  checks.ok(validate(trace, summary_format.page_tokens));
  const std::int64_t judged = trace.judged_steps();
  checks.tensor("budgets", budgets, {"budgets"}, kFloat64, Strides::kContiguous);
  checks.tensor("spans", spans, {"spans", 2}, kInt32, Strides::kContiguous);
  checks.tensor("rows", rows, {budgets.size(0), judged, queries.size(0), kRowValues}, kFloat64,
                Strides::kContiguous);
  checks.tensor("steps", steps, {budgets.size(0), judged, kStepValues + 2 * spans.size(0)},
                kFloat64, Strides::kContiguous);
  std::vector<Budget> allowed;
  for (std::int64_t i = 0; i < budgets.size(0); ++i) {
    allowed.push_back(budget_of(checks, const_data<double>(budgets)[i]));
  }
  std::vector<TokenSpan> token_spans;
  for (std::int64_t i = 0; i < spans.size(0); ++i) {
    const std::int32_t* span = const_data<std::int32_t>(spans) + 2 * i;
    token_spans.push_back({span[0], span[1]});
  }
  const auto results =
      checks.value(measure_steps(trace, checks.value(parse_selector(selector)), summary_format,
                                 allowed, token_spans, torch_executor()));
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto budget = static_cast<std::int64_t>(i);
    write_rows(results[i],
               mutable_data<double>(rows) + budget * judged * queries.size(0) * kRowValues);
    write_steps(results[i],
                mutable_data<double>(steps) + budget * judged * (kStepValues + 2 * spans.size(0)));
  }
}

void select_tokens_op(const Tensor& queries, const Tensor& keys, const Tensor& values,
                      const Tensor& positions, double scale, std::int64_t window,
                      const std::string& selector, std::int64_t page_tokens, double budget,
                      const Tensor& read, const std::optional<Tensor>& repeat_queries,
                      const std::optional<Tensor>& repeat_keys,
                      const std::optional<Tensor>& repeat_chunks) {
  const Checks checks("select_tokens");
  AttentionTrace trace = trace_of(checks, queries, keys, values, positions, scale, window);
  trace.reconstruction =
      reconstruction_of(checks, trace, repeat_queries, repeat_keys, repeat_chunks);
  const Budget allowed = budget_of(checks, budget);
  const auto result =
      select_tokens(checks.value(parse_selector(selector)), trace,
                    checks.to_int("page_tokens", page_tokens), {&allowed, 1}, torch_executor());
  const TokenSets& sets = checks.value(result).front();
  const std::int64_t judged = trace.judged_steps();
  checks.tensor("read", read, {judged, keys.size(0)}, kUInt8, Strides::kContiguous);
  auto* flags = mutable_data<std::uint8_t>(read);
  std::fill_n(flags, judged * keys.size(0), std::uint8_t{0});
  for (std::int64_t step = 0; step < judged; ++step) {
    const auto place = static_cast<std::size_t>(step);
    for (std::int64_t i = sets.begin[place]; i < sets.begin[place + 1]; ++i) {
      flags[step * keys.size(0) + sets.ids[static_cast<std::size_t>(i)]] = 1;
    }
  }
}

double* write_error(const ChainError& error, double* out) {
  *out++ = error.residual;
  *out++ = error.score_error;
  *out++ = error.score_bound;
  return out;
}

void measure_chain_op(const Tensor& queries, const Tensor& keys, const Tensor& values,
                      const Tensor& positions, double scale, std::int64_t window,
                      std::int64_t format, double budget, const Tensor& ideal_keys,
                      const Tensor& pages, const Tensor& steps) {
  const Checks checks("measure_chain");
  const AttentionTrace trace = trace_of(checks, queries, keys, values, positions, scale, window);
  const SummaryFormat summary_format = format_of(checks, format);
  checks.ok(validate(trace, summary_format.page_tokens));
  const std::int64_t num_pages = trace.num_tokens / kBlockTokens * summary_format.pages_per_block();
  checks.tensor("ideal_keys", ideal_keys, {keys.size(0), keys.size(1)}, kFloat32,
                Strides::kContiguous);
  checks.tensor("pages", pages, {num_pages, kChainPageValues}, kFloat64, Strides::kContiguous);
  checks.tensor("steps", steps, {trace.judged_steps(), kChainStepValues}, kFloat64,
                Strides::kContiguous);
  const Result<Chain> result = measure_chain(trace, summary_format, budget_of(checks, budget),
                                             const_data<float>(ideal_keys), torch_executor());
  const Chain& chain = checks.value(result);
  auto* page_out = mutable_data<double>(pages);
  for (const ChainPage& page : chain.pages) {
    page_out = write_error(page.stored, write_error(page.ideal, page_out));
  }
  auto* step_out = mutable_data<double>(steps);
  for (const ChainStep& step : chain.steps) {
    for (const double number :
         {step.oracle.retained, step.ideal.delta, step.ideal.retained, step.stored.delta,
          step.stored.retained, step.output_error, step.output_bound}) {
      *step_out++ = number;
    }
  }
}

std::int64_t selector_bytes_op(const std::string& selector, std::int64_t format,
                               std::int64_t head_dim) {
  const Checks checks("selector_bytes");
  const SummaryFormat summary_format = format_of(checks, format);
  const AttentionParams attention{1, 1, checks.to_int("head_dim", head_dim), 1.0f};
  checks.ok(validate(attention));
  return selector_bytes_per_block(checks.value(parse_selector(selector)), summary_format,
                                  attention.head_dim);
}

bool needs_window_op(const std::string& selector) {
  return needs_window(Checks("needs_window").value(parse_selector(selector)));
}

}  // namespace

}  // namespace locks::binding

STABLE_TORCH_LIBRARY_FRAGMENT(locks, library) {
  library.def("selector_bytes(str selector, int format, int head_dim) -> int");
  library.def("needs_window(str selector) -> bool");
  library.def(
      "measure_quality(Tensor queries, Tensor keys, Tensor values, Tensor positions, "
      "float scale, int window, str selector, int format, Tensor budgets, Tensor spans, "
      "Tensor(a!) rows, Tensor(b!) steps, Tensor? repeat_queries=None, Tensor? repeat_keys=None, "
      "Tensor? repeat_chunks=None) -> ()");
  library.def(
      "select_tokens(Tensor queries, Tensor keys, Tensor values, Tensor positions, float scale, "
      "int window, str selector, int page_tokens, float budget, Tensor(a!) read, "
      "Tensor? repeat_queries=None, Tensor? repeat_keys=None, Tensor? repeat_chunks=None) -> ()");
  library.def(
      "measure_chain(Tensor queries, Tensor keys, Tensor values, Tensor positions, float scale, "
      "int window, int format, float budget, Tensor ideal_keys, Tensor(a!) pages, "
      "Tensor(b!) steps) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(locks, CompositeExplicitAutograd, library) {
  library.impl("selector_bytes", TORCH_BOX(&locks::binding::selector_bytes_op));
  library.impl("needs_window", TORCH_BOX(&locks::binding::needs_window_op));
}

STABLE_TORCH_LIBRARY_IMPL(locks, CPU, library) {
  library.impl("measure_quality", TORCH_BOX(&locks::binding::measure_quality_op));
  library.impl("select_tokens", TORCH_BOX(&locks::binding::select_tokens_op));
  library.impl("measure_chain", TORCH_BOX(&locks::binding::measure_chain_op));
}

// A CUDA tensor comes here, and is named by the checks.
STABLE_TORCH_LIBRARY_IMPL(locks, CUDA, library) {
  library.impl("measure_quality", TORCH_BOX(&locks::binding::measure_quality_op));
  library.impl("select_tokens", TORCH_BOX(&locks::binding::select_tokens_op));
  library.impl("measure_chain", TORCH_BOX(&locks::binding::measure_chain_op));
}
