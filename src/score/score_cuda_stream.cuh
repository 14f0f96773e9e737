// The pipeline of the tuned scorer: how records get into shared memory and who works on what.
//
// Grid: one CTA an SM, persistent. All tiles of all rows, in order, are dealt to the CTAs in
// contiguous ranges of units. A unit is up to four (tile, KV head) pairs: a tile of up to four
// heads or, with one or two heads, four or two tiles. Its records lie in shared memory block by
// block, the `kSlots` pairs side by side, as they lie in memory if head_stride == record_bytes:
// then one bulk copy fetches a block's records of all heads.
//
// The last four warps are producers, one an SM partition, and share the blocks of each stage:
// issuing a bulk copy takes a warp 60 ns and more, and one warp alone would be the bottleneck (35
// us for the 62,500 blocks of 1,000,000 tokens, whatever their bytes). The others are consumers:
// warp w owns slot w % kSlots (and a fragment of the group) of every unit that falls to it, so that
// its query stays in registers. A stage of the ring is a unit or half of one; `full` counts its
// bytes, `empty` its consumers.
#pragma once

#include "core/ptx.cuh"
#include "score/score_cuda_careful.cuh"
#include "score/score_cuda_shape.cuh"

namespace locks::detail {

inline constexpr int kMaxStages = 16;
inline constexpr int kProducerWarps = 4;
inline constexpr int kMaxTunedRecordBytes = 1056;  // fine8 at d = 128
// Rows whose tiles are found by a search in shared memory; more rows go to launch_score_any.
inline constexpr int kMaxStreamRows = 1024;

// How a launch divides its work, from the layer's shape alone.
struct StreamPlan {
  int heads_per_unit;
  int tiles_per_unit;  // heads_per_unit * tiles_per_unit <= kSlots; 1 if there are several chunks
  int num_chunks;      // of heads
  int group_size;
  int num_fragments;
  int num_stages;  // a multiple of the stages that are in work at a time
};

// The ring's place in dynamic shared memory.
struct StreamLayout {
  int rows_offset;
  int scratch_offset;
  int stages_offset;
  int bytes;
};

template <class Consumer>
LOCKS_HD constexpr StreamLayout stream_layout(int num_rows, int num_stages) {
  StreamLayout layout{};
  layout.rows_offset = 2 * kMaxStages * 8;
  layout.scratch_offset = layout.rows_offset + ((num_rows + 1) * 12 + 127) / 128 * 128;
  layout.stages_offset = layout.scratch_offset + Consumer::kWarps * Consumer::kScratchBytes;
  layout.bytes = layout.stages_offset + num_stages * Consumer::kStageBytes;
  return layout;
}

// The plan of the rows in shared memory.
struct RowTable {
  std::int32_t* first_tile;  // [num_rows + 1]
  std::int32_t* scored_blocks;
  std::int32_t* first_new_block;
  int num_rows;

  __device__ RowTable(std::uint8_t* memory, int rows)
      : first_tile(reinterpret_cast<std::int32_t*>(memory)),
        scored_blocks(first_tile + rows + 1),
        first_new_block(scored_blocks + rows + 1),
        num_rows(rows) {}

  __device__ void load(const RowPlan* plan) const {
    for (int i = static_cast<int>(threadIdx.x); i <= num_rows; i += static_cast<int>(blockDim.x)) {
      first_tile[i] = plan[i].first_tile;
      if (i == num_rows) break;
      scored_blocks[i] = plan[i].scored_blocks;
      first_new_block[i] = plan[i].first_new_block;
    }
  }
  __device__ int num_tiles() const { return first_tile[num_rows]; }
  // The row of a tile: the last one that begins at or before it (rows without tiles begin where the
  // next one does).
  __device__ int find(int tile) const {
    int row = 0;
    for (int step = num_rows > 1 ? 1 << (31 - __clz(num_rows - 1)) : 0; step > 0; step /= 2) {
      if (row + step < num_rows && first_tile[row + step] <= tile) row += step;
    }
    return row;
  }
};

// Stands in for the records of a block id that is out of range: no valid header.
static __device__ __align__(128) std::uint8_t no_records[kSlots * kMaxTunedRecordBytes];

// The CTA's range of units.
struct UnitRange {
  int begin;
  int count;

