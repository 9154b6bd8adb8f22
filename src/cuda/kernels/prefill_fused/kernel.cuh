// Fused KDA prefill for Hopper, K = V = 128, bf16 in and out, fp32 state carry. Spec E, H, N, P; design and measured
// figures: docs/kernels/prefill.md.
//
// Grid: clusters of two CTAs, persistent; cluster i takes works i, i + clusters, ... of the list (sequences longest
// first) x (value heads), or a share of their time (balance.cuh). The two CTAs own 64 value rows each and share all
// preparation.
// Block: warps 0-3 run the serial chain (consume.cuh, recurrence.cuh); warps 4-7 and 8-11 are two preparing
// warpgroups (produce.cuh). Item i of a cluster (32 tokens) is prepared by group i/2 % 2 of CTA i % 2 into stage i %
// 4 of both. Shared memory: shared_plan.cuh. Waiting: produce.cuh, consume.cuh; for another cluster only
// as balance.cuh says (F28). Precision: gates, decays, norms, scores, accumulators and state fp32; operands fp16 of
// one term, K^ and T' two terms, blocks of the inverse two tf32 terms (N-6); state, right-hand side and U scaled by a
// causal power of two, with an fp32 slow path (N-7). Limits: rows start at multiples of 16 bytes; at most one live
// write per slot (P-8).
#pragma once

#include "cuda/kernels/prefill_fused/consume.cuh"

namespace kda::cuda::prefill_fused {

// Registers of a thread by role. The CTA starts with 168 for each of its 384 threads and never gets more: 128
// consumers + 256 producers must stay within 64,512, or the kernel hangs.
constexpr int kConsumerRegisters = 200, kProducerRegisters = 152;
static_assert(128 * kConsumerRegisters + 256 * kProducerRegisters <= kThreads * 168);

template <class C>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    prefill_fused_kernel(const __grid_constant__ Params p) {
  const uint32_t shared = ptx::shared_address(s_memory);
  const uint32_t rank = ptx::cluster_rank();
  const int warpgroup = static_cast<int>(threadIdx.x) >> 7;

  share_params(p);
  list_sequences(p, kThreads);
  if constexpr (C::kWorks == Works::kShares) {
    __syncthreads();
    if (threadIdx.x < 32) cut_share(static_cast<int>(threadIdx.x));
  }
  for (uint32_t i = 0; i < kStages; ++i)
    clear_triangles(shared + Shared::kStage + i * Stage::kStride, threadIdx.x, kThreads);
  if (threadIdx.x == 0) {
    const uint32_t barriers = shared + Shared::kBarriers;
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(barriers + i * 8, 1);
      ptx::mbarrier_init(barriers + (kStages + i) * 8, 4 * kClusterSize);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::fence_async_proxy();
  ptx::cluster_arrive();
  ptx::cluster_wait();

  if (warpgroup == 0) {
    ptx::set_max_registers_up<kConsumerRegisters>();
    consume<SharedRing<C::kWorks>, OwnTraffic>(p, shared, rank);
  } else {
    ptx::set_max_registers_down<kProducerRegisters>();
    produce<C>(p);
  }
  // A CTA's shared memory must outlive its partner's copies and arrivals.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace kda::cuda::prefill_fused
