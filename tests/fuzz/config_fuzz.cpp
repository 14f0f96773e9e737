// What a user or an integrator configures: names, one-byte codes, and the numbers of every struct
// that is checked. Each is taken or refused with a message, and what is taken survives the round
// trip and adds up.
#include <string>

#include "input.h"
#include "locks/locks.h"

namespace locks::fuzz {

namespace {

void check(const Status& status) { FUZZ_CHECK(status.ok() == status.message().empty()); }

void check_format(const SummaryFormat& format, int head_dim) {
  const Status status = validate(format);
  check(status);
  const RecordLayout layout = record_layout(format, head_dim);
  if (!status.ok() || !is_supported_head_dim(head_dim)) {
    FUZZ_CHECK(layout.record_bytes == 0);
    return;
  }
  const Result<SummaryFormat> decoded = decode_format(encode_format(format));
  FUZZ_CHECK(decoded.ok() && decoded.value() == format);
  const Result<SummaryFormat> parsed = parse_format(format_name(format));
  FUZZ_CHECK(parsed.ok() && parsed.value() == format);
  const int coefficients_end =
      layout.coefficients_offset + format.pages_per_block() * layout.page_coefficient_bytes;
  FUZZ_CHECK(layout.record_bytes % 32 == 0 && layout.record_bytes <= 4096);
  FUZZ_CHECK(layout.scales_offset == format.pages_per_block() * layout.page_rows_bytes);
  FUZZ_CHECK(layout.coefficients_offset % 8 == 0 &&
             layout.coefficients_offset > layout.scales_offset);
  FUZZ_CHECK(coefficients_end <= layout.header_offset &&
             layout.header_offset + 8 == layout.record_bytes);
}

void check_names(FuzzedDataProvider& input) {
  const std::string name = input.ConsumeRandomLengthString(40);
  const Result<SummaryFormat> format = parse_format(name);
  check(format.status());
  if (format.ok()) check_format(format.value(), input.PickValueInArray(kHeadDims));
  const Result<Selector> selector = parse_selector(name);
  check(selector.status());
  if (selector.ok()) FUZZ_CHECK(selector_name(selector.value()) == name);
  const Result<SummaryFormat> decoded = decode_format(input.ConsumeIntegral<int>());
  check(decoded.status());
  if (decoded.ok()) check_format(decoded.value(), any_int(input, 0, 300));
}

void check_plan(FuzzedDataProvider& input) {
  const AttentionParams attention{any_int(input, 0, 80), any_int(input, 0, 8),
                                  any_int(input, 60, 260), input.ConsumeFloatingPoint<float>()};
  const SummaryFormat format{any_int(input, 3, 17), any_int(input, 0, 9), any_int(input, 3, 9),
                             any_int(input, 3, 9),  any_int(input, 3, 9), input.ConsumeBool()};
  check_format(format, attention.head_dim);
  const Result<DecodePlan> plan = DecodePlan::create(attention, {format, nullptr});
  check(plan.status());
  FUZZ_CHECK(plan.ok() == (validate(format).ok() && validate(attention).ok()));
  if (!plan.ok()) return;
  FUZZ_CHECK(attention.group_size() >= 1 && attention.group_size() <= kMaxGroupSize);
  FUZZ_CHECK(plan.value().layout().record_bytes ==
             record_layout(format, attention.head_dim).record_bytes);
}

void check_budget(FuzzedDataProvider& input) {
  const Budget budget{
      static_cast<Budget::Kind>(input.ConsumeIntegralInRange(0, 2)),
      input.ConsumeBool() ? any_int(input, 0, 4096) : input.ConsumeFloatingPoint<double>()};
  const Status status = validate(budget);
  check(status);
  if (!status.ok()) return;
  const auto length = static_cast<std::int64_t>(input.ConsumeIntegralInRange(0, 1 << 30));
  const int page_tokens = 4 << input.ConsumeIntegralInRange(0, 2);
  bool raised = false;
  const std::int64_t pages = budget_pages(budget, length, page_tokens, &raised);
  const std::int64_t all = num_pages(length, page_tokens);
  FUZZ_CHECK(pages >= 0 && pages <= all);
  FUZZ_CHECK(budget.kind != Budget::Kind::kAll || pages == all);
  std::int64_t always = 0;
  for (std::int64_t page = 0; length <= 4096 && page < all; ++page) {
    always += always_read(page, length, page_tokens) ? 1 : 0;
  }
  // The pages without a record come on top of what a budget is raised to.
  FUZZ_CHECK(always <= kAlwaysReadFirstTokens / page_tokens + kAlwaysReadLastTokens / page_tokens +
                           kBlockTokens / page_tokens);
}

void check_caches(FuzzedDataProvider& input) {
  alignas(16) static std::uint8_t memory[64];
  void* data = input.ConsumeBool() ? memory : nullptr;
  const auto stride = [&] {
    return input.ConsumeBool() ? std::int64_t{any_int(input, 0, 4096)}
                               : input.ConsumeIntegral<std::int64_t>();
  };
  const PagedTensor tensor{data,
                           ScalarType::kBFloat16,
                           stride(),
                           any_int(input, 0, 64),
                           any_int(input, 0, 8),
                           any_int(input, 60, 260),
                           stride(),
                           stride(),
                           stride()};
  check(validate(tensor, "keys"));
  const RecordCache records{static_cast<std::uint8_t*>(data),
                            stride(),
                            any_int(input, 0, 64),
                            any_int(input, 0, 8),
                            stride(),
                            stride(),
                            stride()};
  check(validate(records, "records"));
  check(validate(records, record_layout(kFine, tensor.head_dim), tensor.num_kv_heads, "records"));
}

}  // namespace

}  // namespace locks::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider input(data, size);
  locks::fuzz::check_names(input);
  locks::fuzz::check_plan(input);
  locks::fuzz::check_budget(input);
  locks::fuzz::check_caches(input);
  return 0;
}
