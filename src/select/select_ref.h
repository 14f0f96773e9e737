// The select stage as a full sort: the oracle of the kernels. Tests only.
#pragma once

#include <cstdint>
#include <vector>

#include "locks/select.h"
#include "score/score_ref.h"

namespace locks::ref {

struct Selection {
  std::vector<std::int32_t> pages;  // ascending
  Vector shares;             // [pages], the mean of shares or the largest score; 0 where not finite
  std::vector<bool> forced;  // always read, or a score that is not finite
  std::int64_t nonfinite_pages = 0;
};

std::int64_t budget_pages(const Budget& budget, std::int64_t length, int page_tokens, bool* raised);
bool always_read(std::int64_t page, std::int64_t length, int page_tokens);

// The pages of one KV head: scores [group_size, pages] of the heads of its group. Sorted by
// (forced, share descending, page ascending); taken are as many as the budget and the forced pages
// ask for.
Selection select_pages(const std::vector<float>& scores, int group_size, std::int64_t length,
                       int page_tokens, const Budget& budget, GroupRule rule);

}  // namespace locks::ref
