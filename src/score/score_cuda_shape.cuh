// What the parts of the tuned scorer share: records as compile-time shapes, and the work of a tile.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "decode/step_cuda.h"
#include "score/query_fragments.cuh"

namespace locks::detail {

// The layout of a record (locks/summary.h) as constants.
template <int kDim, int kTokens, int kComponents, int kMuBits, int kVBits, int kCBits>
struct RecordShape {
  static constexpr int kHeadDim = kDim;
  static constexpr int kPageTokens = kTokens;
  static constexpr int kRank = kComponents;
  static constexpr int kCentroidBits = kMuBits;
  static constexpr int kBasisBits = kVBits;
  static constexpr int kCoefficientBits = kCBits;
  static constexpr SummaryFormat kFormat{kTokens, kComponents, kMuBits, kVBits, kCBits};

  static constexpr int kPages = kBlockTokens / kTokens;
  static constexpr int kCentroidRowBytes = kDim * kMuBits / 8;
  static constexpr int kBasisRowBytes = kDim * kVBits / 8;
  static constexpr int kPageRowsBytes = kCentroidRowBytes + kRank * kBasisRowBytes;
  static constexpr int kScalesOffset = kPages * kPageRowsBytes;
  static constexpr int kCoefficientsOffset = (kScalesOffset + kPages * (1 + kRank) * 2 + 7) / 8 * 8;
  static constexpr int kPageCoefficientBytes = kRank * kTokens * kCBits / 8;
  static constexpr int kRecordBytes =
      (kCoefficientsOffset + kPages * kPageCoefficientBytes + 8 + 31) / 32 * 32;
  static constexpr int kHeaderOffset = kRecordBytes - 8;
  static constexpr int kTilePages = kTileBlocks * kPages;
};

// Records side by side in a block's place in shared memory: those of several heads, or of one head
// in several tiles.
inline constexpr int kSlots = 4;

// A (tile, KV head, fragment) of a row: the work that one warp does alone.
struct TileWork {
  int row;
  int first_tile;     // of the row
  int scored_blocks;  // of the row
  int tile;           // within the row
  int kv_head;
  int group_size;
  int first_head;  // of the group, in this fragment: 0 or 8
  int num_heads;   // of the group, in this fragment
};

__device__ __forceinline__ int tile_blocks(const TileWork& work) {
  return min(kTileBlocks, work.scored_blocks - work.tile * kTileBlocks);
}

// The first four bytes of a record's header: magic, version, format.
__device__ __forceinline__ std::uint32_t header_word(std::uint8_t format_code) {
  return kRecordMagic | std::uint32_t{kRecordVersion} << 16 | std::uint32_t{format_code} << 24;
}

// Where tile_sums and tile_shifts of (work, head g of the fragment) lie; times kTilePages, masses.
__device__ __forceinline__ std::int64_t place_of(const StepArguments& args, const TileWork& work,
                                                 int g) {
  const RowPlan row{.scored_blocks = work.scored_blocks, .first_tile = work.first_tile};
  const int head = work.kv_head * work.group_size + work.first_head + g;
  return tile_index(row, args.attention.num_query_heads, head) + work.tile;
}

// Address of the record of (block of the row, KV head), or null if the table's id is no block.
__device__ __forceinline__ const std::uint8_t* find_record(const StepArguments& args, int row,
                                                           int block, int kv_head) {
  const RecordCache& records = args.records;
  const int per_cache_block = records.block_tokens / kBlockTokens;
  int n = block, within = 0;
  if (per_cache_block != 1) {
    n = block / per_cache_block;
    within = block - n * per_cache_block;
  }
  const int id = args.seqs.record_blocks.ids[row * args.seqs.record_blocks.seq_stride + n];
  if (id < 0 || id >= records.num_blocks) return nullptr;
  return records.data + id * records.block_stride + kv_head * records.head_stride +
         within * records.record_bytes;
}

}  // namespace locks::detail
