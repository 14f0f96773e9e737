// Finds the cut: the choice_rank of the last page taken, exactly, over all CTAs of a cluster.
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
  // kSumParts.
  __device__ void load_sums(LaneTiles& sums, int part) const {
    sums.load(row.tile_sums + std::int64_t{part / kSumParts} * row.num_tiles, row.num_tiles,
              part % kSumParts * kWarpLanes);
  }
  // `sums` holds the warp's first.
  __device__ void make_sums(LaneTiles& sums) const {
#pragma unroll 1
    for (int part = warp(); part < row.group * kSumParts; part += Memory::kWarps) {
      if (part >= Memory::kWarps) load_sums(sums, part);
      const std::int64_t tiles = std::int64_t{part / kSumParts} * row.num_tiles;
      const Shifted sum = sum_part(sums, row.tile_sums + tiles, row.tile_shifts + tiles,
                                   row.num_tiles, part % kSumParts * kWarpLanes);
      if (lane() == 0) parts()[part] = sum;
    }
  }

  // Of a thread's head: log2 of the mass of the tokens without a record.
  __device__ float load_log2_tail() const {
    if (thread() >= row.group) return kMinusInfinity;
    return args.workspace.log2_tail[std::int64_t{row.row} * args.attention.num_query_heads +
                                    row.kv_head * row.group + thread()];
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

  __device__ void make_weights(float log2_tail) const {
    bool bad = false;
    const Shifted tail = tail_mass(log2_tail, bad);
    __syncthreads();
    if (thread() < row.group) {
      const int head = thread();
      Shifted total = parts()[head * kSumParts];
#pragma unroll
      for (int p = 1; p < kSumParts; ++p) total = add(total, parts()[head * kSumParts + p]);
      total = add(total, tail);
      // A head without any mass gives no shares: all its pages are forced.
      control.weight[head] =
          total.sum > 0 ? __frcp_rn(total.sum * static_cast<float>(row.group)) : 0.0f;
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
    const std::uint32_t most = max(max(max(low.x, low.y), max(low.z, low.w)),
                                   max(max(high.x, high.y), max(high.z, high.w)));
    const bool is_full = __any_sync(kAllLanes, most > kMostCounted);
    const uint4 words =
        make_uint4(__byte_perm(low.x, low.y, 0x5410), __byte_perm(low.z, low.w, 0x5410),
                   __byte_perm(high.x, high.y, 0x5410), __byte_perm(high.z, high.w, 0x5410));
#pragma unroll 1
    for (int i = warp(); i < row.cluster(); i += Memory::kWarps) {
      const int to = receiver(i);
      mail.put(histograms() + row.rank() * kBins + lane() * 8, words, to, barrier);
      if (lane() == 0) {
        mail.put(bad_counts() + row.rank(),
                 static_cast<std::uint32_t>(control.bad_choices) | (is_full ? kFull : 0), to,
                 barrier);
      }
    }
  }

  __device__ int always_read_pages() const { return row.first + row.num_pages - row.last; }

  // One warp: the bin of the `wanted`-th largest key; bin 0 if fewer were counted. First the word
  // of two bins, lane 0 with the uppermost four words; then the bin in it, a CTA a lane.
  __device__ Boundary find_boundary(int wanted) const {
    constexpr std::uint32_t kOnes = 0x0101u;
    const int vector = kWarpLanes - 1 - lane();
    std::uint32_t count[4] = {};
#pragma unroll 4
    for (int cta = 0; cta < row.cluster(); ++cta) {
      const uint4 bins = *reinterpret_cast<const uint4*>(histograms() + cta * kBins + vector * 8);
      count[0] = __dp2a_lo(bins.x, kOnes, count[0]);
      count[1] = __dp2a_lo(bins.y, kOnes, count[1]);
      count[2] = __dp2a_lo(bins.z, kOnes, count[2]);
      count[3] = __dp2a_lo(bins.w, kOnes, count[3]);
    }
    const int own = static_cast<int>(count[0] + count[1] + count[2] + count[3]);
    int above = own;
#pragma unroll
    for (int apart = 1; apart < kWarpLanes; apart *= 2) {
      const int other = __shfl_up_sync(kAllLanes, above, apart);
      if (lane() >= apart) above += other;
    }
    above -= own;
    int word = -1;
    int above_word = 0;
#pragma unroll
    for (int w = 3; w >= 0; --w) {
      const int next = above + static_cast<int>(count[w]);
      if (above < wanted && next >= wanted) {
        word = vector * 4 + w;
        above_word = above;
      }
      above = next;
    }
    const unsigned finders = __ballot_sync(kAllLanes, word >= 0);
    if (finders == 0) return {0, wanted, kUncounted, 0, 0};
    const int finder = __ffs(static_cast<int>(finders)) - 1;
    word = __shfl_sync(kAllLanes, word, finder);
    above = __shfl_sync(kAllLanes, above_word, finder);
    const std::uint32_t bins =
        lane() < row.cluster()
            ? *reinterpret_cast<const std::uint32_t*>(histograms() + lane() * kBins + word * 2)
            : 0;
    const auto high_count = static_cast<int>(__reduce_add_sync(kAllLanes, bins >> 16));
    const bool is_high = above + high_count >= wanted;
    const auto of_cta = static_cast<int>(is_high ? bins >> 16 : bins & 0xFFFFu);
    Boundary found;
    found.bin = word * 2 + (is_high ? 1 : 0);
    found.wanted = wanted - above - (is_high ? 0 : high_count);
    found.pages = __reduce_add_sync(kAllLanes, of_cta);
    found.others = found.pages - __shfl_sync(kAllLanes, of_cta, row.rank());
    found.first = __reduce_add_sync(kAllLanes, lane() < row.rank() ? of_cta : 0);
    return found;
  }

  // Publishes the boundary and the number of bad pages; returns how many pages are left to choose.
  __device__ int read_histograms() const {
    if (row.cluster() == 1) {
      __syncthreads();
    } else if (warp() == 0) {
      mail.wait(Mail::barrier(control, kHistograms), 0);
    }
    if (warp() == 0) {
      const std::uint32_t of_cta = lane() < row.cluster() ? bad_counts()[lane()] : 0;
      const auto bad = static_cast<int>(__reduce_add_sync(kAllLanes, of_cta & ~kFull));
      const int wanted = row.budget - always_read_pages() - bad;
      Boundary boundary{kBins - 1, 0, 0, 0, 0};
      if (wanted > 0) {
        boundary = __any_sync(kAllLanes, of_cta >= kFull) ? Boundary{0, wanted, kUncounted, 0, 0}
                                                          : find_boundary(wanted);
      }
      if (lane() == 0) {
        control.boundary = boundary;
        control.all_bad_choices = bad;
        if (row.cluster() > 1) {
          barrier_expect_bytes(Mail::barrier(control, kBoundaryPages),
                               row.cluster() * 4 + (boundary.is_sent() ? boundary.others * 8 : 0));
        }
      }
    }
    __syncthreads();
    return row.budget - always_read_pages() - control.all_bad_choices;
  }

  // Lists the CTA's pages of the cut's bin and above, and sends those of the bin. Returns the
  // length of the list; pages past kListPages are left out.
  __device__ int list_pages(const Boundary& boundary) const {
    const Listing<kHeadDim, kThreads> listing{row,
                                              keys,
                                              memory,
                                              control,
                                              bin_begin(boundary.bin),
                                              boundary.is_sent() ? bin_begin(boundary.bin + 1) : 0,
                                              candidates() + boundary.first};
    const int listed = listing.make();
    const std::uint32_t barrier = Mail::barrier(control, kBoundaryPages);
    // Who hears this sends outputs to where histograms lie.
    if (thread() < row.cluster()) mail.put(list_marks() + row.rank(), 1u, thread(), barrier);
    const int sent = boundary.is_sent() && row.cluster() > 1 ? control.num_own : 0;
#pragma unroll 1
    for (int i = thread(); i < sent * row.cluster(); i += kThreads) {
      const int page = quotient(i, row.cluster());
      const int to = i - page * row.cluster();
      if (to == row.rank()) continue;
      const std::uint64_t rank = candidates()[boundary.first + page];
      mail.put(candidates() + boundary.first + page,
               make_uint2(static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(rank >> 32)),
               to, barrier);
    }
    return listed;
  }

  // The choice_rank of the last page taken, the same in every thread of every CTA.
  __device__ std::uint64_t find_cut(int wanted, const Boundary& boundary) const {
    mail.wait(Mail::barrier(control, kBoundaryPages), 0);
    // Nothing, or everything: only where the plan or the masses contradict themselves.
    if (wanted == 0) return ~std::uint64_t{0};
    if (wanted >= row.last - row.first - control.all_bad_choices) return std::uint64_t{1} << 32;
    if (boundary.pages == boundary.wanted) return std::uint64_t{bin_begin(boundary.bin)} << 32;
    if (!boundary.is_sent()) {
      return find_cut_by_digits<kHeadDim, kThreads>(memory, keys.room, wanted);
    }
    if (boundary.pages > kThreads / 4) {
      return find_cut_among(candidates(), boundary.pages, boundary.wanted, digit_counts(), control);
    }
    // Four lanes count the larger ones of one page. All ranks differ.
    const std::uint64_t* rank = candidates();
    const int at = thread() / 4;
    if (at < boundary.pages) {
      const std::uint64_t me = rank[at];
      const unsigned quad = 0xFu << lane() / 4 * 4;
      int larger = 0;
#pragma unroll 4
      for (int other = lane() % 4; other < boundary.pages; other += 4) {
        larger += rank[other] > me ? 1 : 0;
      }
      larger += __shfl_xor_sync(quad, larger, 1);
      larger += __shfl_xor_sync(quad, larger, 2);
      if (larger == boundary.wanted - 1) control.cut = me;
    }
    __syncthreads();
    return control.cut;
  }
};

}  // namespace locks::detail
