// Chooses how a launch of select_attend is cut up, and launches it.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "core/launch_cuda.h"
#include "decode/select_attend_cuda.h"

namespace locks::detail {

namespace {

constexpr int kKeyGroupBytes = 32;
constexpr int kMostKeyGroups = 4096;
// Listing::make fences what it writes where tiles are copied to only if keys do not fit, and it
// writes there for groups past kMaxima.
static_assert(kMostKeyGroups <= kMaxima);
constexpr int kFewKeyGroups = 64;
// What the system keeps of a CTA's shared memory.
constexpr int kReservedBytes = 1024;

SelectAttendKernel find_kernel(int head_dim, bool bf16, int threads) {
  switch (head_dim) {
    case 64:
      return select_attend_kernel_d64(bf16, threads);
    case 80:
      return select_attend_kernel_d80(bf16, threads);
    case 96:
      return select_attend_kernel_d96(bf16, threads);
    case 128:
      return select_attend_kernel_d128(bf16, threads);
    case 192:
      return select_attend_kernel_d192(bf16, threads);
    case 256:
      return select_attend_kernel_d256(bf16, threads);
    default:
      return {nullptr, 0};
  }
}

struct Device {
  int id;
  int multiprocessors;
  int shared_bytes;  // of a multiprocessor
  int cta_bytes;     // that a CTA may ask for
};

cudaError_t current_device(Device& device) {
  cudaError_t error = cudaGetDevice(&device.id);
  const auto read = [&](cudaDeviceAttr attribute, int& value) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device.id);
  };
  read(cudaDevAttrMultiProcessorCount, device.multiprocessors);
  read(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.shared_bytes);
  read(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.cta_bytes);
  return error;
}

// Shared memory of a CTA: all there is for one of 512 threads, half for one of 256 if that is
// enough.
int shared_bytes(const Device& device, const SelectAttendKernel& kernel, int threads) {
  const int half = device.shared_bytes / 2 - kReservedBytes;
  const bool one = threads == 512 || half < kernel.fixed_bytes + kFewKeyGroups * kKeyGroupBytes;
  const int wanted = kernel.fixed_bytes + kMostKeyGroups * kKeyGroupBytes;
  return std::min(one ? device.cta_bytes : half, wanted) / 16 * 16;
}

struct Launch {
  cudaLaunchConfig_t config{};
  std::array<cudaLaunchAttribute, 2> attributes{};
  SelectAttendKernel kernel{};
};

bool is_bf16(const StepArguments& a) { return a.keys.type == ScalarType::kBFloat16; }

