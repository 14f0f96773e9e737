// What a trace must be for anything to be measured on it.
#include "locks/trace.h"

#include <cmath>

#include "core/message.h"
#include "locks/page.h"
#include "locks/score.h"

namespace locks {

using detail::join;

namespace {

Status check_shape(const AttentionTrace& trace) {
  const auto field = [](const char* name, auto value, const auto&... expected) {
    return invalid_argument(join("trace: ", name, " = ", value, ", expected ", expected...));
  };
  if (trace.queries == nullptr) return invalid_argument("trace: queries is null");
  if (trace.keys == nullptr) return invalid_argument("trace: keys is null");
  if (trace.values == nullptr) return invalid_argument("trace: values is null");
  if (trace.positions == nullptr) return invalid_argument("trace: positions is null");
  if (trace.group_size < 1 || trace.group_size > kMaxGroupSize) {
    return field("group_size", trace.group_size, "1 to ", kMaxGroupSize);
  }
  if (trace.num_steps < 1) return field("num_steps", trace.num_steps, ">= 1");
  if (trace.window < 0 || trace.window >= trace.num_steps) {
    return field("window", trace.window, "0 to ", trace.num_steps - 1,
                 ": what is left of num_steps = ", trace.num_steps, " is judged");
  }
  if (!std::isfinite(trace.scale) || trace.scale <= 0) {
    return field("scale", trace.scale, "a finite number above 0");
  }
  if (!is_supported_head_dim(trace.head_dim)) {
    return field("head_dim", trace.head_dim, "64, 80, 96, 128, 192 or 256");
  }
  return {};
}

Status check_chunks(const Reconstruction& pass, int num_tokens) {
  if (pass.num_chunks == 0) return {};
  if (pass.queries == nullptr || pass.keys == nullptr || pass.chunks == nullptr) {
    return invalid_argument("trace: reconstruction is null, expected queries, keys and chunks");
  }
  std::int32_t token = pass.chunks[0];
  std::int32_t row = 0;
  for (int c = 0; c < pass.num_chunks; ++c) {
    const std::int32_t* chunk = pass.chunks + static_cast<std::ptrdiff_t>(c) * 4;
    if (chunk[0] != token || chunk[0] < 0 || chunk[1] <= chunk[0] || chunk[1] > num_tokens ||
        chunk[2] != row || chunk[3] <= chunk[2] || chunk[3] > pass.num_rows) {
      return invalid_argument(join(
          "trace: reconstruction chunk ", c, " has tokens ", chunk[0], " to ", chunk[1],
          " and rows ", chunk[2], " to ", chunk[3], ", expected tokens from ", token,
          " and rows from ", row, ", within ", num_tokens, " tokens and ", pass.num_rows, " rows"));
    }
    token = chunk[1];
    row = chunk[3];
  }
  return {};
}

}  // namespace

Status validate(const AttentionTrace& trace, int page_tokens) {
  LOCKS_RETURN_IF_ERROR(check_shape(trace));
  const int num_tokens = trace.num_tokens / page_tokens * page_tokens;
  for (int t = 0; t < trace.num_steps; ++t) {
    if (trace.positions[t] < 0 || trace.positions[t] >= num_tokens) {
      return invalid_argument(join("trace: positions[", t, "] = ", trace.positions[t],
                                   ", expected 0 to ", num_tokens - 1, " (num_tokens cut to whole ",
                                   "pages of ", page_tokens, ")"));
    }
  }
  return check_chunks(trace.reconstruction, num_tokens);
}

}  // namespace locks
