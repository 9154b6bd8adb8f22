// Copies between rows of a strided state pool and packed tensors (spec state-copy.md C-1..C-22).
#pragma once

#include "cuda/kernels/common/kernel_info.h"
#include "cuda/kernels/common/views.h"

namespace kda::cuda {

enum class CopyDirectionTag { kGather, kScatter };
// What happens to an element on its way: nothing, or a 16-bit float pool beside fp32 packed rows (C-16).
enum class CopyCast { kNone, kBf16, kFp16 };

struct StateCopyParams {
  char* pool = nullptr;            // row 0; written by scatter only
  char* packed = nullptr;          // row 0; written by gather only
  int64_t pool_stride = 0;         // bytes from row to row
  int64_t packed_stride = 0;       // bytes from row to row
  int64_t rows = 0;                // of the pool
  int64_t n = 0;                   // selected rows
  const void* indices = nullptr;   // [n] int32 or int64, by variant
  int64_t index_stride = 1;        // elements
  const uint8_t* flags = nullptr;  // [n]; null = all true; null in scatter
  int64_t lanes = 0;               // of one row
  int32_t lane = 1;                // bytes of the pool's side: 16, 8, 4, 2 or 1; with a cast 8, 4 or 2
};

KernelInfo state_copy_kernel_info(CopyDirectionTag direction, CopyCast cast, bool wide_index);
constexpr int32_t kCopyThreads = 256;
constexpr int32_t kCopyLanes = 4;  // of one thread, all in flight at once
// Dynamic shared memory that no block touches: it keeps five blocks on a multiprocessor instead of eight. Memory
// likes few accesses in flight (state_copy.md).
constexpr int32_t kCopyIdleShared = 44 * 1024;
// Lanes that one block moves.
constexpr int64_t kCopySlice = int64_t{kCopyThreads} * kCopyLanes;
constexpr int32_t kCopyCastLane = 8;  // pool bytes of the widest lane with a cast: 16 bytes on the packed side

}  // namespace kda::cuda
