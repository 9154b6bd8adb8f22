// The fp64 oracle's candidates, one for every operator (spec E-11, R-8).
#pragma once

#include "core/backend.h"

namespace kda::reference {

const Candidate<Prefill>* prefill();
const Candidate<Decode>* decode();
const Candidate<Commit>* commit();
const Candidate<DecodeStep>* decode_step();
const Candidate<Conv>* conv();
const Candidate<GatedNorm>* gated_norm();
const Candidate<ResidualNorm>* residual_norm();
const Candidate<SegmentSummary>* segment_summary();
const Candidate<SegmentMerge>* segment_merge();

}  // namespace kda::reference
