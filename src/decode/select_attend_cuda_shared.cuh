// Shared memory of select_attend, the row that a cluster works on, and how its CTAs talk.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/ptx.cuh"
#include "decode/select_attend_cuda.h"
#include "decode/step_cuda.h"

namespace locks::detail {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;
inline constexpr int kPassHeads = 8;     // query heads that one pass of attention serves
inline constexpr int kGroupPages = 8;    // pages of a key group: one page slot of 8 blocks
inline constexpr int kSumParts = 2;      // partial sums of a head's masses, a warp each
inline constexpr int kStageHeads = 4;    // heads whose masses one stage of the key pass brings
inline constexpr int kListPages = 512;   // pages that a CTA may list before the cut is known
inline constexpr int kChancePages = 16;  // by which a list may pass twice an even share, still few
inline constexpr int kFoundGroups = 1024;  // key groups that a CTA may list
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

// Histogram of keys: 8 bins an octave, from 2^-31 to 2. Counts of up to kMostCounted fit a message.
inline constexpr int kBins = 256;
inline constexpr int kBinShift = 20;
inline constexpr std::uint32_t kFirstBin = 768;
inline constexpr std::uint32_t kMostCounted = 0xFFFF;
// The maxima are kept as the upper bits of keys.
inline constexpr int kMaximumShift = 15;

// n / d for 0 <= n < 2^20 and small d. Exact: quotients lie at least 1 / (2 d) away from whole
// numbers.
__device__ inline int quotient(int n, int d) {
  return static_cast<int>(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(d)));
}

// x as the compiler cannot know it: what is made of it is made here, and not kept from in front of
// a loop in a register that there is none for.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

struct __align__(8) PageKey {
  std::uint32_t key;
  std::uint32_t page;
};

// The (row, KV head) of a cluster and this CTA's share of its pages: units of 128 tokens, dealt out
// round robin, so that runs of good pages spread over the CTAs. A unit has one key group for each
// page slot of a block.
struct RowHead {
  int row, kv_head;
  int group;  // query heads
  int length, num_pages;
  int page_shift;    // log2 of tokens a page
  int slot_shift;    // log2 of pages a block
  int scored_pages;  // pages with a record
  int first, last;   // pages [first, last) are chosen from; the others are always read
  int budget;
  int num_groups;               // key groups of this CTA
  bool has_tail;                // this CTA takes the pages without a record, as one more group
  const __nv_bfloat16* masses;  // of the group's first head
  std::int64_t mass_stride;     // between heads
  const float* tile_sums;       // of the group's first head
  const std::int32_t* tile_shifts;
  int num_tiles;  // also between heads of tile_sums

  // Of the CTA within its cluster, and the CTAs of that: as the grid says, which costs no load.
  __device__ static int rank() { return static_cast<int>(blockIdx.x); }
  __device__ static int cluster() { return static_cast<int>(gridDim.x); }
  __device__ int unit(int group_idx) const {
    return rank() + (group_idx >> slot_shift) * cluster();
  }
  __device__ int slot(int group_idx) const { return group_idx & ((1 << slot_shift) - 1); }
  __device__ int page(int group_idx, int i) const {
    if (group_idx == num_groups) return scored_pages + i;
    return ((unit(group_idx) * kMassBlocks + i) << slot_shift) + slot(group_idx);
  }
  __device__ std::int64_t mass_at(int group_idx) const {
    return (std::int64_t{unit(group_idx)} * kMassBlocks << slot_shift) +
           slot(group_idx) * kMassBlocks;
  }
  __device__ int all_groups() const { return num_groups + (has_tail ? 1 : 0); }
};

