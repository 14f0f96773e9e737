// The list of a CTA: its forced pages, and those of the cut's bin and above. In two phases, so that
// threads share the work evenly however the pages lie: first the key groups with a page for the
// list, by their maxima; then their pages, a group a thread. Where more groups are found than there
// is room for, the threads look at all groups in turn instead.
//
// Pages are listed in the order of groups, so outputs are the same from run to run.
#pragma once

#include "decode/select_attend_cuda_keys.cuh"

namespace locks::detail {

// Makes the keys of a group again, from masses that are brought kAtOnce heads at a time, and leaves
// them in this thread's place: the key pass's ring, idle by then, keys 0 to 3 and kThreads vectors
// further 4 to 7. Seldom needed, so it does not lie in the way of the rest.
template <int kHeadDim, int kThreads>
__device__ __noinline__ void remake_keys(const Control& control, int group_idx, uint4* place) {
  const RowHead& row = control.row;
  std::uint32_t key[kGroupPages];
  if (control.shifted != 0) {
    compute_keys(row, control, group_idx, key);
  } else {
    constexpr int kAtOnce = Layout<kHeadDim, kThreads>::kStages * kStageHeads;
    float shares[kGroupPages] = {};
    const __nv_bfloat16* from = row.masses + row.mass_at(group_idx);
#pragma unroll 1
    for (int first = 0; first < row.group; first += kAtOnce) {
      const int heads = min(row.group - first, kAtOnce);
#pragma unroll 1
      for (int h = 0; h < heads; ++h, from += row.mass_stride) {
        copy_async_16(shared_address(place + h * kThreads), from);
      }
      copy_async_commit();
      copy_async_wait<0>();
#pragma unroll 1
      for (int h = 0; h < heads; ++h) {
        add_shares(shares, place[h * kThreads], control.weight[first + h]);
      }
    }
#pragma unroll
    for (int i = 0; i < kGroupPages; ++i) {
      key[i] = page_key(row, row.page(group_idx, i), shares[i]);
    }
  }
  place[0] = make_uint4(key[0], key[1], key[2], key[3]);
  place[kThreads] = make_uint4(key[4], key[5], key[6], key[7]);
}

template <int kHeadDim, int kThreads>
struct Listing {
  using Memory = Layout<kHeadDim, kThreads>;
  static constexpr int kWarps = Memory::kWarps;
  // Groups that one thread looks through at a time: the maxima of 16 bytes.
  static constexpr int kLookedAt = 8;
  static_assert(kMaxima % kLookedAt == 0);

  const RowHead row;  // a copy, which registers can hold
  const Keys& keys;
  unsigned char* memory;
  Control& control;
  std::uint32_t least;    // the first key of the cut's bin
  std::uint32_t certain;  // the first key above it; `least`: pages of the bin are not wanted apart
  std::uint64_t* of_bin;  // for the ranks of this CTA's pages of the bin

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return thread() % kWarpLanes; }
  __device__ static int warp() { return thread() / kWarpLanes; }

  __device__ const std::uint16_t* maxima() const {
    return reinterpret_cast<const std::uint16_t*>(memory + Memory::kMaximaAt);
  }
  __device__ PageKey* list() const { return reinterpret_cast<PageKey*>(memory + Memory::kListAt); }
  __device__ std::uint16_t* found() const {
    return reinterpret_cast<std::uint16_t*>(memory + Memory::kFoundAt);
  }

