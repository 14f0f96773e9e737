// The parts of the summary stage: formats, record layout, rotation, eigensolver, key hash.
#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "locks/locks.h"
#include "summary/eigensolver.h"
#include "summary/key_hash.h"
#include "support/summary_sequence.h"

namespace locks::testing {
namespace {

TEST(SummaryFormat, EveryFormat_SurvivesCodeAndName) {
  for (int code = 0; code < 144; ++code) {
    const SummaryFormat format = decode_format(code).value();
    EXPECT_TRUE(validate(format).ok()) << code;
    EXPECT_EQ(encode_format(format), code);
    const auto parsed = parse_format(format_name(format));
    ASSERT_TRUE(parsed.ok()) << format_name(format);
    EXPECT_EQ(parsed.value(), format) << format_name(format);
  }
}

TEST(SummaryFormat, Codes_AreWhatRecordsHold) {
  EXPECT_EQ(encode_format(kFine), 0x01);
  EXPECT_EQ(encode_format(kFine8), 0x0D);
  EXPECT_EQ(encode_format(kCompact), 0x21);
  EXPECT_EQ(encode_format(kWide), 0x89);
  EXPECT_EQ(encode_format(kPaper), 0x8A);
}

TEST(SummaryFormat, Names_ArePresetsOrSpelledOut) {
  EXPECT_EQ(format_name(kFine), "fine");
  EXPECT_EQ(format_name(kPaper), "paper");
  EXPECT_EQ(parse_format("b4r1m4v4c4").value(), kFine);
  EXPECT_EQ(parse_format("b16r8m8v4c8-plain").value(), kPaper);
  EXPECT_EQ(format_name({8, 4, 8, 4, 8, false}), "b8r4m8v4c8-plain");
}

TEST(SummaryFormat, BadNames_AreRefused) {
  for (const char* name :
       {"", "Fine", "fine ", "b4", "b4r1m4v4", "b4r1m4v4c4-", "b4r1m4v4c4-plainer", "r1b4m4v4c4",
        "b004r1m4v4c4", "b-4r1m4v4c4", "b4r1m4v4c4c4"}) {
    const auto parsed = parse_format(name);
    ASSERT_FALSE(parsed.ok()) << name;
    EXPECT_EQ(parsed.status().code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(
        contains(parsed.status().message(), "name = '" + std::string(name) + "', expected"));
  }
}

TEST(SummaryFormat, BadValues_AreNamedWithTheirRange) {
  const auto message = [](const SummaryFormat& format) { return validate(format).message(); };
  EXPECT_EQ(message({5, 1, 4, 4, 4, true}), "format: page_tokens = 5, expected 4, 8 or 16");
  EXPECT_EQ(message({4, 4, 4, 4, 4, true}),
            "format: rank = 4, expected 1 or 2 with page_tokens = 4");
  EXPECT_EQ(message({8, 3, 4, 4, 4, true}),
            "format: rank = 3, expected 1, 2 or 4 with page_tokens = 8");
  EXPECT_EQ(message({16, 0, 4, 4, 4, true}),
            "format: rank = 0, expected 1, 2, 4 or 8 with page_tokens = 16");
  EXPECT_EQ(message({4, 1, 2, 4, 4, true}), "format: centroid_bits = 2, expected 4 or 8");
  EXPECT_EQ(message({4, 1, 4, 16, 4, true}), "format: basis_bits = 16, expected 4 or 8");
  EXPECT_EQ(message({4, 1, 4, 4, 0, true}), "format: coefficient_bits = 0, expected 4 or 8");
  EXPECT_TRUE(contains(parse_format("b4r8m4v4c4").status().message(), "rank = 8"));
  for (int code : {-1, 144, 255, 256}) {
    EXPECT_TRUE(contains(decode_format(code).status().message(), "expected 0 to 143")) << code;
  }
}

TEST(RecordLayout, Presets_HaveThePublishedSizes) {
  const int bytes[5][3] = {
      {288, 544, 1056}, {544, 1056, 2080}, {160, 288, 544}, {416, 736, 1376}, {480, 800, 1440}};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(record_layout(kPresets[i], 64).record_bytes, bytes[i][0]);
    EXPECT_EQ(record_layout(kPresets[i], 128).record_bytes, bytes[i][1]);
    EXPECT_EQ(record_layout(kPresets[i], 256).record_bytes, bytes[i][2]);
  }
  EXPECT_EQ(record_layout({0, 1, 4, 4, 4, true}, 64).record_bytes, 0);  // no format
  for (int head_dim : {0, -64, 72, 2147483647, -2147483647 - 1}) {
    EXPECT_EQ(record_layout(kFine, head_dim).record_bytes, 0) << head_dim;
  }
}

TEST(RecordLayout, EveryFormat_HasDisjointAlignedParts) {
  for (const SummaryFormat& format : every_format()) {
    for (int d : kHeadDims) {
      const RecordLayout layout = record_layout(format, d);
      const int pages = format.pages_per_block();
      EXPECT_EQ(layout.record_bytes % 32, 0);
      EXPECT_EQ(layout.header_offset, layout.record_bytes - 8);
      EXPECT_EQ(layout.scales_offset, pages * layout.page_rows_bytes);
      EXPECT_EQ(layout.scales_offset % 2, 0);
      EXPECT_EQ(layout.coefficients_offset % 8, 0);
      EXPECT_GE(layout.coefficients_offset, layout.scales_offset + pages * (1 + format.rank) * 2);
      EXPECT_GE(layout.header_offset,
                layout.coefficients_offset + pages * layout.page_coefficient_bytes);
    }
  }
}

TEST(Rotation, Definition_IsSignsThenHadamardOnEachRun) {
  const auto sign = [](int channel) {  // splitmix64, seed 0x10C5, run from the start
    std::uint64_t state = 0x10C5, z = 0;
    for (int i = 0; i <= channel; ++i) {
      state += 0x9E3779B97F4A7C15u;
      z = state;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      z ^= z >> 31;
    }
    return (z >> 63) == 0 ? 1.0 : -1.0;
  };
  for (int d : kHeadDims) {
    const int run = d & -d;
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> x(at(d));
    for (float& value : x) value = normal(random);
    std::vector<double> expected(at(d));
    for (int i = 0; i < d; ++i) {
      for (int j = i / run * run; j < (i / run + 1) * run; ++j) {
        const double entry =
            __builtin_popcount(static_cast<unsigned>(i & j & (run - 1))) % 2 ? -1 : 1;
        expected[at(i)] += entry * sign(j) * static_cast<double>(x[at(j)]) / std::sqrt(run);
      }
    }
    std::vector<float> first;
    at_each_level([&] {
      std::vector<float> rotated = x;
      rotate(rotated.data(), d);
      // log2(256) = 8 additions on values of a few units, each off by half an ulp of at most 2^-22.
      for (int i = 0; i < d; ++i) EXPECT_NEAR(rotated[at(i)], expected[at(i)], 4e-6) << d;
      if (first.empty()) first = rotated;
      EXPECT_EQ(rotated, first);
    });
  }
}

// Compares with Eigen in double. Errors are relative to the largest eigenvalue; float's rounding
// (6e-8) accumulates over at most 7 sweeps of 15 rounds.
template <int N>
void check_eigenvectors(const Eigen::MatrixXd& matrix, const char* what) {
  SCOPED_TRACE(what);
  std::vector<float> input(N * N), vectors(N * N), values(N);
  for (int i = 0; i < N * N; ++i) input[at(i)] = static_cast<float>(matrix(i / N, i % N));
  detail::top_eigenvectors<N>(input.data(), N, vectors.data(), values.data());
  Eigen::MatrixXd stored(N, N), u(N, N);
  for (int i = 0; i < N * N; ++i) {
    stored(i / N, i % N) = input[at(i)];
    u(i / N, i % N) = vectors[at(i)];
  }
  const Eigen::VectorXd expected =
      Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd>(stored).eigenvalues().reverse();
  const double size = std::max(stored.cwiseAbs().maxCoeff(), 1e-300);
  EXPECT_LT((u * u.transpose() - Eigen::MatrixXd::Identity(N, N)).cwiseAbs().maxCoeff(), 5e-6);
  for (int k = 0; k < N; ++k) {
    EXPECT_NEAR(values[at(k)] / size, expected(k) / size, 4e-6) << k;
    const Eigen::VectorXd residual =
        stored * u.row(k).transpose() - expected(k) * u.row(k).transpose();
    EXPECT_LT(residual.norm() / size, 1e-5) << k;
  }
}

template <int N>
void check_eigensolver() {
  std::mt19937 random(11);
  std::normal_distribution<double> normal;
  const auto tokens = [&](int d) {
    return Eigen::MatrixXd(Eigen::MatrixXd::NullaryExpr(N, d, [&] { return normal(random); }));
  };
  for (int trial = 0; trial < 20; ++trial) {
    const Eigen::MatrixXd x = tokens(64);
    check_eigenvectors<N>(x * x.transpose(), "random Gram");
    const Eigen::MatrixXd centred = x.rowwise() - x.colwise().mean();
    check_eigenvectors<N>(centred * centred.transpose(), "centred Gram, rank N - 1");
    const Eigen::MatrixXd one = tokens(1);
    check_eigenvectors<N>(one * one.transpose(), "rank 1");
    check_eigenvectors<N>(x * x.transpose() * 1e-30, "tiny");
    check_eigenvectors<N>(x * x.transpose() * 1e30, "huge");
    const Eigen::MatrixXd q = Eigen::HouseholderQR<Eigen::MatrixXd>(tokens(N)).householderQ();
    Eigen::VectorXd spectrum = Eigen::VectorXd::Ones(N);
    spectrum.head(N / 2) *= 3;
    check_eigenvectors<N>(q * spectrum.asDiagonal() * q.transpose(), "two tied halves");
    for (int i = 0; i < N; ++i) spectrum(i) = std::pow(10.0, -i);
    check_eigenvectors<N>(q * spectrum.asDiagonal() * q.transpose(), "steep spectrum");
  }
  check_eigenvectors<N>(Eigen::MatrixXd::Zero(N, N), "zero");
  check_eigenvectors<N>(Eigen::MatrixXd::Identity(N, N), "identity");
  check_eigenvectors<N>(Eigen::MatrixXd::Ones(N, N), "ones");
  check_eigenvectors<N>(Eigen::MatrixXd::Identity(N, N) * 1e-44, "subnormal");
  check_eigenvectors<N>(Eigen::MatrixXd::Ones(N, N) * 1.5e37, "near overflow");
}

TEST(Eigensolver, Order4_MatchesEigen) { check_eigensolver<4>(); }
TEST(Eigensolver, Order8_MatchesEigen) { check_eigensolver<8>(); }
TEST(Eigensolver, Order16_MatchesEigen) { check_eigensolver<16>(); }

TEST(Eigensolver, Nan_Returns) {
  std::vector<float> matrix(256, std::numeric_limits<float>::quiet_NaN()), vectors(128);
  detail::top_eigenvectors<16>(matrix.data(), 8, vectors.data(), nullptr);
}

// The hash of 16 rows of `pairs` pairs of words, from its definition.
std::uint32_t hash_rows(const std::vector<std::uint32_t>& words) {
  const std::size_t pairs = words.size() / kBlockTokens / 2;
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < words.size(); i += 2) {
    const auto t = static_cast<int>(i / 2 / pairs), q = static_cast<int>(i / 2 % pairs);
    const std::uint32_t lane = detail::hash_lane_key(t / 4, q % 8);
    sum += detail::hash_pair(words[i] + detail::hash_key(t % 4, q / 8, 0) + lane,
                             words[i + 1] + detail::hash_key(t % 4, q / 8, 1) + lane);
  }
  return detail::finish_key_hash(sum, static_cast<std::uint32_t>(words.size()));
}

TEST(KeyHash, EachWordAndItsPlace_Matter) {
  for (const std::size_t row_words : {32u, 40u, 64u, 256u}) {
    std::vector<std::uint32_t> words(kBlockTokens * row_words);
    std::mt19937 random(3);
    for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random());
    const std::uint32_t hash = hash_rows(words);
    for (std::size_t i = 0; i < words.size(); ++i) {
      auto changed = words;
      changed[i] ^= 1u << (i % 32);
      EXPECT_NE(hash_rows(changed), hash) << "word " << i;
      changed = words;
      std::swap(changed[i], changed[(i * 7 + 1) % words.size()]);
      if (changed != words) {
        EXPECT_NE(hash_rows(changed), hash) << "swapped " << i;
      }
    }
    for (std::size_t t = 1; t < kBlockTokens; ++t) {
      auto changed = words;
      const auto row = static_cast<std::ptrdiff_t>(row_words), at = static_cast<std::ptrdiff_t>(t);
      std::swap_ranges(changed.begin(), changed.begin() + row, changed.begin() + at * row);
      EXPECT_NE(hash_rows(changed), hash) << "tokens 0 and " << t;
    }
  }
}

