// The list of CUDA candidates.
#include "cuda/host/backend.h"

#include "cuda/host/candidates.h"
#include "cuda/host/not_built.h"

namespace kda::cuda {

void add_candidates(Backends& list) {
  add_not_built<Prefill>(list);
  add_not_built<Decode>(list);
  add_not_built<Commit>(list);
  add_not_built<DecodeStep>(list);
  add_not_built<Conv>(list);
  add_not_built<GatedNorm>(list);
  add_not_built<SegmentSummary>(list);
  add_not_built<SegmentMerge>(list);
}

}  // namespace kda::cuda
