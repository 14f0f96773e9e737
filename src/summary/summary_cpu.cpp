// Builds one record from the 16 keys of a block. All sums run in the order of lanes.h.
#include "summary/summary_kernels.h"

#include "core/cpu_namespace.h"
#include "core/scalar.h"
#include "summary/eigensolver.h"
#include "summary/key_hash.h"
#include "summary/lanes.h"
#include "summary/rotation.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroups = kMaxHeadDim / kLanes;
constexpr int kMaxRank = 8;

constexpr std::uint16_t kNanFp16 = 0x7E00;
constexpr float kLargestFloat = 3.402823466e38f;
// Added to the diagonal of the least squares that refit coefficients, whose rows have norms near 1: it
// keeps a row that quantised to zero solvable and moves the others by a millionth.
constexpr float kRidge = 1e-6f;
// A direction that holds less than this share of the page's energy is rounding noise of the Gram matrix.
constexpr float kNoiseEnergy = 1e-12f;

struct RotationTable {
  alignas(64) float signs[kMaxHeadDim] = {};
  constexpr RotationTable() {
    for (int c = 0; c < kMaxHeadDim; ++c) signs[c] = rotation_flips(c) ? -1.0f : 1.0f;
  }
};
constexpr RotationTable kRotation;

// Sum and difference of lanes whose numbers differ in bit H. `flipped` holds -x where that bit is set.
template <int H>
inline Lanes butterfly(Lanes x) {
  constexpr auto swap = [](int lane) { return lane ^ H; };
  constexpr auto sign = [](int lane) { return (lane & H) != 0 ? -1.0f : 1.0f; };
  const Lanes other = __builtin_shufflevector(
      x, x, swap(0), swap(1), swap(2), swap(3), swap(4), swap(5), swap(6), swap(7), swap(8),
      swap(9), swap(10), swap(11), swap(12), swap(13), swap(14), swap(15));
  const Lanes flip = {sign(0),  sign(1),  sign(2),  sign(3), sign(4),  sign(5),
                      sign(6),  sign(7),  sign(8),  sign(9), sign(10), sign(11),
                      sign(12), sign(13), sign(14), sign(15)};
  return other + x * flip;
}

void rotate_row(Lanes* row, int groups) {
  const int run_groups = rotation_run(groups * kLanes) / kLanes;
  const float scale = rotation_scale(groups * kLanes);
  const auto* signs = reinterpret_cast<const Lanes*>(kRotation.signs);
  for (int g = 0; g < groups; ++g) {
    Lanes x = row[g] * (signs[g] * scale);
    x = butterfly<1>(x);
    x = butterfly<2>(x);
    x = butterfly<4>(x);
    row[g] = butterfly<8>(x);
  }
  for (int h = 1; h < run_groups; h *= 2) {
    for (int g = 0; g < groups; ++g) {
      if ((g & h) != 0) continue;
      const Lanes low = row[g], high = row[g + h];
      row[g] = low + high;
      row[g + h] = low - high;
    }
  }
}

void rotate_floats(float* x, int head_dim) {
  Lanes row[kMaxGroups];
  const int groups = head_dim / kLanes;
  __builtin_memcpy(row, x, sizeof(float) * static_cast<unsigned>(head_dim));
  rotate_row(row, groups);
  __builtin_memcpy(x, row, sizeof(float) * static_cast<unsigned>(head_dim));
}

std::uint32_t sum_key_words(const std::uint8_t* bytes, int num_words, std::uint32_t first_index) {
  std::uint32_t sum = 0;
  for (int i = 0; i < num_words; ++i) {
    std::uint32_t word;
    __builtin_memcpy(&word, bytes + 4 * i, 4);
    sum += mix_key_word(word, first_index + static_cast<std::uint32_t>(i));
  }
  return sum;
}

std::uint32_t hash_keys(const BlockKeys& keys, int head_dim) {
  const std::int64_t element = scalar_bytes(keys.type);
  const int words = head_dim * static_cast<int>(element) / 4;
  const auto* bytes = static_cast<const std::uint8_t*>(keys.data) + keys.first * element;
  std::uint32_t sum = 0;
  for (int t = 0; t < kBlockTokens; ++t) {
    sum += sum_key_words(bytes + t * keys.token_stride * element, words,
                         static_cast<std::uint32_t>(t * words));
  }
  return finish_key_hash(sum, static_cast<std::uint32_t>(kBlockTokens * words));
}

// A row's codes and their scale.
struct Quantised {
  std::uint16_t scale_bits;
  float scale;
};

// The fp16 scale with which codes within +-limit reach `largest`. Never zero, since codes divide by it;
// infinite or NaN if `largest` is too large for fp16 or is itself infinite or NaN.
inline Quantised find_scale(float largest, float limit) {
  std::uint16_t bits = float_to_fp16(largest / limit);
  if (bits == 0) bits = 1;
  return {bits, fp16_to_float(bits)};
}

inline bool is_finite(float x) { return magnitude(x) <= kLargestFloat; }