// Half of the places may hold nothing: keys of zero still tell where the others lie.
TEST(KeyHash, MovedWord_ChangesTheHash) {
  std::vector<std::uint32_t> hashes;
  for (std::size_t i = 0; i < kBlockTokens * 64; ++i) {
    std::vector<std::uint32_t> words(kBlockTokens * 64);
    words[i] = 0x3F80;
    hashes.push_back(hash_rows(words));
  }
  std::sort(hashes.begin(), hashes.end());
  EXPECT_EQ(std::adjacent_find(hashes.begin(), hashes.end()), hashes.end());
}

TEST(KeyHash, Record_HoldsIt) {
  Sequence sequence({}, kFine);
  ASSERT_TRUE(sequence.update(0, 16).ok());
  std::vector<std::uint32_t> words;
  for (int i = 0; i < kBlockTokens * 32; ++i) {
    const std::uint32_t low = detail::float_to_bf16(test_key(0, i / 32, i % 32 * 2));
    const std::uint32_t high = detail::float_to_bf16(test_key(0, i / 32, i % 32 * 2 + 1));
    words.push_back(low | high << 16);
  }
  const auto header = read_header(record_layout(kFine, 64), sequence.record(0, 0));
  EXPECT_EQ(header.key_hash, hash_rows(words));
}

}  // namespace
}  // namespace locks::testing
