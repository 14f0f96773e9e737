// Records that summarise_blocks writes, against the double-precision reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "score/score_ref.h"
#include "support/compare.h"
#include "support/paged_fixture.h"

namespace locks::testing {
namespace {

using ref::PageSummary;
using ref::QuantisedPage;
using ref::Vector;

std::int64_t summarise(const PagedFixture& fixture, const std::vector<std::int32_t>& begin,
                       const Executor& executor) {
  std::int64_t built = 0;
  const Status status = summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(),
                                         begin.data(), fixture.records(), &built, executor);
  EXPECT_TRUE(status.ok()) << status.message();
  return built;
}

std::vector<std::int32_t> zeros(const PagedFixture& fixture) {
  return std::vector<std::int32_t>(static_cast<std::size_t>(fixture.num_seqs()), 0);
}

// All records of complete blocks, one after the other.
std::vector<std::uint8_t> all_records(const PagedFixture& fixture) {
  std::vector<std::uint8_t> bytes;
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    for (int h = 0; h < fixture.edge().num_kv_heads; ++h) {
      for (int b = 0; b < fixture.seqs().lengths[i] / kBlockTokens; ++b) {
        const std::uint8_t* record = fixture.record(i, h, b);
        bytes.insert(bytes.end(), record, record + fixture.records().record_bytes);
      }
    }
  }
  return bytes;
}

// The page's keys as the format sees them.
Vector turned_keys(const SummaryFormat& format, const double* keys, int head_dim) {
  Vector result;
  for (int i = 0; i < format.page_tokens; ++i) {
    Vector key(keys + i * head_dim, keys + (i + 1) * head_dim);
    if (format.improved) key = ref::rotate(std::move(key));
    result.insert(result.end(), key.begin(), key.end());
  }
  return result;
}

// sum over tokens of |(k_i - mean) - sum_m c_mi V_m|^2: what basis and coefficients leave.
double residual_energy(const PageSummary& page, const Vector& keys, const Vector& mean) {
  double energy = 0;
  PageSummary about_mean = page;
  about_mean.centroid = mean;
  for (int i = 0; i < page.page_tokens; ++i) {
    const Vector rebuilt = ref::reconstruct_key(about_mean, i);
    for (std::size_t c = 0; c < rebuilt.size(); ++c) {
      const double error = keys[static_cast<std::size_t>(i) * rebuilt.size() + c] - rebuilt[c];
      energy += error * error;
    }
  }
  return energy;
}

int largest_code_difference(const int* a, const int* b, int count, int sign) {
  int largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::abs(a[i] - sign * b[i]));
  return largest;
}

// Codes of one page, kernel against reference. Eigenvectors are defined up to their sign, and up to
// a rotation among nearly equal eigenvalues: rows are compared only where the spectrum separates
// them.
class PageComparison {
 public:
  PageComparison(const EdgeCase& edge, const double* stored_keys, const Vector& reference)
      : format_(edge.format),
        d_(edge.head_dim),
        keys_(turned_keys(edge.format, stored_keys, edge.head_dim)),
        exact_(
            ref::summarise_exact(keys_.data(), format_.page_tokens, d_, format_.rank, &spectrum_)),
        expected_(ref::summarise_page(format_, stored_keys, d_, reference)),
        centroid_(exact_.centroid) {
    for (std::size_t c = 0; c < reference.size() && format_.improved; ++c) {
      centroid_[c] -= reference[c];
    }
  }

  void check(const QuantisedPage& actual) {
    if (std::isnan(expected_.centroid_scale)) {
      EXPECT_TRUE(std::isnan(actual.centroid_scale));
      for (double scale : actual.component_scales) EXPECT_TRUE(std::isnan(scale));
      return;
    }
    check_centroid(actual);
    bool same_basis = true;
    for (int m = 0; m < format_.rank; ++m) {
      same_basis = same_basis && is_separated(m);
      if (is_separated(m)) check_basis(actual, m);
    }
    same_basis = same_basis && flipped_codes == 0;
    for (int m = 0; m < format_.rank; ++m) {
      if (is_separated(m)) check_coefficients(actual, m, same_basis);
    }
    check_residual(actual);
  }

