// Builds records on the GPU, from keys in place in a paged cache.
//
// Grid: a fixed number of CTAs of kWarps warps, whatever the batch. A warp owns one record (block,
// KV head) at a time and walks the batch's new blocks in steps of all warps, so that lengths stay
// on the device and a launch can be captured once and replayed. The 16 keys of a block live in
// shared memory as rotated floats (64 * d bytes a warp); each phase below is one pass over them.
//
// The order of every sum is that of the CPU kernel (core/lanes.h): 16 lanes, half a warp a dot
// product, reduced by the same tree, no fused products (the file is compiled with -fmad=false).
// Records are therefore byte for byte those of the CPU. Bytes: 16 * d * scalar_bytes read and
// record_bytes written a record. Bound by the serial eigensolver of a page's Gram matrix, one lane
// a page, and by shared-memory traffic; tuning it to the memory limit is later work.
#include <cuda_runtime.h>

#include "core/lanes.h"
#include "core/message.h"
#include "core/scalar.h"
#include "locks/cuda.h"
#include "summary/eigensolver.h"
#include "summary/key_hash.h"
#include "summary/quantise.h"
#include "summary/rotation.h"
#include "summary/rows.h"
#include "summary/summary_kernels.h"

namespace locks {

using namespace detail;

namespace {

constexpr int kWarps = 4;
constexpr int kWarpLanes = 32;
constexpr int kCtasPerSm = 4;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr unsigned kHalfWarp = 0xFFFFu;

struct SummariseArguments {
  RecordLayout layout;
  std::uint8_t format_code;
  const float* reference_keys;
  PagedTensor keys;
  SequenceBatch seqs;
  const std::int32_t* begin_tokens;
  RecordCache records;
  unsigned long long* num_records_built;
};

// What a warp keeps in shared memory, in floats, for a block of head_dim d: keys [16, d], then
// centroids [pages, d], a basis row buffer [rank, d], Gram matrices [pages, B, B], weights [pages,
// rank, B], coefficients [rank, 16], scales [rank], energies [pages].
struct WarpMemory {
  float* keys;
  float* centroids;
  float* basis;
  float* gram;
  float* weights;
  float* coefficients;
  float* scales;
  float* energy;
};

__host__ __device__ constexpr int warp_floats(const SummaryFormat& format, int d) {
  const int pages = format.pages_per_block();
  return (kBlockTokens + pages + format.rank) * d + kBlockTokens * format.page_tokens +
         kBlockTokens * format.rank + kMaxRank * kBlockTokens + kMaxRank + kBlockTokens;
}

__device__ WarpMemory cut(float* base, const SummaryFormat& format, int d) {
  WarpMemory m;
  m.keys = base;
  m.centroids = m.keys + kBlockTokens * d;
  m.basis = m.centroids + format.pages_per_block() * d;
  m.gram = m.basis + format.rank * d;
  m.weights = m.gram + kBlockTokens * format.page_tokens;
  m.coefficients = m.weights + kBlockTokens * format.rank;
  m.scales = m.coefficients + kMaxRank * kBlockTokens;
  m.energy = m.scales + kMaxRank;
  return m;
}

// lanes.h's dot product by the half warp that calls it; every lane of the half gets the sum.
__device__ float dot_half_warp(const float* a, const float* b, int d) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const unsigned mask = kHalfWarp << (threadIdx.x % kWarpLanes / kLanes * kLanes);
  float sum = 0;
  for (int c = lane; c < d; c += kLanes) sum += a[c] * b[c];
  for (int apart = kLanes / 2; apart > 0; apart /= 2)
    sum += __shfl_xor_sync(mask, sum, apart, kLanes);
  return sum;
}

// rows.h's max_magnitude by the whole warp.
__device__ float max_magnitude_warp(const float* row, int d) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  int largest = 0;
  for (int c = lane; c < d; c += kWarpLanes)
    largest = max(largest, __float_as_int(row[c]) & 0x7FFFFFFF);
  return __int_as_float(__reduce_max_sync(kAllLanes, largest));
}

