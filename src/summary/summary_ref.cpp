#include "summary/summary_ref.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/scalar.h"

namespace locks::ref {

namespace {

std::size_t at(int row, int columns, int column) {
  return static_cast<std::size_t>(row) * static_cast<std::size_t>(columns) +
         static_cast<std::size_t>(column);
}

// Zeroes a[p, q] by the rotation of planes p and q; accumulates it in v.
void jacobi_rotation(Vector& a, Vector& v, int n, int p, int q) {
  const double apq = a[at(p, n, q)];
  if (apq == 0) return;
  const double theta = (a[at(q, n, q)] - a[at(p, n, p)]) / (2 * apq);
  const double t = std::copysign(1.0, theta) / (std::abs(theta) + std::hypot(theta, 1.0));
  const double c = 1 / std::hypot(t, 1.0), s = t * c;
  for (int i = 0; i < n; ++i) {  // columns
    const double x = a[at(i, n, p)], y = a[at(i, n, q)];
    a[at(i, n, p)] = c * x - s * y;
    a[at(i, n, q)] = s * x + c * y;
  }
  for (int i = 0; i < n; ++i) {  // rows
    const double x = a[at(p, n, i)], y = a[at(q, n, i)];
    a[at(p, n, i)] = c * x - s * y;
    a[at(q, n, i)] = s * x + c * y;
    const double vx = v[at(p, n, i)], vy = v[at(q, n, i)];
    v[at(p, n, i)] = c * vx - s * vy;
    v[at(q, n, i)] = s * vx + c * vy;
  }
}

}  // namespace

Eigenpairs symmetric_eigenpairs(Vector a, int n) {
  Vector v(a.size(), 0.0);
  for (int i = 0; i < n; ++i) v[at(i, n, i)] = 1;
  auto converged = [&] {
    double diagonal = 0, rest = 0;
    for (int p = 0; p < n; ++p) {
      for (int q = 0; q < n; ++q) {
        const double square = a[at(p, n, q)] * a[at(p, n, q)];
        (p == q ? diagonal : rest) += square;
      }
    }
    return rest <= 1e-34 * diagonal;
  };
  constexpr int kMostSweeps = 30;  // convergence is quadratic: 16 x 16 needs about 8
  for (int sweep = 0; sweep < kMostSweeps && !converged(); ++sweep) {
    for (int p = 0; p < n; ++p) {
      for (int q = p + 1; q < n; ++q) jacobi_rotation(a, v, n, p, q);
    }
  }
  std::vector<int> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int i, int j) { return a[at(i, n, i)] > a[at(j, n, j)]; });
  Eigenpairs pairs;
  for (int m : order) {
    pairs.values.push_back(a[at(m, n, m)]);
    for (int i = 0; i < n; ++i) pairs.vectors.push_back(v[at(m, n, i)]);
  }
  return pairs;
}

Vector rotate(Vector x) {
  const std::size_t d = x.size();
  std::uint64_t state = 0x10C5;
  for (double& value : x) {  // splitmix64
    state += 0x9E3779B97F4A7C15u;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    if ((z ^ (z >> 31)) >> 63) value = -value;
  }
  std::size_t run = 1;
  while (d % (2 * run) == 0) run *= 2;
  for (std::size_t half = 1; half < run; half *= 2) {  // H_2n = [[H_n, H_n], [H_n, -H_n]]
    for (std::size_t i = 0; i < d; ++i) {
      if (i / half % 2 != 0) continue;
      const double a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
  for (double& value : x) value /= std::sqrt(static_cast<double>(run));
  return x;
}

double round_to_fp16(double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  constexpr int kSmallestExponent = -14, kMantissaBits = 10;
  const double ulp = std::ldexp(1.0, std::max(std::ilogb(x), kSmallestExponent) - kMantissaBits);
  const double rounded = std::nearbyint(x / ulp) * ulp;
  return std::abs(rounded) > 65504 ? std::copysign(INFINITY, x) : rounded;
}

Vector reconstruct_key(const PageSummary& page, int token) {
  Vector key = page.centroid;
  for (int m = 0; m < page.rank; ++m) {
    for (int c = 0; c < page.head_dim; ++c) {
      key[static_cast<std::size_t>(c)] +=
          page.coefficients[at(m, page.page_tokens, token)] * page.basis[at(m, page.head_dim, c)];
    }
  }
  return key;
}

namespace {

Vector column_means(const double* keys, int n, int d) {
  Vector mean(static_cast<std::size_t>(d), 0.0);
  for (int i = 0; i < n; ++i) {
    for (int c = 0; c < d; ++c) mean[static_cast<std::size_t>(c)] += keys[at(i, d, c)] / n;
  }
  return mean;
}

// a [m, d] times the transpose of b [n, d].
Vector times_transposed(const Vector& a, int m, const Vector& b, int n, int d) {
  Vector product(at(m, n, 0), 0.0);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      for (int c = 0; c < d; ++c) product[at(i, n, j)] += a[at(i, d, c)] * b[at(j, d, c)];
    }
  }
  return product;
}

// Solves the symmetric positive definite [n, n] system g x = b for b [n, columns] by elimination.
Vector solve(Vector g, Vector b, int n, int columns) {
  for (int p = 0; p < n; ++p) {
    for (int i = 0; i < n; ++i) {
      if (i == p) continue;
      const double f = g[at(i, n, p)] / g[at(p, n, p)];
      for (int j = 0; j < n; ++j) g[at(i, n, j)] -= f * g[at(p, n, j)];
      for (int j = 0; j < columns; ++j) b[at(i, columns, j)] -= f * b[at(p, columns, j)];
    }
  }
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < columns; ++j) b[at(i, columns, j)] /= g[at(i, n, i)];
  }
  return b;
}

