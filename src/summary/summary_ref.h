// The summary stage in double precision, from the formulas: the oracle of the kernels. Tests only.
#pragma once

#include <cstdint>
#include <vector>

#include "locks/summary.h"

namespace locks::ref {

using Vector = std::vector<double>;  // matrices are row-major

// Eigenpairs of the symmetric matrix a [n, n] by cyclic Jacobi rotations, largest eigenvalue first.
// Row m of `vectors` is the unit eigenvector of values[m].
struct Eigenpairs {
  Vector values;
  Vector vectors;
};
Eigenpairs symmetric_eigenpairs(Vector a, int n);

// The randomised Hadamard transform of improved formats.
Vector rotate(Vector x);

// The fp16 nearest to x (ties to even), infinity past the largest.
double round_to_fp16(double x);

// One page: k_i is near reference + centroid + sum_m coefficients[m, i] basis[m].
struct PageSummary {
  int page_tokens = 0;
  int rank = 0;
  int head_dim = 0;
  Vector centroid;      // [d]
  Vector basis;         // [rank, d]
  Vector coefficients;  // [rank, page_tokens]
};

// Token i's key as the summary has it, without the reference key.
Vector reconstruct_key(const PageSummary& page, int token);

// Unquantised: the mean of keys [page_tokens, head_dim], its top `rank` principal directions
// (orthonormal; a direction without energy is zero) and the coefficients of each token. `spectrum`
// (if not null): all eigenvalues of the centred Gram matrix.
PageSummary summarise_exact(const double* keys, int page_tokens, int head_dim, int rank,
                            Vector* spectrum = nullptr);

// Codes and the fp16 scales that a record stores.
struct QuantisedPage {
  std::vector<int> centroid;      // [d]
  std::vector<int> basis;         // [rank, d]
  std::vector<int> coefficients;  // [rank, page_tokens]
  double centroid_scale = 0;
  Vector component_scales;  // [rank]
};

// From stored keys [page_tokens, head_dim]; `reference` [head_dim] is rotated, empty for zero.
QuantisedPage summarise_page(const SummaryFormat& format, const double* keys, int head_dim,
                             const Vector& reference);
// Codes times scales; the basis keeps its codes, the component scale goes to the coefficients.
PageSummary dequantise(const SummaryFormat& format, int head_dim, const QuantisedPage& codes);

// The bytes of a record, from the description in locks/summary.h alone.
struct Record {
  std::vector<QuantisedPage> pages;
  RecordHeader header;
};
int record_bytes(const SummaryFormat& format, int head_dim);
Record parse_record(const SummaryFormat& format, int head_dim, const std::uint8_t* bytes);
std::vector<std::uint8_t> pack_record(const SummaryFormat& format, int head_dim,
                                      const Record& record);

}  // namespace locks::ref
