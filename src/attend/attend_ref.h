// Attention by brute force in double precision: the oracle of the kernels. Tests only.
#pragma once

#include <cstdint>
#include <vector>

#include "score/score_ref.h"

namespace locks::ref {

struct Attention {
  Vector output;
  double lse = 0;
};

// o = sum_i softmax(q . k_i) v_i over the tokens i with mask[i], q scaled; keys and values
// [mask.size(), query.size()]. Nothing masked in: zeros and lse = -inf.
Attention attend(const Vector& query, const double* keys, const double* values,
                 const std::vector<bool>& mask);

// The tokens of `pages` in a sequence of `length` tokens.
std::vector<bool> token_mask(const std::vector<std::int32_t>& pages, int page_tokens,
                             std::int64_t length);

// The share of all attention mass that the masked-in tokens hold.
double retained_mass(const Vector& query, const double* keys, const std::vector<bool>& mask);

}  // namespace locks::ref
