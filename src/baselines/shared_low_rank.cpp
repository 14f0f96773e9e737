#include "baselines/shared_low_rank.h"

#include <cstddef>
#include <numeric>

namespace locks::detail {

namespace {

constexpr std::int64_t kScaleBytes = 2;

std::int64_t centroid_bytes(const SummaryFormat& format, int head_dim) {
  return head_dim * format.centroid_bits / 8 + kScaleBytes;
}

std::int64_t component_bytes(const SummaryFormat& format) {
  return format.page_tokens * format.coefficient_bits / 8 + kScaleBytes;
}

// Two rows at right angles, to double's rounding of a sum of 256 products and a margin.
constexpr double kOrthogonal = 1e-13;
// Eigenvalues below this share of their sum are rounding noise of the scatter matrix.
constexpr double kNoiseEnergy = 1e-13;
// Quadratic convergence ends this after 6 to 10 sweeps.
constexpr int kMaxSweeps = 30;

// Turns the two rows in their plane until they are orthogonal; `squares` follows their squared
// lengths. False if they were.
bool orthogonalise(double* a, double* b, double (&squares)[2], int n) {
  const double product = dot(a, b, n);
  if (std::abs(product) <= kOrthogonal * std::sqrt(squares[0] * squares[1])) return false;
  const double ratio = (squares[1] - squares[0]) / (2 * product);
  const double tangent = std::copysign(1 / (std::abs(ratio) + std::hypot(1.0, ratio)), ratio);
  const double cosine = 1 / std::sqrt(1 + tangent * tangent);
  const double sine = cosine * tangent;
  for (int c = 0; c < n; ++c) {
    const double old = a[c];
    a[c] = cosine * old - sine * b[c];
    b[c] = sine * old + cosine * b[c];
  }
  squares[0] = dot(a, a, n);
  squares[1] = dot(b, b, n);
  return true;
}

// Hestenes' one-sided Jacobi method: once the rows of a symmetric, positive semidefinite matrix of
// trace 1 have been turned until all are orthogonal, row i is eigenvector i times its eigenvalue.
// Returns the eigenvalues.
std::vector<double> diagonalise(std::vector<double>& matrix, int n) {
  const auto row = [&](int i) { return matrix.data() + static_cast<std::ptrdiff_t>(i) * n; };
  const auto size = static_cast<std::size_t>(n);
  std::vector<double> squares(size);
  for (int i = 0; i < n; ++i) squares[static_cast<std::size_t>(i)] = dot(row(i), row(i), n);
  bool turned = true;
  for (int sweep = 0; sweep < kMaxSweeps && turned; ++sweep) {
    turned = false;
    for (int i = 0; i < n; ++i) {
      for (int j = i + 1; j < n; ++j) {
        double& first = squares[static_cast<std::size_t>(i)];
        double& second = squares[static_cast<std::size_t>(j)];
        if (std::min(first, second) < kNoiseEnergy * kNoiseEnergy) continue;
        double pair[2] = {first, second};
        if (!orthogonalise(row(i), row(j), pair, n)) continue;
        first = pair[0];
        second = pair[1];
        turned = true;
      }
    }
  }
  for (double& square : squares) square = std::sqrt(square);
  return squares;
}

}  // namespace

int shared_rank(const SummaryFormat& format, int head_dim) {
  const std::int64_t page_bytes =
      record_layout(format, head_dim).record_bytes / format.pages_per_block();
  const std::int64_t rest = page_bytes - centroid_bytes(format, head_dim);
  return static_cast<int>(std::min<std::int64_t>(rest / component_bytes(format), head_dim));
}

std::int64_t shared_page_bytes(const SummaryFormat& format, int head_dim) {
  return centroid_bytes(format, head_dim) + shared_rank(format, head_dim) * component_bytes(format);
}

SharedBasisFit::SharedBasisFit(const SummaryFormat& format, int head_dim)
    : format_(format),
      head_dim_(head_dim),
      sum_(static_cast<std::size_t>(head_dim)),
      scatter_(static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(head_dim)) {}

void SharedBasisFit::add(const PageKeys& keys) {
  if (!is_finite(poison(keys))) return;
  double mean[kMaxHeadDim];
  double centred[kBlockTokens][kMaxHeadDim];
  find_mean(keys, mean);
  for (int c = 0; c < head_dim_; ++c)
    sum_[static_cast<std::size_t>(c)] += mean[c] * keys.num_tokens;
  num_tokens_ += keys.num_tokens;
  for (int t = 0; t < keys.num_tokens; ++t) {
    for (int c = 0; c < head_dim_; ++c) {
      centred[t][c] = static_cast<double>(keys.rows[t][c]) - mean[c];
    }
  }
  double* row = scatter_.data();
  for (int i = 0; i < head_dim_; ++i, row += head_dim_) {
    for (int t = 0; t < keys.num_tokens; ++t) {
      const double factor = centred[t][i];
      for (int j = i; j < head_dim_; ++j) row[j] += factor * centred[t][j];
    }
  }
}

SharedBasis SharedBasisFit::finish() {
  const auto d = static_cast<std::size_t>(head_dim_);
  const int rank = shared_rank(format_, head_dim_);
  SharedBasis basis{format_, rank, std::vector<float>(d),
                    std::vector<float>(static_cast<std::size_t>(rank) * d)};
  if (format_.improved && num_tokens_ > 0) {
    std::transform(sum_.begin(), sum_.end(), basis.reference.begin(), [&](double sum) {
      return static_cast<float>(sum / static_cast<double>(num_tokens_));
    });
  }
  double trace = 0;
  for (std::size_t i = 0; i < d; ++i) trace += scatter_[i * d + i];
  if (trace == 0) return basis;
  for (std::size_t i = 0; i < d; ++i) {
    for (std::size_t j = i; j < d; ++j) {
      scatter_[i * d + j] /= trace;
      scatter_[j * d + i] = scatter_[i * d + j];
    }
  }
  const std::vector<double> values = diagonalise(scatter_, head_dim_);
  std::vector<std::size_t> order(d);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return values[a] > values[b]; });
  for (std::size_t k = 0; k < static_cast<std::size_t>(rank); ++k) {
    const double value = values[order[k]];
    if (value < kNoiseEnergy) break;
    for (std::size_t c = 0; c < d; ++c) {
      basis.rows[k * d + c] = static_cast<float>(scatter_[order[k] * d + c] / value);
    }
  }
  return basis;
}

