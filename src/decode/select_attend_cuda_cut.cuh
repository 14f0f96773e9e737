// Finds the cut, exactly, over all CTAs of a cluster: what the choice_ranks of the pages taken
// reach, and those of no other page.
//
// 1. Sums: each CTA adds up the tile sums of all heads, and knows the weights.
// 2. Keys, and a histogram of them. Histograms are exchanged: all CTAs know the bin that the cut
//    lies in, how many pages of it are taken, and how many each CTA has of it. Pages above that bin
//    are certain.
// 3. The pages of the bin are exchanged, and every CTA finds the cut among them. Where they do not
//    fit, as with many equal keys, all keys are searched digit by digit instead
//    (select_attend_cuda_digits.cuh). All CTAs see the same counts and go the same way.
#pragma once

#include "decode/select_attend_cuda_digits.cuh"
#include "decode/select_attend_cuda_keys.cuh"
#include "decode/select_attend_cuda_list.cuh"
#include "decode/select_attend_cuda_sums.cuh"

namespace locks::detail {

inline constexpr std::uint32_t kFull = 1u << 31;  // some count of a histogram does not fit

struct Choice {
  bool whole;  // everything is read
  int pages;   // taken
  std::uint64_t cut;
};

template <int kHeadDim, int kThreads>
struct Selection {
  using Memory = Layout<kHeadDim, kThreads>;
  // Pages of the cut's bin that are ranked each against all, so many by each warp.
  static constexpr int kRankedByWarp = 8;
  static constexpr int kRanked = kRankedByWarp * Memory::kWarps;

  const StepArguments& args;
  const RowHead& row;
  const Keys& keys;
  const Mail& mail;
  unsigned char* memory;
  Control& control;

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpLanes; }

  __device__ std::uint16_t* maxima() const {
    return reinterpret_cast<std::uint16_t*>(memory + Memory::kMaximaAt);
  }
  // In the place of the list, which is made when all CTAs have these counts.
  __device__ std::uint32_t* histogram() const {
    return reinterpret_cast<std::uint32_t*>(memory + Memory::kListAt);
  }
  __device__ PageKey* list() const { return reinterpret_cast<PageKey*>(memory + Memory::kListAt); }
  // Of each CTA. Outputs arrive in their place, after their senders have heard of this CTA that its
  // list is made.
  __device__ std::uint16_t* histograms() const {
    return reinterpret_cast<std::uint16_t*>(memory + Memory::kFirstInboxAt);
  }
  __device__ std::uint32_t* bad_counts() const {
    return reinterpret_cast<std::uint32_t*>(memory + Memory::kFirstInboxAt + kMostCtas * kBins * 2);
  }
  // Pages of the cut's bin take the place of the sums: they are sent when all histograms have come,
  // that is after every CTA has made its keys.
  __device__ Shifted* parts() const {
    return reinterpret_cast<Shifted*>(memory + Memory::kSecondInboxAt);
  }
  __device__ std::uint64_t* candidates() const {
    return reinterpret_cast<std::uint64_t*>(memory + Memory::kSecondInboxAt);
  }
  // In the place of the maxima, which the list was made from.
  __device__ std::uint32_t* digit_counts() const {
    return reinterpret_cast<std::uint32_t*>(memory + Memory::kMaximaAt);
  }
  __device__ std::uint32_t* list_marks() const {
    return reinterpret_cast<std::uint32_t*>(memory + Memory::kSecondInboxAt + kCandidates * 8);
  }

  __device__ void expect_histograms() const {
    if (row.cluster() == 1 || thread() != 0 || row.scored_pages == 0) return;
    barrier_expect_bytes(Mail::barrier(control, kHistograms), row.cluster() * (2 * kBins + 4));
  }

  // A warp adds up the parts warp(), warp() + kWarps, ...: part p % kSumParts of head p /
  // kSumParts. None of a part that there is not.
  __device__ LaneTiles tiles_of_part(int part) const {
    return {row.tile_sums + std::int64_t{part / kSumParts} * row.num_tiles,
            part < row.group * kSumParts ? row.num_tiles : 0, part % kSumParts * kWarpLanes};
  }
  // `tiles` holds the warp's first.
  __device__ void make_sums(LaneTiles& tiles) const {
    const int num_parts = row.group * kSumParts;
#pragma unroll 1
    for (int part = warp(); part < num_parts; part += Memory::kWarps) {
      if (part >= Memory::kWarps) {
        tiles = tiles_of_part(part);
        tiles.load();
      }
      const Shifted sum = sum_part(tiles, row, part);
      if (lane() == 0) parts()[part] = sum;
    }
  }

