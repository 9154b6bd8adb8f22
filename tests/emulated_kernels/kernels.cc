// The decode family's kernels, for the host.
#include "cuda/kernels/conv/launch.cu"
#include "cuda/kernels/gated_norm/launch.cu"
#include "cuda/kernels/prefill_portable/launch.cu"
#include "cuda/kernels/segments/launch.cu"
