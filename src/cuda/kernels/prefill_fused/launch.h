// Between the sources of the launcher: which kernels serve a gate, and the launches of the staged form.
#pragma once

#include "cuda/kernels/prefill_fused/params.h"

namespace kda::cuda::prefill_fused {

using Kernel = void (*)(Params);

struct Shape {
  int64_t blocks;
  int threads;
  uint32_t shared_bytes;
  bool is_dependent = false;  // may start before the grid before it ends: it waits for that itself
  unsigned cluster = 0;       // blocks of a cluster, where the kernel does not say
};
cudaError_t launch_kernel(Kernel kernel, const Shape& shape, const Params& params, cudaStream_t stream);

// The fused kernel of each of Works.
Kernel find_any_kernel(Gate gate, Real gate_type, Diagonal diagonal);
Kernel find_usual_kernel(Gate gate, Real gate_type, Diagonal diagonal);
Kernel find_balanced_kernel(Gate gate, Real gate_type, Diagonal diagonal);

cudaError_t prepare_staged(Gate gate, Real gate_type, Diagonal diagonal);
cudaError_t launch_stages(const Params& params, Gate gate, Real gate_type, int sm_count, cudaStream_t stream);
cudaError_t launch_chain(const Params& params, int64_t works, int sm_count, cudaStream_t stream);
// The same with one or two SMs a work, at most `room` SMs at once.
cudaError_t launch_chains(const Params& params, int64_t works, int sms, int64_t room, cudaStream_t stream);

}  // namespace kda::cuda::prefill_fused