  // The head whose weight this thread makes. The last warp has the fewest parts to add up.
  __device__ static int weight_head() { return kThreads - 1 - thread(); }

  // Where log2 of the mass of the tokens without a record lies, of a thread's head.
  __device__ const float* log2_tail() const {
    if (weight_head() >= row.group) return nullptr;
    return args.workspace.log2_tail + std::int64_t{row.row} * args.attention.num_query_heads +
           row.kv_head * row.group + weight_head();
  }

  // That mass, and whether it is not finite.
  __device__ static Shifted tail_mass(float log2_tail, bool& bad) {
    bad = !(log2_tail < __int_as_float(0x7F800000));
    if (bad || log2_tail < -126.0f) return {0, 0};
    constexpr float kLargest = 100.0f;
    const int shift =
        log2_tail > kLargest
            ? static_cast<int>(ceilf((log2_tail - kLargest) / static_cast<float>(kShiftUnit)))
            : 0;
    return {exp2f(log2_tail - static_cast<float>(shift * kShiftUnit)), shift};
  }

  // Of the thread's head, if it has one, of which log2_tail is.
  __device__ void make_weights(float log2_tail) const {
    bool bad = false;
    const Shifted tail = tail_mass(log2_tail, bad);
    const int head = weight_head();
    const int group = row.group;
    __syncthreads();
    if (head < group) {
      Shifted total = parts()[head * kSumParts];
#pragma unroll
      for (int p = 1; p < kSumParts; ++p) total = add(total, parts()[head * kSumParts + p]);
      total = add(total, tail);
      // A head without any mass gives no shares: all its pages are forced.
      control.weight[head] =
          total.sum > 0 ? __frcp_rn(total.sum * static_cast<float>(group)) : 0.0f;
      control.top_shift[head] = total.shift;
      if (total.shift > 0) control.shifted = 1;
      if (bad) control.tail_is_bad = 1;
    }
    __syncthreads();
  }

  // Each CTA starts with itself.
  __device__ int receiver(int i) const {
    const int to = i + row.rank();
    return to < row.cluster() ? to : to - row.cluster();
  }

  // 8 bins a lane and receiver, two bytes each. Where a count does not fit, all are told that the
  // boundary is not known, along with the number of bad pages.
  __device__ void send_histogram() const {
    static_assert(kBins == 8 * kWarpLanes);
    const std::uint32_t barrier = Mail::barrier(control, kHistograms);
    const auto* own = reinterpret_cast<const uint4*>(histogram()) + 2 * lane();
    const uint4 low = own[0];
    const uint4 high = own[1];
    const uint4 words =
        make_uint4(__byte_perm(low.x, low.y, 0x5410), __byte_perm(low.z, low.w, 0x5410),
                   __byte_perm(high.x, high.y, 0x5410), __byte_perm(high.z, high.w, 0x5410));
    const std::uint32_t most = max(max(max(low.x, low.y), max(low.z, low.w)),
                                   max(max(high.x, high.y), max(high.z, high.w)));
    const std::uint32_t bad = static_cast<std::uint32_t>(control.bad_choices) |
                              (__any_sync(kAllLanes, most > kMostCounted) ? kFull : 0);
#pragma unroll 1
    for (int i = warp(); i < row.cluster(); i += Memory::kWarps) {
      const int to = receiver(i);
      mail.put(histograms() + row.rank() * kBins + lane() * 8, words, to, barrier);
      if (lane() == 0) mail.put(bad_counts() + row.rank(), bad, to, barrier);
    }
  }

  __device__ int always_read_pages() const { return row.first + row.num_pages - row.last; }

  // A lane's share of all histograms: pages in the words of two bins 4 * vector and on.
  __device__ void add_histograms(int vector, std::uint32_t (&count)[4]) const {
    const auto* from = reinterpret_cast<const uint4*>(histograms()) + vector;
    const auto add = [&](int cta) {
      constexpr std::uint32_t kOnes = 0x0101u;
      const uint4 bins = from[cta * (kBins / 8)];
      count[0] = __dp2a_lo(bins.x, kOnes, count[0]);
      count[1] = __dp2a_lo(bins.y, kOnes, count[1]);
      count[2] = __dp2a_lo(bins.z, kOnes, count[2]);
      count[3] = __dp2a_lo(bins.w, kOnes, count[3]);
    };
    if (row.cluster() == kMostCtas) {  // few rows, which time matters for: all loads at once
#pragma unroll
      for (int cta = 0; cta < kMostCtas; ++cta) add(cta);
    } else {
#pragma unroll 4
      for (int cta = 0; cta < row.cluster(); ++cta) add(cta);
    }
  }

