// Summary stage: formats, record layout, eigensolver, and the bytes of records.
#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/scalar.h"
#include "locks/locks.h"
#include "summary/eigensolver.h"
#include "summary/key_hash.h"

namespace locks {
namespace {

constexpr int kHeadDims[] = {64, 80, 96, 128, 192, 256};
constexpr SummaryFormat kPresets[] = {kFine, kFine8, kCompact, kWide, kPaper};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << text << "' lacks '" << part << "'";
}

std::vector<SummaryFormat> all_formats() {
  std::vector<SummaryFormat> formats;
  for (int code = 0; code < 144; ++code) formats.push_back(decode_format(code).value());
  return formats;
}

std::vector<CpuLevel> levels() {
  std::vector<CpuLevel> found;
  for (CpuLevel level : {CpuLevel::kBaseline, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (level <= best_cpu_level()) found.push_back(level);
  }
  return found;
}

// Runs `body` at each instruction-set level that the machine has, then returns to the best.
template <class Body>
void at_each_level(Body body) {
  for (CpuLevel level : levels()) {
    ASSERT_TRUE(set_cpu_level(level).ok());
    SCOPED_TRACE(cpu_level_name(level));
    body();
  }
  ASSERT_TRUE(set_cpu_level(best_cpu_level()).ok());
}

// ----------------------------------------------------------------------------------------------
// formats

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

// -----------------------------------------------------------------------------------------------
// layout

TEST(RecordLayout, Presets_HaveThePublishedSizes) {
  const int bytes[5][3] = {
      {288, 544, 1056}, {544, 1056, 2080}, {160, 288, 544}, {416, 736, 1376}, {480, 800, 1440}};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(record_layout(kPresets[i], 64).record_bytes, bytes[i][0]);
    EXPECT_EQ(record_layout(kPresets[i], 128).record_bytes, bytes[i][1]);
    EXPECT_EQ(record_layout(kPresets[i], 256).record_bytes, bytes[i][2]);
  }
}

TEST(RecordLayout, EveryFormat_HasDisjointAlignedParts) {
  for (const SummaryFormat& format : all_formats()) {
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

// ---------------------------------------------------------------------------------------------
// rotation

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
    std::vector<float> x(index(d));
    for (float& value : x) value = normal(random);
    std::vector<double> expected(index(d));
    for (int i = 0; i < d; ++i) {
      for (int j = i / run * run; j < (i / run + 1) * run; ++j) {
        const double entry =
            __builtin_popcount(static_cast<unsigned>(i & j & (run - 1))) % 2 ? -1 : 1;
        expected[index(i)] += entry * sign(j) * static_cast<double>(x[index(j)]) / std::sqrt(run);
      }
    }
    std::vector<float> first;
    at_each_level([&] {
      std::vector<float> rotated = x;
      rotate(rotated.data(), d);
      // log2(256) = 8 additions on values of a few units, each off by half an ulp of at most 2^-22.
      for (int i = 0; i < d; ++i) EXPECT_NEAR(rotated[index(i)], expected[index(i)], 4e-6) << d;
      if (first.empty()) first = rotated;
      EXPECT_EQ(rotated, first);
    });
  }
}

// ------------------------------------------------------------------------------------------
// eigensolver

// Compares with Eigen in double. Errors are relative to the largest eigenvalue; float's rounding
// (6e-8) accumulates over at most 7 sweeps of 15 rounds.
template <int N>
void check_eigenvectors(const Eigen::MatrixXd& matrix, const char* what) {
  SCOPED_TRACE(what);
  std::vector<float> input(N * N), vectors(N * N), values(N);
  for (int i = 0; i < N * N; ++i) input[index(i)] = static_cast<float>(matrix(i / N, i % N));
  detail::top_eigenvectors<N>(input.data(), N, vectors.data(), values.data());
  Eigen::MatrixXd stored(N, N), u(N, N);
  for (int i = 0; i < N * N; ++i) {
    stored(i / N, i % N) = input[index(i)];
    u(i / N, i % N) = vectors[index(i)];
  }
  const Eigen::VectorXd expected =
      Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd>(stored).eigenvalues().reverse();
  const double size = std::max(stored.cwiseAbs().maxCoeff(), 1e-300);
  EXPECT_LT((u * u.transpose() - Eigen::MatrixXd::Identity(N, N)).cwiseAbs().maxCoeff(), 5e-6);
  for (int k = 0; k < N; ++k) {
    EXPECT_NEAR(values[index(k)] / size, expected(k) / size, 4e-6) << k;
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
  std::vector<float> matrix(256, kNan), vectors(128);
  detail::top_eigenvectors<16>(matrix.data(), 8, vectors.data(), nullptr);
}

TEST(KeyHash, EachWordAndItsPlace_Matter) {
  using detail::mix_key_word;
  const std::uint32_t sum = mix_key_word(1, 0) + mix_key_word(2, 1);
  EXPECT_NE(sum, mix_key_word(2, 0) + mix_key_word(1, 1));
  for (int bit = 0; bit < 32; ++bit) {
    EXPECT_NE(mix_key_word(0, 5), mix_key_word(1u << bit, 5)) << bit;
  }
}

// ----------------------------------------------------------------------------------------------
// records

// Key (head, token, channel) of all record tests: splitmix64, seed 2026, output number
// (head * 2^20 + token) * 256 + channel; its top byte as a signed number, over 32. So a key is a
// multiple of 1/32 in [-4, 4), exact in f32, bf16 and f16.
float test_key(int head, int token, int channel) {
  const std::uint64_t number =
      (static_cast<std::uint64_t>(head) << 20 | static_cast<std::uint64_t>(token)) * 256 +
      static_cast<std::uint64_t>(channel);
  std::uint64_t z = 2026 + (number + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return static_cast<float>(static_cast<std::int8_t>(z >> 56)) / 32;
}

struct Shape {
  int head_dim = 64;
  int num_kv_heads = 2;
  int num_tokens = 96;
  ScalarType type = ScalarType::kBFloat16;
  int block_tokens = 16;
  int record_block_tokens = 16;
  bool token_major = false;
};

constexpr std::uint8_t kPoison = 0xA5;

// One sequence with its cache and records, both in cache blocks that are out of order.
class Sequence {
 public:
  explicit Sequence(const Shape& shape, const SummaryFormat& format = kFine)
      : shape_(shape), layout_(record_layout(format, shape.head_dim)) {
    const int d = shape.head_dim, heads = shape.num_kv_heads;
    key_ids_ = scattered(shape.num_tokens, shape.block_tokens);
    record_ids_ = scattered(shape.num_tokens, shape.record_block_tokens);
    keys_.type = shape.type;
    keys_.num_blocks = static_cast<std::int64_t>(key_ids_.size()) + 2;
    keys_.block_tokens = shape.block_tokens;
    keys_.num_kv_heads = heads;
    keys_.head_dim = d;
    keys_.token_stride = shape.token_major ? heads * d : d;
    keys_.head_stride = shape.token_major ? d : shape.block_tokens * d;
    keys_.block_stride =
        heads * shape.block_tokens * d + 32;  // a gap, as in a pool shared with values
    key_bytes_.assign(index(keys_.num_blocks * keys_.block_stride * scalar_bytes(shape.type)),
                      kPoison);
    keys_.data = key_bytes_.data();
    for (int h = 0; h < heads; ++h) {
      for (int t = 0; t < shape.num_tokens; ++t) {
        for (int c = 0; c < d; ++c) set(h, t, c, test_key(h, t, c));
      }
    }
    records_.num_blocks = static_cast<std::int64_t>(record_ids_.size()) + 2;
    records_.block_tokens = shape.record_block_tokens;
    records_.num_kv_heads = heads;
    records_.record_bytes = layout_.record_bytes;
    records_.head_stride = shape.record_block_tokens / 16 * layout_.record_bytes;
    records_.block_stride = heads * records_.head_stride + 16;
    record_bytes_.resize(index(records_.num_blocks * records_.block_stride + 16));
    const auto address = reinterpret_cast<std::uintptr_t>(record_bytes_.data());
    records_.data = record_bytes_.data() + (16 - address % 16) % 16;
    poison();
  }

  void set(int head, int token, int channel, float value) {
    const int n = token / shape_.block_tokens, t = token % shape_.block_tokens;
    detail::store_scalar(key_bytes_.data(), shape_.type,
                         key_ids_[index(n)] * keys_.block_stride + head * keys_.head_stride +
                             t * keys_.token_stride + channel,
                         value);
  }

  // Every channel of tokens [begin, end) of both heads.
  void fill(int begin, int end, float value) {
    for (int h = 0; h < shape_.num_kv_heads; ++h) {
      for (int t = begin; t < end; ++t) {
        for (int c = 0; c < shape_.head_dim; ++c) set(h, t, c, value);
      }
    }
  }

  void poison() { std::fill(record_bytes_.begin(), record_bytes_.end(), kPoison); }

  SequenceBatch batch(const std::int32_t* length) const {
    return {1, length, table(key_ids_), table(record_ids_)};
  }

  Status update(std::int32_t begin, std::int32_t length, const float* reference = nullptr,
                const Executor& executor = serial_executor()) {
    return summarise_blocks({layout_.format, reference}, keys_, batch(&length), &begin, records_,
                            &built_, executor);
  }

  std::uint8_t* record(int head, int block) {
    const int per_block = shape_.record_block_tokens / 16;
    return records_.data + record_ids_[index(block / per_block)] * records_.block_stride +
           head * records_.head_stride + block % per_block * records_.record_bytes;
  }

  // All complete records, heads first; without the key hash, which depends on the keys' type, if
  // asked.
  std::vector<std::uint8_t> bytes(bool with_hash = true) {
    std::vector<std::uint8_t> all;
    const int size = layout_.record_bytes - (with_hash ? 0 : 4);
    for (int h = 0; h < shape_.num_kv_heads; ++h) {
      for (int k = 0; k < shape_.num_tokens / 16; ++k) {
        all.insert(all.end(), record(h, k), record(h, k) + size);
      }
    }
    return all;
  }

  // Bits of scale `k` (0 centroid, then components) of a page.
  std::uint16_t scale_bits(int head, int block, int page, int k) {
    std::uint16_t bits;
    std::memcpy(
        &bits,
        record(head, block) + layout_.scales_offset + 2 * (page * (1 + layout_.format.rank) + k),
        2);
    return bits;
  }

  const Shape& shape() const { return shape_; }
  const RecordLayout& layout() const { return layout_; }
  const PagedTensor& keys() const { return keys_; }
  const RecordCache& records() const { return records_; }
  std::int64_t built() const { return built_; }
  const std::vector<std::uint8_t>& record_memory() const { return record_bytes_; }

 private:
  // Ids from the highest down, so that neighbours in the sequence are not neighbours in memory.
  static std::vector<std::int32_t> scattered(int num_tokens, int block_tokens) {
    std::vector<std::int32_t> ids(index((num_tokens + block_tokens - 1) / block_tokens));
    for (std::size_t n = 0; n < ids.size(); ++n) ids[n] = static_cast<std::int32_t>(ids.size() - n);
    return ids;
  }
  static BlockTable table(const std::vector<std::int32_t>& ids) {
    return {ids.data(), 0, static_cast<std::int64_t>(ids.size())};
  }

  Shape shape_;
  RecordLayout layout_;
  std::vector<std::uint8_t> key_bytes_, record_bytes_;
  std::vector<std::int32_t> key_ids_, record_ids_;
  PagedTensor keys_;
  RecordCache records_;
  std::int64_t built_ = 0;
};

std::vector<std::uint8_t> build_all(const Shape& shape, const SummaryFormat& format,
                                    bool with_hash = true) {
  Sequence sequence(shape, format);
  EXPECT_TRUE(sequence.update(0, shape.num_tokens).ok());
  return sequence.bytes(with_hash);
}

std::uint64_t fnv1a(const std::vector<std::uint8_t>& bytes) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (std::uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001B3u;
  return hash;
}

struct Golden {
  const char* format;
  int head_dim;
  std::uint64_t fnv;  // of the 12 records of Shape{} at this head_dim, heads first
};

class GoldenBytes : public ::testing::TestWithParam<Golden> {};

TEST_P(GoldenBytes, Records_AreTheseAtEveryLevel) {
  const Golden& golden = GetParam();
  Shape shape;
  shape.head_dim = golden.head_dim;
  at_each_level([&] {
    const std::uint64_t fnv = fnv1a(build_all(shape, parse_format(golden.format).value()));
    EXPECT_EQ(fnv, golden.fnv) << std::hex << "{\"" << golden.format << "\", " << std::dec
                               << golden.head_dim << ", 0x" << std::hex << fnv << "}";
  });
}

INSTANTIATE_TEST_SUITE_P(Presets, GoldenBytes,
                         ::testing::Values(Golden{"fine", 64, 0x2fefafcf66e73757U}, Golden{"fine", 80, 0xee3d7a49d6487f39U},
                                           Golden{"fine", 96, 0x6b0bba82604b8304U}, Golden{"fine", 128, 0x8ac3593aa834f861U},
                                           Golden{"fine", 192, 0x35f3a3a0942a289eU}, Golden{"fine", 256, 0x74bd15422cab40daU},
                                           Golden{"fine8", 128, 0x557c64823849b224U}, Golden{"compact", 128, 0xad7ae8b46feeaf5aU},
                                           Golden{"wide", 80, 0x555adad4f6fe5fe0U}, Golden{"wide", 128, 0x22ea247f06a574e2U},
                                           Golden{"paper", 96, 0xb9ee26b721f58531U}, Golden{"paper", 128, 0xed8079d4ac1ba4b1U},
                                           Golden{"b8r4m8v8c8", 128, 0xf03b36317c59844dU}));

TEST(Records, TailOfAFineRecord_IsTheseBytes) {
  Sequence sequence({}, kFine);
  ASSERT_TRUE(sequence.update(0, 16).ok());
  const std::uint8_t* record = sequence.record(0, 0);
  std::string tail;
  for (int i = 256; i < 288; ++i) {
    char byte[3];
    std::snprintf(byte, sizeof byte, "%02x", record[i]);
    tail += byte;
  }
  EXPECT_EQ(tail,
            "4e36f02e7d35d32ccd36602e7736e62e"  // four times the scales of centroid and component
            "f268af34683ff458"                  // 16 coefficients
            "4c4b01013ba011e9");                // magic, version, format, hash
}

TEST(Records, EveryFormatAndHeadDim_IsTheSameAtEveryLevel) {
  for (const SummaryFormat& format : all_formats()) {
    for (int d : kHeadDims) {
      Shape shape;
      shape.head_dim = d;
      shape.num_tokens = 32;
      std::vector<std::uint8_t> first;
      at_each_level([&] {
        const auto bytes = build_all(shape, format);
        if (first.empty()) first = bytes;
        EXPECT_EQ(bytes, first) << format_name(format) << " " << d;
      });
    }
  }
}

TEST(Records, CacheLayoutAndBlockSizes_DoNotMatter) {
  for (const SummaryFormat& format : {kFine, kPaper}) {
    Shape shape;
    shape.num_tokens = 256;
    const auto expected = build_all(shape, format);
    for (int block_tokens : {16, 32, 64, 128}) {
      for (int record_block_tokens : {16, 32, 64, 128}) {
        for (bool token_major : {false, true}) {
          shape.block_tokens = block_tokens;
          shape.record_block_tokens = record_block_tokens;
          shape.token_major = token_major;
          EXPECT_EQ(build_all(shape, format), expected)
              << block_tokens << " " << record_block_tokens << " " << token_major;
        }
      }
    }
  }
}

TEST(Records, ScalarType_ChangesOnlyTheKeyHash) {
  Shape shape;
  const auto expected = build_all(shape, kFine, false);
  std::vector<std::vector<std::uint8_t>> whole;
  for (ScalarType type : {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16}) {
    shape.type = type;
    EXPECT_EQ(build_all(shape, kFine, false), expected);
    whole.push_back(build_all(shape, kFine));
  }
  EXPECT_NE(whole[0], whole[1]);
  EXPECT_NE(whole[1], whole[2]);
}

TEST(Records, AnyChunks_EqualOneShot) {
  Shape shape;
  shape.num_tokens = 200;
  Sequence once(shape);
  ASSERT_TRUE(once.update(0, 200).ok());
  EXPECT_EQ(once.built(), 2 * 12);
  std::mt19937 random(3);
  for (int trial = 0; trial < 20; ++trial) {
    Sequence chunked(shape);
    for (int begin = 0; begin < 200;) {
      const int end = std::min(200, begin + static_cast<int>(random() % (trial < 5 ? 3 : 50)));
      ASSERT_TRUE(chunked.update(begin, end).ok());
      begin = end;
    }
    EXPECT_EQ(chunked.bytes(), once.bytes());
    EXPECT_EQ(chunked.built(), once.built());
  }
}

TEST(Records, ManyWorkers_EqualOne) {
  const Executor threads{4,
                         [](void*, int n, Executor::Work work, void* argument) {
                           std::vector<std::thread> pool;
                           for (int w = 0; w < n; ++w) pool.emplace_back(work, argument, w);
                           for (auto& thread : pool) thread.join();
                         },
                         nullptr};
  Shape shape;
  shape.num_tokens = 16 * 70;  // three items a head
  Sequence one(shape), four(shape);
  ASSERT_TRUE(one.update(0, shape.num_tokens).ok());
  ASSERT_TRUE(four.update(0, shape.num_tokens, nullptr, threads).ok());
  EXPECT_EQ(one.record_memory(), four.record_memory());
}

TEST(Records, Batch_DealsWithEachSequenceOnItsOwn) {
  Shape shape;
  shape.num_tokens = 96;
  Sequence expected(shape), batched(shape);
  ASSERT_TRUE(expected.update(0, 96).ok());
  // Four rows over one table: two that complete blocks, one that leaves a block, one of length 0.
  const std::int32_t lengths[] = {48, 96, 41, 0}, begins[] = {0, 48, 41, 0};
  const std::int32_t length = 96;
  SequenceBatch batch = batched.batch(&length);
  batch.num_seqs = 4;
  batch.lengths = lengths;
  std::int64_t built = 5;
  ASSERT_TRUE(summarise_blocks({kFine, nullptr}, batched.keys(), batch, begins, batched.records(),
                               &built, serial_executor())
                  .ok());
  EXPECT_EQ(built, 5 + 2 * 6);
  EXPECT_EQ(batched.bytes(), expected.bytes());
}

TEST(Records, IncompleteBlock_LosesItsHeader) {
  Shape shape;
  Sequence sequence(shape);
  ASSERT_TRUE(sequence.update(0, 96).ok());
  ASSERT_TRUE(header_matches(sequence.layout(), sequence.record(1, 2)));
  // Another sequence takes the cache blocks over, and writes tokens 32 to 40.
  ASSERT_TRUE(sequence.update(32, 41).ok());
  for (int h = 0; h < 2; ++h) {
    EXPECT_FALSE(header_matches(sequence.layout(), sequence.record(h, 2)));
    EXPECT_TRUE(header_matches(sequence.layout(), sequence.record(h, 1)));
    EXPECT_TRUE(header_matches(sequence.layout(), sequence.record(h, 3)));
  }
  const RecordHeader header = read_header(sequence.layout(), sequence.record(0, 2));
  EXPECT_EQ(header.magic, 0);
  EXPECT_EQ(header.key_hash, 0u);
}

TEST(Records, NoNewTokens_TouchNothing) {
  Sequence sequence({});
  for (int length : {0, 5, 16, 96}) {
    const auto before = sequence.record_memory();
    ASSERT_TRUE(sequence.update(length, length).ok());
    EXPECT_EQ(sequence.record_memory(), before);
  }
  EXPECT_EQ(sequence.built(), 0);
}

TEST(Records, Writes_StayWithinTheirRecords) {
  Shape shape;
  Sequence sequence(shape);
  ASSERT_TRUE(sequence.update(0, 96).ok());
  const auto first = sequence.bytes();
  for (int h = 0; h < 2; ++h) {
    for (int k = 0; k < 6; ++k) {
      std::memset(sequence.record(h, k), kPoison, index(sequence.layout().record_bytes));
    }
  }
  for (std::uint8_t byte : sequence.record_memory()) ASSERT_EQ(byte, kPoison);
  ASSERT_TRUE(sequence.update(0, 96).ok());
  EXPECT_EQ(sequence.bytes(), first);
}

// The same layouts, written over different old contents, give the same bytes: no gap is left as it
// was.
TEST(Records, OldContents_LeaveNoTrace) {
  for (const SummaryFormat& format : all_formats()) {
    Shape shape;
    shape.num_tokens = 16;
    Sequence over_poison(shape, format), over_zero(shape, format);
    std::memset(over_zero.record(0, 0), 0, index(over_zero.layout().record_bytes));
    std::memset(over_zero.record(1, 0), 0, index(over_zero.layout().record_bytes));
    ASSERT_TRUE(over_poison.update(0, 16).ok());
    ASSERT_TRUE(over_zero.update(0, 16).ok());
    EXPECT_EQ(over_poison.bytes(), over_zero.bytes()) << format_name(format);
  }
}

// ------------------------------------------------------------------------------------ what records
// hold

// Relative distance of the reconstructed keys centroid + sum_k c_k basis_k from the rotated keys of
// head 0.
double reconstruction_error(Sequence& sequence, int num_blocks) {
  const RecordLayout& layout = sequence.layout();
  const SummaryFormat& format = layout.format;
  const int d = layout.head_dim, pages = format.pages_per_block(), tokens = format.page_tokens;
  std::vector<float> centroid(index(pages * d)), basis(index(pages * format.rank * d)),
      coefficients(index(16 * format.rank)), key(index(d));
  double error = 0, energy = 0;
  for (int block = 0; block < num_blocks; ++block) {
    EXPECT_TRUE(unpack_record(layout, sequence.record(0, block), centroid.data(), basis.data(),
                              coefficients.data())
                    .ok());
    for (int t = 0; t < 16; ++t) {
      for (int c = 0; c < d; ++c) key[index(c)] = test_key(0, 16 * block + t, c);
      if (format.improved) rotate(key.data(), d);
      const int page = t / tokens;
      for (int c = 0; c < d; ++c) {
        double value = centroid[index(page * d + c)];
        for (int k = 0; k < format.rank; ++k) {
          const int component = page * format.rank + k;
          value += static_cast<double>(basis[index(component * d + c)]) *
                   coefficients[index(component * tokens + t % tokens)];
        }
        error += std::pow(key[index(c)] - value, 2);
        energy += std::pow(key[index(c)], 2);
      }
    }
  }
  return std::sqrt(error / energy);
}

// Independent uniform keys have no structure: of a page's B energies the centroid takes one and r
// components a little over r more, so about (B - 1 - r) / B stays, plus quantisation.
TEST(Records, Reconstruction_IsAsGoodAsTheRankAllows) {
  for (const SummaryFormat& format : all_formats()) {
    for (int d : {64, 80, 256}) {
      Shape shape;
      shape.head_dim = d;
      Sequence sequence(shape, format);
      ASSERT_TRUE(sequence.update(0, 96).ok());
      const double left =
          static_cast<double>(format.page_tokens - 1 - format.rank) / format.page_tokens;
      const double error = reconstruction_error(sequence, 6);
      EXPECT_LT(error, std::sqrt(left) + 0.03) << format_name(format) << " " << d;
      EXPECT_GT(error, std::sqrt(left) * 0.6) << format_name(format) << " " << d;
    }
  }
}

TEST(Records, Reference_ComesOffTheCentroidOfImprovedFormatsOnly) {
  std::vector<float> reference(2 * 64);
  for (std::size_t i = 0; i < reference.size(); ++i) reference[i] = static_cast<float>(i % 7) - 3;
  for (const SummaryFormat& format : {kFine8, kPaper}) {
    Sequence without({}, format), with({}, format);
    ASSERT_TRUE(without.update(0, 16).ok());
    ASSERT_TRUE(with.update(0, 16, reference.data()).ok());
    if (!format.improved) {
      EXPECT_EQ(with.bytes(), without.bytes());
      continue;
    }
    std::vector<float> plain(4 * 64), shifted(4 * 64), basis(4 * 64), coefficients(16);
    for (int h = 0; h < 2; ++h) {
      ASSERT_TRUE(unpack_record(with.layout(), without.record(h, 0), plain.data(), basis.data(),
                                coefficients.data())
                      .ok());
      ASSERT_TRUE(unpack_record(with.layout(), with.record(h, 0), shifted.data(), basis.data(),
                                coefficients.data())
                      .ok());
      for (int i = 0; i < 4 * 64; ++i) {  // two roundings of half a step, values up to 9, 127 steps
        EXPECT_NEAR(plain[index(i)] - shifted[index(i)], reference[index(h * 64 + i % 64)], 0.08);
      }
    }
  }
}

TEST(Records, Unpack_RefusesAForeignRecord) {
  Sequence sequence({});
  ASSERT_TRUE(sequence.update(0, 16).ok());
  std::vector<float> centroid(4 * 64), basis(4 * 64), coefficients(16);
  sequence.record(0, 0)[sequence.layout().header_offset + 2] = 9;
  const Status status = unpack_record(sequence.layout(), sequence.record(0, 0), centroid.data(),
                                      basis.data(), coefficients.data());
  EXPECT_TRUE(contains(status.message(), "version 9"));
}

// ----------------------------------------------------------------------------------------- special
// keys

bool is_nan_fp16(std::uint16_t bits) { return (bits & 0x7FFF) > 0x7C00; }
bool is_finite_fp16(std::uint16_t bits) { return (bits & 0x7C00) != 0x7C00; }

TEST(SpecialKeys, NanOrInfinite_SpoilTheirPageAlone) {
  for (const SummaryFormat& format : kPresets) {
    for (float bad : {kNan, kInf, -kInf}) {
      at_each_level([&] {
        Sequence clean({}, format), spoiled({}, format);
        const int bad_page = 5 / format.page_tokens;
        spoiled.set(1, 16 + 5, 63, bad);
        ASSERT_TRUE(clean.update(0, 96).ok());
        ASSERT_TRUE(spoiled.update(0, 96).ok());
        const RecordLayout& layout = clean.layout();
        for (int page = 0; page < format.pages_per_block(); ++page) {
          for (int k = 0; k <= format.rank; ++k) {
            EXPECT_EQ(is_nan_fp16(spoiled.scale_bits(1, 1, page, k)), page == bad_page);
          }
          if (page == bad_page) continue;
          const int rows = page * layout.page_rows_bytes;
          EXPECT_EQ(std::memcmp(clean.record(1, 1) + rows, spoiled.record(1, 1) + rows,
                                index(layout.page_rows_bytes)),
                    0);
        }
        EXPECT_TRUE(header_matches(layout, spoiled.record(1, 1)));
        for (int block : {0, 2, 3}) {
          EXPECT_EQ(std::memcmp(clean.record(1, block), spoiled.record(1, block),
                                index(layout.record_bytes)),
                    0);
        }
      });
    }
  }
}

TEST(SpecialKeys, ZeroAndConstant_ReconstructExactly) {
  for (const SummaryFormat& format : kPresets) {
    for (float value : {0.0f, -0.0f, 2.0f}) {
      Sequence sequence({}, format);
      sequence.fill(0, 96, value);
      ASSERT_TRUE(sequence.update(0, 96).ok());
      const int pages = format.pages_per_block();
      std::vector<float> centroid(index(pages * 64)), basis(index(pages * format.rank * 64)),
          coefficients(index(16 * format.rank));
      ASSERT_TRUE(unpack_record(sequence.layout(), sequence.record(0, 1), centroid.data(),
                                basis.data(), coefficients.data())
                      .ok());
      for (float c : coefficients) EXPECT_EQ(c, 0);
      float norm = 0;
      for (int c = 0; c < 64; ++c) norm += centroid[index(c)] * centroid[index(c)];
      // 64 channels of 2; int4 rounds each rotated channel by at most a fourteenth of the largest.
      const double expected = 8 * std::fabs(static_cast<double>(value));
      EXPECT_NEAR(std::sqrt(norm), expected, expected * (format.centroid_bits == 8 ? 0.01 : 0.2));
    }
  }
}

// What fp16 scales cannot hold must show: a score of such a page is NaN or infinite, so it is read.
TEST(SpecialKeys, Huge_EndInScalesThatAreNotFinite) {
  for (const SummaryFormat& format : kPresets) {
    for (float huge : {1e8f, 1e18f, 1e30f, 3e38f}) {
      at_each_level([&] {
        Shape shape;
        shape.type = ScalarType::kFloat32;
        Sequence constant(shape, format), spread(shape, format), mixed(shape, format);
        constant.fill(0, 96, huge);
        for (int t = 0; t < 96; ++t) spread.fill(t, t + 1, t % 2 == 0 ? huge : -huge);
        mixed.set(0, 3, 10, huge);
        ASSERT_TRUE(constant.update(0, 96).ok());
        ASSERT_TRUE(spread.update(0, 96).ok());
        ASSERT_TRUE(mixed.update(0, 96).ok());
        EXPECT_FALSE(is_finite_fp16(constant.scale_bits(0, 0, 0, 0))) << huge;
        EXPECT_FALSE(is_finite_fp16(spread.scale_bits(0, 0, 0, 1))) << huge;
        EXPECT_FALSE(is_finite_fp16(mixed.scale_bits(0, 0, 0, 1))) << huge;
        if (format.pages_per_block() > 1) {
          EXPECT_TRUE(is_finite_fp16(mixed.scale_bits(0, 0, 1, 1)));
        }
      });
    }
  }
}

TEST(SpecialKeys, Tiny_BecomeZero) {
  for (const SummaryFormat& format : kPresets) {
    Shape shape;
    shape.type = ScalarType::kFloat32;
    Sequence sequence(shape, format);
    for (int t = 0; t < 96; ++t) sequence.fill(t, t + 1, t % 2 == 0 ? 1e-30f : -3e-30f);
    ASSERT_TRUE(sequence.update(0, 96).ok());
    for (int k = 0; k <= format.rank; ++k) EXPECT_LE(sequence.scale_bits(0, 0, 0, k), 1);
  }
}

TEST(SpecialKeys, HashInHeader_FollowsEveryKey) {
  Sequence sequence({});
  ASSERT_TRUE(sequence.update(0, 96).ok());
  const auto hash = [&](int block) {
    return read_header(sequence.layout(), sequence.record(0, block)).key_hash;
  };
  const std::uint32_t first = hash(1), other = hash(2);
  EXPECT_NE(first, other);
  for (int token : {16, 20, 31}) {
    for (int channel : {0, 1, 63}) {
      const float old = test_key(0, token, channel);
      sequence.set(0, token, channel, old + 8);
      ASSERT_TRUE(sequence.update(16, 48).ok());
      EXPECT_NE(hash(1), first);
      EXPECT_EQ(hash(2), other);
      sequence.set(0, token, channel, old);
    }
  }
  ASSERT_TRUE(sequence.update(16, 48).ok());
  EXPECT_EQ(hash(1), first);
}

// -------------------------------------------------------------------------------------------- bad
// input

class BadInput : public ::testing::Test {
 protected:
  // The call must fail with this message and write nothing.
  void expect_refused(const std::string& message) {
    std::int64_t built = 7;
    const auto before = sequence.record_memory();
    const Status status = summarise_blocks(params, keys, batch, begin_null ? nullptr : &begin,
                                           records, &built, serial_executor());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "summarise_blocks: " + message);
    EXPECT_EQ(built, 7);
    EXPECT_EQ(sequence.record_memory(), before);
  }

  Sequence sequence{Shape{}};
  std::int32_t length = 96, begin = 0;
  SummaryParams params{kFine, nullptr};
  PagedTensor keys = sequence.keys();
  RecordCache records = sequence.records();
  SequenceBatch batch = sequence.batch(&length);
  bool begin_null = false;
};

TEST_F(BadInput, Format_IsNamed) {
  params.format.rank = 3;
  expect_refused("format: rank = 3, expected 1 or 2 with page_tokens = 4");
}

TEST_F(BadInput, RecordSize_IsNamed) {
  params.format = kCompact;
  expect_refused("records: record_bytes = 288, expected 160 for format compact at head_dim = 64");
}

TEST_F(BadInput, HeadDim_IsNamed) {
  keys.head_dim = 100;
  expect_refused("keys: head_dim = 100, expected 64, 80, 96, 128, 192 or 256");
}

TEST_F(BadInput, Heads_MustAgree) {
  records.num_kv_heads = 1;
  expect_refused("records: num_kv_heads = 1, expected 2 as in keys");
}

TEST_F(BadInput, BeginTokens_LieWithinTheLength) {
  begin = 97;
  expect_refused("begin_tokens: sequence 0 has 97, expected 0 to its length 96");
  begin = -1;
  expect_refused("begin_tokens: sequence 0 has -1, expected 0 to its length 96");
  begin_null = true;
  expect_refused("begin_tokens: null, expected one entry a sequence");
}

TEST_F(BadInput, Lengths_FitTheTable) {
  length = -1;
  expect_refused("lengths: sequence 0 has -1, expected >= 0");
  length = 97;
  expect_refused("block table: sequence 0 needs 7 cache blocks, the table has 6");
}

TEST_F(BadInput, BlockIds_LieInTheCache) {
  keys.num_blocks = 6;
  expect_refused("block table: sequence 0, entry 0 = 6, expected 0 to 5");
  keys.num_blocks = 8;
  records.num_blocks = 6;
  expect_refused("record block table: sequence 0, entry 0 = 6, expected 0 to 5");
}

TEST_F(BadInput, NullData_IsNamed) {
  keys.data = nullptr;
  expect_refused("keys: data is null");
}

}  // namespace
}  // namespace locks
