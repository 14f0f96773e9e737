// Keys of pages: what select_attend ranks by, from the masses that the scorer left.
//
// The key of a page that may be chosen is the bits of its share plus 1, so that keys order as
// shares do and 0 is left for "no page here"; kForced is a page that is read whatever its share.
// Shares are sums over heads in order, of mass * weight with fused multiply-adds, so a key is the
// same whoever computes it.
#pragma once

#include "decode/select_attend_cuda_shared.cuh"

namespace locks::detail {

inline constexpr std::uint32_t kForced = 0xFFFFFFFFu;
inline constexpr std::uint32_t kNoPage = 0;

// Descending order of these is the order of choice: larger keys first, then lower pages.
__device__ inline std::uint64_t choice_rank(std::uint32_t key, std::uint32_t page) {
  return std::uint64_t{key} << 32 | static_cast<std::uint32_t>(~page);
}

__device__ inline bool is_taken(std::uint32_t key, std::uint32_t page, std::uint64_t cut) {
  return key == kForced || (key != kNoPage && choice_rank(key, page) >= cut);
}

__device__ inline int bin_of(std::uint32_t key) {
  return min(max(static_cast<int>(key >> kBinShift) - static_cast<int>(kFirstBin), 0), kBins - 1);
}

// The least key of a bin.
__device__ inline std::uint32_t bin_begin(int bin) {
  return bin == 0 ? 1u : (static_cast<std::uint32_t>(bin) + kFirstBin) << kBinShift;
}

// --- sums with shifts ---------------------------------------------------------------------------

// sum * 2^(kShiftUnit * shift).
struct Shifted {
  float sum;
  int shift;
};

__device__ inline float scale_down(float x, int units) {
  if (units == 0) return x;
  if (units > 3) return 0;  // below 2^100 * 2^-256
  for (int i = 0; i < units; ++i) x *= 0x1p-64f;
  return x;
}

__device__ inline Shifted add(Shifted a, Shifted b) {
  if (a.shift == b.shift) return {a.sum + b.sum, a.shift};
  const int shift = max(a.shift, b.shift);
  return {scale_down(a.sum, min(shift - a.shift, 4)) + scale_down(b.sum, min(shift - b.shift, 4)),
          shift};
}

__device__ inline Shifted tile_mass(const RowHead& row, int head, int tile, float sum) {
  if (!(sum < 0)) return {sum, 0};
  return {-sum, row.tile_shifts[std::int64_t{head} * row.num_tiles + tile]};
}

// Sums the runs of one slot of one head (runs slot, slot + 16, ...) with 8 lanes: lane l takes
// every eighth of them, in order; then the lanes in a tree. All 8 lanes return the sum. All lanes
// of the warp take part; those without work have `active` false.
__device__ inline Shifted sum_slot(const RowHead& row, int head, int slot, bool active) {
  constexpr int kLanes8 = 8;
  constexpr int kAtOnce = 4;  // runs whose loads are on their way together
  const int lane = static_cast<int>(threadIdx.x) % kLanes8;
  const float* sums = row.tile_sums + std::int64_t{head} * row.num_tiles;
  const int runs = active ? (row.num_tiles + kTilesPerRun - 1) / kTilesPerRun : 0;
  Shifted total{0, 0};
  for (int run = slot + kSumSlots * lane; run < runs; run += kSumSlots * kLanes8 * kAtOnce) {
    float tile[kAtOnce][kTilesPerRun];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int t = 0; t < kTilesPerRun; ++t) {
        const int at = (run + i * kSumSlots * kLanes8) * kTilesPerRun + t;
        tile[i][t] = at < row.num_tiles ? sums[at] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int begin = (run + i * kSumSlots * kLanes8) * kTilesPerRun;
      bool plain = true;
#pragma unroll
      for (int t = 0; t < kTilesPerRun; ++t) plain = plain && !(tile[i][t] < 0);
      Shifted sum{tile[i][0], 0};
      if (plain) {
#pragma unroll
        for (int t = 1; t < kTilesPerRun; ++t) sum.sum += tile[i][t];
      } else {
        sum = tile_mass(row, head, begin, tile[i][0]);
#pragma unroll
        for (int t = 1; t < kTilesPerRun; ++t) {
          sum = add(sum, tile_mass(row, head, begin + t, tile[i][t]));
        }
      }
      total = add(total, sum);
    }
  }
#pragma unroll
  for (int apart = 1; apart < kLanes8; apart *= 2) {
    const Shifted other{__shfl_xor_sync(kAllLanes, total.sum, apart),
                        __shfl_xor_sync(kAllLanes, total.shift, apart)};
    total = add(total, other);
  }
  return total;
}

