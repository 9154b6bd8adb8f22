// The list of CUDA candidates.
#include "cuda/host/backend.h"

#include "cuda/host/candidates.h"

namespace kda::cuda {
void add_candidates(Backends& list) {
  list.add(fused_prefill());
  list.add(portable_prefill());
  list.add(fused_decode());
  list.add(portable_decode());
  list.add(fused_commit());
  list.add(portable_commit());
  list.add(fused_decode_step());
  list.add(portable_decode_step());
  list.add(portable_conv());
  list.add(portable_gated_norm());
  list.add(portable_residual_norm());
  list.add(fused_segment_summary());
  list.add(portable_segment_summary());
  list.add(portable_segment_merge());
}

}  // namespace kda::cuda