  __device__ UnitRange(int num_tiles, const StreamPlan& plan) {
    const int units = (num_tiles + plan.tiles_per_unit - 1) / plan.tiles_per_unit * plan.num_chunks;
    const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
    const int share = units / ctas, rest = units - share * ctas;
    begin = share * cta + min(cta, rest);
    count = share + (cta < rest ? 1 : 0);
  }
};

// A piece is what one producer warp copies of a tile's share of a stage: kStageBlocks /
// kProducerWarps blocks. Lanes look up the blocks of the next few pieces while those in front are
// copied.
template <class Consumer>
class Producer {
 public:
  __device__ Producer(const StepArguments& args, const StreamPlan& plan, const RowTable& rows,
                      int warp, std::uint8_t* stages, std::uint32_t full, std::uint32_t empty)
      : args_(args),
        plan_(plan),
        rows_(rows),
        first_block_(warp * kBlocks),
        stages_(stages),
        full_(full),
        empty_(empty) {}

  __device__ void run(const UnitRange& range) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int num_pieces = range.count * plan_.tiles_per_unit * Consumer::kParts;
    const std::uint64_t policy = policy_evict_first();
    bool waited = false;
    int sub_tile = 0, stage = 0, round = 0;
    Source next = look_up(range, lane / kBlocks, num_pieces, lane);
    for (int first = 0; first < num_pieces; first += kPiecesAtOnce) {
      const Source source = next;
      next = look_up(range, first + kPiecesAtOnce + lane / kBlocks, num_pieces, lane);
#pragma unroll 1
      for (int n = 0; n < kPiecesAtOnce && first + n < num_pieces; ++n) {
        if (sub_tile == 0 && round > 0) {
          barrier_wait(empty_ + 8 * stage, (round - 1) & 1);
        }
        // Records that the kernel in front may build come after its end. Of all others half a ring
        // is enough to begin with: what is asked for now delays what that kernel still loads.
        const bool is_early = round == 0 && stage < plan_.num_stages / 2;
        if (!waited && (!is_early || __shfl_sync(~0u, source.is_old, n * kBlocks) == 0)) {
          wait_for_prior_kernel();
          waited = true;
        }
        copy_piece(source, lane / kBlocks == n, first_block_ + lane % kBlocks, sub_tile, stage,
                   policy);
        if (++sub_tile == plan_.tiles_per_unit) {
          sub_tile = 0;
          if (++stage == plan_.num_stages) {
            stage = 0;
            ++round;
          }
        }
      }
    }
    if (!waited) wait_for_prior_kernel();
  }

 private:
  static constexpr int kBlocks = Consumer::kStageBlocks / kProducerWarps;
  static constexpr int kPiecesAtOnce = 32 / kBlocks;
  using Shape = typename Consumer::Shape;
  static_assert(Shape::kRecordBytes <= kMaxTunedRecordBytes);

  // A block as the table names it. Its id is on its way from memory: nothing may be made of it
  // before the pieces in front have been copied.
  struct Source {
    int id = 0;
    int within = 0;     // block within its cache block
    int head = 0;       // the first to copy
    int num_heads = 0;  // to copy; 0: no tile
    int is_old = 1;
  };

