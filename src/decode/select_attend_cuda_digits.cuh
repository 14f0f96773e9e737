// The cut found digit by digit among all keys: what select_attend does where the pages of the cut's
// bin do not fit into one exchange. Slow, as each round is two meetings of the cluster, but exact
// for any keys, so it is the one way that always works.
#pragma once

#include "decode/select_attend_cuda_keys.cuh"

namespace locks::detail {

inline constexpr int kDigits = 512;

// One warp: the digit with the `wanted`-th largest, how many are wanted of it, how many it has.
__device__ inline void find_digit(const std::uint32_t* counts, int wanted, Control& control) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int begin = (kWarpLanes - 1 - lane) * (kDigits / kWarpLanes);
  int own = 0;
  for (int b = 0; b < kDigits / kWarpLanes; ++b) own += static_cast<int>(counts[begin + b]);
  int above = own;
#pragma unroll
  for (int apart = 1; apart < kWarpLanes; apart *= 2) {
    const int other = __shfl_up_sync(kAllLanes, above, apart);
    if (lane >= apart) above += other;
  }
  above -= own;
  for (int b = kDigits / kWarpLanes - 1; b >= 0; --b) {
    const int count = static_cast<int>(counts[begin + b]);
    if (above < wanted && above + count >= wanted) {
      control.digit = begin + b;
      control.digit_left = wanted - above;
      control.digit_count = count;
    }
    above += count;
  }
}

// The same search among `count` ranks in shared memory, by one CTA: what the `wanted` largest
// reach, and no other.
static __device__ __noinline__ std::uint64_t find_cut_among(const std::uint64_t* ranks, int count,
                                                            int wanted, std::uint32_t* digits,
                                                            Control& control) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  constexpr int kBits = 9;
  static_assert(kDigits == 1 << kBits);
  std::uint64_t prefix = 0;  // the uppermost bit is that of a share's sign
#pragma unroll 1
  for (int low = 63 - kBits;; low -= kBits) {
    for (int d = thread; d < kDigits; d += threads) digits[d] = 0;
    __syncthreads();
    for (int i = thread; i < count; i += threads) {
      const std::uint64_t rank = ranks[i] >> low;
      if (rank >> kBits == prefix) atomicAdd(&digits[rank & (kDigits - 1)], 1u);
    }
    __syncthreads();
    if (thread < kWarpLanes) find_digit(digits, wanted, control);
    __syncthreads();
    wanted = control.digit_left;
    prefix = prefix << kBits | static_cast<unsigned>(control.digit);
    if (control.digit_count == wanted || low == 0) return prefix << low;
  }
}

// Radix search over (key, page) of all CTAs, 9 bits a round; rounds over the page's bits follow
// only if equal keys straddle the cut. For wanted < number of choices.
template <int kHeadDim, int kThreads>
__device__ __noinline__ std::uint64_t find_cut_by_digits(unsigned char* memory, int key_room,
                                                         int wanted) {
  using Memory = Layout<kHeadDim, kThreads>;
  auto& control = *reinterpret_cast<Control*>(memory + Memory::kControlAt);
  const RowHead& row = control.row;
  const Keys keys{row, control, reinterpret_cast<uint4*>(memory + Memory::kKeysAt), key_room};
  const Mail mail{row.cluster()};
  const int thread = static_cast<int>(threadIdx.x);
  auto* own = reinterpret_cast<std::uint32_t*>(memory + Memory::kSecondInboxAt);
  std::uint32_t* all = own + kDigits;
  const int page_bits = 32 - __clz(row.num_pages);
  std::uint64_t prefix = 0;
  std::uint64_t mask = 0;
  int top = 64;
#pragma unroll 1
  for (;;) {
    if (top == 32) {  // ~page: the bits above those of any page are ones
      top = page_bits;
      const std::uint64_t ones = (std::uint64_t{1} << 32) - (std::uint64_t{1} << top);
      prefix |= ones;
      mask |= ones;
    }
    const int bits = min(9, top > 32 ? top - 32 : top);
    const int low = top - bits;
    const std::uint32_t digit_mask = (1u << bits) - 1;
    __syncthreads();
    for (int b = thread; b < kDigits; b += kThreads) own[b] = 0;
    __syncthreads();
    for (int g = thread; g < row.num_groups; g += kThreads) {
      std::uint32_t key[kGroupPages];
      keys.load(g, key);
#pragma unroll
      for (int i = 0; i < kGroupPages; ++i) {
        if (key[i] == kNoPage || key[i] == kForced) continue;
        const std::uint64_t rank = choice_rank(key[i], static_cast<std::uint32_t>(row.page(g, i)));
        if ((rank & mask) == prefix) {
          atomicAdd(&own[static_cast<std::uint32_t>(rank >> low) & digit_mask], 1u);
        }
      }
    }
    mail.sync();
    for (int b = thread; b < kDigits; b += kThreads) {
      std::uint32_t sum = 0;
      if (row.cluster() == 1) {
        sum = own[b];
      } else {
        for (int cta = 0; cta < row.cluster(); ++cta) {
          sum += load_remote(address_in(shared_address(own + b), cta));
        }
      }
      all[b] = sum;
    }
    mail.sync();  // all have read before anyone starts the next round
    if (thread < kWarpLanes) find_digit(all, wanted, control);
    __syncthreads();
    wanted = control.digit_left;
    prefix |= std::uint64_t(static_cast<unsigned>(control.digit)) << low;
    mask |= std::uint64_t{digit_mask} << low;
    if (control.digit_count == wanted || low == 0) return prefix;
    top = low;
  }
}

}  // namespace locks::detail
