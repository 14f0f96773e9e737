// Finds the cut: the choice_rank of the last page taken, exactly, over all CTAs of a cluster.
//
// 1. Sums: each CTA adds up the tile sums of its slots; all get all slots and know the weights.
// 2. Keys, and a histogram of the largest key of each group of 8 pages. With k pages to choose, the
//    k-th largest of those maxima is not above the k-th largest key, so the pages from its bin on
//    contain the best k. Where groups are few for the budget that bin lies too low, and all keys
//    are counted instead (RowHead::counts_pages). Histograms are exchanged, counts cut off at 255:
//    a count that is too low only lowers the bin.
// 3. Pages from that bin on (a little more than k where good pages are scattered) are exchanged,
//    and every CTA finds the cut among them. Where they do not fit, as with many equal keys, pages
//    in clusters, or large budgets, all keys are searched digit by digit instead
//    (select_attend_cuda_digits.cuh). All CTAs see the same counts and go the same way.
#pragma once

#include "decode/select_attend_cuda_digits.cuh"
#include "decode/select_attend_cuda_keys.cuh"
#include "decode/select_attend_cuda_list.cuh"
#include "decode/select_attend_cuda_sums.cuh"

namespace locks::detail {

struct Choice {
  bool whole;  // everything is read
  int bin;     // pages to be taken are from this bin on, or forced
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

  __device__ uint2* slots() const {
    return reinterpret_cast<uint2*>(memory + Memory::kSecondInboxAt);
  }
  __device__ std::uint16_t* maxima() const {
    return reinterpret_cast<std::uint16_t*>(memory + Memory::kMaximaAt);
  }
  __device__ std::uint32_t* histogram() const {
    return reinterpret_cast<std::uint32_t*>(memory + Memory::kListAt);
  }
  __device__ PageKey* list() const { return reinterpret_cast<PageKey*>(memory + Memory::kListAt); }
  __device__ std::uint8_t* histograms() const { return memory + Memory::kFirstInboxAt; }
  __device__ std::int32_t* bad_counts() const {
    return reinterpret_cast<std::int32_t*>(memory + Memory::kFirstInboxAt + kMostCtas * kBins);
  }
  // Own candidates take the place of the histograms once those are read. Outputs arrive there only
  // after their senders have all candidates, which this CTA sends when it has copied its own.
  __device__ std::uint64_t* own_candidates() const {
    return reinterpret_cast<std::uint64_t*>(memory + Memory::kFirstInboxAt);
  }
  // Candidates take the place of the slots: they are sent when all histograms have come, that is
  // after every CTA has made its keys.
  __device__ std::uint64_t* candidates() const {
    return reinterpret_cast<std::uint64_t*>(memory + Memory::kSecondInboxAt);
  }
  __device__ std::int32_t* candidate_counts() const {
    return reinterpret_cast<std::int32_t*>(memory + Memory::kSecondInboxAt + kCandidates * 8);
  }
  // The candidates of the boundary's bin, in place of the maxima.
  __device__ std::uint64_t* boundary() const {
    return reinterpret_cast<std::uint64_t*>(memory + Memory::kMaximaAt);
  }

  __device__ void expect_mail() const {
    if (row.cluster == 1 || thread() != 0) return;
    if (row.scored_pages == 0) return;
    barrier_expect_bytes(Mail::barrier(control, kSums), kSumSlots * row.group * 8);
    barrier_expect_bytes(Mail::barrier(control, kHistograms), row.cluster * (kBins + 4));
    barrier_expect_bytes(Mail::barrier(control, kCandidateLists),
                         row.cluster * (row.cta_candidates * 8 + 4));
  }