// Symmetric, to nearest even, one fp16 scale: x is near code * scale. Returns the scale.
double quantise(const double* x, int count, int bits, int* codes) {
  const int limit = (1 << (bits - 1)) - 1;
  double largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::abs(x[i]));
  constexpr double kSmallestScale = 6e-8;  // the least fp16, so that zeros do not divide by zero
  const double scale = std::max(round_to_fp16(largest / limit), kSmallestScale);
  for (int i = 0; i < count; ++i) {
    codes[i] = std::clamp(static_cast<int>(std::nearbyint(x[i] / scale)), -limit, limit);
  }
  return scale;
}

}  // namespace

PageSummary summarise_exact(const double* keys, int page_tokens, int head_dim, int rank,
                            Vector* spectrum) {
  const int n = page_tokens, d = head_dim;
  PageSummary page{n, rank, d, column_means(keys, n, d), Vector(at(rank, d, 0), 0.0), {}};
  Vector centred(keys, keys + at(n, d, 0));
  for (int i = 0; i < n; ++i) {
    for (int c = 0; c < d; ++c) centred[at(i, d, c)] -= page.centroid[static_cast<std::size_t>(c)];
  }
  const Eigenpairs pairs = symmetric_eigenpairs(times_transposed(centred, n, centred, n, d), n);
  if (spectrum != nullptr) *spectrum = pairs.values;
  for (int m = 0; m < rank; ++m) {  // V_m = X^T u_m / sqrt(lambda_m)
    const double energy = pairs.values[static_cast<std::size_t>(m)];
    if (energy <= 1e-14 * pairs.values[0] || energy <= 0) continue;
    for (int i = 0; i < n; ++i) {
      for (int c = 0; c < d; ++c) {
        page.basis[at(m, d, c)] +=
            pairs.vectors[at(m, n, i)] * centred[at(i, d, c)] / std::sqrt(energy);
      }
    }
  }
  page.coefficients = times_transposed(page.basis, rank, centred, n, d);
  return page;
}