cudaError_t prepare_launch(const StepArguments& a, const SelectAttendCut& cut, const Device& device,
                           cudaStream_t stream, Launch& launch) {
  launch.kernel = find_kernel(a.attention.head_dim, is_bf16(a), cut.threads);
  if (launch.kernel.function == nullptr) return cudaErrorInvalidValue;
  bool hopper = false;  // else there are no clusters, and no wait for the kernel in front
  if (const cudaError_t error = has_hopper_code(launch.kernel.function, hopper);
      error != cudaSuccess) {
    return error;
  }
  if (!hopper && cut.cluster > 1) return cudaErrorInvalidValue;
  const int bytes = shared_bytes(device, launch.kernel, cut.threads);
  if (bytes < launch.kernel.fixed_bytes) return cudaErrorInvalidConfiguration;
  cudaError_t error = cudaFuncSetAttribute(launch.kernel.function,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && cut.cluster > 8) {
    error = cudaFuncSetAttribute(launch.kernel.function,
                                 cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  launch.config.gridDim =
      dim3(static_cast<unsigned>(cut.cluster), static_cast<unsigned>(a.attention.num_kv_heads),
           static_cast<unsigned>(a.seqs.num_seqs));
  launch.config.blockDim = dim3(static_cast<unsigned>(cut.threads));
  launch.config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  launch.config.stream = stream;
  launch.config.attrs = launch.attributes.data();
  launch.config.numAttrs = 0;
  if (hopper) {
    launch.attributes[launch.config.numAttrs++] = early_start();
  }
  if (cut.cluster > 1) {
    cudaLaunchAttribute& cluster = launch.attributes[launch.config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(cut.cluster);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  return cudaSuccess;
}

// Clusters of a cut that are resident at once; asked once a device, kernel and cut.
cudaError_t resident_clusters(const StepArguments& a, const SelectAttendCut& cut,
                              const Device& device, int& clusters) {
  constexpr std::size_t kDevices = 16, kDims = 6, kCuts = 2 * kMostCtas;
  static std::array<std::atomic<int>, kDevices * kDims * 2 * kCuts> known{};  // plus 1
  constexpr std::array<int, kDims> kHeadDims = {64, 80, 96, 128, 192, 256};
  std::size_t at = 0;
  while (at < kDims && kHeadDims[at] != a.attention.head_dim) ++at;
  if (at == kDims) return cudaErrorInvalidValue;
  const auto cut_idx =
      static_cast<std::size_t>((cut.threads == 512 ? 0 : kMostCtas) + cut.cluster - 1);
  const auto device_idx = static_cast<std::size_t>(device.id);
  at = ((device_idx * kDims + at) * 2 + (is_bf16(a) ? 1 : 0)) * kCuts + cut_idx;
  if (device_idx < kDevices) {
    if (const int seen = known[at].load(std::memory_order_relaxed); seen > 0) {
      clusters = seen - 1;
      return cudaSuccess;
    }
  }
  Launch launch;
  cudaError_t error = prepare_launch(a, cut, device, nullptr, launch);
  if (error == cudaSuccess && cut.cluster == 1) {
    int ctas = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &ctas, launch.kernel.function, cut.threads, launch.config.dynamicSmemBytes);
    clusters = ctas * device.multiprocessors;
  } else if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveClusters(&clusters, launch.kernel.function, &launch.config);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();
    clusters = 0;  // a cut that the device cannot have
  }
  if (device_idx < kDevices) known[at].store(clusters + 1, std::memory_order_relaxed);
  return cudaSuccess;
}

int log2_of(int x) {
  int log2 = 0;
  while (x > 1) x /= 2, ++log2;
  return log2;
}

bool is_aligned(const PagedTensor& t) {
  constexpr std::int64_t kElements = 8;
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.block_stride % kElements == 0 &&
         t.head_stride % kElements == 0 && t.token_stride % kElements == 0;
}

bool is_together(const PagedTensor& k, const PagedTensor& v) {
  return static_cast<const std::uint16_t*>(k.data) + k.head_dim == v.data &&
         k.block_stride == v.block_stride && k.head_stride == v.head_stride &&
         k.token_stride == 2 * k.head_dim && v.token_stride == k.token_stride;
}

}  // namespace

cudaError_t choose_select_attend_cut(const StepArguments& a, SelectAttendCut& cut) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return error;
  cut = {256, 1};  // what any device has
  // The most threads that are resident in one wave; among equals the larger CTAs, which spend less
  // on talk. Room for just as many clusters as there are is too little: while the kernel in front
  // still holds a multiprocessor, the last cluster has nowhere to go, and a second wave costs more
  // than larger clusters gain.
  const int wanted = a.seqs.num_seqs * a.attention.num_kv_heads;
  int most = 0;
  for (const int threads : {512, 256}) {
    for (int cluster = largest_cluster(threads); cluster >= 1; --cluster) {
      int resident = 0;
      const SelectAttendCut candidate{threads, cluster};
      if (const cudaError_t error = resident_clusters(a, candidate, device, resident);
          error != cudaSuccess) {
        return error;
      }
      if (resident < wanted + (cluster > 1 ? 1 : 0)) continue;
      if (cluster * threads > most) {
        most = cluster * threads;
        cut = candidate;
      }
      break;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_select_attend(const StepArguments& a, const SelectAttendCut& cut,
                                 cudaStream_t stream) {
  if (a.seqs.num_seqs == 0) return cudaSuccess;
  const bool half = a.keys.type == ScalarType::kBFloat16 || a.keys.type == ScalarType::kFloat16;
  const bool known_cluster = cut.cluster >= 1 && cut.cluster <= largest_cluster(cut.threads);
  if (!half || a.keys.type != a.values.type || !known_cluster ||
      a.keys.block_tokens != a.values.block_tokens) {
    return cudaErrorInvalidValue;
  }
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return error;
  Launch launch;
  if (const cudaError_t error = prepare_launch(a, cut, device, stream, launch);
      error != cudaSuccess) {
    return error;
  }
  SelectAttendShape shape;
  shape.cluster = cut.cluster;
  shape.group = a.attention.group_size();
  shape.page_shift = log2_of(a.layout.format.page_tokens);
  const int block_shift = log2_of(a.keys.block_tokens);
  shape.block_shift = 1 << block_shift == a.keys.block_tokens ? block_shift : -1;
  shape.query_as_cache = a.query.type == a.keys.type &&
                         reinterpret_cast<std::uintptr_t>(a.query.data) % 8 == 0 &&
                         a.query.seq_stride % 4 == 0 && a.query.head_stride % 4 == 0;
  shape.key_groups =
      (static_cast<int>(launch.config.dynamicSmemBytes) - launch.kernel.fixed_bytes) /
      kKeyGroupBytes;
  shape.rows_aligned = is_aligned(a.keys) && is_aligned(a.values);
  shape.rows_together = is_together(a.keys, a.values);
  return cudaLaunchKernelEx(&launch.config, launch.kernel.function, a, shape);
}

cudaError_t launch_select_attend(const StepArguments& arguments, cudaStream_t stream) {
  SelectAttendCut cut;
  if (const cudaError_t error = choose_select_attend_cut(arguments, cut); error != cudaSuccess) {
    return error;
  }
  return launch_select_attend(arguments, cut, stream);
}

}  // namespace locks::detail
