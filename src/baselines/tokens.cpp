// Runs the selectors of tokens: checks, one selector a trace, steps dealt out to the workers.
#include "locks/tokens.h"

#include <algorithm>
#include <memory>

#include "baselines/kv_zip.h"
#include "baselines/rocket_kv.h"
#include "baselines/shadow_kv.h"
#include "baselines/snap_kv.h"
#include "baselines/step_tokens.h"
#include "core/message.h"
#include "core/scalar.h"
#include "core/work_queue.h"

namespace locks {

using detail::join;
using detail::StepTokens;
using detail::TokenSelector;

namespace {

Status check_finite(const AttentionTrace& trace) {
  const auto spoiled = [&](const float* numbers, std::int64_t rows) {
    return !std::all_of(numbers, numbers + rows * trace.head_dim, detail::is_finite);
  };
  const Reconstruction& pass = trace.reconstruction;
  const std::int64_t heads = trace.group_size;
  const char* name = spoiled(trace.keys, trace.num_tokens)             ? "keys"
                     : spoiled(trace.queries, heads * trace.num_steps) ? "queries"
                     : pass.num_chunks > 0 && (spoiled(pass.keys, pass.num_rows) ||
                                               spoiled(pass.queries, heads * pass.num_rows))
                         ? "reconstruction"
                         : nullptr;
  if (name == nullptr) return {};
  return invalid_argument(join("trace: ", name, " holds NaN or infinity, expected finite numbers"));
}

Status check(Selector selector, const AttentionTrace& trace, int page_tokens) {
  const auto refused = [&](const auto&... reason) {
    return invalid_argument(join("selector = ", selector_name(selector), ": ", reason...));
  };
  if (!selects_tokens(selector)) return refused("it ranks pages, expected a selector of tokens");
  if (page_tokens != 4 && page_tokens != 8 && page_tokens != 16) {
    return refused("page_tokens = ", page_tokens, ", expected 4, 8 or 16");
  }
  LOCKS_RETURN_IF_ERROR(validate(trace, page_tokens));
  const std::int32_t* judged = trace.positions + trace.window;
  const std::int32_t first = *std::min_element(judged, trace.positions + trace.num_steps);
  if (needs_window(selector)) {
    if (trace.window == 0) {
      return refused(
          "it evicts by what a window of queries attends to, and window = 0, expected "
          "1 to ",
          trace.num_steps - 1, ", such as half of the steps");
    }
    const std::int32_t last = detail::prompt_end(trace) - 1;
    if (last >= first) {
      return refused("the window reaches position ", last, ", expected judged steps behind it, ",
                     "and the first is at ", first);
    }
  }
  if (needs_reconstruction(selector)) {
    const Reconstruction& pass = trace.reconstruction;
    if (pass.num_chunks == 0) {
      return refused(
          "the trace holds no pass in which the model repeats its context, expected one "
          "captured with `locks capture --repeat-context`");
    }
    const std::int32_t end = pass.chunks[static_cast<std::ptrdiff_t>(pass.num_chunks) * 4 - 3];
    if (end > first) {
      return refused("the context ends at token ", end, ", expected judged steps behind it, and ",
                     "the first is at ", first);
    }
  }
  return check_finite(trace);
}

std::unique_ptr<TokenSelector> make(Selector selector, const AttentionTrace& trace, int page_tokens,
                                    const Executor& executor) {
  switch (selector) {
    case Selector::kShadowKv:
      return std::make_unique<detail::ShadowKv>(trace, executor);
    case Selector::kRocketKv:
      return std::make_unique<detail::RocketKv>(trace, page_tokens, executor);
    case Selector::kSnapKv:
      return std::make_unique<detail::SnapKv>(trace, executor);
    default:
      return std::make_unique<detail::KvZip>(trace, executor);
  }
}

// The choices of all judged steps at the budget that the selector is set to.
std::vector<StepTokens> choose(const TokenSelector& selector, const AttentionTrace& trace,
                               int page_tokens, const Budget& budget, const Executor& executor) {
  std::vector<StepTokens> chosen;
  for (int step = trace.window; step < trace.num_steps; ++step) {
    chosen.emplace_back(trace.positions[step] + 1, page_tokens, budget);
  }
  detail::for_each_item(executor, trace.judged_steps(), [&](std::int64_t step, int) {
    selector.choose(trace.window + static_cast<int>(step), chosen[static_cast<std::size_t>(step)]);
  });
  return chosen;
}

TokenSets gather(const TokenSelector& selector, const std::vector<StepTokens>& chosen,
                 int head_dim) {
  TokenSets sets;
  sets.begin.push_back(0);
  for (const StepTokens& tokens : chosen) {
    tokens.append_to(sets.ids);
    const auto end = static_cast<std::int64_t>(sets.ids.size());
    const std::int64_t kept = selector.kept_tokens(tokens.length(), end - sets.begin.back());
    sets.begin.push_back(end);
    sets.resident_bytes.push_back(detail::cache_bytes(kept, head_dim) +
                                  selector.statistics_bytes(tokens.length()));
    sets.read_bytes.push_back(selector.read_bytes(tokens.length()));
  }
  return sets;
}

}  // namespace

Result<std::vector<TokenSets>> select_tokens(Selector selector, const AttentionTrace& trace,
                                             int page_tokens, std::span<const Budget> budgets,
                                             const Executor& executor) {
  for (const Budget& budget : budgets) LOCKS_RETURN_IF_ERROR(validate(budget));
  LOCKS_RETURN_IF_ERROR(check(selector, trace, page_tokens));
  const std::unique_ptr<TokenSelector> chooser = make(selector, trace, page_tokens, executor);
  std::vector<TokenSets> all;
  for (const Budget& budget : budgets) {
    chooser->set_budget(budget);
    const auto chosen = choose(*chooser, trace, page_tokens, budget, executor);
    for (const StepTokens& tokens : chosen) {
      if (tokens.room() >= 0) continue;
      return invalid_argument(
          join("selector = ", selector_name(selector), ": at position ", tokens.length() - 1,
               " the ", "tokens that are never evicted exceed the budget by ", -tokens.room(),
               ", expected a larger one, or judged steps nearer to the prompt's end"));
    }
    all.push_back(gather(*chooser, chosen, trace.head_dim));
  }
  return all;
}

}  // namespace locks