__device__ float load_key(const PagedTensor& keys, std::int64_t index) {
  return load_scalar(keys.data, keys.type, index);
}

// Loads and rotates the block's keys and returns, on every lane, the hash of their bytes.
__device__ std::uint32_t load_keys(const PagedTensor& keys, std::int64_t first, bool rotated,
                                   float* x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int d = keys.head_dim;
  const int words = d * static_cast<int>(scalar_bytes(keys.type)) / 4;
  std::uint32_t hash = 0;
  for (int t = 0; t < kBlockTokens; ++t) {
    const std::int64_t row = first + t * keys.token_stride;
    for (int c = lane; c < d; c += kWarpLanes) {
      const float value = load_key(keys, row + c);
      x[t * d + c] = rotated && rotation_flips(c) ? -value : value;
    }
    const auto* bytes = static_cast<const std::uint8_t*>(keys.data) + row * scalar_bytes(keys.type);
    for (int w = lane; w < words; w += kWarpLanes) {
      // Two halves, since a 16-bit row need not begin at a multiple of four bytes.
      const auto* halves = reinterpret_cast<const std::uint16_t*>(bytes) + 2 * w;
      const std::uint32_t word = halves[0] | static_cast<std::uint32_t>(halves[1]) << 16;
      hash += mix_key_word(word, static_cast<std::uint32_t>(t * words + w));
    }
  }
  __syncwarp();
  if (rotated) {
    for (int h = 1; h < rotation_run(d); h *= 2) {
      for (int pair = lane; pair < kBlockTokens * d / 2; pair += kWarpLanes) {
        float* low = x + pair / h * 2 * h + pair % h;  // runs never straddle rows: 2 h divides d
        const float a = low[0], b = low[h];
        low[0] = a + b;
        low[h] = a - b;
      }
      __syncwarp();
    }
    const float scale = rotation_scale(d);
    for (int c = lane; c < kBlockTokens * d; c += kWarpLanes) x[c] *= scale;
    __syncwarp();
  }
  return finish_key_hash(__reduce_add_sync(kAllLanes, hash),
                         static_cast<std::uint32_t>(kBlockTokens * words));
}

// Quantises and packs a row with the whole warp; leaves its rounded values in `row` if asked to.
__device__ Quantised write_row(float* row, int d, int bits, bool keep_rounded, std::uint8_t* out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const float limit = code_limit(bits);
  const Quantised q = find_scale(max_magnitude_warp(row, d), limit);
  const bool finite = is_finite(q.scale);
  const auto code_of = [&](int c) { return finite ? round_to_code(row[c], q.scale, limit) : 0; };
  const auto rounded = [&](int code) { return static_cast<float>(code) * q.scale; };
  if (bits == 8) {
    for (int c = lane; c < d; c += kWarpLanes) {
      const int code = code_of(c);
      out[c] = static_cast<std::uint8_t>(code);
      if (keep_rounded) row[c] = rounded(code);
    }
  } else {
    for (int b = lane; b < d / 2; b += kWarpLanes) {
      const int low = code_of(b), high = code_of(b + d / 2);
      out[b] = static_cast<std::uint8_t>(16 * high + low + 8);
      if (keep_rounded) {
        row[b] = rounded(low);
        row[b + d / 2] = rounded(high);
      }
    }
  }
  __syncwarp();
  return q;
}

__device__ void write_unscorable_page(const RecordLayout& layout, std::uint8_t* rows,
                                      std::uint8_t* scales, std::uint8_t* coefficients) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const SummaryFormat& format = layout.format;
  for (int b = lane; b < layout.page_rows_bytes; b += kWarpLanes) {
    const bool int4 =
        (b < layout.centroid_row_bytes ? format.centroid_bits : format.basis_bits) == 4;
    rows[b] = int4 ? 8 : 0;
  }
  if (lane <= format.rank) store_fp16(scales, lane, kFp16Nan);
  for (int b = lane; b < layout.page_coefficient_bytes; b += kWarpLanes) {
    coefficients[b] = format.coefficient_bits == 4 ? 0x88 : 0x80;
  }
  __syncwarp();
}

