#include "select/select_ref.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace locks::ref {

std::int64_t budget_pages(const Budget& budget, std::int64_t length, int page_tokens,
                          bool* raised) {
  const std::int64_t pages = (length + page_tokens - 1) / page_tokens;
  const std::int64_t least = (16 + 64) / page_tokens + 1;
  std::int64_t asked = pages;
  if (budget.kind == Budget::Kind::kTokens) {
    asked = static_cast<std::int64_t>(std::floor(budget.value / page_tokens));
  } else if (budget.kind == Budget::Kind::kFraction) {
    asked = static_cast<std::int64_t>(
        std::nearbyint(budget.value * static_cast<double>(length) / page_tokens));
  }
  if (raised != nullptr) *raised = asked < std::min(least, pages);
  return std::min(std::max(asked, least), pages);
}

bool always_read(std::int64_t page, std::int64_t length, int page_tokens) {
  const std::int64_t complete_pages = length / page_tokens;
  const std::int64_t recorded_tokens = length / kBlockTokens * kBlockTokens;
  return page * page_tokens < 16 || page >= complete_pages - 64 / page_tokens ||
         (page + 1) * page_tokens > recorded_tokens;
}

Selection select_pages(const std::vector<float>& scores, int group_size, std::int64_t length,
                       int page_tokens, const Budget& budget, GroupRule rule) {
  const auto pages = static_cast<std::size_t>((length + page_tokens - 1) / page_tokens);
  Selection result{{}, Vector(pages, 0.0), std::vector<bool>(pages), 0};
  std::vector<bool> finite(pages, true);
  for (std::size_t p = 0; p < pages; ++p) {
    for (std::size_t h = 0; h < static_cast<std::size_t>(group_size); ++h) {
      if (!std::isfinite(scores[h * pages + p])) finite[p] = false;
    }
    result.nonfinite_pages += !finite[p];
    result.forced[p] =
        !finite[p] || ref::always_read(static_cast<std::int64_t>(p), length, page_tokens);
  }
  for (std::size_t h = 0; h < static_cast<std::size_t>(group_size); ++h) {
    Vector row;
    for (std::size_t p = 0; p < pages; ++p) {
      if (finite[p]) row.push_back(scores[h * pages + p]);
    }
    const double total = log_sum_exp(row);
    for (std::size_t p = 0; p < pages; ++p) {
      if (!finite[p]) continue;
      const double score = scores[h * pages + p];
      if (rule == GroupRule::kMeanOfShares) {
        result.shares[p] += std::exp(score - total) / group_size;
      } else {
        result.shares[p] = h == 0 ? score : std::max(result.shares[p], score);
      }
    }
  }
  std::vector<std::int32_t> order(pages);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    const auto i = static_cast<std::size_t>(a), j = static_cast<std::size_t>(b);
    if (result.forced[i] != result.forced[j]) return static_cast<bool>(result.forced[i]);
    if (result.forced[i]) return false;
    return result.shares[i] > result.shares[j];
  });
  const auto forced = std::count(result.forced.begin(), result.forced.end(), true);
  const std::int64_t taken =
      std::max<std::int64_t>(forced, ref::budget_pages(budget, length, page_tokens, nullptr));
  order.resize(static_cast<std::size_t>(taken));
  std::sort(order.begin(), order.end());
  result.pages = order;
  return result;
}

}  // namespace locks::ref