  __device__ Source look_up(const UnitRange& range, int piece, int num_pieces, int lane) const {
    Source source;
    if (piece >= num_pieces) return source;
    const int stage_idx = piece / plan_.tiles_per_unit;
    const int unit = range.begin + stage_idx / Consumer::kParts;
    int chunk = 0, tiles = unit;
    if (plan_.num_chunks > 1) {
      tiles = unit / plan_.num_chunks;
      chunk = unit - tiles * plan_.num_chunks;
    }
    const int tile = tiles * plan_.tiles_per_unit + piece % plan_.tiles_per_unit;
    if (tile >= rows_.num_tiles()) return source;
    const int row = rows_.find(tile);
    const int scored = rows_.scored_blocks[row];
    const int first_block = (tile - rows_.first_tile[row]) * kTileBlocks;
    const int head = chunk * plan_.heads_per_unit;
    // Past the end the last block stands in: a stage always holds the same number of bytes.
    const int block = min(first_block + stage_idx % Consumer::kParts * Consumer::kStageBlocks +
                              first_block_ + lane % kBlocks,
                          scored - 1);
    const int per_cache_block = args_.records.block_tokens / kBlockTokens;
    const int cache_block = per_cache_block == 1 ? block : block / per_cache_block;
    const BlockTable& table = args_.seqs.record_blocks;
    source.id = table.ids[row * table.seq_stride + cache_block];
    source.within = block - cache_block * per_cache_block;
    source.head = head;
    source.num_heads = min(plan_.heads_per_unit, args_.attention.num_kv_heads - head);
    source.is_old = min(first_block + kTileBlocks, scored) <= rows_.first_new_block[row] ? 1 : 0;
    return source;
  }

  // `mine`: this lane holds block `block` of the stage.
  __device__ void copy_piece(const Source& source, bool mine, int block, int sub_tile, int stage,
                             std::uint64_t policy) const {
    const std::uint32_t barrier = full_ + 8 * stage;
    std::uint8_t* to = stages_ + stage * Consumer::kStageBytes + block * Consumer::kPitch +
                       sub_tile * plan_.heads_per_unit * Shape::kRecordBytes;
    const bool copies = mine && source.num_heads > 0;
    const int bytes = copies ? source.num_heads * Shape::kRecordBytes : 0;
    const unsigned total = __reduce_add_sync(~0u, static_cast<unsigned>(bytes));
    if (threadIdx.x % 32 == 0) barrier_expect_bytes(barrier, total);
    __syncwarp();
    if (!copies) return;
    const RecordCache& records = args_.records;
    const bool is_block = source.id >= 0 && source.id < records.num_blocks;
    const std::uint8_t* record = !is_block ? no_records
                                           : records.data + source.id * records.block_stride +
                                                 source.head * records.head_stride +
                                                 source.within * records.record_bytes;
    if (!is_block || records.head_stride == Shape::kRecordBytes) {
      copy_bulk(shared_address(to), record, static_cast<std::uint32_t>(bytes), barrier, policy);
    } else {
      for (int h = 0; h < source.num_heads; ++h) {
        copy_bulk(shared_address(to + h * Shape::kRecordBytes), record + h * records.head_stride,
                  Shape::kRecordBytes, barrier, policy);
      }
    }
  }

  const StepArguments& args_;
  const StreamPlan& plan_;
  const RowTable& rows_;
  int first_block_;  // of the stage, for this warp
  std::uint8_t* stages_;
  std::uint32_t full_, empty_;
};

