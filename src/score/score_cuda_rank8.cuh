// Masses of a tile for formats of 16-token pages and rank 8 (wide, paper): the consumer's
// arithmetic.
//
// The eight basis rows of a record are one int8 product with the group's query: lane l holds, with
// g = l / 4 and j = l % 4, components 2j and 2j + 1 of query head g. That is the A operand of an
// fp16 product with the coefficients, two records at a time (block-diagonal: rows 0-7 and channels
// 0-7 are the first record's), which gives the logits of 16 tokens. Components are split into two
// fp16 numbers, so that logits are as accurate as in floats. Centroids of eight records are one
// int8 product.
//
// A record and warp at d = 128: 736 or 800 bytes, about 75 instructions; the limit is memory.
#pragma once

#include "score/score_cuda_rank1.cuh"

namespace locks::detail {

template <class RecordShapeT, int kPartBlocks, int kNumWarps>
class RankEightConsumer {
 public:
  using Shape = RecordShapeT;
  static constexpr int kWarps = kNumWarps;
  static constexpr int kStageBlocks = kPartBlocks;
  static constexpr int kParts = kTileBlocks / kPartBlocks;
  // 64 bytes past a multiple of 128: centroid rows of two records lie in different banks.
  static constexpr int kPitch = kSlots * Shape::kRecordBytes + 64;
  static constexpr int kStageBytes = kPartBlocks * kPitch;
  static constexpr int kScratchBytes = 0;

 private:
  static constexpr int kDim = Shape::kHeadDim;
  // Blocks of a lane: lane j ends with the masses of blocks kLaneBlocks * j and those after it.
  static constexpr int kLaneBlocks = kPartBlocks / 4;
  static_assert(Shape::kRank == 8 && Shape::kPages == 1);
  static_assert(Shape::kCentroidBits == 8 && Shape::kBasisBits == 4);

 public:
  __device__ RankEightConsumer(int lane, std::uint32_t header)
      : lane_(lane), g_(lane / 4), j_(lane % 4), header_(header), policy_(policy_evict_last()) {}

  __device__ void set_query(const StepArguments& args, const TileWork& work) {
    const std::uint32_t* words = fragment_of<Shape>(args, work);
    basis_query_.load(words, lane_);
    centroid_query_.load(words + fragment_width_words(kDim), lane_);
    negative_base_ = negative_base(args, work, g_);
    TileWork row = work;
    row.tile = 0;
    const std::int64_t place = place_of(args, row, min(g_, work.num_heads - 1));
    has_head_ = g_ < work.num_heads;
    row_masses_ = args.workspace.masses + place * Shape::kTilePages + kLaneBlocks * j_;
    sums_.set_row(args.workspace.tile_sums + place, has_head_, j_);
  }

  __device__ void begin_tile(const TileWork& work) {
    blocks_ = tile_blocks(work);
    masses_ = row_masses_ + static_cast<std::int64_t>(work.tile) * Shape::kTilePages;
    sum_ = 0;
    bad_header_ = 0;
  }

  template <class Release>
  __device__ void score_part(const std::uint8_t* records, std::uint8_t*, int part,
                             const Release& release) {
    const auto header = *reinterpret_cast<const std::uint32_t*>(
        records + lane_ % kPartBlocks * kPitch + Shape::kHeaderOffset);
    bad_header_ |= part * kPartBlocks + lane_ % kPartBlocks < blocks_ ? header ^ header_ : 0;
    float centroids[kPartBlocks / 8][2];
    score_centroids(records, centroids);
    float mass[kLaneBlocks];
#pragma unroll
    for (int q = 0; q < kLaneBlocks; ++q) {
      mass[q] = score_quad(records, q, centroids, q == kLaneBlocks - 1, release);
      if (part * kPartBlocks + kLaneBlocks * j_ + q >= blocks_) mass[q] = 0;
      sum_ += mass[q];
    }
    if (!has_head_) return;
    static_assert(kLaneBlocks == 2);
    store_hinted(masses_ + part * kPartBlocks, pack_bf16(mass[0], mass[1]), policy_);
  }

  __device__ void end_tile(const StepArguments& args, const TileWork& work) {
    finish_tile<Shape>(args, work, sum_, bad_header_, sums_);
  }
  __device__ void end() { sums_.flush(); }

 private:
  // centroids[m][i]: logit of the centroid of block 8 m + 2 j + i, less the base.
  __device__ void score_centroids(const std::uint8_t* records,
                                  float (&centroids)[kPartBlocks / 8][2]) const {
#pragma unroll
    for (int m = 0; m < kPartBlocks / 8; ++m) {
      RowWords<8, kDim> row;
      row.load(records + (8 * m + g_) * kPitch, j_);
      int sums[4];
      row.multiply(sums, centroid_query_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = __half2float(*reinterpret_cast<const __half*>(
            records + (8 * m + 2 * j_ + i) * kPitch + Shape::kScalesOffset));
        // An infinite scale becomes NaN.
        centroids[m][i] = fmaf(centroid_query_.dot(sums[i], sums[2 + i]), fmaf(scale, 0.0f, scale),
                               negative_base_);
      }
    }
  }

  // What a lane reads of a record beside the centroid.
  struct RecordWords {
    RowWords<4, kDim> rows;
    __half scales[2];
    std::uint32_t
        codes;  // of tokens 2g and 2g + 1: component 2j in the low half, 2j + 1 in the high