  int flipped_codes = 0;  // codes that rounded the other way
  int num_codes = 0;

 private:
  // The centroid's codes follow from it alone; half a step, plus one rounding of the scale in fp16.
  void check_centroid(const QuantisedPage& actual) {
    const double scale = actual.centroid_scale;
    EXPECT_TRUE(near(scale, expected_.centroid_scale,
                     {0x1p-24, 0x1p-10, "one fp16 step: the float mean may round the other way"}));
    const int limit = (1 << (format_.centroid_bits - 1)) - 1;
    const double largest_key = std::abs(*std::max_element(
        keys_.begin(), keys_.end(), [](double a, double b) { return std::abs(a) < std::abs(b); }));
    for (int c = 0; c < d_; ++c) {
      const double allowed =
          scale * (0.5 + limit * 0x1p-11) + 32 * kFloatRoundoff * largest_key + 6e-8;
      const int code = actual.centroid[static_cast<std::size_t>(c)];
      ASSERT_LE(std::abs(code), limit);
      ASSERT_LE(std::abs(code * scale - centroid_[static_cast<std::size_t>(c)]), allowed)
          << "centroid channel " << c;
    }
  }

  // Directions within a float's reach of each other may come out as any mixture.
  bool is_separated(int m) const {
    constexpr double kLeastGap = 0.02;
    const double value = spectrum_[static_cast<std::size_t>(m)];
    const double above = m == 0 ? INFINITY : spectrum_[static_cast<std::size_t>(m) - 1];
    const double below = spectrum_[static_cast<std::size_t>(m) + 1];
    return value > 1e-3 * spectrum_[0] && value > 1e-6 && above - value > kLeastGap * value &&
           value - below > kLeastGap * value;
  }

  int sign_of(const QuantisedPage& actual, int m) const {
    const int* basis = &actual.basis[static_cast<std::size_t>(m * d_)];
    const int* expected = &expected_.basis[static_cast<std::size_t>(m * d_)];
    return std::inner_product(basis, basis + d_, expected, 0) < 0 ? -1 : 1;
  }

  void check_basis(const QuantisedPage& actual, int m) {
    const int* basis = &actual.basis[static_cast<std::size_t>(m * d_)];
    const int* expected = &expected_.basis[static_cast<std::size_t>(m * d_)];
    const int sign = sign_of(actual, m);
    EXPECT_LE(largest_code_difference(basis, expected, d_, sign), 1) << "basis row " << m;
    for (int i = 0; i < d_; ++i) flipped_codes += basis[i] != sign * expected[i];
    num_codes += d_;
  }

  // The fit couples all rows: a flipped code in one, worth up to 1 / 7 of its largest channel,
  // moves the coefficients of those with less energy by a few per cent.
  void check_coefficients(const QuantisedPage& actual, int m, bool same_basis) {
    const int n = format_.page_tokens;
    const int* coefficients = &actual.coefficients[static_cast<std::size_t>(m * n)];
    const int* expected = &expected_.coefficients[static_cast<std::size_t>(m * n)];
    const int limit = (1 << (format_.coefficient_bits - 1)) - 1;
    const int sign = sign_of(actual, m);
    const Tolerance rounding = {0x1p-24, 4 * 0x1p-11, "two scales and their product in fp16"};
    const Tolerance flipped = {0x1p-24, 0.08, "a basis code rounded the other way"};
    EXPECT_TRUE(near(actual.component_scales[static_cast<std::size_t>(m)],
                     expected_.component_scales[static_cast<std::size_t>(m)],
                     same_basis ? rounding : flipped));
    EXPECT_LE(largest_code_difference(coefficients, expected, n, sign),
              same_basis ? 1 : 1 + limit / 12)
        << "coefficients of component " << m;
    if (!same_basis) return;
    for (int i = 0; i < n; ++i) flipped_codes += coefficients[i] != sign * expected[i];
    num_codes += n;
  }