  // Slot s belongs to CTA s % cluster. Eight lanes make one sum and send it to everybody.
  struct OwnSum {
    int head, slot;
    bool active;
    std::int64_t tiles;
    int num_tiles;
  };
  __device__ OwnSum own_sum(int turn) const {
    const int sum_idx = (turn * 4 + lane() / 8) * Memory::kWarps + warp();
    const int slot_idx = quotient(sum_idx, row.group);
    const int slot = row.rank + slot_idx * row.cluster;
    OwnSum own;
    own.active = slot < kSumSlots;
    own.head = own.active ? sum_idx - slot_idx * row.group : 0;
    own.slot = own.active ? slot : 0;
    own.tiles = std::int64_t{own.head} * row.num_tiles;
    own.num_tiles = own.active ? row.num_tiles : 0;
    return own;
  }
  __device__ bool has_sums(int turn) const {  // of the warp
    return row.rank + quotient(turn * 4 * Memory::kWarps + warp(), row.group) * row.cluster <
           kSumSlots;
  }
  __device__ void load_sums(SlotRuns& runs, const OwnSum& own) const {
    runs.load(row.tile_sums + own.tiles, own.num_tiles, own.slot + kSumSlots * (lane() % 8));
  }
  // `runs` holds the warp's first.
  __device__ void send_sums(SlotRuns& runs, OwnSum own) const {
    const std::uint32_t barrier = Mail::barrier(control, kSums);
#pragma unroll 1
    for (int turn = 0; has_sums(turn); ++turn) {
      if (turn > 0) {
        own = own_sum(turn);
        load_sums(runs, own);
      }
      const Shifted sum = sum_slot(runs, row.tile_sums + own.tiles, row.tile_shifts + own.tiles,
                                   own.num_tiles, own.slot);
      const uint2 words = make_uint2(__float_as_uint(sum.sum), static_cast<unsigned>(sum.shift));
      for (int to = lane() % 8; to < row.cluster && own.active; to += 8) {
        mail.put(slots() + own.slot * row.group + own.head, words, to, barrier);
      }
    }
  }

  // The mass of the tokens without a record, and whether it is not finite.
  __device__ Shifted tail_mass(int head, bool& bad) const {
    const float log2_tail =
        args.workspace.log2_tail[std::int64_t{row.row} * args.attention.num_query_heads +
                                 row.kv_head * row.group + head];
    bad = !(log2_tail < __int_as_float(0x7F800000));
    if (bad || log2_tail < -126.0f) return {0, 0};
    constexpr float kLargest = 100.0f;
    const int shift =
        log2_tail > kLargest
            ? static_cast<int>(ceilf((log2_tail - kLargest) / static_cast<float>(kShiftUnit)))
            : 0;
    return {exp2f(log2_tail - static_cast<float>(shift * kShiftUnit)), shift};
  }

  __device__ Shifted sum_of_slots(int head) const {
    uint2 words[kSumSlots];
    bool plain = true;
#pragma unroll
    for (int slot = 0; slot < kSumSlots; ++slot) {
      words[slot] = slots()[slot * row.group + head];
      plain = plain && words[slot].y == 0;
    }
    Shifted total{0, 0};
    if (plain) {
#pragma unroll
      for (int slot = 0; slot < kSumSlots; ++slot) total.sum += __uint_as_float(words[slot].x);
      return total;
    }
#pragma unroll 1
    for (int slot = 0; slot < kSumSlots; ++slot) {
      const uint2 word = slots()[slot * row.group + head];
      total = add(total, {__uint_as_float(word.x), static_cast<int>(word.y)});
    }
    return total;
  }

