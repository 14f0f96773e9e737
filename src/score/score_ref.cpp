#include "score/score_ref.h"

#include <algorithm>
#include <cmath>

namespace locks::ref {

double dot(const Vector& a, const double* b) {
  double sum = 0;
  for (std::size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

Vector scaled(const Vector& x, double scale) {
  Vector result = x;
  for (double& value : result) value *= scale;
  return result;
}

double log_sum_exp(const Vector& x) {
  double largest = -INFINITY;
  for (double value : x) {
    if (std::isnan(value)) return value;
    largest = std::max(largest, value);
  }
  if (std::isinf(largest)) return largest;
  double sum = 0;
  for (double value : x) sum += std::exp(value - largest);
  return largest + std::log(sum);
}

double score_page(const PageSummary& page, const Vector& query, const Vector& reference) {
  Vector logits(static_cast<std::size_t>(page.page_tokens), 0.0);
  for (int m = 0; m < page.rank; ++m) {
    const double z = dot(query, page.basis.data() + m * page.head_dim);
    for (int i = 0; i < page.page_tokens; ++i) {
      logits[static_cast<std::size_t>(i)] +=
          z * page.coefficients[static_cast<std::size_t>(m * page.page_tokens + i)];
    }
  }
  const double constant = reference.empty() ? 0.0 : dot(query, reference.data());
  return constant + dot(query, page.centroid.data()) + log_sum_exp(logits);
}

double log_mass(const double* keys, int tokens, const Vector& query) {
  Vector logits;
  for (int i = 0; i < tokens; ++i) {
    logits.push_back(dot(query, keys + static_cast<std::size_t>(i) * query.size()));
  }
  return log_sum_exp(logits);
}

std::vector<PageSummary> unpack_pages(const RecordLayout& layout, const std::uint8_t* record) {
  const SummaryFormat& f = layout.format;
  const auto pages = static_cast<std::size_t>(f.pages_per_block());
  const auto d = static_cast<std::size_t>(layout.head_dim);
  const auto r = static_cast<std::size_t>(f.rank), b = static_cast<std::size_t>(f.page_tokens);
  std::vector<float> centroid(pages * d), basis(pages * r * d), coefficients(pages * r * b);
  if (!unpack_record(layout, record, centroid.data(), basis.data(), coefficients.data()).ok()) {
    return {};
  }
  auto slice = [](const std::vector<float>& all, std::size_t page, std::size_t size) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(page * size);
    return Vector(begin, begin + static_cast<std::ptrdiff_t>(size));
  };
  std::vector<PageSummary> result;
  for (std::size_t p = 0; p < pages; ++p) {
    result.push_back({f.page_tokens, f.rank, layout.head_dim, slice(centroid, p, d),
                      slice(basis, p, r * d), slice(coefficients, p, r * b)});
  }
  return result;
}

}  // namespace locks::ref
