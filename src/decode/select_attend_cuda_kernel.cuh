// Selection and attention of a decode step in one kernel.
//
// Grid: one cluster of 1 to 16 CTAs for each (row, KV head), all resident at once where the batch
// allows it. A CTA owns every cluster-th unit of 128 tokens of its row: it makes the keys of their
// pages, takes part in finding the cut (select_attend_cuda_cut.cuh), attends to its pages that are
// taken (select_attend_cuda_attend.cuh), and owns a share of the outputs
// (select_attend_cuda_merge.cuh). Rows that are read whole are dealt out in blocks of 16 tokens and
// go straight to attention, before the kernel in front has ended: they need nothing of it.
//
// Bytes: 2 * group a page of masses and 4 * group a tile of sums, all from L2 where the scorer left
// them, and 4 * head_dim a token attended to. With few rows nothing of this is the limit but a
// chain of dependent steps: sums, keys, histogram, list, cut, outputs, with three exchanges
// between CTAs. What can be early is early: masses are on their way while sums are made, and the
// first tiles of a CTA's list while the cut is found; the bytes of those not taken are
// counted apart (kBytesUnused). With many rows and for whole rows the limit is memory.
//
// Results depend on the cluster size in the last bits of the outputs, never in the pages taken.
#pragma once

#include "decode/select_attend_cuda_attend.cuh"
#include "decode/select_attend_cuda_cut.cuh"
#include "decode/select_attend_cuda_merge.cuh"