// Grid: x is the CTA of the cluster, y the KV head, z the row.
__device__ inline RowHead row_head(const StepArguments& args, const SelectAttendShape& shape) {
  RowHead r;
  r.kv_head = static_cast<int>(blockIdx.y);
  r.row = static_cast<int>(blockIdx.z);
  r.group = shape.group;
  const RowPlan plan = args.plan[r.row];
  r.page_shift = shape.page_shift;
  r.slot_shift = 4 - r.page_shift;
  r.length = max(plan.length, 0);
  r.num_pages = (r.length + (1 << r.page_shift) - 1) >> r.page_shift;
  const int blocks = r.length > 0 ? max(plan.scored_blocks, 0) : 0;
  r.scored_pages = blocks << r.slot_shift;
  r.first = kAlwaysReadFirstTokens >> r.page_shift;
  r.last =
      min((r.length >> r.page_shift) - (kAlwaysReadLastTokens >> r.page_shift), r.scored_pages);
  r.last = max(r.last, r.first);
  r.budget = plan.budget_pages;
  const int units = (blocks + kMassBlocks - 1) / kMassBlocks;
  const int own_units = quotient(units - r.rank() + r.cluster() - 1, r.cluster());
  r.num_groups = own_units << r.slot_shift;
  const int last_unit = blocks / kMassBlocks;
  r.has_tail = blocks > 0 && last_unit - quotient(last_unit, r.cluster()) * r.cluster() == r.rank();
  r.num_tiles = num_tiles(blocks);
  const std::int64_t tiles = std::int64_t{plan.first_tile} * args.attention.num_query_heads +
                             std::int64_t{r.kv_head} * r.group * r.num_tiles;
  r.masses = args.workspace.masses + (tiles * kTileBlocks << r.slot_shift);
  r.mass_stride = std::int64_t{r.num_tiles} * kTileBlocks << r.slot_shift;
  r.tile_sums = args.workspace.tile_sums + tiles;
  r.tile_shifts = args.workspace.tile_shifts + tiles;
  return r;
}

// The bin that the cut lies in: pages above it are taken, pages below it are not.
struct Boundary {
  int bin;
  int wanted;  // pages to take of it
  int pages;   // that it has, in all CTAs; kUncounted: not known
  int first;   // place of this CTA's first one among them
  int others;  // of other CTAs

  // Whether they are exchanged: some of them are taken, and there is room.
  __device__ bool is_sent() const { return wanted < pages && pages <= kCandidates; }
};
inline constexpr int kUncounted = 1 << 30;

struct Control {
  std::uint64_t exchange[3];  // barrier of each Exchange
  std::uint64_t tile[16];     // barrier of each warp's tile
  std::uint64_t cut;
  float weight[kMaxGroupSize + 1];   // 1 / (sum of a head's masses * heads)
  int top_shift[kMaxGroupSize + 1];  // of a head's tiles; weights are relative to it
  int warp_counts[2][16];            // of each warp, for sums over the CTA
  RowHead row;                       // made once, by one thread, and read by all
  int shifted;                       // some head has a shifted tile
  int tail_is_bad;                   // some head's mass of unrecorded tokens is not finite
  int bad_pages;                     // of this CTA: recorded pages that are not finite
  int bad_choices;                   // those among them that are not always read anyway
  int all_bad_choices;               // of the cluster
  Boundary boundary;
  int digit;
  int digit_left;
  int digit_count;
};

template <int kHeadDim, int kThreads>
struct Layout {
  static constexpr int kWarps = kThreads / kWarpLanes;
  // A tile: 4 quads of 4 tokens, each token its key row and its value row. The 32 bytes between
  // quads put the rows that a warp reads at once into different banks (see attend_tile).
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kTokenBytes = 2 * kRowBytes;
  static constexpr int kQuadBytes = 4 * kTokenBytes + 32;
  static constexpr int kTileBytes = 4 * kQuadBytes;
  // The tiles' area also is the ring of the key pass: kStages stages of kStageHeads * 16 bytes a
  // thread. The most that leaves room for the keys of 1,000,000 tokens in 16 CTAs of 512 threads,
  // and of 131,072 tokens in 4 CTAs of 256 threads, two of which share a multiprocessor.
  static constexpr int kAreaBytes = kThreads == 512 ? 131072 : 41600;
  static constexpr int kStageBytes = kThreads * kStageHeads * 16;
  static constexpr int kStages = kAreaBytes / kStageBytes;
  // Warps whose tile lies in the area; the others' lie in the place of the keys, once those are of
  // no more use.
  static constexpr int kAreaWarps =
      kAreaBytes / kTileBytes < kWarps ? kAreaBytes / kTileBytes : kWarps;