QuantisedPage summarise_page(const SummaryFormat& format, const double* keys, int head_dim,
                             const Vector& reference) {
  const int n = format.page_tokens, d = head_dim, r = format.rank;
  Vector k(keys, keys + at(n, d, 0));
  if (!std::all_of(k.begin(), k.end(), [](double x) { return std::isfinite(x); })) {
    return {std::vector<int>(at(1, d, 0)), std::vector<int>(at(r, d, 0)),
            std::vector<int>(at(r, n, 0)), NAN, Vector(at(r, 1, 0), NAN)};
  }
  if (format.improved) {
    for (int i = 0; i < n; ++i) {
      const Vector row = rotate(Vector(keys + at(i, d, 0), keys + at(i + 1, d, 0)));
      std::copy(row.begin(), row.end(), k.begin() + static_cast<std::ptrdiff_t>(at(i, d, 0)));
    }
  }
  const PageSummary exact = summarise_exact(k.data(), n, d, r);

  QuantisedPage page;
  page.basis.resize(at(r, d, 0));
  Vector rounded(at(r, d, 0)), basis_scales;
  for (int m = 0; m < r; ++m) {
    basis_scales.push_back(
        quantise(&exact.basis[at(m, d, 0)], d, format.basis_bits, &page.basis[at(m, d, 0)]));
    for (int c = 0; c < d; ++c)
      rounded[at(m, d, c)] = page.basis[at(m, d, c)] * basis_scales.back();
  }

  Vector coefficients = exact.coefficients;
  if (format.improved) {  // least squares on the rounded basis, with a ridge far below its energy
    Vector centred = k;
    for (int i = 0; i < n; ++i) {
      for (int c = 0; c < d; ++c)
        centred[at(i, d, c)] -= exact.centroid[static_cast<std::size_t>(c)];
    }
    Vector gram = times_transposed(rounded, r, rounded, r, d);
    constexpr double kRidge = 1e-6;
    for (int m = 0; m < r; ++m) gram[at(m, r, m)] += kRidge;
    coefficients = solve(gram, times_transposed(rounded, r, centred, n, d), r, n);
  }
  page.coefficients.resize(at(r, n, 0));
  for (int m = 0; m < r; ++m) {
    const double scale = quantise(&coefficients[at(m, n, 0)], n, format.coefficient_bits,
                                  &page.coefficients[at(m, n, 0)]);
    page.component_scales.push_back(
        round_to_fp16(basis_scales[static_cast<std::size_t>(m)] * scale));
  }

  Vector centroid = exact.centroid;
  if (format.improved && !reference.empty()) {
    for (std::size_t c = 0; c < centroid.size(); ++c) centroid[c] -= reference[c];
  }
  page.centroid.resize(static_cast<std::size_t>(d));
  page.centroid_scale = quantise(centroid.data(), d, format.centroid_bits, page.centroid.data());
  return page;
}

PageSummary dequantise(const SummaryFormat& format, int head_dim, const QuantisedPage& codes) {
  PageSummary page{format.page_tokens, format.rank, head_dim, {}, {}, {}};
  for (int code : codes.centroid) page.centroid.push_back(code * codes.centroid_scale);
  page.basis.assign(codes.basis.begin(), codes.basis.end());
  for (int m = 0; m < format.rank; ++m) {
    for (int i = 0; i < format.page_tokens; ++i) {
      page.coefficients.push_back(codes.coefficients[at(m, format.page_tokens, i)] *
                                  codes.component_scales[static_cast<std::size_t>(m)]);
    }
  }
  return page;
}

namespace {

// Byte offsets of a record's parts.
struct Offsets {
  int centroid_row, basis_row, page_rows, scales, coefficients, page_coefficients, bytes;
};

Offsets offsets(const SummaryFormat& f, int d) {
  const int pages = kBlockTokens / f.page_tokens;
  Offsets o{};
  o.centroid_row = d * f.centroid_bits / 8;
  o.basis_row = d * f.basis_bits / 8;
  o.page_rows = o.centroid_row + f.rank * o.basis_row;
  o.scales = pages * o.page_rows;
  o.coefficients = (o.scales + pages * (1 + f.rank) * 2 + 7) / 8 * 8;
  o.page_coefficients = f.rank * f.page_tokens * f.coefficient_bits / 8;
  o.bytes = (o.coefficients + pages * o.page_coefficients + 8 + 31) / 32 * 32;
  return o;
}

int parse_row(const std::uint8_t* row, int d, int bits, int channel) {
  if (bits == 8) return static_cast<std::int8_t>(row[channel]);
  const int half = d / 2, byte = static_cast<std::int8_t>(row[channel % half]);
  const int high = static_cast<int>(std::floor(byte / 16.0));  // byte = 16 high + (low + 8)
  return channel >= half ? high : byte - 16 * high - 8;
}

void pack_row(const int* codes, int d, int bits, std::uint8_t* row) {
  if (bits == 8) {
    for (int c = 0; c < d; ++c) row[c] = static_cast<std::uint8_t>(codes[c]);
    return;
  }
  for (int b = 0; b < d / 2; ++b) {
    row[b] = static_cast<std::uint8_t>(16 * codes[b + d / 2] + codes[b] + 8);
  }
}

double parse_fp16(const std::uint8_t* bytes) {
  return detail::fp16_to_float(static_cast<std::uint16_t>(bytes[0] | bytes[1] << 8));
}

void pack_fp16(double value, std::uint8_t* bytes) {
  const std::uint16_t bits = detail::float_to_fp16(static_cast<float>(value));
  bytes[0] = static_cast<std::uint8_t>(bits & 0xFF);
  bytes[1] = static_cast<std::uint8_t>(bits >> 8);
}

}  // namespace