  __device__ void make_weights() const {
    bool bad = false;
    Shifted tail{0, 0};
    if (thread() < row.group) tail = tail_mass(thread(), bad);  // while sums are on their way
    if (row.cluster == 1) {
      __syncthreads();
    } else if (thread() < row.group) {
      mail.wait(Mail::barrier(control, kSums), 0);
    }
    if (thread() < row.group) {
      const int head = thread();
      const Shifted total = add(sum_of_slots(head), tail);
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
    const int to = i + row.rank;
    return to < row.cluster ? to : to - row.cluster;
  }

  // 16 bins a thread and receiver, one byte each.
  __device__ void send_histogram() const {
    constexpr int kVectors = kBins / 16;
    static_assert(kVectors == kWarpLanes);
    const std::uint32_t barrier = Mail::barrier(control, kHistograms);
#pragma unroll 1
    for (int i = warp(); i < row.cluster; i += Memory::kWarps) {
      const int to = receiver(i);
      std::uint32_t word[4] = {};
#pragma unroll
      for (int bin = 0; bin < 16; ++bin) {
        word[bin / 4] |= min(histogram()[bin * kVectors + lane()], 255u) << bin % 4 * 8;
      }
      mail.put(histograms() + row.rank * kBins + lane() * 16,
               make_uint4(word[0], word[1], word[2], word[3]), to, barrier);
    }
    if (thread() < row.cluster) {
      mail.put(bad_counts() + row.rank, static_cast<std::uint32_t>(control.bad_choices), thread(),
               barrier);
    }
  }

  __device__ int always_read_pages() const { return row.first + row.num_pages - row.last; }

  // One warp: the bin of the `wanted`-th largest that was counted, 0 if there are fewer. First the
  // word of 4 bins, lane 0 with the uppermost four words; then the bin in it, a CTA a lane.
  __device__ int find_bin(int wanted) const {
    constexpr std::uint32_t kOnes = 0x01010101u;
    const int vector = kWarpLanes - 1 - lane();
    std::uint32_t count[4] = {};
#pragma unroll
    for (int cta = 0; cta < kMostCtas; ++cta) {
      if (cta >= row.cluster) break;
      const uint4 bins = *reinterpret_cast<const uint4*>(histograms() + cta * kBins + vector * 16);
      count[0] = __dp4a(bins.x, kOnes, count[0]);
      count[1] = __dp4a(bins.y, kOnes, count[1]);
      count[2] = __dp4a(bins.z, kOnes, count[2]);
      count[3] = __dp4a(bins.w, kOnes, count[3]);
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
    if (finders == 0) return 0;
    const int finder = __ffs(static_cast<int>(finders)) - 1;
    word = __shfl_sync(kAllLanes, word, finder);
    above = __shfl_sync(kAllLanes, above_word, finder);
    const std::uint32_t bins =
        lane() < row.cluster
            ? *reinterpret_cast<const std::uint32_t*>(histograms() + lane() * kBins + word * 4)
            : 0;
    int bin = word * 4 + 3;
#pragma unroll
    for (int b = 3; b > 0; --b) {
      above += static_cast<int>(__reduce_add_sync(kAllLanes, bins >> b * 8 & 255u));
      if (above < wanted) bin = word * 4 + b - 1;
    }
    return bin;
  }

  // Publishes the bin and the number of bad pages; returns how many pages are left to choose.
  __device__ int read_histograms() const {
    if (row.cluster == 1) {
      __syncthreads();
    } else if (warp() == 0) {
      mail.wait(Mail::barrier(control, kHistograms), 0);
    }
    if (warp() == 0) {
      const int bad = __reduce_add_sync(kAllLanes, lane() < row.cluster ? bad_counts()[lane()] : 0);
      const int wanted = row.budget - always_read_pages() - bad;
      const int bin = wanted > 0 ? find_bin(wanted) : kBins;
      if (lane() == 0) {
        control.bin = bin;
        control.all_bad_choices = bad;
      }
    }
    __syncthreads();
    return row.budget - always_read_pages() - control.all_bad_choices;
  }

  // Lists the CTA's forced pages and candidates, and copies the candidates for the exchange.
  // Returns the length of the list; pages past kListPages are left out.
  __device__ int list_candidates(int bin) const {
    return Listing<kHeadDim, kThreads>{row, keys, memory, control, bin_begin(bin)}.make();
  }

  // Two candidates a thread and receiver; places without one hold 0. A receiver goes on once it has
  // the counts too, and sends outputs to where this CTA's candidates lie: counts come last.
  __device__ void send_candidates() const {
    const std::uint32_t barrier = Mail::barrier(control, kCandidateLists);
    const int pairs = row.cta_candidates / 2;
    const int count = control.num_candidates;
#pragma unroll 1
    for (int i = thread(); i < pairs * row.cluster; i += kThreads) {
      const int turn = quotient(i, pairs);
      const int to = receiver(turn);
      const int at = (i - turn * pairs) * 2;
      const std::uint64_t a = at < count ? own_candidates()[at] : 0;
      const std::uint64_t b = at + 1 < count ? own_candidates()[at + 1] : 0;
      mail.put(candidates() + row.rank * row.cta_candidates + at,
               make_uint4(static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(a >> 32),
                          static_cast<std::uint32_t>(b), static_cast<std::uint32_t>(b >> 32)),
               to, barrier);
    }
    __syncthreads();
    if (thread() < row.cluster) {
      mail.put(candidate_counts() + row.rank, static_cast<std::uint32_t>(count), thread(), barrier);
    }
  }

  // The choice_rank of the `wanted`-th page, the same in every thread of every CTA.
  __device__ std::uint64_t find_cut(int wanted, int bin) const {
    mail.wait(Mail::barrier(control, kCandidateLists), 0);
    // Nothing, or everything: only where the plan or the masses contradict themselves.
    if (wanted == 0) return ~std::uint64_t{0};
    if (wanted >= row.last - row.first - control.all_bad_choices) return std::uint64_t{1} << 32;
    const int count_of_lane = lane() < row.cluster ? candidate_counts()[lane()] : 0;
    const int total = __reduce_add_sync(kAllLanes, count_of_lane);
    if (__any_sync(kAllLanes, count_of_lane > row.cta_candidates))
      return find_cut_by_digits<kHeadDim, kThreads>(memory, keys.room, wanted);
    if (total <= wanted) return std::uint64_t{bin_begin(bin)} << 32;  // all candidates
    constexpr int kOwn = kCandidates / kThreads;
    std::uint64_t own[kOwn];
    int own_bin[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = i * kThreads + thread();
      own[i] = at < row.cluster * row.cta_candidates ? candidates()[at] : 0;
      own_bin[i] = own[i] == 0 ? -1 : bin_of(static_cast<std::uint32_t>(own[i] >> 32));
    }
    // The least bin with fewer than `wanted` candidates above it: seldom far above `bin`.
    int low = bin;
    int high = kBins - 1;
    int above = 0;  // candidates above bin `high`
    for (int step = 0; low < high; ++step) {
      const int middle = step < 3 ? low : (low + high) / 2;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) count += __syncthreads_count(own_bin[i] > middle);
      if (count < wanted) {
        high = middle;
        above = count;
      } else {
        low = middle + 1;
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (own_bin[i] == high) boundary()[atomicAdd(&control.num_boundary, 1)] = own[i];
    }
    __syncthreads();
    // Eight lanes count the larger ones of one candidate. All ranks differ.
    const int num_boundary = control.num_boundary;
    for (int begin = 0; begin < num_boundary; begin += kThreads / 8) {
      const int at = begin + thread() / 8;
      const std::uint64_t me = at < num_boundary ? boundary()[at] : 0;
      int larger = 0;
      for (int other = lane() % 8; other < num_boundary; other += 8) {
        larger += boundary()[other] > me ? 1 : 0;
      }
#pragma unroll
      for (int apart = 1; apart < 8; apart *= 2) {
        larger += __shfl_xor_sync(kAllLanes, larger, apart);
      }
      if (at < num_boundary && above + larger == wanted - 1 && lane() % 8 == 0) control.cut = me;
    }
    __syncthreads();
    return control.cut;
  }
};

}  // namespace locks::detail
