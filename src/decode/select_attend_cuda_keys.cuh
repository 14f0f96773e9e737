// Keys of pages: what select_attend ranks by, from the masses that the scorer left.
//
// The key of a page that may be chosen is the bits of its share plus 1, so that keys order as
// shares do and 0 is left for "no page here"; kForced is a page that is read whatever its share.
// Shares are sums over heads in order, of mass * weight with fused multiply-adds, so a key is the
// same whoever computes it.
#pragma once

#include <type_traits>

#include "decode/select_attend_cuda_shared.cuh"
#include "decode/select_attend_cuda_sums.cuh"

namespace locks::detail {

inline constexpr std::uint32_t kForced = 0xFFFFFFFFu;
inline constexpr std::uint32_t kNoPage = 0;
inline constexpr std::uint32_t kInfinityBits = 0x7F800000u;

// Descending order of these is the order of choice: larger keys first, then lower pages.
__device__ inline std::uint64_t choice_rank(std::uint32_t key, std::uint32_t page) {
  return std::uint64_t{key} << 32 | static_cast<std::uint32_t>(~page);
}

__device__ inline bool is_taken(std::uint32_t key, std::uint32_t page, std::uint64_t cut) {
  return key == kForced || (key != kNoPage && choice_rank(key, page) >= cut);
}

// The least key of a bin; of the one past the last: more than any page's that may be chosen.
__device__ inline std::uint32_t bin_begin(int bin) {
  if (bin == kBins) return kForced;
  return bin == 0 ? 1u : (static_cast<std::uint32_t>(bin) + kFirstBin) << kBinShift;
}

// Counts a key, not those of bin 0: what lies in there is told from no other.
__device__ inline void count_key(std::uint32_t* histogram, std::uint32_t key) {
  const std::uint32_t place = key >> kBinShift;
  if (place > kFirstBin) atomicAdd(histogram + min(place - kFirstBin, kBins - 1u), 1u);
}

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
  return max(control.top_shift[head] - shift, 0);
}

__device__ inline bool is_bad(float share) { return __float_as_uint(share) >= kInfinityBits; }

__device__ inline std::uint32_t page_key(const RowHead& row, int page, float share) {
  if (page >= row.scored_pages) return kNoPage;
  if (is_bad(share) || page < row.first || page >= row.last) return kForced;
  return __float_as_uint(share) + 1;
}

// Shares of a group straight from the masses. Nothing that the tuned path calls for.
static __device__ __noinline__ void read_shares(const Control& control, int group_idx,
                                                float* shares) {
  const RowHead& row = control.row;
  float sums[kGroupPages] = {};
  const __nv_bfloat16* masses = row.masses + row.mass_at(group_idx);
#pragma unroll 1
  for (int head = 0; head < row.group; ++head) {
    const uint4 some = *reinterpret_cast<const uint4*>(masses + head * row.mass_stride);
    if (control.shifted != 0) {
      add_shifted_shares(sums, some, control.weight[head],
                         units_below_top(row, control, head, group_idx));
    } else {
      add_shares(sums, some, control.weight[head]);
    }
  }
#pragma unroll
  for (int i = 0; i < kGroupPages; ++i) shares[i] = sums[i];
}

__device__ inline void compute_shares(const Control& control, int group_idx,
                                      float (&shares)[kGroupPages]) {
  float read[kGroupPages];  // the only array that lies in memory
  read_shares(control, group_idx, read);
#pragma unroll
  for (int i = 0; i < kGroupPages; ++i) shares[i] = read[i];
}

__device__ inline void compute_keys(const RowHead& row, const Control& control, int group_idx,
                                    std::uint32_t (&key)[kGroupPages]) {
  float shares[kGroupPages];
  compute_shares(control, group_idx, shares);
#pragma unroll
  for (int i = 0; i < kGroupPages; ++i) {
    key[i] = page_key(row, row.page(group_idx, i), shares[i]);
  }
}

// One key straight from the masses.
static __device__ __noinline__ std::uint32_t compute_key(const Control& control, int group_idx,
                                                         int i) {
  std::uint32_t key[kGroupPages];
  compute_keys(control.row, control, group_idx, key);
  std::uint32_t one = key[0];
#pragma unroll
  for (int k = 1; k < kGroupPages; ++k) one = i == k ? key[k] : one;
  return one;
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

  // Of a group of pages with records.
  __device__ void load(int group_idx, std::uint32_t (&key)[kGroupPages]) const {
    if (group_idx >= room) {
      compute_keys(row, control, group_idx, key);
      return;
    }
    const uint4 low = stored[group_idx];
    const uint4 high = stored[room + group_idx];
    key[0] = low.x, key[1] = low.y, key[2] = low.z, key[3] = low.w;
    key[4] = high.x, key[5] = high.y, key[6] = high.z, key[7] = high.w;
  }

  // Of any group, the one of the pages without a record included.
  __device__ std::uint32_t one(int group_idx, int i) const {
    if (group_idx == row.num_groups) {
      return row.scored_pages + i < row.num_pages ? kForced : kNoPage;
    }
    if (group_idx >= room) return compute_key(control, group_idx, i);
    return reinterpret_cast<const std::uint32_t*>(stored + (i >= 4 ? room : 0) + group_idx)[i & 3];
  }
};

// Brings the masses of a CTA's key groups through a ring in shared memory and turns them into keys.
// Each thread reads what it copied itself: the ring needs no barrier. kStages stages of kStageHeads
// heads are on their way at a time, since registers for as many loads would not be free here.
template <int kHeadDim, int kThreads>
struct KeyPass {
  using Memory = Layout<kHeadDim, kThreads>;
  static constexpr int kHeadBytes = kThreads * 16;