  static constexpr int align(int bytes) { return (bytes + 127) / 128 * 128; }
  static constexpr int larger(int a, int b) { return a > b ? a : b; }

  // Regions that serve one after the other share a place; why that is safe is said where they are
  // used. Outputs: 16 bytes for each 4 channels of 8 heads, dealt out to the CTAs rounded up.
  static constexpr int kOutputBytes = (2 * kHeadDim + kMostCtas) * 16;
  static constexpr int kArea = 0;
  static constexpr int kMaximaAt = kArea + align(kAreaBytes);
  static constexpr int kFoundAt = kMaximaAt + align(kMaxima * 2);
  static constexpr int kListAt = kFoundAt + align(kFoundGroups * 2);
  static constexpr int kFirstInboxAt = kListAt + align(larger(kListPages * 8, kBins * 4));
  static constexpr int kFirstInboxBytes = larger(kMostCtas * (2 * kBins + 4), kOutputBytes);
  static constexpr int kMergeInboxAt = kFirstInboxAt + align(kFirstInboxBytes);
  static constexpr int kSecondInboxAt = kMergeInboxAt + align(kMostCtas * kPassHeads * 8);
  static constexpr int kSecondInboxBytes =
      larger(kSumParts * kMaxGroupSize * 8, kCandidates * 8 + kMostCtas * 4);
  static constexpr int kQueryAt = kSecondInboxAt + align(kSecondInboxBytes);
  static constexpr int kMergeAt = kQueryAt + align(kHeadDim * 32);
  static constexpr int kControlAt = kMergeAt + align(kWarps * kPassHeads * 8);
  static constexpr int kKeysAt = kControlAt + align(static_cast<int>(sizeof(Control)));

  __device__ static unsigned char* tile(unsigned char* memory, int warp) {
    return warp < kAreaWarps ? memory + kArea + warp * kTileBytes
                             : memory + kKeysAt + (warp - kAreaWarps) * kTileBytes;
  }
};

// What the CTAs of a cluster send each other, in this order.
enum Exchange { kHistograms, kBoundaryPages, kOutputs };

// Messages between the CTAs of a cluster: stores to the receiver's inbox, whose barrier counts the
// bytes. The receiver knows how many to expect. A cluster of one stores, and waits for its threads.
struct Mail {
  int cluster;

  __device__ static std::uint32_t barrier(const Control& control, int exchange) {
    return shared_address(&control.exchange[exchange]);
  }
  __device__ void put(void* inbox, std::uint32_t value, int to, std::uint32_t barrier) const {
    if (cluster == 1) {
      *static_cast<std::uint32_t*>(inbox) = value;
    } else {
      send_u32(address_in(shared_address(inbox), to), value, address_in(barrier, to));
    }
  }
  __device__ void put(void* inbox, uint2 value, int to, std::uint32_t barrier) const {
    if (cluster == 1) {
      *static_cast<uint2*>(inbox) = value;
    } else {
      send_u32x2(address_in(shared_address(inbox), to), value.x, value.y, address_in(barrier, to));
    }
  }
  __device__ void put(void* inbox, uint4 value, int to, std::uint32_t barrier) const {
    if (cluster == 1) {
      *static_cast<uint4*>(inbox) = value;
    } else {
      send_u32x4(address_in(shared_address(inbox), to), value, address_in(barrier, to));
    }
  }
  __device__ void wait(std::uint32_t barrier, std::uint32_t parity) const {
    if (cluster == 1) {
      __syncthreads();
    } else {
      barrier_wait_cluster(barrier, parity);
    }
  }
  // All threads of all CTAs.
  __device__ void sync() const {
    if (cluster == 1) {
      __syncthreads();
    } else {
      __syncwarp();
      cluster_arrive();
      cluster_wait();
    }
  }
};

}  // namespace locks::detail
