// Telling other CTAs, through global memory, that data is there.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

// Until at most `kPending` of this thread's bulk stores are under way: what the others stored is visible to it.
template <int kPending>
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Between ordinary accesses of global memory and those of bulk copies.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Whoever acquires this word sees what this thread knew to be written before.
__device__ __forceinline__ void store_release(uint32_t* p, uint32_t x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

}  // namespace kda::cuda::ptx