  // Holds whatever the spectrum: no worse a reconstruction than the reference's. Where the basis is
  // a mixture, its quantisation error differs, at most by about the quantisation error itself.
  void check_residual(const QuantisedPage& actual) {
    const double tail = std::accumulate(spectrum_.begin() + format_.rank, spectrum_.end(), 0.0);
    const double mine =
        residual_energy(ref::dequantise(format_, d_, actual), keys_, exact_.centroid);
    const double theirs =
        residual_energy(ref::dequantise(format_, d_, expected_), keys_, exact_.centroid);
    bool separated = true;
    for (int m = 0; m < format_.rank; ++m) separated = separated && is_separated(m);
    const double slack = separated ? 0.02 : 1.0;
    const double float_noise = 1e-10 * ref::dot(keys_, keys_.data()) + 1e-10;
    EXPECT_LE(mine, theirs + slack * (theirs - tail) + float_noise);
  }

  SummaryFormat format_;
  int d_;
  Vector keys_, spectrum_;
  PageSummary exact_;
  QuantisedPage expected_;
  Vector centroid_;
};

class SummaryConformance : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(SummaryConformance, Records_MatchReference) {
  const EdgeCase& edge = GetParam();
  PagedFixture fixture(edge);
  const RecordLayout layout = record_layout(edge.format, edge.head_dim);
  ASSERT_EQ(layout.record_bytes, ref::record_bytes(edge.format, edge.head_dim));
  std::vector<std::uint8_t> first;
  for_each_setting([&](const Executor& executor) {
    fixture.poison_records();
    const std::int64_t built = summarise(fixture, zeros(fixture), executor);
    const std::vector<std::uint8_t> bytes = all_records(fixture);
    ASSERT_EQ(built * layout.record_bytes, static_cast<std::int64_t>(bytes.size()));
    if (!edge.top_of_big_pool) {
      // Nothing but the records, and the 8-byte headers of incomplete blocks, has been written.
      std::size_t most = bytes.size();
      for (int length : edge.lengths) {
        most += static_cast<std::size_t>(length % kBlockTokens != 0) *
                static_cast<std::size_t>(edge.num_kv_heads) * 8;
      }
      EXPECT_LE(fixture.num_touched_record_bytes(), most);
    }
    if (first.empty()) {
      first = bytes;
    } else {
      const auto [mine, other] = std::mismatch(bytes.begin(), bytes.end(), first.begin());
      ASSERT_TRUE(mine == bytes.end())
          << "records differ between CPU levels or numbers of workers, first at byte "
          << (mine - bytes.begin()) % layout.record_bytes << " of record "
          << (mine - bytes.begin()) / layout.record_bytes << ": " << int{*mine} << " and "
          << int{*other};
    }
  });

  int flipped = 0, codes = 0;
  for (int i = 0; i < fixture.num_seqs() && !HasFailure(); ++i) {
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      const int blocks = edge.lengths[static_cast<std::size_t>(i)] / kBlockTokens;
      for (int b = 0; b < blocks && !HasFailure(); ++b) {
        const std::uint8_t* bytes = fixture.record(i, h, b);
        ASSERT_TRUE(header_matches(layout, bytes));
        const ref::Record record = ref::parse_record(edge.format, edge.head_dim, bytes);
        EXPECT_EQ(record.header.magic, kRecordMagic);
        EXPECT_EQ(record.header.version, kRecordVersion);
        EXPECT_EQ(record.header.format, encode_format(edge.format));
        for (int p = 0; p < edge.format.pages_per_block() && !HasFailure(); ++p) {
          SCOPED_TRACE(::testing::Message()
                       << "sequence " << i << ", head " << h << ", block " << b << ", page " << p);
          const std::ptrdiff_t token = b * kBlockTokens + p * edge.format.page_tokens;
          PageComparison comparison(edge, fixture.dense_keys(i, h).data() + token * edge.head_dim,
                                    fixture.reference(h));
          comparison.check(record.pages[static_cast<std::size_t>(p)]);
          flipped += comparison.flipped_codes;
          codes += comparison.num_codes;
        }
      }
      if (edge.lengths[static_cast<std::size_t>(i)] % kBlockTokens != 0) {
        EXPECT_FALSE(header_matches(layout, fixture.record(i, h, blocks)));
      }
    }
  }
  // Codes differ only where a value lies within float rounding of a tie, which is rare.
  EXPECT_LE(flipped, 2 + codes / 500) << "of " << codes << " codes";
}