Quantised quantise_row(const Lanes* row, int groups, int bits, std::int8_t* codes) {
  const float limit = bits == 4 ? 7.0f : 127.0f;
  const Quantised result = find_scale(max_magnitude(row, groups), limit);
  const bool finite = is_finite(result.scale);
  for (int g = 0; g < groups; ++g) {
    LaneBytes lanes{};
    if (finite) lanes = __builtin_convertvector(round_to_codes(row[g], result.scale, limit), LaneBytes);
    __builtin_memcpy(codes + g * kLanes, &lanes, sizeof lanes);
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

inline void store_fp16(std::uint8_t* scales, int index, std::uint16_t bits) {
  __builtin_memcpy(scales + 2 * index, &bits, sizeof bits);
}

// Quantises the coefficients of one component against one scale and packs them from code place `first`.
Quantised pack_coefficients(const float* c, int count, int bits, int first, std::uint8_t* packed) {
  const float limit = bits == 4 ? 7.0f : 127.0f;
  alignas(64) float padded[kLanes] = {};
  for (int i = 0; i < count; ++i) padded[i] = c[i];
  const auto* row = reinterpret_cast<const Lanes*>(padded);
  const Quantised result = find_scale(max_magnitude(row, 1), limit);
  LaneInts codes{};
  if (is_finite(result.scale)) codes = round_to_codes(*row, result.scale, limit);
  codes += 1 << (bits - 1);
  for (int i = 0; i < count; ++i) {
    const int place = first + i;
    const int shift = bits == 4 ? place % 2 * 4 : 0;
    std::uint8_t& byte = packed[bits == 4 ? place / 2 : place];
    byte = static_cast<std::uint8_t>((shift == 0 ? 0 : byte) | codes[i] << shift);
  }
  return result;
}

// Solves (gram + kRidge I) c = rhs for the B right-hand sides in place, by Cholesky. A pivot is never
// below the ridge, which float's rounding could otherwise bring to zero.
template <int B>
void solve_refit(float (&gram)[kMaxRank][kMaxRank], int rank, float (&rhs)[kMaxRank][kBlockTokens]) {
  for (int k = 0; k < rank; ++k) {
    float pivot = gram[k][k] + kRidge;
    for (int m = 0; m < k; ++m) pivot -= gram[k][m] * gram[k][m];
    pivot = square_root(pivot > kRidge ? pivot : kRidge);
    gram[k][k] = pivot;
    for (int i = k + 1; i < rank; ++i) {
      float entry = gram[i][k];
      for (int m = 0; m < k; ++m) entry -= gram[i][m] * gram[k][m];
      gram[i][k] = entry / pivot;
    }
    for (int t = 0; t < B; ++t) {
      float entry = rhs[k][t];
      for (int m = 0; m < k; ++m) entry -= gram[k][m] * rhs[m][t];
      rhs[k][t] = entry / pivot;
    }
  }
  for (int k = rank - 1; k >= 0; --k) {
    for (int t = 0; t < B; ++t) {
      float entry = rhs[k][t];
      for (int m = k + 1; m < rank; ++m) entry -= gram[m][k] * rhs[m][t];
      rhs[k][t] = entry / gram[k][k];
    }
  }
}

// Centres the page's keys in place.
template <int B>
void centre(Lanes* x, int groups, Lanes* mean) {
  for (int g = 0; g < groups; ++g) {
    Lanes sum = x[g];
    for (int t = 1; t < B; ++t) sum += x[t * groups + g];
    mean[g] = sum * (1.0f / B);
    for (int t = 0; t < B; ++t) x[t * groups + g] -= mean[g];
  }
}

// Fills the symmetric matrix and returns its trace, the page's energy about its centroid.
template <int B>
float gram_matrix(const Lanes* x, int groups, float* gram) {
  float energy = 0;
  for (int i = 0; i < B; ++i) {
    for (int j = 0; j <= i; ++j) {
      gram[i * B + j] = gram[j * B + i] = dot(x + i * groups, x + j * groups, groups);
    }
    energy += gram[i * B + i];
  }
  return energy;
}

// weights . x, brought to unit length; zero if it holds only noise.
template <int B>
void unit_direction(const Lanes* x, int groups, const float* weights, float energy, Lanes* row) {
  for (int g = 0; g < groups; ++g) {
    Lanes sum = x[g] * weights[0];
    for (int t = 1; t < B; ++t) sum += x[t * groups + g] * weights[t];
    row[g] = sum;
  }
  const float squared = dot(row, row, groups);
  const float factor = squared > kNoiseEnergy * energy ? 1 / square_root(squared) : 0.0f;
  for (int g = 0; g < groups; ++g) row[g] *= factor;
}

// The parts of a record that belong to one page.
struct PageParts {
  std::uint8_t* rows;
  std::uint8_t* scales;
  std::uint8_t* coefficients;
};

// Basis, coefficients and component scales of a page of centred keys.
template <int B>
void write_components(const RecordLayout& layout, const Lanes* x, int groups, const float* gram,
                      float energy, const PageParts& out) {
  const SummaryFormat& format = layout.format;
  const int rank = format.rank;
  Lanes basis[kMaxRank][kMaxGroups];
  float weights[kMaxRank * kBlockTokens], coefficients[kMaxRank][kBlockTokens], scales[kMaxRank];
  std::int8_t codes[kMaxHeadDim];
  top_eigenvectors<B>(gram, rank, weights, nullptr);
  for (int k = 0; k < rank; ++k) {
    Lanes* row = basis[k];
    unit_direction<B>(x, groups, weights + k * B, energy, row);
    scales[k] = quantise_row(row, groups, format.basis_bits, codes).scale;
    pack_row(codes, format.basis_bits, layout.head_dim,
             out.rows + layout.centroid_row_bytes + k * layout.basis_row_bytes);
    if (format.improved) {  // what a reader will see: coefficients are fitted to that
      for (int g = 0; g < groups; ++g) {
        LaneBytes lanes;
        __builtin_memcpy(&lanes, codes + g * kLanes, sizeof lanes);
        row[g] = __builtin_convertvector(lanes, Lanes) * scales[k];
      }
    }
    for (int t = 0; t < B; ++t) coefficients[k][t] = dot(row, x + t * groups, groups);
  }
  if (format.improved) {
    float overlap[kMaxRank][kMaxRank];
    for (int k = 0; k < rank; ++k) {
      for (int m = 0; m <= k; ++m) overlap[k][m] = dot(basis[k], basis[m], groups);
    }
    solve_refit<B>(overlap, rank, coefficients);
  }
  for (int k = 0; k < rank; ++k) {
    const Quantised c = pack_coefficients(coefficients[k], B, format.coefficient_bits, k * B,
                                          out.coefficients);
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
  for (int k = 0; k <= format.rank; ++k) store_fp16(out.scales, k, kNanFp16);
  const int zero_code = format.coefficient_bits == 4 ? 0x88 : 0x80;
  __builtin_memset(out.coefficients, zero_code, static_cast<unsigned>(layout.page_coefficient_bytes));
}

template <int B>
void write_page(const RecordLayout& layout, Lanes* x, int groups, const float* reference,
                const PageParts& out) {
  Lanes centroid[kMaxGroups];
  float gram[kBlockTokens * kBlockTokens];
  centre<B>(x, groups, centroid);
  const float energy = gram_matrix<B>(x, groups, gram);
  // A NaN or infinite key is NaN once centred. Energy past float's range means a key past fp16's.
  if (!is_finite(energy)) {
    write_unscorable_page(layout, out);
    return;
  }
  if (reference != nullptr) {
    for (int g = 0; g < groups; ++g) {
      Lanes lanes;
      __builtin_memcpy(&lanes, reference + g * kLanes, sizeof lanes);
      centroid[g] -= lanes;
    }
  }
  std::int8_t codes[kMaxHeadDim];
  const Quantised row = quantise_row(centroid, groups, layout.format.centroid_bits, codes);
  pack_row(codes, layout.format.centroid_bits, layout.head_dim, out.rows);
  store_fp16(out.scales, 0, row.scale_bits);
  write_components<B>(layout, x, groups, gram, energy, out);
}

void write_header(const RecordLayout& layout, std::uint8_t format_code, std::uint32_t key_hash,
                  std::uint8_t* record) {
  std::uint8_t* header = record + layout.header_offset;
  __builtin_memcpy(header, &kRecordMagic, 2);
  header[2] = kRecordVersion;
  header[3] = format_code;
  __builtin_memcpy(header + 4, &key_hash, 4);
}

void build_record(const RecordLayout& layout, std::uint8_t format_code, const BlockKeys& keys,
                  const float* reference, std::uint8_t* record) {
  const SummaryFormat& format = layout.format;
  const int d = layout.head_dim, groups = d / kLanes;
  Lanes x[kBlockTokens * kMaxGroups];
  for (int t = 0; t < kBlockTokens; ++t) {
    Lanes* row = x + t * groups;
    load_floats(keys.data, keys.type, keys.first + t * keys.token_stride, d,
                reinterpret_cast<float*>(row));
    if (format.improved) rotate_row(row, groups);
  }
  // The alignment gaps, whatever the record's memory held before.
  const int scales_end = layout.scales_offset + format.pages_per_block() * (1 + format.rank) * 2;
  __builtin_memset(record + scales_end, 0, static_cast<unsigned>(layout.header_offset - scales_end));
  for (int page = 0; page < format.pages_per_block(); ++page) {
    const PageParts out = {
        record + page * layout.page_rows_bytes,
        record + layout.scales_offset + page * (1 + format.rank) * 2,
        record + layout.coefficients_offset + page * layout.page_coefficient_bytes};
    Lanes* first = x + page * format.page_tokens * groups;
    switch (format.page_tokens) {
      case 4: write_page<4>(layout, first, groups, reference, out); break;
      case 8: write_page<8>(layout, first, groups, reference, out); break;
      default: write_page<16>(layout, first, groups, reference, out); break;
    }
  }
  write_header(layout, format_code, hash_keys(keys, d), record);
}

}  // namespace

const SummaryKernels& summary_kernels() {
  static constexpr SummaryKernels kKernels = {build_record, rotate_floats};
  return kKernels;
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
