// The candidates of the CUDA backend (spec ). Each is a function-local static.
#pragma once

#include "core/backend.h"

namespace kda::cuda {

const Candidate<Prefill>* fused_prefill();
const Candidate<Prefill>* portable_prefill();
const Candidate<Decode>* fused_decode();
const Candidate<Decode>* portable_decode();
const Candidate<Commit>* fused_commit();
const Candidate<Commit>* portable_commit();
const Candidate<DecodeStep>* fused_decode_step();
const Candidate<DecodeStep>* portable_decode_step();
const Candidate<Conv>* portable_conv();
const Candidate<GatedNorm>* portable_gated_norm();
const Candidate<ResidualNorm>* portable_residual_norm();
const Candidate<SegmentSummary>* fused_segment_summary();
const Candidate<SegmentSummary>* portable_segment_summary();
const Candidate<SegmentMerge>* portable_segment_merge();

}  // namespace kda::cuda
