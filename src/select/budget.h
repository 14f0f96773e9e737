// The budget of one sequence in pages, on the host and on the device.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/cpu_namespace.h"
#include "locks/select.h"

namespace locks::detail {

struct BudgetedPages {
  std::int64_t pages = 0;
  bool raised = false;  // the always-read set lifted it
};

LOCKS_HD inline BudgetedPages pages_within(const Budget& budget, std::int64_t length,
                                           int page_tokens) {
  const auto pages = static_cast<double>(num_pages(length, page_tokens));
  double asked = pages;
  if (budget.kind == Budget::Kind::kTokens) {
    asked = ::floor(budget.value / page_tokens);
  } else if (budget.kind == Budget::Kind::kFraction) {
    asked = ::nearbyint(budget.value * static_cast<double>(length) / page_tokens);
  }
  constexpr int kAlwaysReadTokens = kAlwaysReadFirstTokens + kAlwaysReadLastTokens;
  const int most_always_read = kAlwaysReadTokens / page_tokens + 1;
  const double least = most_always_read < pages ? most_always_read : pages;
  const bool enough = asked >= least;  // false for NaN, which validate refuses
  const double allowed = !enough ? least : asked < pages ? asked : pages;
  return {static_cast<std::int64_t>(allowed), !enough};
}

}  // namespace locks::detail
