// Builds one record from the 16 keys of a block. Sums over channels run in the order of lanes.h.
#include "core/cpu_namespace.h"
#include "core/lanes.h"
#include "core/scalar.h"
#include "summary/differences.h"
#include "summary/eigensolver.h"
#include "summary/key_hash.h"
#include "summary/quantise.h"
#include "summary/rotation.h"
#include "summary/rows.h"
#include "summary/summary_kernels.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

namespace {

struct RotationTable {
  alignas(64) float signs[kMaxHeadDim] = {};
  constexpr RotationTable() {
    for (int c = 0; c < kMaxHeadDim; ++c) signs[c] = rotation_flips(c) ? -1.0f : 1.0f;
  }
};
constexpr RotationTable kRotation;

// Sums and differences of the lanes whose numbers differ in bit H.
template <int H>
inline void butterfly(float (&x)[kLanes]) {
  float y[kLanes];
  for (int l = 0; l < kLanes; ++l) y[l] = (l & H) != 0 ? x[l ^ H] - x[l] : x[l] + x[l ^ H];
  for (int l = 0; l < kLanes; ++l) x[l] = y[l];
}

// The signs' products are exact and the scale comes last: g++ 12 at AVX-512 fuses a product with
// the alternating sum behind it in spite of -ffp-contract=off, which here then rounds nothing away.
void rotate_row(float* row, int d) {
  const int run = rotation_run(d);
  for (int c = 0; c < d; c += kLanes) {
    float x[kLanes];
    for (int l = 0; l < kLanes; ++l) x[l] = row[c + l] * kRotation.signs[c + l];
    butterfly<1>(x);
    butterfly<2>(x);
    butterfly<4>(x);
    butterfly<8>(x);
    for (int l = 0; l < kLanes; ++l) row[c + l] = x[l];
  }
  for (int h = kLanes; h < run; h *= 2) {
    for (int c = 0; c < d; c += kLanes) {
      if ((c & h) != 0) continue;
      for (int l = c; l < c + kLanes; ++l) {
        const float low = row[l], high = row[l + h];
        row[l] = low + high;
        row[l + h] = low - high;
      }
    }
  }
  const float scale = rotation_scale(d);
  for (int c = 0; c < d; ++c) row[c] *= scale;
}

// What the hash adds to the words of a row, by token and by group of tokens.
struct HashTable {
  static constexpr int kSteps = kMaxHeadDim / (2 * kHashLanes);
  std::uint32_t key[kHashTokens][kSteps][2] = {};
  alignas(64) std::uint32_t lane[kBlockTokens / kHashTokens][2 * kHashLanes] = {};
  constexpr HashTable() {
    for (int i = 0; i < kHashTokens * kSteps * 2; ++i) {
      key[i / 2 / kSteps][i / 2 % kSteps][i % 2] = hash_key(i / 2 / kSteps, i / 2 % kSteps, i % 2);
    }
    for (int i = 0; i < kBlockTokens / kHashTokens * 2 * kHashLanes; ++i) {
      const int group = i / (2 * kHashLanes), word = i % (2 * kHashLanes);
      lane[group][word] = hash_lane_key(group, word / 2);
    }
  }
};
constexpr HashTable kHash;

// Adds the pairs of up to 2 * kHashLanes words, zeros behind them left out.
inline void hash_words(const std::uint8_t* bytes, int num_pairs, const std::uint32_t (&key)[2],
                       const std::uint32_t* lane, std::uint64_t (&sum)[kHashLanes]) {
  for (int j = 0; j < num_pairs; ++j) {
    std::uint64_t pair;
    __builtin_memcpy(&pair, bytes + 8 * j, 8);
    const auto first = static_cast<std::uint32_t>(pair) + key[0] + lane[2 * j];
    const auto second = static_cast<std::uint32_t>(pair >> 32) + key[1] + lane[2 * j + 1];
    sum[j] += hash_pair(first, second);
  }
}

std::uint32_t hash_keys(const BlockKeys& keys, int head_dim) {
  const std::int64_t element = scalar_bytes(keys.type);
  const int words = head_dim * static_cast<int>(element) / 4;
  const auto* bytes = static_cast<const std::uint8_t*>(keys.data) + keys.first * element;
  std::uint64_t sum[kHashLanes] = {};
  for (int t = 0; t < kBlockTokens; ++t) {
    const std::uint8_t* row = bytes + t * keys.token_stride * element;
    const std::uint32_t* lane = kHash.lane[t / kHashTokens];
    int step = 0;
    for (; (step + 1) * 2 * kHashLanes <= words; ++step) {
      hash_words(row + step * 8 * kHashLanes, kHashLanes, kHash.key[t % kHashTokens][step], lane,
                 sum);
    }
    const int rest = words / 2 - step * kHashLanes;
    if (rest > 0) {
      hash_words(row + step * 8 * kHashLanes, rest, kHash.key[t % kHashTokens][step], lane, sum);
    }
  }
  std::uint64_t total = 0;
  for (int j = 0; j < kHashLanes; ++j) total += sum[j];
  return finish_key_hash(total, static_cast<std::uint32_t>(kBlockTokens * words));
}

Quantised quantise_row(const float* __restrict row, int d, int bits,
                       std::int8_t* __restrict codes) {
  const float limit = code_limit(bits);
  const Quantised result = find_scale(max_magnitude(row, d), limit);
  if (!is_finite(result.scale)) {
    __builtin_memset(codes, 0, static_cast<unsigned>(d));
    return result;
  }
  const float scale = result.scale;
  for (int c = 0; c < d; ++c) {
    codes[c] = static_cast<std::int8_t>(round_to_code(row[c], scale, limit));
  }
  return result;
}

void pack_row(const std::int8_t* codes, int bits, int head_dim, std::uint8_t* __restrict out) {
  if (bits == 8) {
    __builtin_memcpy(out, codes, static_cast<unsigned>(head_dim));
    return;
  }
  const int half = head_dim / 2;
  for (int b = 0; b < half; ++b) {
    out[b] = static_cast<std::uint8_t>(16 * codes[b + half] + codes[b] + 8);
  }
}

// Centres the page's keys in place.
template <int B>
void centre(float* __restrict x, int d, float* __restrict mean) {
  for (int c = 0; c < d; ++c) {
    float sum = x[c];
    for (int t = 1; t < B; ++t) sum += x[t * d + c];
    mean[c] = sum * (1.0f / B);
  }
  for (int t = 0; t < B; ++t) {
    for (int c = 0; c < d; ++c) x[t * d + c] -= mean[c];
  }
}

// Fills the symmetric matrix and returns its trace, the page's energy about its centroid.
template <int B>
float gram_matrix(const float* x, int d, float* gram) {
  float energy = 0;
  for (int i = 0; i < B; ++i) {
    for (int j = 0; j <= i; ++j) {
      gram[i * B + j] = gram[j * B + i] = dot(x + i * d, x + j * d, d);
    }
    energy += gram[i * B + i];
  }
  return energy;
}

// weights . x, brought to unit length; zero if it holds only noise.
template <int B>
void unit_direction(const float* __restrict x, int d, const float* __restrict weights, float energy,
                    float* __restrict row) {
  for (int c = 0; c < d; ++c) {
    float sum = x[c] * weights[0];
    for (int t = 1; t < B; ++t) sum += x[t * d + c] * weights[t];
    row[c] = sum;
  }
  const float squared = dot(row, row, d);
  const float factor = squared > kNoiseEnergy * energy ? 1 / square_root(squared) : 0.0f;
  for (int c = 0; c < d; ++c) row[c] *= factor;
}

// The parts of a record that belong to one page.
struct PageParts {
  std::uint8_t* rows;
  std::uint8_t* scales;
  std::uint8_t* coefficients;
};

// Basis, coefficients and component scales of a page of centred keys.
template <int B>
void write_components(const RecordLayout& layout, const float* x, const float* gram, float energy,
                      const PageParts& out) {
  const SummaryFormat& format = layout.format;
  const int d = layout.head_dim, rank = format.rank;
  float basis[kMaxRank][kMaxHeadDim];
  float weights[kMaxRank * kBlockTokens], coefficients[kMaxRank][kBlockTokens], scales[kMaxRank];
  std::int8_t codes[kMaxHeadDim];
  top_eigenvectors<B>(gram, rank, weights, nullptr);
  for (int k = 0; k < rank; ++k) {
    float* row = basis[k];
    unit_direction<B>(x, d, weights + k * B, energy, row);
    scales[k] = quantise_row(row, d, format.basis_bits, codes).scale;
    pack_row(codes, format.basis_bits, d,
             out.rows + layout.centroid_row_bytes + k * layout.basis_row_bytes);
    if (format.improved) {  // what a reader will see: coefficients are fitted to that
      for (int c = 0; c < d; ++c) row[c] = static_cast<float>(codes[c]) * scales[k];
    }
    for (int t = 0; t < B; ++t) coefficients[k][t] = dot(row, x + t * d, d);
  }
  if (format.improved) {
    float overlap[kMaxRank][kMaxRank];
    for (int k = 0; k < rank; ++k) {
      for (int m = 0; m <= k; ++m) overlap[k][m] = dot(basis[k], basis[m], d);
    }
    solve_refit<B>(overlap, rank, coefficients);
  }
  for (int k = 0; k < rank; ++k) {
    const Quantised c =
        pack_coefficients(coefficients[k], B, format.coefficient_bits, k * B, out.coefficients);
    store_fp16(out.scales, 1 + k, float_to_fp16(scales[k] * c.scale));
  }
}

// Zero codes under NaN scales: every score of the page is NaN, so it is always read.
void write_unscorable_page(const RecordLayout& layout, const PageParts& out) {
  const SummaryFormat& format = layout.format;
  const std::int8_t zeros[kMaxHeadDim] = {};
  pack_row(zeros, format.centroid_bits, layout.head_dim, out.rows);
  for (int k = 0; k < format.rank; ++k) {
    pack_row(zeros, format.basis_bits, layout.head_dim,
             out.rows + layout.centroid_row_bytes + k * layout.basis_row_bytes);
  }
  for (int k = 0; k <= format.rank; ++k) store_fp16(out.scales, k, kFp16Nan);
  const int zero_code = format.coefficient_bits == 4 ? 0x88 : 0x80;
  __builtin_memset(out.coefficients, zero_code,
                   static_cast<unsigned>(layout.page_coefficient_bytes));
}

template <int B>
void write_page(const RecordLayout& layout, float* x, const float* reference,
                const PageParts& out) {
  const int d = layout.head_dim;
  float centroid[kMaxHeadDim];
  float gram[kBlockTokens * kBlockTokens];
  centre<B>(x, d, centroid);
  const float energy = gram_matrix<B>(x, d, gram);
  // A NaN or infinite key is NaN once centred. Energy past float's range means a key past fp16's.
  if (!is_finite(energy)) {
    write_unscorable_page(layout, out);
    return;
  }
  if (reference != nullptr) {
    for (int c = 0; c < d; ++c) centroid[c] -= reference[c];
  }
  std::int8_t codes[kMaxHeadDim];
  const Quantised row = quantise_row(centroid, d, layout.format.centroid_bits, codes);
  pack_row(codes, layout.format.centroid_bits, d, out.rows);
  store_fp16(out.scales, 0, row.scale_bits);
  write_components<B>(layout, x, gram, energy, out);
}

// The rotation of rows made of differences, without signs and scale. Its stages have an order of
// their own, which suits the GPU: 1, 2, then 32 and more, then 4, 8 and 16 channels apart.
void turn_row(float* __restrict row, int d) {
  const int run = rotation_run(d);
  for (int c = 0; c < d; c += kLanes) {
    float x[kLanes];
    for (int l = 0; l < kLanes; ++l) x[l] = row[c + l];
    butterfly<1>(x);
    butterfly<2>(x);
    for (int l = 0; l < kLanes; ++l) row[c + l] = x[l];
  }
  const auto turn_far = [row, d](int h) {
    for (int c = 0; c < d; c += kLanes) {
      if ((c & h) != 0) continue;
      for (int l = c; l < c + kLanes; ++l) {
        const float low = row[l], high = row[l + h];
        row[l] = low + high;
        row[l + h] = low - high;
      }
    }
  };
  for (int h = 2 * kLanes; h < run; h *= 2) turn_far(h);
  for (int c = 0; c < d; c += kLanes) {
    float x[kLanes];
    for (int l = 0; l < kLanes; ++l) x[l] = row[c + l];
    butterfly<4>(x);
    butterfly<8>(x);
    for (int l = 0; l < kLanes; ++l) row[c + l] = x[l];
  }
  if (run > kLanes) turn_far(kLanes);
}

// Keys to their sum and differences, in place.
void split_keys(float* __restrict x, int d) {
  for (int c = 0; c < d; ++c) {
    const float a = x[c] + x[d + c], b = x[c] - x[d + c];
    const float e = x[2 * d + c] + x[3 * d + c], f = x[2 * d + c] - x[3 * d + c];
    x[c] = a + e;
    x[d + c] = a - e;
    x[2 * d + c] = b + f;
    x[3 * d + c] = b - f;
  }
}

// A sum of products over the channels: channel c in place c mod 32, then the places' bits 0, 1, 4,
// 3 and 2.
inline float dot_by_fours(const float* a, const float* b, int d) {
  float low[kLanes] = {}, high[kLanes] = {};
  int c = 0;
  for (; c + 2 * kLanes <= d; c += 2 * kLanes) {
    for (int l = 0; l < kLanes; ++l) low[l] += a[c + l] * b[c + l];
    for (int l = 0; l < kLanes; ++l) high[l] += a[c + kLanes + l] * b[c + kLanes + l];
  }
  if (c < d) {
    for (int l = 0; l < kLanes; ++l) low[l] += a[c + l] * b[c + l];
  }
  float x[kLanes], y[kLanes];
  for (int l = 0; l < kLanes; ++l) x[l] = low[l] + low[l ^ 1];
  for (int l = 0; l < kLanes; ++l) y[l] = high[l] + high[l ^ 1];
  for (int l = 0; l < kLanes; ++l) low[l] = x[l] + x[l ^ 2];
  for (int l = 0; l < kLanes; ++l) high[l] = y[l] + y[l ^ 2];
  for (int l = 0; l < kLanes; ++l) x[l] = low[l] + high[l];
  return (x[0] + x[8]) + (x[4] + x[12]);
}

Quantised write_row(const float* row, int bits, int d, std::int8_t* codes, std::uint8_t* out) {
  const float limit = code_limit(bits);
  const Quantised result = find_scale(max_magnitude(row, d), limit);
  if (is_finite(result.scale)) {
    const float inverse = 1.0f / result.scale;
    for (int c = 0; c < d; ++c) {
      codes[c] = static_cast<std::int8_t>(round_product_to_code(row[c], inverse, limit));
    }
  } else {
    __builtin_memset(codes, 0, static_cast<unsigned>(d));
  }
  pack_row(codes, bits, d, out);
  return result;
}

// The coefficients of the four tokens, fitted to the direction's codes.
void write_coefficients(const RecordLayout& layout, const float* y, const std::int8_t* codes,
                        float basis_scale, const PageParts& out) {
  const int d = layout.head_dim;
  float turned[kMaxHeadDim], product[kDifferences], coefficients[4];
  std::int32_t squared = 0;
  for (int c = 0; c < d; ++c) squared += codes[c] * codes[c];
  for (int c = 0; c < d; ++c) turned[c] = codes[c];
  turn_row(turned, d);  // exact: integers
  for (int m = 0; m < kDifferences; ++m) product[m] = dot_by_fours(turned, y + (m + 1) * d, d);
  const float factor = refit_factor(basis_scale, static_cast<float>(squared), rotation_scale(d));
  for (int t = 0; t < 4; ++t) coefficients[t] = combine_differences(product, t) * factor;
  const Quantised c =
      pack_coefficients(coefficients, 4, layout.format.coefficient_bits, 0, out.coefficients);
  store_fp16(out.scales, 1, float_to_fp16(basis_scale * c.scale));
}

// A page whose format uses_differences. y: its keys, signs flipped.
void write_page_of_four(const RecordLayout& layout, float* y, const float* reference,
                        const PageParts& out) {
  const int d = layout.head_dim;
  const SummaryFormat& format = layout.format;
  split_keys(y, d);
  const float *y1 = y + d, *y2 = y + 2 * d, *y3 = y + 3 * d;
  const Direction direction =
      find_direction({{dot_by_fours(y1, y1, d), dot_by_fours(y2, y2, d), dot_by_fours(y3, y3, d),
                       dot_by_fours(y1, y2, d), dot_by_fours(y1, y3, d), dot_by_fours(y2, y3, d)}},
                     rotation_scale(d));
  if (!direction.is_scorable) {
    write_unscorable_page(layout, out);
    return;
  }
  std::int8_t codes[kMaxHeadDim];
  turn_row(y, d);
  const float scale = 0.25f * rotation_scale(d);
  for (int c = 0; c < d; ++c) y[c] *= scale;
  if (reference != nullptr) {
    for (int c = 0; c < d; ++c) y[c] -= reference[c];
  }
  store_fp16(out.scales, 0, write_row(y, format.centroid_bits, d, codes, out.rows).scale_bits);
  float row[kMaxHeadDim];
  const float(&w)[kDifferences] = direction.weight;
  for (int c = 0; c < d; ++c) row[c] = (y1[c] * w[0] + y2[c] * w[1]) + y3[c] * w[2];
  turn_row(row, d);
  const Quantised basis =
      write_row(row, format.basis_bits, d, codes, out.rows + layout.centroid_row_bytes);
  write_coefficients(layout, y, codes, basis.scale, out);
}

void flip_signs(float* row, int d) {
  for (int c = 0; c < d; ++c) row[c] *= kRotation.signs[c];
}

void build_record(const RecordLayout& layout, std::uint8_t format_code, const BlockKeys& keys,
                  const float* reference, std::uint8_t* record) {
  const SummaryFormat& format = layout.format;
  const int d = layout.head_dim;
  alignas(64) float x[kBlockTokens * kMaxHeadDim];
  for (int t = 0; t < kBlockTokens; ++t) {
    float* row = x + t * d;
    load_floats(keys.data, keys.type, keys.first + t * keys.token_stride, d, row);
    if (uses_differences(format)) {
      flip_signs(row, d);
    } else if (format.improved) {
      rotate_row(row, d);
    }
  }
  // The alignment gaps, whatever the record's memory held before.
  const int scales_end = layout.scales_offset + format.pages_per_block() * (1 + format.rank) * 2;
  __builtin_memset(record + scales_end, 0,
                   static_cast<unsigned>(layout.header_offset - scales_end));
  for (int page = 0; page < format.pages_per_block(); ++page) {
    const PageParts out = {
        record + page * layout.page_rows_bytes,
        record + layout.scales_offset + page * (1 + format.rank) * 2,
        record + layout.coefficients_offset + page * layout.page_coefficient_bytes};
    float* first = x + page * format.page_tokens * d;
    switch (format.page_tokens) {
      case 4:
        if (uses_differences(format)) {
          write_page_of_four(layout, first, reference, out);
        } else {
          write_page<4>(layout, first, reference, out);
        }
        break;
      case 8:
        write_page<8>(layout, first, reference, out);
        break;
      default:
        write_page<16>(layout, first, reference, out);
        break;
    }
  }
  write_header(layout, format_code, hash_keys(keys, d), record);
}

}  // namespace

const SummaryKernels& summary_kernels() {
  static constexpr SummaryKernels kKernels = {build_record, rotate_row};
  return kKernels;
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