// Centres page `page` in place and fills its centroid, Gram matrix and energy.
template <int B>
__device__ void measure_page(const WarpMemory& m, int page, int d) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  float* x = m.keys + page * B * d;
  for (int c = lane; c < d; c += kWarpLanes) {
    float sum = x[c];
    for (int t = 1; t < B; ++t) sum += x[t * d + c];
    const float mean = sum * (1.0f / B);
    m.centroids[page * d + c] = mean;
    for (int t = 0; t < B; ++t) x[t * d + c] -= mean;
  }
  __syncwarp();
  float* gram = m.gram + page * B * B;
  const int half = lane / kLanes;
  for (int entry = half; entry < B * B; entry += 2) {
    const int i = entry / B, j = entry % B;
    if (j > i) continue;  // the same for the whole half warp
    const float product = dot_half_warp(x + i * d, x + j * d, d);
    if (lane % kLanes == 0) gram[i * B + j] = gram[j * B + i] = product;
  }
  __syncwarp();
  float energy = 0;
  for (int i = 0; i < B; ++i) energy += gram[i * B + i];
  if (lane == 0) m.energy[page] = energy;
  __syncwarp();
}

// Basis rows, coefficients and scales of a centred page whose eigenvectors are known.
template <int B>
__device__ void write_components(const RecordLayout& layout, const WarpMemory& m, int page,
                                 std::uint8_t* rows, std::uint8_t* scales, std::uint8_t* packed) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int half = lane / kLanes;
  const SummaryFormat& format = layout.format;
  const int d = layout.head_dim, rank = format.rank;
  const float* x = m.keys + page * B * d;
  const float* weights = m.weights + page * rank * B;
  for (int k = 0; k < rank; ++k) {
    float* row = m.basis + k * d;
    for (int c = lane; c < d; c += kWarpLanes) {
      float sum = x[c] * weights[k * B];
      for (int t = 1; t < B; ++t) sum += x[t * d + c] * weights[k * B + t];
      row[c] = sum;
    }
    __syncwarp();
    const float squared = dot_half_warp(row, row, d);
    const float factor = squared > kNoiseEnergy * m.energy[page] ? 1 / square_root(squared) : 0.0f;
    __syncwarp();
    for (int c = lane; c < d; c += kWarpLanes) row[c] *= factor;
    __syncwarp();
    const Quantised q = write_row(row, d, format.basis_bits, format.improved,
                                  rows + layout.centroid_row_bytes + k * layout.basis_row_bytes);
    if (lane == 0) m.scales[k] = q.scale;
    for (int t = half; t < B; t += 2) {
      const float c = dot_half_warp(row, x + t * d, d);
      if (lane % kLanes == 0) m.coefficients[k * kBlockTokens + t] = c;
    }
    __syncwarp();
  }
  float overlap[kMaxRank][kMaxRank];
  if (format.improved) {
    for (int k = 0; k < rank; ++k) {
      for (int n = 0; n <= k; ++n)
        overlap[k][n] = dot_half_warp(m.basis + k * d, m.basis + n * d, d);
    }
  }
  if (lane == 0) {
    auto& coefficients = *reinterpret_cast<float(*)[kMaxRank][kBlockTokens]>(m.coefficients);
    if (format.improved) solve_refit<B>(overlap, rank, coefficients);
    for (int k = 0; k < rank; ++k) {
      const Quantised q =
          pack_coefficients(coefficients[k], B, format.coefficient_bits, k * B, packed);
      store_fp16(scales, 1 + k, float_to_fp16(m.scales[k] * q.scale));
    }
  }
  __syncwarp();
}

