// Masses of a tile for formats of rank 1 (fine, fine8, compact): the consumer's arithmetic.
//
// Eight rows are one int8 product with the group's query: centroid and basis row of the four pages
// of a record, or of the two pages of two records. Lane l holds, with g = l / 4 and j = l % 4, both
// dot products of query head g with page j of those: no lane needs another's.
// What hangs on the page alone (four or eight coefficients times their scale, the centroid's scale)
// is unpacked once by one lane for the eight heads and passed through shared memory.
//
// A record and warp of fine at d = 128: 544 bytes, about 37 instructions (4 products, 4
// exponentials); the limit is memory as long as a record takes a scheduler less than about 130
// cycles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/ptx.cuh"
#include "score/score_cuda_careful.cuh"
#include "score/score_cuda_shape.cuh"

namespace locks::detail {

// The query of one fragment for rows of one width, in registers.
template <int kHeadDim>
struct QueryOperand {
  static constexpr int kProducts = kHeadDim / 32;
  std::uint32_t a[kProducts][4];
  int start[4];
  float high_scale, low_scale, bias;

  __device__ void load(const std::uint32_t* words, int lane) {
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const uint4 w = reinterpret_cast<const uint4*>(words)[i * 32 + lane];
      a[i][0] = w.x, a[i][1] = w.y, a[i][2] = w.z, a[i][3] = w.w;
    }
    const QueryScale scale =
        reinterpret_cast<const QueryScale*>(words + fragment_operand_words(kHeadDim))[lane / 4];
    start[0] = scale.high_start;
    start[2] = scale.low_start;
    // Copies that the compiler cannot tell from their sources: else it builds the four registers
    // anew for each product instead of keeping them.
    start[1] = __shfl_sync(~0u, start[0], lane);
    start[3] = __shfl_sync(~0u, start[2], lane);
    high_scale = scale.high_scale;
    low_scale = scale.high_scale * (1.0f / 256);
    bias = -kIntBiasValue * high_scale - kIntBiasValue * low_scale;  // exact, see QueryScale
  }
  // The dot product from the sums of the high and the low bytes. The high part first: its product
  // is exact, and what the addition rounds off is below the low bytes' unit.
  __device__ float dot(int high, int low) const {
    return fmaf(__int_as_float(low), low_scale, fmaf(__int_as_float(high), high_scale, bias));
  }
};

// A lane's words of a row: the bytes that meet its part of the operand.
template <int kBits, int kHeadDim>
struct RowWords {
  static constexpr int kWords = kHeadDim * kBits / 8 / 16;
  std::uint32_t w[kWords];

  __device__ void load(const std::uint8_t* row, int j) {
    if constexpr (kWords == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(row + 8 * j);
      w[0] = v.x, w[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(row + 64 * i + 16 * j);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
      }
    }
  }
  __device__ void multiply(int (&sums)[4], const QueryOperand<kHeadDim>& query) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = query.start[i];
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) mma_s8(sums, query.a[i], w[2 * i], w[2 * i + 1]);
    if constexpr (kBits == 4) {
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) {
        mma_s8(sums, query.a[kWords / 2 + i], w[2 * i] & 0x0F0F0F0Fu, w[2 * i + 1] & 0x0F0F0F0Fu);
      }
    }
  }
};

// Base of a query head with its sign turned; NaN if it cannot be one. Lanes without a head get
// masses of zero.
__device__ __forceinline__ float negative_base(const StepArguments& args, const TileWork& work,
                                               int g) {
  if (g >= work.num_heads) return -1000.0f;
  const float base =
      args.workspace.base[static_cast<std::int64_t>(work.row) * args.attention.num_query_heads +
                          work.kv_head * work.group_size + work.first_head + g];
  return isfinite(base) ? -base : __uint_as_float(0x7FC00000u);
}

template <class Shape>
__device__ __forceinline__ const std::uint32_t* fragment_of(const StepArguments& args,
                                                            const TileWork& work) {
  const int fragments = (work.group_size + kFragmentHeads - 1) / kFragmentHeads;
  const std::int64_t idx =
      (static_cast<std::int64_t>(work.row) * args.attention.num_kv_heads + work.kv_head) *
          fragments +
      work.first_head / kFragmentHeads;
  return args.workspace.fragments + idx * one_fragment_words(Shape::kFormat, Shape::kHeadDim);
}

// Sums of tiles on their way to memory. The four lanes of a head keep one each, and four go at a
// time: a store for each tile would be a third of all store requests.
class TileSums {
 public:
  __device__ void set_row(float* sums, bool has_head, int j) {
    flush();
    row_ = sums;
    has_head_ = has_head;
    j_ = j;
  }
  // `sum` over the four lanes of a head.
  __device__ void add(int tile, float sum) {
    if (j_ == count_) {
      sum_ = sum;
      tile_ = tile;
    }
    if (++count_ == 4) flush();
  }
  __device__ void flush() {
    if (has_head_ && j_ < count_) row_[tile_] = sum_;
    count_ = 0;
  }