  const RowHead row;    // a copy, which registers can hold
  unsigned char* ring;  // this thread's first 16 bytes
  int chunks;           // of heads
  // What is brought next: a chunk of heads of a group.
  int next_group, next_chunk;
  const __nv_bfloat16* next_first;  // of the group's first head
  const __nv_bfloat16* next_masses;

  __device__ KeyPass(const RowHead& row_head, unsigned char* memory)
      : row(row_head),
        ring(memory + Memory::kArea + static_cast<int>(threadIdx.x) * 16),
        chunks((row_head.group + kStageHeads - 1) / kStageHeads),
        next_group(static_cast<int>(threadIdx.x)),
        next_chunk(0),
        next_first(row_head.masses + row_head.mass_at(next_group)),
        next_masses(next_first) {}

  // Calls body(std::integral_constant) with the number of heads in a chunk.
  template <class Body>
  __device__ void with_heads(int chunk, const Body& body) const {
    static_assert(kStageHeads == 4);
    switch (min(row.group - chunk * kStageHeads, kStageHeads)) {
      case 4:
        return body(std::integral_constant<int, 4>());
      case 3:
        return body(std::integral_constant<int, 3>());
      case 2:
        return body(std::integral_constant<int, 2>());
      default:
        return body(std::integral_constant<int, 1>());
    }
  }

  __device__ void bring(int place) {
    if (next_group < row.num_groups) {
      const std::uint32_t to = shared_address(ring + place * Memory::kStageBytes);
      with_heads(next_chunk, [&](auto heads) {
        const __nv_bfloat16* from = next_masses;
#pragma unroll
        for (int h = 0; h < heads(); ++h) {
          copy_async_16(to + h * kHeadBytes, from);
          from += row.mass_stride;
        }
      });
      next_masses += kStageHeads * row.mass_stride;
      if (++next_chunk == chunks) {
        next_chunk = 0;
        next_group += kThreads;  // units of all CTAs lie between this thread's groups
        next_first += kThreads * kGroupPages * row.cluster();
        next_masses = next_first;
      }
    }
    copy_async_commit();
  }

  __device__ void start() {
#pragma unroll 1
    for (int place = 0; place < Memory::kStages; ++place) bring(place);
  }

  __device__ void count_bad(const float (&shares)[kGroupPages], int group_idx,
                            Control& control) const {
    int pages = 0;
    int choices = 0;
#pragma unroll
    for (int i = 0; i < kGroupPages; ++i) {
      const int page = row.page(group_idx, i);
      const bool bad = is_bad(shares[i]) && page < row.scored_pages;
      pages += bad ? 1 : 0;
      choices += bad && page >= row.first && page < row.last ? 1 : 0;
    }
    if (pages != 0) {
      atomicAdd(&control.bad_pages, pages);
      atomicAdd(&control.bad_choices, choices);
    }
  }

  // Keys, the largest key of each group, the histogram of keys, and counts of bad pages, to shared
  // memory.
  __device__ void finish(const Keys& keys, std::uint16_t* maxima, std::uint32_t* histogram,
                         Control& control) {
    const bool shifted = control.shifted != 0;
    int place = 0;
#pragma unroll 1
    for (int turn = 0; turn * kThreads < row.num_groups; ++turn) {
      float shares[kGroupPages] = {};
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        copy_async_wait<Memory::kStages - 1>();
        const unsigned char* from = ring + place * Memory::kStageBytes;
        const float* weight = control.weight + chunk * kStageHeads;
        with_heads(chunk, [&](auto heads) {
          uint4 masses[heads()];
#pragma unroll
          for (int h = 0; h < heads(); ++h) {
            masses[h] = *reinterpret_cast<const uint4*>(from + h * kHeadBytes);
          }
#pragma unroll
          for (int h = 0; h < heads(); ++h) add_shares(shares, masses[h], weight[h]);
        });
        bring(place);
        if (++place == Memory::kStages) place = 0;
      }
      const int group_idx = turn * kThreads + static_cast<int>(threadIdx.x);
      if (group_idx >= row.num_groups) continue;
      std::uint32_t key[kGroupPages];
      std::uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kGroupPages; ++i) {
        largest = max(largest, __float_as_uint(shares[i]));
        key[i] = __float_as_uint(shares[i]) + 1;
      }
      // Pages that are always read, or not finite, or shifted: seldom.
      const bool plain = largest < kInfinityBits && row.page(group_idx, 0) >= row.first &&
                         row.page(group_idx, kGroupPages - 1) < row.last && !shifted;
      std::uint32_t maximum = (largest + 1) >> kMaximumShift;
      if (plain) {
#pragma unroll
        for (int i = 0; i < kGroupPages; ++i) count_key(histogram, key[i]);
      } else {
        if (largest >= kInfinityBits) count_bad(shares, group_idx, control);
        if (shifted) compute_shares(control, group_idx, shares);
        bool forced = false;
        largest = kNoPage;
#pragma unroll
        for (int i = 0; i < kGroupPages; ++i) {
          key[i] = page_key(row, row.page(group_idx, i), shares[i]);
          forced = forced || key[i] == kForced;
          largest = key[i] == kForced ? largest : max(largest, key[i]);
          count_key(histogram, key[i] == kForced ? kNoPage : key[i]);
        }
        maximum = forced ? 0xFFFFu : largest >> kMaximumShift;
      }
      keys.store(group_idx, key);
      if (group_idx < kMaxima) maxima[group_idx] = static_cast<std::uint16_t>(maximum);
    }
    copy_async_wait<0>();
  }
};

}  // namespace locks::detail