// A prompt in chunks that end anywhere, then token by token: the same records as in one call.
TEST_P(SummaryConformance, Chunks_GiveTheBytesOfOneCall) {
  const EdgeCase& edge = GetParam();
  PagedFixture whole(edge), parts(edge);
  summarise(whole, zeros(whole), serial_executor());
  std::mt19937_64 random(7);
  std::vector<std::int32_t> begin = zeros(parts), lengths = zeros(parts);
  SequenceBatch batch = parts.seqs();
  batch.lengths = lengths.data();
  std::int64_t built = 0;
  for (bool more = true; more;) {
    more = false;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      begin[i] = lengths[i];
      const int step = std::uniform_int_distribution<int>(0, 120)(random);
      lengths[i] = std::min(lengths[i] + step, edge.lengths[i]);
      more = more || lengths[i] < edge.lengths[i];
    }
    const Status status = summarise_blocks(parts.summary(), parts.keys(), batch, begin.data(),
                                           parts.records(), &built, serial_executor());
    ASSERT_TRUE(status.ok()) << status.message();
  }
  EXPECT_TRUE(all_records(whole) == all_records(parts));
  EXPECT_EQ(built * ref::record_bytes(edge.format, edge.head_dim),
            static_cast<std::int64_t>(all_records(whole).size()));
}

// A record left by another sequence must not outlive the first token that replaces its keys.
TEST_P(SummaryConformance, ReusedBlock_LosesItsRecord) {
  const EdgeCase& edge = GetParam();
  PagedFixture fixture(edge);
  const RecordLayout layout = record_layout(edge.format, edge.head_dim);
  std::vector<std::int32_t> begin, lengths;
  ref::Record stale;
  for (int p = 0; p < edge.format.pages_per_block(); ++p) {
    const Vector keys(static_cast<std::size_t>(edge.format.page_tokens * edge.head_dim), 1.0);
    stale.pages.push_back(ref::summarise_page(edge.format, keys.data(), edge.head_dim, {}));
  }
  stale.header = {kRecordMagic, kRecordVersion, encode_format(edge.format), 1};
  const auto stale_bytes = ref::pack_record(edge.format, edge.head_dim, stale);
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    const int block = edge.lengths[static_cast<std::size_t>(i)] / kBlockTokens;
    const bool partial = edge.lengths[static_cast<std::size_t>(i)] % kBlockTokens != 0;
    lengths.push_back(edge.lengths[static_cast<std::size_t>(i)]);
    begin.push_back(std::max(0, lengths.back() - 1));
    for (int h = 0; h < edge.num_kv_heads && partial; ++h) {
      std::memcpy(fixture.record(i, h, block), stale_bytes.data(), stale_bytes.size());
      ASSERT_TRUE(header_matches(layout, fixture.record(i, h, block)));
    }
  }
  summarise(fixture, begin, serial_executor());
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    if (lengths[static_cast<std::size_t>(i)] % kBlockTokens == 0) continue;
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      EXPECT_FALSE(header_matches(
          layout, fixture.record(i, h, lengths[static_cast<std::size_t>(i)] / kBlockTokens)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Edge, SummaryConformance, ::testing::ValuesIn(edge_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

TEST(SummaryConformance, KeyHash_TellsKeysApart) {
  PagedFixture a({.name = "", .lengths = {64}}), b({.name = "", .lengths = {64}}, 2);
  summarise(a, zeros(a), serial_executor());
  summarise(b, zeros(b), serial_executor());
  const RecordLayout layout = record_layout(kFine, 64);
  std::vector<std::uint32_t> hashes;
  for (const PagedFixture* fixture : {&a, &b}) {
    for (int block = 0; block < 4; ++block) {
      for (int h = 0; h < 2; ++h) {
        hashes.push_back(read_header(layout, fixture->record(0, h, block)).key_hash);
      }
    }
  }
  std::sort(hashes.begin(), hashes.end());
  EXPECT_EQ(std::adjacent_find(hashes.begin(), hashes.end()), hashes.end());
}

}  // namespace
}  // namespace locks::testing