SharedLowRankPage::SharedLowRankPage(const PageKeys& keys, const SharedBasis& basis) {
  const int d = keys.head_dim;
  restored.num_tokens = keys.num_tokens;
  restored.head_dim = d;
  double mean[kMaxHeadDim];
  double centroid[kMaxHeadDim];
  find_mean(keys, mean);
  const float* reference = basis.reference.data();
  for (int c = 0; c < d; ++c) centroid[c] = mean[c] - static_cast<double>(reference[c]);
  quantise_row(centroid, d, basis.format.centroid_bits);
  double centred[kBlockTokens][kMaxHeadDim];
  for (int t = 0; t < keys.num_tokens; ++t) {
    for (int c = 0; c < d; ++c) {
      centred[t][c] = static_cast<double>(keys.rows[t][c]) - mean[c];
      restored.rows[t][c] = static_cast<float>(centroid[c]) + reference[c];
    }
  }
  for (int k = 0; k < basis.rank; ++k) {
    const float* row = basis.rows.data() + static_cast<std::ptrdiff_t>(k) * d;
    double coefficients[kBlockTokens];
    for (int t = 0; t < keys.num_tokens; ++t) {
      coefficients[t] =
          sum_channels(d, [&](int c) { return centred[t][c] * static_cast<double>(row[c]); });
    }
    quantise_row(coefficients, keys.num_tokens, basis.format.coefficient_bits);
    for (int t = 0; t < keys.num_tokens; ++t) {
      const auto coefficient = static_cast<float>(coefficients[t]);
      for (int c = 0; c < d; ++c) restored.rows[t][c] += coefficient * row[c];
    }
  }
}

}  // namespace locks::detail