    __device__ void load(const std::uint8_t* record, int g, int j) {
      rows.load(record + Shape::kCentroidRowBytes + g * Shape::kBasisRowBytes, j);
      const auto* all_scales = reinterpret_cast<const __half*>(record + Shape::kScalesOffset);
      scales[0] = all_scales[1 + 2 * j];
      scales[1] = all_scales[2 + 2 * j];
      const std::uint8_t* packed = record + Shape::kCoefficientsOffset;
      if constexpr (Shape::kCoefficientBits == 4) {
        codes = packed[2 * j * 8 + g] | packed[(2 * j + 1) * 8 + g] << 16;
      } else {
        codes = *reinterpret_cast<const std::uint16_t*>(packed + 2 * j * 16 + 2 * g) |
                *reinterpret_cast<const std::uint16_t*>(packed + (2 * j + 1) * 16 + 2 * g) << 16;
      }
    }
    // fp16 pair of the codes of token 2g + t.
    __device__ std::uint32_t coefficients(int t) const {
      // The bits of a small integer below the exponent of 1024 are the fp16 number 1024 + integer.
      __half2 pair;
      if constexpr (Shape::kCoefficientBits == 4) {
        pair = as_half2((codes & (t == 0 ? 0x000F000Fu : 0x00F000F0u)) | 0x64006400u);
        if (t == 0) {
          pair = __hsub2(pair, __float2half2_rn(1024 + 8));
        } else {
          pair = __hfma2(pair, __float2half2_rn(1.0f / 16), __float2half2_rn(-64 - 8));
        }
      } else {
        pair = as_half2(__byte_perm(codes, 0x64646464u, t == 0 ? 0x4240 : 0x4341));
        pair = __hsub2(pair, __float2half2_rn(1024 + 128));
      }
      return as_word(pair);
    }
    __device__ static __half2 as_half2(std::uint32_t word) {
      return *reinterpret_cast<const __half2*>(&word);
    }
    __device__ static std::uint32_t as_word(__half2 pair) {
      return *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  };

  // Components times their scales, as the sum of two fp16 numbers. Past the range of fp16, or with
  // a scale that is not finite, the second becomes NaN or infinite, and so the mass not finite.
  __device__ void score_components(const RecordWords& words, std::uint32_t& high,
                                   std::uint32_t& low) const {
    int sums[4];
    words.rows.multiply(sums, basis_query_);
    const float first = basis_query_.dot(sums[0], sums[2]) * __half2float(words.scales[0]);
    const float second = basis_query_.dot(sums[1], sums[3]) * __half2float(words.scales[1]);
    const __half2 rounded = __floats2half2_rn(first, second);
    const float2 back = __half22float2(rounded);
    high = RecordWords::as_word(rounded);
    low = RecordWords::as_word(__floats2half2_rn(first - back.x, second - back.y));
  }

  // Masses of blocks q, kLaneBlocks + q, ...; lane j gets that of the j-th of them.
  template <class Release>
  __device__ float score_quad(const std::uint8_t* records, int q,
                              const float (&centroids)[kPartBlocks / 8][2], bool last,
                              const Release& release) const {
    RecordWords words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      words[n].load(records + (kLaneBlocks * n + q) * kPitch, g_, j_);
    }
    if (last) release();
    std::uint32_t high[4], low[4];
    float sums[4], centroid[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int block = kLaneBlocks * n + q;
      score_components(words[n], high[n], low[n]);
      centroid[n] = __shfl_sync(~0u, centroids[block / 8][block % 2], (lane_ & ~3) | block % 8 / 2);
      sums[n] = 0;
    }
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const std::uint32_t b0 = words[n].coefficients(t), b1 = words[n + 1].coefficients(t);
        float logits[4] = {centroid[n], centroid[n], centroid[n + 1], centroid[n + 1]};
        const std::uint32_t a_high[4] = {high[n], 0, 0, high[n + 1]};
        const std::uint32_t a_low[4] = {low[n], 0, 0, low[n + 1]};
        mma_f16(logits, a_low, b0, b1);
        mma_f16(logits, a_high, b0, b1);
        sums[n] += exp2_fast(logits[0]) + exp2_fast(logits[1]);
        sums[n + 1] += exp2_fast(logits[2]) + exp2_fast(logits[3]);
      }
    }
    return sum_of_own(sums);
  }

  // Lane j gets the sum of sums[j] over the four lanes of its head: each exchange halves the count.
  __device__ float sum_of_own(const float (&sums)[4]) const {
    const bool odd = j_ % 2 != 0, upper = j_ / 2 != 0;
    const float a = (odd ? sums[1] : sums[0]) + __shfl_xor_sync(~0u, odd ? sums[0] : sums[1], 1);
    const float b = (odd ? sums[3] : sums[2]) + __shfl_xor_sync(~0u, odd ? sums[2] : sums[3], 1);
    return (upper ? b : a) + __shfl_xor_sync(~0u, upper ? a : b, 2);
  }

  int lane_, g_, j_;
  std::uint32_t header_;
  std::uint64_t policy_;
  QueryOperand<kDim> basis_query_, centroid_query_;
  float negative_base_ = 0;
  bool has_head_ = false;
  __nv_bfloat16* row_masses_ = nullptr;
  TileSums sums_;
  __nv_bfloat16* masses_ = nullptr;
  int blocks_ = 0;
  float sum_ = 0;
  std::uint32_t bad_header_ = 0;  // not zero: a header differs
};

}  // namespace locks::detail