 private:
  float* row_ = nullptr;
  bool has_head_ = false;
  int j_ = 0;
  int count_ = 0;
  int tile_ = 0;
  float sum_ = 0;
};

// Adds up the four lanes of a head; keeps the tile's sum or takes the slow path.
template <class Shape>
__device__ __forceinline__ void finish_tile(const StepArguments& args, const TileWork& work,
                                            float sum, std::uint32_t bad_header, TileSums& sums) {
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (__any_sync(~0u, bad_header != 0 || !(sum <= kLargestTileSum))) {
    score_tile_carefully<Shape>(args, work);
  } else {
    sums.add(work.tile, sum);
  }
}

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

template <class RecordShapeT, int kPartBlocks, int kNumWarps>
class RankOneConsumer {
 public:
  using Shape = RecordShapeT;
  static constexpr int kWarps = kNumWarps;
  static constexpr int kStageBlocks = kPartBlocks;
  static constexpr int kParts = kTileBlocks / kPartBlocks;
  // 16 bytes past a multiple of 128: the scales of eight blocks lie in different banks.
  static constexpr int kPitch = kSlots * Shape::kRecordBytes + 16;
  static constexpr int kStageBytes = kPartBlocks * kPitch;

 private:
  static constexpr int kTokens = Shape::kPageTokens;
  static constexpr int kBatchBlocks = 32 / Shape::kPages;  // of 32 pages: one a lane to unpack
  static constexpr int kBatches = kPartBlocks / kBatchBlocks;
  static constexpr int kBits = Shape::kBasisBits;
  static_assert(Shape::kRank == 1 && Shape::kCentroidBits == kBits && kBatches >= 1);
  static_assert(Shape::kCoefficientBits == 4);
  static constexpr int kWeightBytes = kBatches * 32 * kTokens * 4;

 public:
  static constexpr int kScratchBytes = kWeightBytes + kBatches * 32 * 4;

  __device__ RankOneConsumer(int lane, std::uint32_t header)
      : lane_(lane), g_(lane / 4), j_(lane % 4), header_(header), policy_(policy_evict_last()) {}

  __device__ void set_query(const StepArguments& args, const TileWork& work) {
    query_.load(fragment_of<Shape>(args, work), lane_);
    negative_base_ = negative_base(args, work, g_);
    TileWork row = work;
    row.tile = 0;
    const std::int64_t place = place_of(args, row, min(g_, work.num_heads - 1));
    has_head_ = g_ < work.num_heads;
    sums_.set_row(args.workspace.tile_sums + place, has_head_, j_);
    row_masses_ = args.workspace.masses + place * Shape::kTilePages + 8 * j_;
  }

  __device__ void begin_tile(const TileWork& work) {
    blocks_ = tile_blocks(work);
    masses_ = row_masses_ + static_cast<std::int64_t>(work.tile) * Shape::kTilePages;
    sum_ = 0;
    bad_header_ = 0;
  }

