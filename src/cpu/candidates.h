// The candidates of the CPU backend, all named "portable" (spec R-8). Each is a function-local static.
#pragma once

#include "core/backend.h"

namespace kda::cpu {

const Candidate<Prefill>* portable_prefill();
const Candidate<SegmentSummary>* portable_segment_summary();
const Candidate<SegmentMerge>* portable_segment_merge();
const Candidate<Decode>* portable_decode();
const Candidate<Commit>* portable_commit();
const Candidate<DecodeStep>* portable_decode_step();
const Candidate<Conv>* portable_conv();
const Candidate<GatedNorm>* portable_gated_norm();
const Candidate<ResidualNorm>* portable_residual_norm();

}  // namespace kda::cpu