template <int B>
__device__ void write_pages(const SummariseArguments& a, const WarpMemory& m,
                            const float* reference, std::uint8_t* record) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const RecordLayout& layout = a.layout;
  const int d = layout.head_dim, rank = layout.format.rank;
  constexpr int kPages = kBlockTokens / B;
  for (int page = 0; page < kPages; ++page) measure_page<B>(m, page, d);
  // One lane a page: the solver is serial and the pages are independent.
  if (lane < kPages && is_finite(m.energy[lane])) {
    top_eigenvectors<B>(m.gram + lane * B * B, rank, m.weights + lane * rank * B, nullptr);
  }
  __syncwarp();
  for (int page = 0; page < kPages; ++page) {
    std::uint8_t* rows = record + page * layout.page_rows_bytes;
    std::uint8_t* scales = record + layout.scales_offset + page * (1 + rank) * 2;
    std::uint8_t* packed =
        record + layout.coefficients_offset + page * layout.page_coefficient_bytes;
    if (!is_finite(m.energy[page])) {
      write_unscorable_page(layout, rows, scales, packed);
      continue;
    }
    float* centroid = m.centroids + page * d;
    if (reference != nullptr) {
      for (int c = lane; c < d; c += kWarpLanes) centroid[c] -= reference[c];
      __syncwarp();
    }
    const Quantised q = write_row(centroid, d, layout.format.centroid_bits, false, rows);
    if (lane == 0) store_fp16(scales, 0, q.scale_bits);
    write_components<B>(layout, m, page, rows, scales, packed);
  }
}

// Where a block's record lies, null if the table names a cache block that does not exist.
__device__ std::uint8_t* record_address(const SummariseArguments& a, int seq, std::int64_t block,
                                        int head) {
  const int blocks = a.records.block_tokens / kBlockTokens;
  const std::int64_t id =
      a.seqs.record_blocks.ids[seq * a.seqs.record_blocks.seq_stride + block / blocks];
  if (id < 0 || id >= a.records.num_blocks) return nullptr;
  return a.records.data + id * a.records.block_stride + head * a.records.head_stride +
         block % blocks * a.records.record_bytes;
}

// Tells whether there was a place for it.
template <int B>
__device__ bool build_record(const SummariseArguments& a, int seq, std::int64_t block, int head,
                             float* memory) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const RecordLayout& layout = a.layout;
  const int d = layout.head_dim;
  const std::int64_t token = block * kBlockTokens;
  const std::int64_t id =
      a.seqs.cache_blocks.ids[seq * a.seqs.cache_blocks.seq_stride + token / a.keys.block_tokens];
  const std::int64_t first = id * a.keys.block_stride + head * a.keys.head_stride +
                             token % a.keys.block_tokens * a.keys.token_stride;
  std::uint8_t* record = record_address(a, seq, block, head);
  if (record == nullptr || id < 0 || id >= a.keys.num_blocks) return false;
  const WarpMemory m = cut(memory, layout.format, d);
  const std::uint32_t hash = load_keys(a.keys, first, layout.format.improved, m.keys);
  const int scales_end =
      layout.scales_offset + layout.format.pages_per_block() * (1 + layout.format.rank) * 2;
  for (int b = scales_end + lane; b < layout.header_offset; b += kWarpLanes) record[b] = 0;
  __syncwarp();
  const float* reference = a.reference_keys == nullptr ? nullptr : a.reference_keys + head * d;
  write_pages<B>(a, m, reference, record);
  if (lane == 0) write_header(layout, a.format_code, hash, record);
  __syncwarp();  // the next record reuses the memory
  return true;
}