int record_bytes(const SummaryFormat& format, int head_dim) {
  return offsets(format, head_dim).bytes;
}

Record parse_record(const SummaryFormat& f, int d, const std::uint8_t* bytes) {
  const Offsets o = offsets(f, d);
  Record record;
  for (int p = 0; p < kBlockTokens / f.page_tokens; ++p) {
    QuantisedPage page;
    const std::uint8_t* rows = bytes + p * o.page_rows;
    const std::uint8_t* scales = bytes + o.scales + p * (1 + f.rank) * 2;
    const std::uint8_t* packed = bytes + o.coefficients + p * o.page_coefficients;
    page.centroid_scale = parse_fp16(scales);
    for (int c = 0; c < d; ++c) page.centroid.push_back(parse_row(rows, d, f.centroid_bits, c));
    for (int m = 0; m < f.rank; ++m) {
      const std::uint8_t* row = rows + o.centroid_row + m * o.basis_row;
      page.component_scales.push_back(parse_fp16(scales + 2 * (m + 1)));
      for (int c = 0; c < d; ++c) page.basis.push_back(parse_row(row, d, f.basis_bits, c));
      for (int i = 0; i < f.page_tokens; ++i) {
        const int n = m * f.page_tokens + i;
        page.coefficients.push_back(
            f.coefficient_bits == 8 ? packed[n] - 128 : ((packed[n / 2] >> (n % 2 * 4)) & 15) - 8);
      }
    }
    record.pages.push_back(std::move(page));
  }
  const std::uint8_t* h = bytes + o.bytes - 8;
  record.header = {static_cast<std::uint16_t>(h[0] | h[1] << 8), h[2], h[3],
                   static_cast<std::uint32_t>(h[4]) | static_cast<std::uint32_t>(h[5]) << 8 |
                       static_cast<std::uint32_t>(h[6]) << 16 |
                       static_cast<std::uint32_t>(h[7]) << 24};
  return record;
}

std::vector<std::uint8_t> pack_record(const SummaryFormat& f, int d, const Record& record) {
  const Offsets o = offsets(f, d);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(o.bytes), 0);
  for (int p = 0; p < kBlockTokens / f.page_tokens; ++p) {
    const QuantisedPage& page = record.pages[static_cast<std::size_t>(p)];
    std::uint8_t* rows = bytes.data() + p * o.page_rows;
    std::uint8_t* scales = bytes.data() + o.scales + p * (1 + f.rank) * 2;
    std::uint8_t* packed = bytes.data() + o.coefficients + p * o.page_coefficients;
    pack_fp16(page.centroid_scale, scales);
    pack_row(page.centroid.data(), d, f.centroid_bits, rows);
    for (int m = 0; m < f.rank; ++m) {
      pack_fp16(page.component_scales[static_cast<std::size_t>(m)], scales + 2 * (m + 1));
      pack_row(&page.basis[at(m, d, 0)], d, f.basis_bits, rows + o.centroid_row + m * o.basis_row);
      for (int i = 0; i < f.page_tokens; ++i) {
        const int n = m * f.page_tokens + i;
        const int code = page.coefficients[static_cast<std::size_t>(n)];
        if (f.coefficient_bits == 8) {
          packed[n] = static_cast<std::uint8_t>(code + 128);
        } else {
          packed[n / 2] = static_cast<std::uint8_t>(packed[n / 2] | (code + 8) << (n % 2 * 4));
        }
      }
    }
  }
  std::uint8_t* h = bytes.data() + o.bytes - 8;
  const RecordHeader& header = record.header;
  const std::uint8_t fields[8] = {static_cast<std::uint8_t>(header.magic & 0xFF),
                                  static_cast<std::uint8_t>(header.magic >> 8),
                                  header.version,
                                  header.format,
                                  static_cast<std::uint8_t>(header.key_hash & 0xFF),
                                  static_cast<std::uint8_t>(header.key_hash >> 8 & 0xFF),
                                  static_cast<std::uint8_t>(header.key_hash >> 16 & 0xFF),
                                  static_cast<std::uint8_t>(header.key_hash >> 24)};
  std::copy(fields, fields + 8, h);
  return bytes;
}

}  // namespace locks::ref
