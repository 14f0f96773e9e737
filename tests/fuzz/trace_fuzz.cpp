// A trace of any shape, positions, spans and reconstruction, and any selector on it: it is refused
// with a message, or measured within the range of what was asked for. Its arrays are exactly as
// large as its shape says.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "input.h"
#include "locks/locks.h"
#include "locks/quality.h"
#include "locks/trace.h"

namespace locks::fuzz {

namespace {

constexpr Selector kSelectors[] = {
    Selector::kLocks,    Selector::kOracle, Selector::kQuest,         Selector::kMeanStd,
    Selector::kCentroid, Selector::kInt3,   Selector::kSharedLowRank, Selector::kShadowKv,
    Selector::kRocketKv, Selector::kSnapKv, Selector::kKvZip};

struct Traced {
  AttentionTrace trace;
  std::vector<float> queries, keys, values, repeat_queries, repeat_keys;
  std::vector<std::int32_t> positions, chunks;
};

std::size_t size(int one, int two = 1, int three = 1) {
  return static_cast<std::size_t>(one) * static_cast<std::size_t>(two) *
         static_cast<std::size_t>(three);
}

// Chunks that follow each other, but for the numbers that the input changes.
void read_chunks(FuzzedDataProvider& input, Traced& traced) {
  Reconstruction& pass = traced.trace.reconstruction;
  pass.num_chunks = input.ConsumeIntegralInRange(0, 3);
  std::int32_t token = input.ConsumeIntegralInRange(0, 8), row = 0;
  for (int c = 0; c < pass.num_chunks; ++c) {
    const std::int32_t chunk[] = {token, any_int(input, token + 1, token + 60), row,
                                  any_int(input, row + 1, row + 20)};
    traced.chunks.insert(traced.chunks.end(), chunk, chunk + 4);
    token = std::clamp(chunk[1], 0, 1000);
    row = std::clamp(chunk[3], 0, 1000);
  }
  pass.num_rows = input.ConsumeIntegralInRange(0, 64);
}

Traced read_trace(FuzzedDataProvider& input) {
  Traced traced;
  AttentionTrace& trace = traced.trace;
  trace.group_size = input.ConsumeIntegralInRange(1, 3);
  trace.num_steps = input.ConsumeIntegralInRange(1, 4);
  trace.num_tokens = input.ConsumeIntegralInRange(0, 200);
  trace.head_dim = input.ConsumeBool() ? 64 : input.ConsumeIntegralInRange(1, 80);
  trace.scale = input.ConsumeBool() ? 0.125F : input.ConsumeFloatingPoint<float>();
  trace.window = any_int(input, 0, 3);
  for (int t = 0; t < trace.num_steps; ++t) traced.positions.push_back(any_int(input, 0, 199));
  read_chunks(input, traced);
  const std::uint32_t planted =
      input.ConsumeIntegral<std::uint32_t>();  // any float, NaN and infinity among them
  const std::vector<std::uint8_t> payload = input.ConsumeRemainingBytes<std::uint8_t>();
  traced.queries = numbers(payload, size(trace.group_size, trace.num_steps, trace.head_dim), 0);
  traced.keys = numbers(payload, size(trace.num_tokens, trace.head_dim), 1);
  traced.values = numbers(payload, size(trace.num_tokens, trace.head_dim), 2);
  traced.repeat_queries =
      numbers(payload, size(trace.group_size, trace.reconstruction.num_rows, trace.head_dim), 3);
  traced.repeat_keys = numbers(payload, size(trace.reconstruction.num_rows, trace.head_dim), 4);
  for (std::vector<float>* array : {&traced.queries, &traced.keys, &traced.values}) {
    if (!array->empty() && planted % 3 == 0)
      std::memcpy(&(*array)[planted % array->size()], &planted, sizeof planted);
  }
  return traced;
}

void point(Traced& traced) {
  traced.trace.queries = traced.queries.data();
  traced.trace.keys = traced.keys.data();
  traced.trace.values = traced.values.data();
  traced.trace.positions = traced.positions.data();
  traced.trace.reconstruction.queries = traced.repeat_queries.data();
  traced.trace.reconstruction.keys = traced.repeat_keys.data();
  traced.trace.reconstruction.chunks = traced.chunks.data();
}

bool is_share(double value) { return value >= 0 && value <= 1 + 1e-3; }  // sums of floats

void check_quality(const AttentionTrace& trace, const StepQuality& quality, std::size_t spans) {
  const auto steps = static_cast<std::size_t>(trace.judged_steps());
  FUZZ_CHECK(quality.recall.size() == steps && quality.carriers_read.size() == steps * spans);
  FUZZ_CHECK(quality.retained.size() == steps * static_cast<std::size_t>(trace.group_size));
  for (double value : quality.retained) FUZZ_CHECK(is_share(value));
  for (double value : quality.retained_oracle) FUZZ_CHECK(is_share(value));
  for (double value : quality.output_error) FUZZ_CHECK(value >= 0);
  for (std::size_t step = 0; step < steps; ++step) {
    const int length = trace.positions[trace.window + static_cast<int>(step)] + 1;
    FUZZ_CHECK(is_share(quality.recall[step]));
    FUZZ_CHECK(quality.tokens_read[step] >= 0 && quality.tokens_read[step] <= length);
    FUZZ_CHECK(quality.bytes_read[step] >= 0);
  }
}

}  // namespace

}  // namespace locks::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace locks;
  FuzzedDataProvider input(data, size);
  const Selector selector = input.PickValueInArray(fuzz::kSelectors);
  const Result<SummaryFormat> format = decode_format(input.ConsumeIntegralInRange(0, 143));
  const Budget budget{static_cast<Budget::Kind>(input.ConsumeIntegralInRange(0, 2)),
                      input.ConsumeBool() ? 0.5 : fuzz::any_int(input, 0, 200)};
  const TokenSpan span{fuzz::any_int(input, 0, 200), fuzz::any_int(input, 0, 200)};
  const std::size_t spans = input.ConsumeBool() ? 1 : 0;
  fuzz::Traced traced = fuzz::read_trace(input);
  fuzz::point(traced);
  const auto results = measure_steps(traced.trace, selector, format.value(), {&budget, 1},
                                     {&span, spans}, serial_executor());
  FUZZ_CHECK(results.ok() == results.status().message().empty());
  if (results.ok()) {
    FUZZ_CHECK(results.value().size() == 1);
    fuzz::check_quality(traced.trace, results.value().front(), spans);
  }
  return 0;
}
