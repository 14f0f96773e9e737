// PTX instructions that CUDA C++ has no good spelling for, one line of meaning each. Instructions
// of sm_90 and later are compiled to nothing below it; callers ask kHasHopper before they rely on
// one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace locks::detail {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define LOCKS_HOPPER 1
#else
#define LOCKS_HOPPER 0
#endif
inline constexpr bool kHasHopper = LOCKS_HOPPER;  // of the code being compiled, not of the machine

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Programmatic dependent launch.

// Waits until all kernels in front have ended and their writes are seen.
__device__ __forceinline__ void wait_for_prior_kernel() {
#if LOCKS_HOPPER
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start once every CTA has said so; it still waits for our writes.
__device__ __forceinline__ void allow_next_kernel() {
#if LOCKS_HOPPER
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Barriers in shared memory, and the bulk copies that they count.

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, int arrivals) {
#if LOCKS_HOPPER
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
#endif
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void barrier_init_fence() {
#if LOCKS_HOPPER
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_expect_bytes(std::uint32_t barrier, std::uint32_t bytes) {
#if LOCKS_HOPPER
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
#if LOCKS_HOPPER
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
#if LOCKS_HOPPER
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// As barrier_wait, for data that other CTAs of the cluster sent.
__device__ __forceinline__ void barrier_wait_cluster(std::uint32_t barrier, std::uint32_t parity) {
#if LOCKS_HOPPER
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Global to shared memory by the copy engine; both ends and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_bulk(std::uint32_t to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier, std::uint64_t policy) {
#if LOCKS_HOPPER
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

// The line at `from` into L2.
__device__ __forceinline__ void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Forgets the 128 bytes at `at`, a multiple of 128: what they are is undefined until they are
// written again, and L2 has nothing to write to memory.
__device__ __forceinline__ void discard_line(std::uintptr_t at) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(at) : "memory");
}

// Global memory into L2; both are multiples of 16.
__device__ __forceinline__ void prefetch_bulk(const void* from, std::uint32_t bytes) {
#if LOCKS_HOPPER
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Clusters.

// The address in CTA `rank` of the cluster that corresponds to our shared address.
__device__ __forceinline__ std::uint32_t address_in(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t mapped = address;
#if LOCKS_HOPPER
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
#endif
  return mapped;
}

// Stores to another CTA's shared memory; its barrier counts the bytes as they arrive.
__device__ __forceinline__ void send_u32(std::uint32_t to, std::uint32_t value,
                                         std::uint32_t barrier) {
#if LOCKS_HOPPER
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(value), "r"(barrier)
      : "memory");
#endif
}

__device__ __forceinline__ void send_u32x2(std::uint32_t to, std::uint32_t a, std::uint32_t b,
                                           std::uint32_t barrier) {
#if LOCKS_HOPPER
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "r"(a), "r"(b), "r"(barrier)
      : "memory");
#endif
}

__device__ __forceinline__ void send_u32x4(std::uint32_t to, uint4 value, std::uint32_t barrier) {
#if LOCKS_HOPPER
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
#endif
}

// A word of another CTA's shared memory; `from` is of address_in.
__device__ __forceinline__ std::uint32_t load_remote(std::uint32_t from) {
  std::uint32_t value = 0;
#if LOCKS_HOPPER
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
#endif
  return value;
}

__device__ __forceinline__ void cluster_arrive() {
#if LOCKS_HOPPER
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if LOCKS_HOPPER
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Copies of 16 bytes a thread, sm_80.

__device__ __forceinline__ void copy_async_16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups are on their way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary accesses of shared memory before bulk copies that follow a barrier.
__device__ __forceinline__ void fence_before_bulk_copies() {
#if LOCKS_HOPPER
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Hints to L2.

__device__ __forceinline__ std::uint64_t policy_evict_first() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ std::uint64_t policy_evict_last() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void store_hinted(void* to, uint4 value, std::uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void store_hinted(void* to, std::uint32_t value, std::uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(value), "l"(policy)
               : "memory");
}

// Arithmetic.

// 2^x to about 2 ulp; denormal results become zero.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Matrix units.
// D += A B with A row-major [16, k], B [k, 8], D [16, 8]. Lane l holds, with g = l / 4 and j = l %
// 4:
//   D: {[g][2j], [g][2j+1], [g+8][2j], [g+8][2j+1]}.

// k = 32, signed bytes. A: {[g][4j..], [g+8][4j..], [g][16+4j..], [g+8][16+4j..]}; B: {[4j..][g],
// [16+4j..][g]}.
__device__ __forceinline__ void mma_s8(int (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                       std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// k = 16, bf16 or fp16 pairs. A: {[g][2j..], [g+8][2j..], [g][8+2j..], [g+8][8+2j..]}; B:
// {[2j..][g], [8+2j..][g]}.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const std::uint32_t (&a)[4],
                                        std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace locks::detail
