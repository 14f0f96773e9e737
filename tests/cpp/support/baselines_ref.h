// Double-precision references of the selectors that keep codes: keys in, keys as they are read back
// out. Eigen finds the principal components.
#pragma once

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "locks/summary.h"
#include "support/paged_fixture.h"

namespace locks::testing {

using Keys = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;  // [token, d]
using RowVector = Eigen::RowVectorXd;

// `row` after rounding to 2^bits - 1 codes about zero with one fp16 scale.
inline RowVector rounded(const RowVector& row, int bits) {
  const double most = std::pow(2.0, bits - 1) - 1;
  double scale = round_to(ScalarType::kFloat16, row.cwiseAbs().maxCoeff() / most);
  if (scale == 0) scale = std::pow(2.0, -24);
  return row.unaryExpr([=](double x) {
    const double code = std::min(most, std::max(-most, std::rint(x / scale)));
    return code * scale;
  });
}

inline RowVector mean_of(const Keys& page) {
  RowVector sum = RowVector::Zero(page.cols());
  for (Eigen::Index t = 0; t < page.rows(); ++t) sum += page.row(t);
  return sum / static_cast<double>(page.rows());
}

inline Keys int3_restored(const Keys& page) {
  const RowVector mean = rounded(mean_of(page), 8);
  Keys restored(page.rows(), page.cols());
  for (Eigen::Index t = 0; t < page.rows(); ++t) {
    restored.row(t) = mean + rounded(page.row(t) - mean, 3);
  }
  return restored;
}

struct SharedReference {
  RowVector reference;
  Keys basis;  // [rank, d], the largest component first
};

// Of all keys of a sequence, centred page by page.
inline SharedReference shared_reference(const Keys& keys, int page_tokens, int rank,
                                        bool improved) {
  Keys centred = keys;
  for (Eigen::Index first = 0; first < keys.rows(); first += page_tokens) {
    const Eigen::Index count = std::min<Eigen::Index>(page_tokens, keys.rows() - first);
    centred.middleRows(first, count).rowwise() -= mean_of(keys.middleRows(first, count));
  }
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(centred.transpose() * centred);
  const RowVector mean = mean_of(keys);
  return {improved ? mean : RowVector(RowVector::Zero(keys.cols())),
          solver.eigenvectors().rightCols(rank).rowwise().reverse().transpose()};
}

inline Keys shared_restored(const Keys& page, const SharedReference& shared,
                            const SummaryFormat& format) {
  const RowVector mean = mean_of(page);
  Keys coefficients = shared.basis * (page.rowwise() - mean).transpose();  // [rank, token]
  for (Eigen::Index k = 0; k < coefficients.rows(); ++k) {
    coefficients.row(k) = rounded(coefficients.row(k), format.coefficient_bits);
  }
  Keys restored = coefficients.transpose() * shared.basis;
  restored.rowwise() += rounded(mean - shared.reference, format.centroid_bits) + shared.reference;
  return restored;
}

inline double log_mass_of(const Keys& page, const RowVector& query) {
  const Eigen::VectorXd logits = page * query.transpose();
  const double most = logits.maxCoeff();
  return most + std::log((logits.array() - most).exp().sum());
}

}  // namespace locks::testing