  // One warp: the bin of the `wanted`-th largest key; bin 0 if fewer were counted. First the word
  // of two bins, lane 0 with the uppermost four words; then the bin in it, a CTA a lane. Lanes look
  // for the word before it is known whose it is, and add up both bins, so that steps do not wait
  // for one another.
  __device__ Boundary find_boundary(int vector, const std::uint32_t (&count)[4], int wanted) const {
    const int own = static_cast<int>(count[0] + count[1] + count[2] + count[3]);
    int upto = own;
#pragma unroll
    for (int apart = 1; apart < kWarpLanes; apart *= 2) {
      const int other = __shfl_up_sync(kAllLanes, upto, apart);
      if (lane() >= apart) upto += other;
    }
    const unsigned finders = __ballot_sync(kAllLanes, upto >= wanted);
    if (finders == 0) return {0, wanted, kUncounted, 0, 0};
    int word = vector * 4 + 3;
    int above = upto - own;
    int next = above;
#pragma unroll
    for (int w = 3; w > 0; --w) {
      next += static_cast<int>(count[w]);
      if (next < wanted) {
        above = next;
        --word;
      }
    }
    const int finder = __ffs(static_cast<int>(finders)) - 1;
    word = __shfl_sync(kAllLanes, word, finder);
    above = __shfl_sync(kAllLanes, above, finder);
    const auto* words = reinterpret_cast<const std::uint32_t*>(histograms()) + word;
    const std::uint32_t bins = lane() < row.cluster() ? words[lane() * (kBins / 2)] : 0;
    const std::uint32_t bins_before = lane() < row.rank() ? bins : 0;
    const std::uint32_t own_bins = words[row.rank() * (kBins / 2)];
    const std::uint32_t pages[2] = {__reduce_add_sync(kAllLanes, bins & 0xFFFFu),
                                    __reduce_add_sync(kAllLanes, bins >> 16)};
    const std::uint32_t first[2] = {__reduce_add_sync(kAllLanes, bins_before & 0xFFFFu),
                                    __reduce_add_sync(kAllLanes, bins_before >> 16)};
    const bool is_high = above + static_cast<int>(pages[1]) >= wanted;
    Boundary found;
    found.bin = word * 2 + (is_high ? 1 : 0);
    found.wanted = wanted - above - (is_high ? 0 : static_cast<int>(pages[1]));
    found.pages = static_cast<int>(is_high ? pages[1] : pages[0]);
    found.others = found.pages - static_cast<int>(is_high ? own_bins >> 16 : own_bins & 0xFFFFu);
    found.first = static_cast<int>(is_high ? first[1] : first[0]);
    return found;
  }

  // One warp, when all histograms are there: publishes the boundary and the number of bad pages.
  // `left`: pages to choose if none is bad.
  __device__ void publish_boundary(int left) const {
    const std::uint32_t of_cta = lane() < row.cluster() ? bad_counts()[lane()] : 0;
    const int vector = kWarpLanes - 1 - lane();
    std::uint32_t count[4] = {};
    add_histograms(vector, count);
    const auto bad = static_cast<int>(__reduce_add_sync(kAllLanes, of_cta & ~kFull));
    const bool is_full = __any_sync(kAllLanes, of_cta >= kFull);
    const int wanted = left - bad;
    Boundary boundary{kBins - 1, 0, 0, 0, 0};
    if (wanted > 0) {
      boundary =
          is_full ? Boundary{0, wanted, kUncounted, 0, 0} : find_boundary(vector, count, wanted);
    }
    if (lane() != 0) return;
    control.boundary = boundary;
    control.all_bad_choices = bad;
    if (row.cluster() > 1) {
      barrier_expect_bytes(Mail::barrier(control, kBoundaryPages),
                           row.cluster() * 4 + (boundary.is_sent() ? boundary.others * 8 : 0));
    }
  }