namespace locks::detail {

// A padded row: zeros.
__device__ inline void write_nothing(const StepArguments& args, const RowHead& row) {
  if (row.rank() != 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int head_dim = args.attention.head_dim;
  for (int i = thread; i < row.group * head_dim; i += threads) {
    store_scalar(args.output.data, args.output.type,
                 std::int64_t{row.row} * args.output.seq_stride +
                     (row.kv_head * row.group + i / head_dim) * args.output.head_stride +
                     i % head_dim,
                 0.0f);
  }
  if (args.output.lse == nullptr) return;
  for (int i = thread; i < row.group; i += threads) {
    args.output
        .lse[std::int64_t{row.row} * args.attention.num_query_heads + row.kv_head * row.group + i] =
        kMinusInfinity;
  }
}

__device__ inline std::uint8_t* selected_pages_of(const StepArguments& args, const RowHead& row) {
  return args.selected +
         (std::int64_t{row.row} * args.attention.num_kv_heads + row.kv_head) * args.selected_pages;
}

// Pages [0, pages) as read, the others as not, by all CTAs together.
__device__ inline void write_selected_run(const StepArguments& args, const RowHead& row,
                                          std::int64_t begin, std::int64_t pages) {
  if (args.selected == nullptr) return;
  std::uint8_t* selected = selected_pages_of(args, row);
  const std::int64_t step = std::int64_t{row.cluster()} * blockDim.x;
  for (std::int64_t p = begin + row.rank() * std::int64_t{blockDim.x} + threadIdx.x;
       p < args.selected_pages; p += step) {
    selected[p] = p < pages ? 1 : 0;
  }
}

__device__ inline void write_selected(const StepArguments& args, const RowHead& row,
                                      const Keys& keys, std::uint64_t cut) {
  std::uint8_t* selected = selected_pages_of(args, row);
  for (int g = static_cast<int>(threadIdx.x); g < row.all_groups();
       g += static_cast<int>(blockDim.x)) {
#pragma unroll 1
    for (int i = 0; i < kGroupPages; ++i) {
      const int page = row.page(g, i);
      const std::uint32_t key = keys.one(g, i);
      if (key == kNoPage || page >= args.selected_pages) continue;
      selected[page] = is_taken(key, static_cast<std::uint32_t>(page), cut) ? 1 : 0;
    }
  }
  write_selected_run(args, row, row.num_pages, 0);
}

// A row is counted by its first KV head: should only some of its heads be read whole, by what that
// one does. One lane.
__device__ inline void count(const StepArguments& args, const RowHead& row, const Control& control,
                             const Choice& choice) {
  const auto add = [&](StepCounter counter, std::int64_t value) {
    if (value != 0) {
      atomicAdd(&args.counters[counter], static_cast<unsigned long long>(value));
    }
  };
  const int blocks = row.scored_pages >> row.slot_shift;
  if (blocks > 0) {
    add(kNonfinitePages, control.bad_pages + (row.rank() == 0 ? control.tail_is_bad : 0));
  }
  if (row.rank() != 0) return;
  const std::int64_t token_bytes = std::int64_t{args.attention.head_dim} * 4;
  const std::int64_t beyond = (std::int64_t{row.num_pages} << row.page_shift) - row.length;
  const std::int64_t tokens = (std::int64_t{choice.pages} << row.page_shift) - beyond;
  if (row.kv_head == 0) {
    add(choice.pages == row.num_pages ? kDenseRows : kSparseRows, 1);
    add(kRaisedBudgets, args.plan[row.row].raised);
  }
  add(kPagesRead, choice.pages);
  add(kRecordsRead, blocks);
  add(kBytesRead, tokens * token_bytes + std::int64_t{blocks} * args.layout.record_bytes);
  add(kBytesDense, row.length * token_bytes);
}

// What a CTA attends to, and the tiles of it that are on their way, one of each warp at most.
struct Work {
  Choice choice;
  Source source;
  int listed;       // pages of the list
  int tiles;        // of the CTA
  int early_tiles;  // on their way, one for each of the first warps
  int keep;         // tokens of this lane's quad of it that are wanted; -1: the warp has none
  PageKey page;     // of the list, that the quad lies in
};

template <int kHeadDim, bool kBf16, int kThreads>
struct SelectAttend {
  using Memory = Layout<kHeadDim, kThreads>;

  const StepArguments& args;
  const RowHead& row;
  const Keys& keys;
  const Mail& mail;
  const Selection<kHeadDim, kThreads>& select;
  Control& control;
  Attention<kHeadDim, kBf16, kThreads>& attend;

  // Before a CTA's first message: the others' barriers are ready.
  __device__ void wait_for_cluster() const {
    if (row.cluster() == 1) return;
    __syncwarp();
    cluster_wait();
  }

  __device__ Tiles tiles_of(const Work& work, int first) const {
    // An incomplete list is of no use: its place serves the warps' queues.
    auto* queue = reinterpret_cast<std::uint32_t*>(select.list()) + attend.warp * 64;
    return {work.source, row,
            keys,        select.list(),
            work.listed, work.tiles,
            queue,       work.choice.cut,
            first,       attend.merge.tile_warps};
  }

  // Everything is read, and nothing of it is on its way.
  __device__ Work whole() const {
    return {{true, row.num_pages, 0}, Source::kDense, 0, dense_tiles(), 0, -1, {}};
  }

  __device__ int dense_tiles() const {
    const int blocks = (row.length + kBlockTokens - 1) / kBlockTokens;
    return quotient(blocks - row.rank() + row.cluster() - 1, row.cluster());
  }

  // A row that is read whole: its first tiles are asked for before all else. Padded rows have none.
  __device__ Work begin_whole() const {
    Work work = whole();
    attend.set_warps(work.tiles, false);
    Quad first{0, 0, -1};
    work.early_tiles = min(work.tiles, Memory::kAreaWarps);
    const bool is_early = attend.warp < work.early_tiles;
    if (is_early) {
      Tiles tiles = tiles_of(work, attend.warp);
      attend.next(tiles, first);
    }
    attend.load_query(0);  // while block ids are on their way
    if (is_early) {
      attend.check(first);
      attend.fetch(first);
      work.keep = first.tokens;
    }
    wait_for_cluster();
    __syncthreads();
    attend.set_warps(work.tiles, true);
    return work;
  }

  // A row whose pages are chosen, from sums of masses to the cut. Waits for the kernel in front.
  __device__ Work choose() const {
    KeyPass<kHeadDim, kThreads> pass(row, attend.memory);
    LaneTiles tiles = select.tiles_of_part(attend.warp);
    const float* const log2_tail_at = select.log2_tail();
    wait_for_prior_kernel();
    tiles.load();
    const float log2_tail = log2_tail_at == nullptr ? kMinusInfinity : *log2_tail_at;
    pass.start();
    select.make_sums(tiles);
    select.make_weights(log2_tail);
    pass.finish(keys, select.maxima(), select.histogram(), control);
    fence_before_bulk_copies();  // the ring was where tiles will be
    wait_for_cluster();
    __syncthreads();
    select.send_histogram();
    const int wanted = select.read_histograms();
    if (wanted < 0) {
      // Forced pages alone pass the budget. All pages are a superset of them, and of what the CPU
      // reads.
      mail.sync();  // all have read the histograms, where outputs will arrive
      const Work work = whole();
      attend.set_warps(work.tiles, true);
      return work;
    }
    const Boundary boundary = control.boundary;
    Work work = whole();
    work.listed = select.list_pages(boundary);
    work.source = work.listed <= kListPages ? Source::kList : Source::kWalk;
    const bool is_listed = work.source == Source::kList;
    work.tiles = is_listed ? ((work.listed << (row.page_shift - 2)) + 3) / 4 : Tiles::kUnknown;
    Quad first{0, 0, -1};
    if (is_listed) attend.set_warps(work.tiles, false);
    // A list of more than twice an even share, and some for chance, waits for the cut: most of its
    // pages may not be taken.
    if (is_listed && (work.listed - kChancePages) * row.cluster() <= 2 * wanted) {
      work.early_tiles = min(work.tiles, Memory::kAreaWarps);
      if (attend.warp < work.early_tiles) {
        Tiles early = tiles_of(work, attend.warp);
        attend.next(early, first);
        work.page = early.page;
        attend.check(first);
        attend.fetch(first);
        work.keep = 0;
      }
    }
    const int choices = row.last - row.first - control.all_bad_choices;
    work.choice = {false,
                   select.always_read_pages() + control.all_bad_choices + min(wanted, choices),
                   select.find_cut(wanted, boundary)};
    if (is_taken(work.page.key, work.page.page, work.choice.cut)) work.keep = first.tokens;
    if (is_listed && args.selected == nullptr) attend.set_warps(work.tiles, true);
    return work;
  }

  // Bytes that are read early and not used. One warp.
  __device__ void count_dropped(const Work& work) const {
    const int early_pages = min(work.early_tiles * 4 >> (row.page_shift - 2), work.listed);
    int dropped = 0;
#pragma unroll 1
    for (int i = attend.lane; i < early_pages; i += kWarpLanes) {
      const PageKey page = select.list()[i];
      dropped += is_taken(page.key, page.page, work.choice.cut) ? 0 : 1;
    }
    dropped = __reduce_add_sync(kAllLanes, dropped);
    if (dropped > 0 && attend.lane == 0) {
      atomicAdd(&args.counters[kBytesUnused],
                static_cast<unsigned long long>(dropped * Memory::kTokenBytes) << row.page_shift);
    }
  }

  // Attends in passes of 8 query heads; the queries of the first are in place.
  __device__ void read(const Work& work) const {
#pragma unroll 1
    for (int pass = 0; pass * kPassHeads < row.group; ++pass) {
      if (pass > 0) {
        attend.merge.expect_outputs(pass);
        // Inboxes are read, and partial outputs lie where tiles will be copied to.
        fence_before_bulk_copies();
        mail.sync();
        attend.load_query(pass);
        __syncthreads();
      }
      attend.reset();
      const bool go_on = pass == 0 && work.keep >= 0;
      Tiles tiles = tiles_of(work, attend.warp + (go_on ? attend.merge.tile_warps : 0));
      attend.attend(tiles, go_on, work.keep);
      attend.store_partial();
      attend.merge.send(pass);
      // While outputs are on their way. The last warp is the least busy one.
      if (pass == 0 && attend.warp == Memory::kWarps - 1) {
        if (attend.lane == 0) count(args, row, control, work.choice);
        if (work.source == Source::kList) count_dropped(work);
      }
      attend.merge.receive(pass);
    }
    if (args.selected == nullptr) return;  // before a look at what may have left the registers
    if (work.choice.whole) {
      write_selected_run(args, row, 0, row.num_pages);
    } else {
      write_selected(args, row, keys, work.choice.cut);
    }
  }
};

// When all outputs have come, no CTA of the cluster looks at masses again. They lie in L2, written
// and never to be read: left there, they would go to memory when the model's weights come, 14 MB at
// 1,000,000 tokens. A line that belongs to two clusters stays.
__device__ inline void drop_masses(const StepArguments& args, const RowHead& row) {
  if (!args.drops_masses || args.selected != nullptr) return;
  constexpr std::uintptr_t kLine = 128;
  const auto first = reinterpret_cast<std::uintptr_t>(row.masses);
  const auto last = reinterpret_cast<std::uintptr_t>(row.masses + row.group * row.mass_stride);
  const std::uintptr_t step =
      std::uintptr_t{blockDim.x} * static_cast<unsigned>(row.cluster()) * kLine;
  const std::uintptr_t own = (blockDim.x * static_cast<unsigned>(row.rank()) + threadIdx.x) * kLine;
  for (std::uintptr_t at = (first + kLine - 1) / kLine * kLine + own; at + kLine <= last;
       at += step) {
    discard_line(at);
  }
}

// Block ids of the CTA's units, to L2: later they are asked for one by one, and waited for.
__device__ inline void prefetch_table(const StepArguments& args, const SelectAttendShape& shape,
                                      const RowHead& row) {
  if (shape.block_shift < 0) return;
  const BlockTable& table = args.seqs.cache_blocks;
  const std::int32_t* ids = table.ids + row.row * table.seq_stride;
  for (int g = static_cast<int>(threadIdx.x) << row.slot_shift; g < row.num_groups;
       g += static_cast<int>(blockDim.x) << row.slot_shift) {
    prefetch_line(ids + (row.unit(g) * (kMassBlocks * kBlockTokens) >> shape.block_shift));
  }
}

template <int kHeadDim, int kThreads>
__device__ inline void prepare_memory(const StepArguments& args, const SelectAttendShape& shape,
                                      unsigned char* memory, Control& control) {
  using Memory = Layout<kHeadDim, kThreads>;
  const int thread = static_cast<int>(threadIdx.x);
  auto* histogram = reinterpret_cast<std::uint32_t*>(memory + Memory::kListAt);
  for (int b = thread; b < kBins; b += kThreads) histogram[b] = 0;
  if (thread == 0) {
    for (const std::uint64_t& exchange : control.exchange) {
      barrier_init(shared_address(&exchange), 1);
    }
    for (const std::uint64_t& tile : control.tile) {
      barrier_init(shared_address(&tile), kTileQuads);
    }
    barrier_init_fence();
    control.row = row_head(args, shape);
    control.cut = 0;
    control.shifted = 0;
    control.tail_is_bad = 0;
    control.bad_pages = 0;
    control.bad_choices = 0;
    control.all_bad_choices = 0;
  }
}

template <int kHeadDim, bool kBf16, int kThreads>
__global__ void __launch_bounds__(kThreads, 512 / kThreads)
    select_attend_kernel(const __grid_constant__ StepArguments args,
                         const __grid_constant__ SelectAttendShape shape) {
  using Memory = Layout<kHeadDim, kThreads>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& control = *reinterpret_cast<Control*>(memory + Memory::kControlAt);
  allow_next_kernel();
  prepare_memory<kHeadDim, kThreads>(args, shape, memory, control);
  __syncthreads();
  // Read from shared memory again and again: registers are short, and what spills of them comes
  // back from L2.
  const RowHead& row = control.row;
  const Mail mail{shape.cluster};
  const Keys keys{row, control, reinterpret_cast<uint4*>(memory + Memory::kKeysAt),
                  shape.key_groups};
  const Selection<kHeadDim, kThreads> select{args, row, keys, mail, memory, control};
  Attention<kHeadDim, kBf16, kThreads> attend(args, shape, row, memory, control, mail);
  const SelectAttend<kHeadDim, kBf16, kThreads> step{args,   row,     keys,  mail,
                                                     select, control, attend};
  // A CTA may be sent to once the whole cluster has come this far.
  select.expect_histograms();
  attend.merge.expect_outputs(0);
  if (shape.cluster > 1) {
    __syncwarp();
    cluster_arrive();
  }
  // Only masses and sums come from the kernel in front. Rows without them wait for it at their end,
  // for the sake of the kernel behind, which waits for this one alone.
  Work work = step.whole();
  if (row.scored_pages > 0) {
    prefetch_table(args, shape, row);
    attend.load_query(0);
    work = step.choose();
  } else {
    work = step.begin_whole();
  }
  if (row.length > 0) {
    step.read(work);
    if (row.scored_pages > 0) drop_masses(args, row);
  } else {
    write_nothing(args, row);
    write_selected_run(args, row, 0, 0);
  }
  if (row.scored_pages == 0) wait_for_prior_kernel();
}

template <int kHeadDim>
SelectAttendKernel select_attend_kernel_of(bool bf16, int threads) {
  using Function = SelectAttendKernel::Function;
  if (threads == 512) {
    const Function function = bf16 ? &select_attend_kernel<kHeadDim, true, 512>
                                   : &select_attend_kernel<kHeadDim, false, 512>;
    return {function, Layout<kHeadDim, 512>::kKeysAt};
  }
  if (threads == 256) {
    const Function function = bf16 ? &select_attend_kernel<kHeadDim, true, 256>
                                   : &select_attend_kernel<kHeadDim, false, 256>;
    return {function, Layout<kHeadDim, 256>::kKeysAt};
  }
  return {nullptr, 0};
}

}  // namespace locks::detail
