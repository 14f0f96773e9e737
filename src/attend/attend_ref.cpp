#include "attend/attend_ref.h"

#include <algorithm>
#include <cmath>

namespace locks::ref {

Attention attend(const Vector& query, const double* keys, const double* values,
                 const std::vector<bool>& mask) {
  const std::size_t d = query.size();
  Vector logits;
  std::vector<std::size_t> tokens;
  for (std::size_t i = 0; i < mask.size(); ++i) {
    if (!mask[i]) continue;
    tokens.push_back(i);
    logits.push_back(dot(query, keys + i * d));
  }
  Attention result{Vector(d, 0.0), log_sum_exp(logits)};
  for (std::size_t n = 0; n < tokens.size(); ++n) {
    const double weight = std::exp(logits[n] - result.lse);
    for (std::size_t c = 0; c < d; ++c) result.output[c] += weight * values[tokens[n] * d + c];
  }
  return result;
}

std::vector<bool> token_mask(const std::vector<std::int32_t>& pages, int page_tokens,
                             std::int64_t length) {
  std::vector<bool> mask(static_cast<std::size_t>(length), false);
  for (std::int64_t page : pages) {
    const std::int64_t end = std::min((page + 1) * page_tokens, length);
    for (std::int64_t i = page * page_tokens; i < end; ++i)
      mask[static_cast<std::size_t>(i)] = true;
  }
  return mask;
}

double retained_mass(const Vector& query, const double* keys, const std::vector<bool>& mask) {
  Vector all, kept;
  for (std::size_t i = 0; i < mask.size(); ++i) {
    all.push_back(dot(query, keys + i * query.size()));
    if (mask[i]) kept.push_back(all.back());
  }
  return std::exp(log_sum_exp(kept) - log_sum_exp(all));
}

}  // namespace locks::ref
