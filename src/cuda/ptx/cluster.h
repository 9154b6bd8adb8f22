// Thread block clusters: ranks, distributed shared-memory addresses, barriers.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same from an address of this CTA's shared memory, which carries the rank in its upper bits.
__device__ __forceinline__ uint32_t rank_of_window(uint32_t shared_address) { return shared_address >> 24; }

// The address, in the cluster's shared window, of `address` in the CTA of that rank.
__device__ __forceinline__ uint32_t map_shared_rank(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// To an address of the cluster's shared window.
__device__ __forceinline__ void store_cluster(uint32_t address, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// The same, counted by a barrier of the CTA that owns the address.
__device__ __forceinline__ void store_cluster_counted(uint32_t address, float x, uint32_t cluster_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(x)), "r"(cluster_barrier)
               : "memory");
}

// The two halves of a cluster barrier: what is read before arriving is read before anyone's writes after waiting. In
// a launch without clusters a block is its own.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Without an order for earlier writes.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A barrier among `threads` threads of the CTA (id 1..15).
__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts for the barrier of that many threads without waiting for it: orders what came before for those who do.
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace kda::cuda::ptx
