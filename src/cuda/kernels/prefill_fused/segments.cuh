// Sequences cut into segments (S-6), for few heads, in the staged form. While their items are prepared, chains run
//   1  Pass::kOpening    the first segments (Cut::opening) as one, from the initial state, with outputs;
//   2  Pass::kSummaries  of the segments behind them but the last, Cut::run at a time: B (from S := 0) and M (from
//                        S := I, V := 0) from the run's start to the end of each;
// then
//   3  Pass::kSegments   all segments behind the opening: outputs, final state. The state S before each is made by the
//                        chain itself: from the opening's, S := S M + B for every run before and for the segments of
//                        its own run before it (S-4).
// A run goes through its segments one after the other, so that 3 has more and shorter chains than 2.
//
// A map comes in four blocks of 32 channels, through the ring of stages. S M on the tensor cores: operands of two
// tf32 terms (S-7), the map's made by who stores it (Layout::kMap), fp32 sums.
#pragma once

#include "cuda/kernels/prefill_fused/value_rows.cuh"

namespace kda::cuda::prefill_fused {

constexpr int kMapBlocks = kDim / 32;
static_assert(kMapBlockBytes <= Stage::kBytes);

// sum += state M for the state's first 32 columns and a block of a map, `map16` its shared address / 16. The state's
// columns move on by 32.
__device__ __forceinline__ void add_map_block(float (&sum)[64], float (&state)[64], uint32_t map16) {
  // Eight channels a step, of this lane two: the even one stands first, the odd one four places on.
  uint32_t high[16], low[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const Terms terms(state[(i & ~3) + (i & 1) * 2 + (i >> 1 & 1)]);
    high[i] = terms.high, low[i] = terms.low;
  }
  ptx::wgmma_fence();
#pragma unroll
  for (int s = 0; s < 16; s += 4) {
    const uint64_t b_high = ptx::matrix_descriptor<16, 1024, ptx::Swizzle::k128>(map16 + s / 2);
    const uint64_t b_low = ptx::matrix_descriptor<16, 1024, ptx::Swizzle::k128>(map16 + kMapTermBytes / 16 + s / 2);
    ptx::wgmma_m64n128k8_tf32(sum, low[s], low[s + 1], low[s + 2], low[s + 3], b_high);
    ptx::wgmma_m64n128k8_tf32(sum, high[s], high[s + 1], high[s + 2], high[s + 3], b_low);
    ptx::wgmma_m64n128k8_tf32(sum, high[s], high[s + 1], high[s + 2], high[s + 3], b_high);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin_registers(sum);
#pragma unroll
  for (int i = 0; i < 48; ++i) state[i] = state[i + 16];
}

}  // namespace kda::cuda::prefill_fused
