// Records: their bytes, what they depend on, and the input that is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "locks/locks.h"
#include "support/summary_sequence.h"

namespace locks::testing {
namespace {

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

INSTANTIATE_TEST_SUITE_P(
    Presets, GoldenBytes,
    ::testing::Values(
        Golden{"fine", 64, 0xb847dc14884e210cU}, Golden{"fine", 80, 0x652d594557c363edU},
        Golden{"fine", 96, 0x164fb31bfb4292f6U}, Golden{"fine", 128, 0x2d2553d4485262dfU},
        Golden{"fine", 192, 0x8b17119d9ecae52fU}, Golden{"fine", 256, 0x433975f0610ec3e6U},
        Golden{"fine8", 128, 0x6bd225e1503eb638U}, Golden{"compact", 128, 0x99a238b239102208U},
        Golden{"wide", 80, 0x137769037c5525d6U}, Golden{"wide", 128, 0xc6e16db13817e070U},
        Golden{"paper", 96, 0xcc007b6932faff27U}, Golden{"paper", 128, 0x30c216abc08476e7U},
        Golden{"b8r4m8v8c8", 128, 0x796fb269b122bf5bU}));

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
            "1ea8af34683f1cb8"                  // 16 coefficients
            "4c4b0101063d4862");                // magic, version, format, hash
}

TEST(Records, EveryFormatAndHeadDim_IsTheSameAtEveryLevel) {
  for (const SummaryFormat& format : every_format()) {
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
  Shape shape;
  shape.num_tokens = 16 * 70;  // three items a head
  Sequence one(shape), four(shape);
  ASSERT_TRUE(one.update(0, shape.num_tokens).ok());
  ASSERT_TRUE(four.update(0, shape.num_tokens, nullptr, thread_executor(4)).ok());
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
      std::memset(sequence.record(h, k), kOldContents, at(sequence.layout().record_bytes));
    }
  }
  for (std::uint8_t byte : sequence.record_memory()) ASSERT_EQ(byte, kOldContents);
  ASSERT_TRUE(sequence.update(0, 96).ok());
  EXPECT_EQ(sequence.bytes(), first);
}

// The same layouts, written over different old contents, give the same bytes: no gap is left as it
// was.
TEST(Records, OldContents_LeaveNoTrace) {
  for (const SummaryFormat& format : every_format()) {
    Shape shape;
    shape.num_tokens = 16;
    Sequence over_poison(shape, format), over_zero(shape, format);
    std::memset(over_zero.record(0, 0), 0, at(over_zero.layout().record_bytes));
    std::memset(over_zero.record(1, 0), 0, at(over_zero.layout().record_bytes));
    ASSERT_TRUE(over_poison.update(0, 16).ok());
    ASSERT_TRUE(over_zero.update(0, 16).ok());
    EXPECT_EQ(over_poison.bytes(), over_zero.bytes()) << format_name(format);
  }
}

// Relative distance of the reconstructed keys centroid + sum_k c_k basis_k from the rotated keys of
// head 0.
double reconstruction_error(Sequence& sequence, int num_blocks) {
  const RecordLayout& layout = sequence.layout();
  const SummaryFormat& format = layout.format;
  const int d = layout.head_dim, pages = format.pages_per_block(), tokens = format.page_tokens;
  std::vector<float> centroid(at(pages * d)), basis(at(pages * format.rank * d)),
      coefficients(at(16 * format.rank)), key(at(d));
  double error = 0, energy = 0;
  for (int block = 0; block < num_blocks; ++block) {
    EXPECT_TRUE(unpack_record(layout, sequence.record(0, block), centroid.data(), basis.data(),
                              coefficients.data())
                    .ok());
    for (int t = 0; t < 16; ++t) {
      for (int c = 0; c < d; ++c) key[at(c)] = test_key(0, 16 * block + t, c);
      if (format.improved) rotate(key.data(), d);
      const int page = t / tokens;
      for (int c = 0; c < d; ++c) {
        double value = centroid[at(page * d + c)];
        for (int k = 0; k < format.rank; ++k) {
          const int component = page * format.rank + k;
          value += static_cast<double>(basis[at(component * d + c)]) *
                   coefficients[at(component * tokens + t % tokens)];
        }
        error += std::pow(key[at(c)] - value, 2);
        energy += std::pow(key[at(c)], 2);
      }
    }
  }
  return std::sqrt(error / energy);
}

// Independent uniform keys have no structure: of a page's B energies the centroid takes one and r
// components a little over r more, so about (B - 1 - r) / B stays, plus quantisation.
TEST(Records, Reconstruction_IsAsGoodAsTheRankAllows) {
  for (const SummaryFormat& format : every_format()) {
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
        EXPECT_NEAR(plain[at(i)] - shifted[at(i)], reference[at(h * 64 + i % 64)], 0.08);
      }
    }
  }
}

TEST(Records, HashInHeader_FollowsEveryKey) {
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

TEST(Records, Unpack_RefusesAForeignRecord) {
  Sequence sequence({});
  ASSERT_TRUE(sequence.update(0, 16).ok());
  std::vector<float> centroid(4 * 64), basis(4 * 64), coefficients(16);
  sequence.record(0, 0)[sequence.layout().header_offset + 2] = 9;
  const Status status = unpack_record(sequence.layout(), sequence.record(0, 0), centroid.data(),
                                      basis.data(), coefficients.data());
  EXPECT_TRUE(contains(status.message(), "version 9"));
}

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
  expect_refused("records: num_kv_heads = 1, expected 2");
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
}  // namespace locks::testing