// Clears the headers of blocks that the step leaves incomplete, one lane a (sequence, head).
__device__ void clear_incomplete(const SummariseArguments& a, std::int64_t thread,
                                 std::int64_t num_threads) {
  const std::int64_t num_items = static_cast<std::int64_t>(a.seqs.num_seqs) * a.keys.num_kv_heads;
  for (std::int64_t item = thread; item < num_items; item += num_threads) {
    const int seq = static_cast<int>(item / a.keys.num_kv_heads);
    const int head = static_cast<int>(item % a.keys.num_kv_heads);
    const int length = a.seqs.lengths[seq];
    if (length % kBlockTokens == 0 || a.begin_tokens[seq] >= length) continue;
    std::uint8_t* record = record_address(a, seq, length / kBlockTokens, head);
    if (record != nullptr) *reinterpret_cast<std::uint64_t*>(record + a.layout.header_offset) = 0;
  }
}

template <int B>
__global__ void __launch_bounds__(kWarps* kWarpLanes)
    summarise_blocks_kernel(const __grid_constant__ SummariseArguments a) {
  extern __shared__ float shared[];
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  float* memory = shared + warp * warp_floats(a.layout.format, a.layout.head_dim);
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * kWarps;
  const int heads = a.keys.num_kv_heads;
  std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  std::int64_t built = 0;
  // `item` counts on through the new blocks of one sequence after the other.
  for (int seq = 0; seq < a.seqs.num_seqs; ++seq) {
    const std::int64_t first = a.begin_tokens[seq] / kBlockTokens;
    const std::int64_t items = (a.seqs.lengths[seq] / kBlockTokens - first) * heads;
    for (; item < items; item += num_warps) {
      built +=
          build_record<B>(a, seq, first + item / heads, static_cast<int>(item % heads), memory);
    }
    item -= items > 0 ? items : 0;
  }
  if (threadIdx.x % kWarpLanes == 0 && built != 0 && a.num_records_built != nullptr) {
    atomicAdd(a.num_records_built, static_cast<unsigned long long>(built));
  }
  clear_incomplete(a, static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                   static_cast<std::int64_t>(gridDim.x) * blockDim.x);
}

Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return unsupported(join("summarise_blocks_cuda: ", what, ": ", cudaGetErrorString(error)));
}

template <int B>
Status launch(const SummariseArguments& arguments, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  LOCKS_RETURN_IF_ERROR(cuda_status(cudaGetDevice(&device), "cudaGetDevice"));
  LOCKS_RETURN_IF_ERROR(cuda_status(
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "device"));
  const int bytes = kWarps * warp_floats(arguments.layout.format, arguments.layout.head_dim) *
                    static_cast<int>(sizeof(float));
  LOCKS_RETURN_IF_ERROR(
      cuda_status(cudaFuncSetAttribute(summarise_blocks_kernel<B>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                  "shared memory"));
  summarise_blocks_kernel<B><<<static_cast<unsigned>(num_sms * kCtasPerSm), kWarps * kWarpLanes,
                               static_cast<std::size_t>(bytes), stream>>>(arguments);
  return cuda_status(cudaGetLastError(), "launch");
}

}  // namespace

Status summarise_blocks_cuda(const SummaryParams& params, const PagedTensor& keys,
                             const SequenceBatch& seqs, const std::int32_t* begin_tokens,
                             const RecordCache& records, std::int64_t* num_records_built,
                             void* stream) {
  LOCKS_RETURN_IF_ERROR(check_summary_shapes(params, keys, records));
  if (seqs.num_seqs == 0) return {};
  const SummariseArguments arguments = {record_layout(params.format, keys.head_dim),
                                        encode_format(params.format),
                                        params.format.improved ? params.reference_keys : nullptr,
                                        keys,
                                        seqs,
                                        begin_tokens,
                                        records,
                                        reinterpret_cast<unsigned long long*>(num_records_built)};
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (params.format.page_tokens) {
    case 4:
      return launch<4>(arguments, cuda_stream);
    case 8:
      return launch<8>(arguments, cuda_stream);
    default:
      return launch<16>(arguments, cuda_stream);
  }
}

}  // namespace locks
