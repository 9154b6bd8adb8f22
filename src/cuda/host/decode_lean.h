// The common decode, verify and verify_record call, told from the others (kernels/decode/lean.cuh).
#pragma once

#include <optional>

#include "cuda/kernels/decode/lean_params.h"
#include "cuda/kernels/decode/params.h"

namespace kda::cuda {

// The lean kernels' arguments for a call, if it is one that they serve: K = V = 128; 16-bit q, k and v with rows of
// whole, aligned groups of four; one int32 table of slots, all states initial; a state stored per token, or records;
// sequences one row each, or by int32 offsets; outputs row by row; strides below 4 GiB; HV/H a power of two.
// `element`: bytes of a state's.
std::optional<LeanParams> lean_call(const DecodeParams& p, int64_t element);
std::optional<LeanRecordParams> lean_record_call(const DecodeParams& p, int64_t element);
// A commit as a verify_record of no new tokens.
std::optional<LeanRecordParams> lean_commit_call(const CommitParams& p, int64_t element);

}  // namespace kda::cuda