  // Of x over the threads in front of this one, and over all. Takes turns between two places, so
  // that one barrier is enough. Two sums of less than 2^16 fit into one.
  struct Sum {
    int before, all;
  };
  __device__ Sum sum_in_order(int x, int turn) const {
    int* counts = control.warp_counts[turn % 2];
    int sum = x;
#pragma unroll
    for (int apart = 1; apart < kWarpLanes; apart *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, apart);
      if (lane() >= apart) sum += other;
    }
    if (lane() == kWarpLanes - 1) counts[warp()] = sum;
    __syncthreads();
    const int count = lane() < kWarps ? counts[lane()] : 0;
    return {sum - x + __reduce_add_sync(kAllLanes, lane() < warp() ? count : 0),
            __reduce_add_sync(kAllLanes, count)};
  }

  // Groups with a page for the list among kLookedAt from `first` on, one bit each. The group of
  // the pages without a record is one of them.
  __device__ unsigned look_at(int first) const {
    const int groups = row.num_groups - first;
    unsigned found = 0;
    if (first < kMaxima) {
      const std::uint32_t least_maximum = least >> kMaximumShift;
      const uint4 some = *reinterpret_cast<const uint4*>(maxima() + first);
      const std::uint32_t pairs[4] = {some.x, some.y, some.z, some.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        found |= (pairs[i] & 0xFFFFu) >= least_maximum ? 1u << 2 * i : 0;
        found |= pairs[i] >> 16 >= least_maximum ? 2u << 2 * i : 0;
      }
      found &= (1u << min(groups, kLookedAt)) - 1;
    } else {
#pragma unroll 1
      for (int i = 0; i < min(groups, kLookedAt); ++i) {
        remake_keys<kHeadDim, kThreads>(control, first + i, own_place());
        const uint4 low = own_place()[0];
        const uint4 high = own_place()[kThreads];
        const std::uint32_t largest = max(max(max(low.x, low.y), max(low.z, low.w)),
                                          max(max(high.x, high.y), max(high.z, high.w)));
        found |= largest >= least ? 1u << i : 0;
      }
    }
    return row.has_tail && groups < kLookedAt ? found | 1u << groups : found;
  }

  // Lists those groups; returns their number, more than kFoundGroups if they do not fit.
  __device__ int find_groups() const {
    const int groups = row.all_groups();
    if (groups > 0xFFFF) return groups;
    int all = 0;
    int turn = 0;
#pragma unroll 1
    for (int begin = 0; begin < groups; begin += kThreads * kLookedAt) {
      const int first = begin + thread() * kLookedAt;
      const unsigned some = first < groups ? look_at(first) : 0;
      const Sum sum = sum_in_order(__popc(some), turn++);
      int at = all + sum.before;
      all += sum.all;
      if (all > kFoundGroups) continue;
#pragma unroll
      for (int i = 0; i < kLookedAt; ++i) {
        if ((some >> i & 1) != 0) found()[at++] = static_cast<std::uint16_t>(first + i);
      }
    }
    __syncthreads();
    return all;
  }

  // This thread's 32 bytes for keys that are not stored: of the key pass's ring, idle by now.
  __device__ uint4* own_place() const {
    return reinterpret_cast<uint4*>(memory + Memory::kArea) + thread();
  }

  // The keys of a group. Its pages lie `apart` behind the first one.
  struct Pages {
    std::uint32_t key[kGroupPages];
    int first, apart;
  };

  // A group without a page for the list may come without keys.
  __device__ Pages pages_of(int group_idx, bool is_found) const {
    Pages pages{};
    pages.first = row.page(group_idx, 0);
    if (group_idx == row.num_groups) {
      pages.apart = 1;
      const int count = row.num_pages - pages.first;
#pragma unroll
      for (int i = 0; i < kGroupPages; ++i) pages.key[i] = i < count ? kForced : kNoPage;
      return pages;
    }
    pages.apart = 1 << row.slot_shift;
    const uint4* stored = keys.stored + group_idx;
    int high_at = keys.room;
    if (group_idx >= keys.room) {
      if (!is_found && group_idx < kMaxima && maxima()[group_idx] < least >> kMaximumShift) {
        return pages;
      }
      remake_keys<kHeadDim, kThreads>(control, group_idx, own_place());
      stored = own_place();
      high_at = kThreads;
    }
    const uint4 low = stored[0];
    const uint4 high = stored[high_at];
    pages.key[0] = low.x, pages.key[1] = low.y, pages.key[2] = low.z, pages.key[3] = low.w;
    pages.key[4] = high.x, pages.key[5] = high.y, pages.key[6] = high.z, pages.key[7] = high.w;
    return pages;
  }

  // Pages of the list in the lower half, those of the bin among them in the upper half.
  __device__ int count(const Pages& pages) const {
    unsigned listed = 0;
    unsigned above = 0;
#pragma unroll
    for (int i = 0; i < kGroupPages; ++i) {
      listed |= (pages.key[i] >= least ? 1u : 0u) << i;
      above |= (pages.key[i] >= certain ? 1u : 0u) << i;
    }
    return __popc(listed) | __popc(listed & ~above) << 16;
  }

  __device__ void put(const Pages& pages, PageKey* to) const {
#pragma unroll
    for (int i = 0; i < kGroupPages; ++i) {
      const auto page = static_cast<std::uint32_t>(pages.first + i * pages.apart);
      if (pages.key[i] >= least) *to++ = {pages.key[i], page};
    }
  }
  __device__ void put_ranks(const Pages& pages, std::uint64_t* to) const {
#pragma unroll
    for (int i = 0; i < kGroupPages; ++i) {
      const auto page = static_cast<std::uint32_t>(pages.first + i * pages.apart);
      if (pages.key[i] >= least && pages.key[i] < certain) {
        *to++ = choice_rank(pages.key[i], page);
      }
    }
  }

  // Returns the number of pages for the list, which is of no use if they are more than kListPages.
  __device__ int make() const {
    // Few groups: each thread looks at its own.
    int groups = row.all_groups();
    bool is_found = groups > kThreads;
    if (is_found) {
      const int found_groups = find_groups();
      is_found = found_groups <= kFoundGroups;
      groups = is_found ? found_groups : groups;
    }
    int total = 0;
    int total_of_bin = 0;
    int turn = 0;
#pragma unroll 1
    for (int begin = 0; begin < groups; begin += kThreads) {
      const int i = begin + thread();
      Pages pages{};
      if (i < groups) pages = pages_of(is_found ? found()[i] : i, is_found);
      const int own = count(pages);
      const Sum sum = sum_in_order(own, turn++);
      const int at = total + (sum.before & 0xFFFF);
      total += sum.all & 0xFFFF;
      if (total <= kListPages) put(pages, list() + at);
      if (own >> 16 != 0) put_ranks(pages, of_bin + total_of_bin + (sum.before >> 16));
      total_of_bin += sum.all >> 16;
    }
    if (row.num_groups > keys.room) fence_before_bulk_copies();  // tiles will be where keys were
    __syncthreads();
    return total;
  }
};

}  // namespace locks::detail