// --- keys ---------------------------------------------------------------------------------------

__device__ inline float low_bf16(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_bf16(std::uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// shares[i] += masses[i] * weight
__device__ inline void add_shares(float (&shares)[kGroupPages], uint4 masses, float weight) {
  const std::uint32_t pairs[4] = {masses.x, masses.y, masses.z, masses.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    shares[2 * i] = __fmaf_rn(low_bf16(pairs[i]), weight, shares[2 * i]);
    shares[2 * i + 1] = __fmaf_rn(high_bf16(pairs[i]), weight, shares[2 * i + 1]);
  }
}

// The same for masses of a tile that lies `units` shift units below the head's largest.
__device__ inline void add_shifted_shares(float (&shares)[kGroupPages], uint4 masses, float weight,
                                          int units) {
  const std::uint32_t pairs[4] = {masses.x, masses.y, masses.z, masses.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    shares[2 * i] = __fmaf_rn(scale_down(low_bf16(pairs[i]), units), weight, shares[2 * i]);
    shares[2 * i + 1] =
        __fmaf_rn(scale_down(high_bf16(pairs[i]), units), weight, shares[2 * i + 1]);
  }
}

__device__ inline int units_below_top(const RowHead& row, const Control& control, int head,
                                      int group_idx) {
  const int tile = row.unit(group_idx) / (kTileBlocks / kMassBlocks);
  const std::int64_t at = std::int64_t{head} * row.num_tiles + tile;
  const int shift = row.tile_sums[at] < 0 ? row.tile_shifts[at] : 0;
  return min(max(control.top_shift[head] - shift, 0), 4);
}

__device__ inline bool is_bad(float share) { return !(share < __int_as_float(0x7F800000)); }

__device__ inline std::uint32_t page_key(const RowHead& row, int page, float share) {
  if (page >= row.scored_pages) return kNoPage;
  if (is_bad(share) || page < row.first || page >= row.last) return kForced;
  return __float_as_uint(share) + 1;
}

// The keys of one CTA: in shared memory as far as there is room, else computed anew.
struct Keys {
  const RowHead& row;
  const Control& control;
  uint4* stored;  // [2][room]: keys 0 to 3, then 4 to 7, of each group
  int room;       // groups

  __device__ void store(int group_idx, const std::uint32_t (&key)[kGroupPages]) const {
    if (group_idx >= room) return;
    stored[group_idx] = make_uint4(key[0], key[1], key[2], key[3]);
    stored[room + group_idx] = make_uint4(key[4], key[5], key[6], key[7]);
  }

  __device__ void load(int group_idx, std::uint32_t (&key)[kGroupPages]) const {
    if (group_idx == row.num_groups) {
#pragma unroll
      for (int i = 0; i < kGroupPages; ++i) {
        key[i] = row.scored_pages + i < row.num_pages ? kForced : kNoPage;
      }
      return;
    }
    if (group_idx >= room) return compute(group_idx, key);
    const uint4 low = stored[group_idx];
    const uint4 high = stored[room + group_idx];
    key[0] = low.x, key[1] = low.y, key[2] = low.z, key[3] = low.w;
    key[4] = high.x, key[5] = high.y, key[6] = high.z, key[7] = high.w;
  }

  __device__ std::uint32_t one(int group_idx, int i) const {
    if (group_idx < min(room, row.num_groups)) {
      const auto* words =
          reinterpret_cast<const std::uint32_t*>(stored + (i >= 4 ? room : 0) + group_idx);
      return words[i & 3];
    }
    std::uint32_t key[kGroupPages];
    load(group_idx, key);
    std::uint32_t found = key[0];
#pragma unroll
    for (int k = 1; k < kGroupPages; ++k) found = k == i ? key[k] : found;
    return found;
  }

  __device__ void compute(int group_idx, std::uint32_t (&key)[kGroupPages]) const {
    float shares[kGroupPages] = {};
    const __nv_bfloat16* masses = row.masses + row.mass_at(group_idx);
#pragma unroll 1
    for (int head = 0; head < row.group; ++head) {
      const uint4 some = *reinterpret_cast<const uint4*>(masses + head * row.mass_stride);
      add(shares, some, head, group_idx);
    }
#pragma unroll
    for (int i = 0; i < kGroupPages; ++i) {
      key[i] = page_key(row, row.page(group_idx, i), shares[i]);
    }
  }

  __device__ void add(float (&shares)[kGroupPages], uint4 masses, int head, int group_idx) const {
    if (control.shifted != 0) {
      add_shifted_shares(shares, masses, control.weight[head],
                         units_below_top(row, control, head, group_idx));
    } else {
      add_shares(shares, masses, control.weight[head]);
    }
  }
};

// Brings the masses of a CTA's key groups through a ring in shared memory and turns them into keys.
// Each thread reads what it copied itself: the ring needs no barrier. kStages stages of kStageHeads
// heads are on their way at a time, since registers for as many loads would not be free here.
template <int kHeadDim, int kThreads>
struct KeyPass {
  using Memory = Layout<kHeadDim, kThreads>;
  static constexpr int kHeadBytes = kThreads * 16;

  const RowHead& row;
  unsigned char* ring;  // this thread's first 16 bytes
  std::uint64_t policy;
  int chunks, stages;  // chunks of heads a turn, stages of all turns
  int next_stage, next_turn, next_chunk;

  __device__ KeyPass(const RowHead& row_head, unsigned char* memory)
      : row(row_head),
        ring(memory + Memory::kArea + static_cast<int>(threadIdx.x) * 16),
        policy(policy_evict_last()),
        chunks((row_head.group + kStageHeads - 1) / kStageHeads),
        stages((row_head.num_groups + kThreads - 1) / kThreads * chunks),
        next_stage(0),
        next_turn(0),
        next_chunk(0) {}

  __device__ void bring(int place) {
    const int group_idx = next_turn * kThreads + static_cast<int>(threadIdx.x);
    if (next_stage < stages && group_idx < row.num_groups) {
      const int head = next_chunk * kStageHeads;
      const __nv_bfloat16* from =
          row.masses + row.mass_at(group_idx) + std::int64_t{head} * row.mass_stride;
      const std::uint32_t to = shared_address(ring + place * Memory::kStageBytes);
#pragma unroll
      for (int h = 0; h < kStageHeads; ++h) {
        if (head + h < row.group) {
          copy_async_16(to + h * kHeadBytes, from, policy);
          from += row.mass_stride;
        }
      }
    }
    copy_async_commit();
    ++next_stage;
    if (++next_chunk == chunks) next_chunk = 0, ++next_turn;
  }

  __device__ void start() {
#pragma unroll
    for (int place = 0; place < Memory::kStages; ++place) bring(place);
  }

  // Keys and maxima to shared memory; the histogram of the maxima; counts of bad pages.
  __device__ void finish(const Keys& keys, std::uint16_t* maxima, std::uint32_t* histogram,
                         Control& control) {
    int place = 0;
    int bad_pages = 0;
    int bad_choices = 0;
    for (int turn = 0; turn * kThreads < row.num_groups; ++turn) {
      const int group_idx = turn * kThreads + static_cast<int>(threadIdx.x);
      const bool active = group_idx < row.num_groups;
      float shares[kGroupPages] = {};
      for (int chunk = 0; chunk < chunks; ++chunk) {
        copy_async_wait<Memory::kStages - 1>();
        if (active) {
          const unsigned char* from = ring + place * Memory::kStageBytes;
#pragma unroll
          for (int h = 0; h < kStageHeads; ++h) {
            const int head = chunk * kStageHeads + h;
            if (head < row.group) {
              keys.add(shares, *reinterpret_cast<const uint4*>(from + h * kHeadBytes), head,
                       group_idx);
            }
          }
        }
        bring(place);
        if (++place == Memory::kStages) place = 0;
      }
      if (!active) continue;
      std::uint32_t key[kGroupPages];
      std::uint32_t largest = kNoPage;
      bool forced = false;
#pragma unroll
      for (int i = 0; i < kGroupPages; ++i) {
        const int page = row.page(group_idx, i);
        key[i] = page_key(row, page, shares[i]);
        forced = forced || key[i] == kForced;
        largest = key[i] == kForced ? largest : max(largest, key[i]);
        if (is_bad(shares[i]) && page < row.scored_pages) {
          ++bad_pages;
          bad_choices += page >= row.first && page < row.last ? 1 : 0;
        }
      }
      keys.store(group_idx, key);
      if (group_idx < kMaxima) {
        maxima[group_idx] = forced ? 0xFFFFu : static_cast<std::uint16_t>(largest >> kMaximumShift);
      }
      if (largest != kNoPage) atomicAdd(&histogram[bin_of(largest)], 1u);
    }
    copy_async_wait<0>();
    if (bad_pages != 0) {
      atomicAdd(&control.bad_pages, bad_pages);
      atomicAdd(&control.bad_choices, bad_choices);
    }
  }
};

}  // namespace locks::detail