// One consumer warp. The consumer's interface: set_query(args, work) once for each (row, head,
// fragment); begin_tile(blocks); score_part(records, scratch, part, release), which calls release()
// behind its last read of the stage; end_tile(args, work); end().
template <class Consumer>
__device__ void consume(const StepArguments& args, const StreamPlan& plan, const RowTable& rows,
                        const UnitRange& range, int warp, const std::uint8_t* stages,
                        std::uint8_t* scratch, std::uint32_t full, std::uint32_t empty) {
  using Shape = typename Consumer::Shape;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int num_items = kSlots * plan.num_fragments;
  const int units_at_once = Consumer::kWarps / num_items;
  const int slot = warp % num_items % kSlots, fragment = warp % num_items / kSlots;
  const int sub_tile = slot / plan.heads_per_unit;
  const int head_in_unit = slot - sub_tile * plan.heads_per_unit;
  const bool has_slot = sub_tile < plan.tiles_per_unit;
  const int num_tiles = rows.num_tiles();
  Consumer consumer(lane, header_word(args.format_code));
  TileWork work{};
  work.group_size = plan.group_size;
  work.first_head = fragment * kFragmentHeads;
  work.num_heads = min(plan.group_size - work.first_head, kFragmentHeads);
  work.kv_head = -1;
  int row_end = -1;  // tile behind the row's last
  int stage = warp / num_items * Consumer::kParts, parity = 0;
  for (int n = warp / num_items; n < range.count; n += units_at_once) {
    const int unit = range.begin + n;
    int chunk = 0, tiles = unit;
    if (plan.num_chunks > 1) {
      tiles = unit / plan.num_chunks;
      chunk = unit - tiles * plan.num_chunks;
    }
    const int tile = tiles * plan.tiles_per_unit + sub_tile;
    const int head = chunk * plan.heads_per_unit + head_in_unit;
    const bool active = has_slot && tile < num_tiles && head < args.attention.num_kv_heads;
    if (active) {
      if (tile >= row_end || head != work.kv_head) {
        work.row = rows.find(tile);
        work.first_tile = rows.first_tile[work.row];
        work.scored_blocks = rows.scored_blocks[work.row];
        work.kv_head = head;
        row_end = work.first_tile + detail::num_tiles(work.scored_blocks);
        consumer.set_query(args, work);
      }
      work.tile = tile - work.first_tile;
      consumer.begin_tile(work);
    }
#pragma unroll
    for (int part = 0; part < Consumer::kParts; ++part) {
      barrier_wait(full + 8 * (stage + part), parity);
      const auto release = [&] {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * (stage + part));
      };
      if (active) {
        consumer.score_part(
            stages + (stage + part) * Consumer::kStageBytes + slot * Shape::kRecordBytes, scratch,
            part, release);
      } else {
        release();
      }
    }
    if (active) consumer.end_tile(args, work);
    stage += units_at_once * Consumer::kParts;
    if (stage >= plan.num_stages) {
      stage -= plan.num_stages;
      parity ^= 1;
    }
  }
  consumer.end();
}

template <class Consumer>
__global__ void __launch_bounds__((Consumer::kWarps + kProducerWarps) * 32, 1)
    score_tiles_kernel(const __grid_constant__ StepArguments args,
                       const __grid_constant__ StreamPlan plan) {
#if LOCKS_HOPPER && __CUDA_ARCH__ < 1000  // launch_score asks for 9.x
  extern __shared__ __align__(128) std::uint8_t memory[];
  const int num_rows = args.seqs.num_seqs;
  const StreamLayout layout = stream_layout<Consumer>(num_rows, plan.num_stages);
  const RowTable rows(memory + layout.rows_offset, num_rows);
  rows.load(args.plan);
  const std::uint32_t full = shared_address(memory), empty = full + 8 * kMaxStages;
  // The same in all lanes, and the compiler is to know it.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == Consumer::kWarps * 32) {
    for (int i = 0; i < plan.num_stages; ++i) {
      barrier_init(full + 8 * i, plan.tiles_per_unit * kProducerWarps);
      barrier_init(empty + 8 * i, kSlots * plan.num_fragments);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const UnitRange range(rows.num_tiles(), plan);
  // CTA 0 waits even if it has nothing to score, so that the end of this launch means the end of
  // the one in front, and lets nobody begin before. The others leave their multiprocessors to the
  // launch behind.
  if (range.count == 0 && blockIdx.x != 0) return;
  std::uint8_t* stages = memory + layout.stages_offset;
  if (warp >= Consumer::kWarps) {
    Producer<Consumer>(args, plan, rows, warp - Consumer::kWarps, stages, full, empty).run(range);
    return;
  }
  wait_for_prior_kernel();
  allow_next_kernel();
  consume<Consumer>(args, plan, rows, range, warp, stages,
                    memory + layout.scratch_offset + warp * Consumer::kScratchBytes, full, empty);
#endif
}

}  // namespace locks::detail
