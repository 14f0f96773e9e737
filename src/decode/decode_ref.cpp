#include "decode/decode_ref.h"

#include <algorithm>

namespace locks::ref {

std::vector<float> exact_scores(const HeadInput& input) {
  const int page_tokens = input.format.page_tokens;
  std::vector<float> scores;
  for (const Vector& query : input.queries) {
    const Vector q = scaled(query, input.scale);
    for (int begin = 0; begin < input.length; begin += page_tokens) {
      const int tokens = std::min(page_tokens, input.length - begin);
      const double* keys = input.keys.data() + static_cast<std::ptrdiff_t>(begin) * input.head_dim;
      scores.push_back(static_cast<float>(log_mass(keys, tokens, q)));
    }
  }
  return scores;
}

std::vector<float> page_scores(const HeadInput& input) {
  const SummaryFormat& f = input.format;
  std::vector<float> scores = exact_scores(input);
  const auto pages = scores.size() / input.queries.size();
  const auto recorded =
      static_cast<std::size_t>(input.length / kBlockTokens * kBlockTokens / f.page_tokens);
  for (std::size_t p = 0; p < recorded; ++p) {
    const double* keys = input.keys.data() + p * static_cast<std::size_t>(f.page_tokens) *
                                                 static_cast<std::size_t>(input.head_dim);
    const PageSummary page =
        dequantise(f, input.head_dim, summarise_page(f, keys, input.head_dim, input.reference));
    for (std::size_t h = 0; h < input.queries.size(); ++h) {
      const Vector q = scaled(input.queries[h], input.scale);
      scores[h * pages + p] = static_cast<float>(
          f.improved ? score_page(page, rotate(q), input.reference) : score_page(page, q, {}));
    }
  }
  return scores;
}

HeadOutput decode_head(const HeadInput& input, const Budget& budget) {
  HeadOutput output;
  const int page_tokens = input.format.page_tokens;
  output.selection = select_pages(page_scores(input), static_cast<int>(input.queries.size()),
                                  input.length, page_tokens, budget, GroupRule::kMeanOfShares);
  const std::vector<bool> mask = token_mask(output.selection.pages, page_tokens, input.length);
  for (const Vector& query : input.queries) {
    output.heads.push_back(
        attend(scaled(query, input.scale), input.keys.data(), input.values.data(), mask));
  }
  return output;
}

std::vector<Attention> dense_attention(const HeadInput& input) {
  const std::vector<bool> mask(static_cast<std::size_t>(input.length), true);
  std::vector<Attention> heads;
  for (const Vector& query : input.queries) {
    heads.push_back(
        attend(scaled(query, input.scale), input.keys.data(), input.values.data(), mask));
  }
  return heads;
}

}  // namespace locks::ref