  // Returns how many pages are left to choose; the boundary is in place.
  __device__ int read_histograms() const {
    const int left = row.budget - always_read_pages();
    if (row.cluster() == 1) {
      __syncthreads();
    } else if (warp() == 0) {
      mail.wait(Mail::barrier(control, kHistograms), 0);
    }
    if (warp() == 0) publish_boundary(left);
    __syncthreads();
    return left - control.all_bad_choices;
  }

  // Lists the CTA's pages of the cut's bin and above, and sends those of the bin. Returns their
  // number; the list is of no use if that is more than kListPages.
  __device__ int list_pages(const Boundary& boundary) const {
    const std::uint32_t least = bin_begin(boundary.bin);
    std::uint64_t* own = candidates() + boundary.first;
    const Listing<kHeadDim, kThreads> listing{
        row, keys, memory, control, least, boundary.is_sent() ? bin_begin(boundary.bin + 1) : least,
        own};
    const int listed = listing.make();
    const int to = static_cast<int>(threadIdx.x % kMostCtas);
    if (to >= row.cluster()) return listed;
    const std::uint32_t barrier = Mail::barrier(control, kBoundaryPages);
    // Who hears this sends outputs to where histograms lie.
    if (thread() < kMostCtas) mail.put(list_marks() + row.rank(), 1u, to, barrier);
    const int sent = boundary.is_sent() && to != row.rank() ? boundary.pages - boundary.others : 0;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x / kMostCtas); i < sent; i += kThreads / kMostCtas) {
      mail.put(own + i, *reinterpret_cast<const uint2*>(own + i), to, barrier);
    }
    return listed;
  }

  // What the choice_ranks of the pages taken reach, the same in every thread of every CTA.
  __device__ std::uint64_t find_cut(int wanted, const Boundary& boundary) const {
    mail.wait(Mail::barrier(control, kBoundaryPages), 0);
    if (!boundary.is_sent()) {
      // Forced pages are the budget; or every choice is taken; or all of the bin; or it is too full
      // to be sent.
      if (wanted == 0) return ~std::uint64_t{0};
      if (wanted >= row.last - row.first - control.all_bad_choices) return std::uint64_t{1} << 32;
      if (boundary.pages == boundary.wanted) return std::uint64_t{bin_begin(boundary.bin)} << 32;
      return find_cut_by_digits<kHeadDim, kThreads>(memory, keys.room, wanted);
    }
    if (boundary.pages > kRanked) {
      return find_cut_among(candidates(), boundary.pages, boundary.wanted, digit_counts(), control);
    }
    find_cut_by_ranks(boundary);
    __syncthreads();
    return control.cut;
  }

  // Few pages: each lane of a warp holds some of all, and counts those that are larger than each of
  // the warp's. Ranks are less than 2^63, and all differ.
  __device__ void find_cut_by_ranks(const Boundary& boundary) const {
    const int first = warp() * kRankedByWarp;
    if (first >= boundary.pages) return;
    const std::uint64_t* ranks = candidates();
    std::uint64_t others[kRanked / kWarpLanes];
#pragma unroll
    for (int k = 0; k < kRanked / kWarpLanes; ++k) {
      const int i = k * kWarpLanes + lane();
      others[k] = i < boundary.pages ? ranks[i] : 0;
    }
    std::uint32_t larger[kRankedByWarp / 4] = {};  // a byte for each of the warp's pages
    static_assert(kRanked <= 0xFF);
#pragma unroll
    for (int i = 0; i < kRankedByWarp; ++i) {
      const std::uint64_t own = ranks[first + i];
      std::uint32_t count = 0;
#pragma unroll
      for (const std::uint64_t other : others) {
        count += static_cast<std::uint32_t>((own - other) >> 63);
      }
      larger[i / 4] += count << i % 4 * 8;
    }
    static_assert(kRankedByWarp == 8);
    const std::uint32_t low = __reduce_add_sync(kAllLanes, larger[0]);
    const std::uint32_t high = __reduce_add_sync(kAllLanes, larger[1]);
    if (lane() >= min(kRankedByWarp, boundary.pages - first)) return;
    const std::uint32_t of_lane = (lane() < 4 ? low : high) >> (lane() & 3) * 8 & 0xFFu;
    if (static_cast<int>(of_lane) == boundary.wanted - 1) control.cut = ranks[first + lane()];
  }
};

}  // namespace locks::detail