  template <class Release>
  __device__ void score_part(const std::uint8_t* records, std::uint8_t* scratch, int part,
                             const Release& release) {
    __syncwarp();  // all lanes have read the scratch of the part before
    Rows rows;
    unpack(records, scratch, part);
    __syncwarp();
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      rows.load(*this, records, batch);
      if (batch == kBatches - 1) release();
      score_batch(rows, scratch, part, batch);
    }
  }

  __device__ void end_tile(const StepArguments& args, const TileWork& work) {
    finish_tile<Shape>(args, work, sum_, bad_header_, sums_);
  }
  __device__ void end() { sums_.flush(); }

 private:
  // Place of page slot (r, j) of a batch: with two pages a record, records r and r + 8 share a
  // product.
  __device__ static int block_of(int batch, int r, int j) {
    return Shape::kPages == 4 ? batch * kBatchBlocks + r : r + 8 * (j / 2);
  }

  struct Rows {
    RowWords<kBits, Shape::kHeadDim> product[8];

    __device__ void load(const RankOneConsumer& self, const std::uint8_t* records, int batch) {
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const std::uint8_t* row =
            Shape::kPages == 4
                ? records + (batch * kBatchBlocks + r) * kPitch + self.g_ * Shape::kBasisRowBytes
                : records + (r + 8 * (self.g_ / 4)) * kPitch + self.g_ % 4 * Shape::kBasisRowBytes;
        product[r].load(row, self.j_);
      }
    }
  };

  // What is packed of one page a lane. Loads of all batches come before the first store: the
  // compiler must not move them across it.
  struct Packed {
    __half2 scales;
    std::uint32_t codes;
    std::uint32_t header;

    __device__ void load(const std::uint8_t* record, int page) {
      scales = *reinterpret_cast<const __half2*>(record + Shape::kScalesOffset + 4 * page);
      const std::uint8_t* packed =
          record + Shape::kCoefficientsOffset + page * Shape::kPageCoefficientBytes;
      if constexpr (kTokens == 4) {
        codes = *reinterpret_cast<const std::uint16_t*>(packed);
      } else {
        codes = *reinterpret_cast<const std::uint32_t*>(packed);
      }
      header = *reinterpret_cast<const std::uint32_t*>(record + Shape::kHeaderOffset);
    }
  };

  // weights[t] = scale * code of one page a lane, and the centroid's scale. An infinite scale
  // becomes NaN: 16 inf - 24 inf, and 0 inf.
  __device__ void unpack(const std::uint8_t* records, std::uint8_t* scratch, int part) {
    Packed packed[kBatches];
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      packed[batch].load(records + block_of(batch, g_, j_) * kPitch, j_ % Shape::kPages);
    }
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      const bool counts = part * kPartBlocks + block_of(batch, g_, j_) < blocks_;
      bad_header_ |= counts ? packed[batch].header ^ header_ : 0;
      const float2 scale = __half22float2(packed[batch].scales);
      const std::uint32_t codes = packed[batch].codes;
      float weight[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        // Code n in the bits of the float 16 + n.
        const std::uint32_t bits = t <= 4 ? codes << (19 - 4 * t) : codes >> (4 * t - 19);
        weight[t] = fmaf(select_bits(bits, 0x00780000u, 0x41800000u), scale.y, -24 * scale.y);
      }
      auto* weights = reinterpret_cast<float4*>(scratch) + batch * 32 + lane_;
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        weights[i * kBatches * 32] =
            make_float4(weight[4 * i], weight[4 * i + 1], weight[4 * i + 2], weight[4 * i + 3]);
      }
      reinterpret_cast<float*>(scratch + kWeightBytes)[batch * 32 + lane_] =
          fmaf(scale.x, 0.0f, scale.x);
    }
  }

  // (bits & mask) | base as a float, in one instruction.
  __device__ static float select_bits(std::uint32_t bits, std::uint32_t mask, std::uint32_t base) {
    std::uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(bits), "r"(mask), "r"(base));
    return __uint_as_float(result);
  }

  __device__ void score_batch(const Rows& rows, const std::uint8_t* scratch, int part, int batch) {
    const auto* weights = reinterpret_cast<const float4*>(scratch) + batch * 32 + j_;
    const auto* centroid_scales =
        reinterpret_cast<const float*>(scratch + kWeightBytes) + batch * 32 + j_;
    float mass[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      int sums[4];
      rows.product[r].multiply(sums, query_);
      const float centroid =
          fmaf(query_.dot(sums[0], sums[2]), centroid_scales[4 * r], negative_base_);
      const float component = query_.dot(sums[1], sums[3]);
      mass[r] = 0;
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        const float4 w = weights[i * kBatches * 32 + 4 * r];
        const float m =
            (exp2_fast(fmaf(component, w.x, centroid)) +
             exp2_fast(fmaf(component, w.y, centroid))) +
            (exp2_fast(fmaf(component, w.z, centroid)) + exp2_fast(fmaf(component, w.w, centroid)));
        mass[r] = i == 0 ? m : mass[r] + m;
      }
    }
    if (blocks_ < kTileBlocks) {
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        if (part * kPartBlocks + block_of(batch, r, j_) >= blocks_) mass[r] = 0;
      }
    }
    sum_ +=
        ((mass[0] + mass[1]) + (mass[2] + mass[3])) + ((mass[4] + mass[5]) + (mass[6] + mass[7]));
    const uint4 packed = make_uint4(pack_bf16(mass[0], mass[1]), pack_bf16(mass[2], mass[3]),
                                    pack_bf16(mass[4], mass[5]), pack_bf16(mass[6], mass[7]));
    if (has_head_) store_hinted(masses_ + (part * kBatches + batch) * 32, packed, policy_);
  }

  int lane_, g_, j_;
  std::uint32_t header_;
  std::uint64_t policy_;
  QueryOperand<Shape::kHeadDim> query_;
  float negative_base_ = 0;
  bool has_head_ = false;
  __nv_bfloat16* row_masses_ = nullptr;
  __nv_bfloat16* masses_ = nullptr;
  TileSums sums_;
  int blocks_ = 0;
  float sum_ = 0;
  std::uint32_t bad_header_ = 0;  // not zero: a header differs
};

}  // namespace locks::detail
