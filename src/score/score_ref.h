// The score stage in plain double precision: the oracle of the kernels. Tests only.
#pragma once

#include "summary/summary_ref.h"

namespace locks::ref {

double dot(const Vector& a, const double* b);
Vector scaled(const Vector& x, double scale);
// log sum exp(x_i); -inf for an empty sum, NaN if any x_i is NaN.
double log_sum_exp(const Vector& x);

// s = q.ref + q.mu + log sum_i exp(sum_m (V_m . q) c_mi), q rotated like the summary and scaled.
double score_page(const PageSummary& page, const Vector& query, const Vector& reference);

// The exact log mass log sum_i exp(q . k_i) of keys [tokens, query.size()], q scaled.
double log_mass(const double* keys, int tokens, const Vector& query);

// The record's pages as the library's unpack_record gives them.
std::vector<PageSummary> unpack_pages(const RecordLayout& layout, const std::uint8_t* record);

}  // namespace locks::ref
