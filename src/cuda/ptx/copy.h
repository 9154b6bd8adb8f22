// Asynchronous copies and matrix loads between global memory, shared memory and registers.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

// Orders this thread's ordinary shared-memory writes before later accesses of the async proxy (wgmma, bulk copies).
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Shared memory of this CTA to shared memory of a CTA of the cluster; completes on a barrier there.
__device__ __forceinline__ void bulk_copy_to_cluster(uint32_t cluster_target, uint32_t source, uint32_t bytes,
                                                     uint32_t cluster_barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cluster_target),
               "r"(source), "r"(bytes), "r"(cluster_barrier)
               : "memory");
}

// Global memory to this CTA's shared memory: `bytes` a multiple of 16, both ends 16-byte aligned; completes on a barrier.
__device__ __forceinline__ void bulk_load(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Global memory to the same place in the shared memory of every CTA of the cluster in `ctas` (bit r: rank r);
// completes on the barrier at `barrier` in each. Addresses of this CTA's window.
__device__ __forceinline__ void bulk_load_multicast(uint32_t target, const void* source, uint32_t bytes,
                                                    uint32_t barrier, uint32_t ctas) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}

// Shared to global memory. The issuing thread commits what it started to a group, and waits until all but the last
// kPending groups have read their sources.
__device__ __forceinline__ void bulk_store(void* target, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// 16 bytes to shared memory; with `bytes` 0 the source is not read and zeros are written.
__device__ __forceinline__ void copy_async_16(uint32_t target, const void* source, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Arrives at a barrier, which counts this arrival, once this thread's copies so far are done.
__device__ __forceinline__ void copy_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements, transposed: lane l gets elements [2*(l%4)], [2*(l%4)+1] of column l/4.
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_matrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                      uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint2 x) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint16_t x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}
__device__ __forceinline__ float load_shared_f1(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ float2 load_shared_f2(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ float4 load_shared_f4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ uint2 load_shared_u2(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint32_t load_shared_u32(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint4 load_shared_u4(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// Global loads that do not pollute the L1, for rows read once.
__device__ __forceinline__ uint4 load_global_16(const void* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

__device__ __forceinline__ uint32_t load_global_once(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}
__device__ __forceinline__ float2 load_global_once(const float2* p) {
  float2 x;
  asm volatile("ld.global.nc.L1::no_allocate.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(p));
  return x;
}

// 16 bytes past the L1; neither this load nor a later store changes its place in the program.
__device__ __forceinline__ uint4 load_global_16_in_order(const void* p) {
  uint4 x;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p)
               : "memory");
  return x;
}

// The same pointer, said to lead to global memory: generic accesses take longer.
template <class T>
__device__ __forceinline__ T* in_global(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// Asks for the line of this address in the L2.
__device__ __forceinline__ void prefetch_to_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// Starts bringing `bytes` (a multiple of 16, 16-byte aligned) into the L2. One thread: lanes would take turns.
__device__ __forceinline__ void prefetch_block_to_l2(const void* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

__device__ __forceinline__ uint64_t load_shared_u64(uint32_t address) {
  uint64_t x;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint64_t x) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
}

}  // namespace kda::cuda::ptx
