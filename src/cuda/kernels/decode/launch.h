// The built kernels of decode, verify and commit.
#pragma once

#include "cuda/kernels/common/kernel_info.h"
#include "cuda/kernels/decode/params.h"

namespace kda::cuda {

enum class Flow : int32_t { kColumns, kRecords, kCommit };

KernelInfo decode_kernel_info(Dtype pool, Shape shape, Flow flow);

// The common calls (lean.cuh, lean_records.cuh): one token a row, the same for few heads, and where the states fill
// the L2 many times over; several tokens a row; records, and with states as many.
enum class LeanCall : int32_t { kToken, kTokenOfFew, kTokenOfMany, kWindow, kRecords, kRecordsOfMany };

KernelInfo lean_kernel_info(Dtype pool, LeanCall call);

KernelInfo set_counts_kernel_info();  // DecodeParams: after verify_record, one thread a sequence
KernelInfo end_commit_kernel_info();  // CommitParams: after commit, one block a sequence

// Per pool dtype, each in a file of its own.
KernelInfo decode_kernel_fp32(Shape shape, Flow flow);
KernelInfo decode_kernel_bf16(Shape shape, Flow flow);
KernelInfo decode_kernel_fp16(Shape shape, Flow flow);
KernelInfo lean_kernel_fp32(LeanCall call);
KernelInfo lean_kernel_bf16(LeanCall call);
KernelInfo lean_kernel_fp16(LeanCall call);

}  // namespace kda::cuda
