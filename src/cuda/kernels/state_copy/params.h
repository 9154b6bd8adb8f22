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
  bool guesses = false;            // the row of an index before the grid before has ended; lanes of 16 bytes only
  int32_t lane = 1;                // bytes of the pool's side: 16, 8, 4, 2 or 1; with a cast 8, 4 or 2
};

KernelInfo state_copy_kernel_info(CopyDirectionTag direction, CopyCast cast, bool wide_index);
// What a warp moves, on the wider side: 4 KB, in two turns of four 16-byte accesses a lane.
constexpr int64_t kCopySlice = 4096;
// A block is a warp: memory likes few accesses in flight, well spread (state_copy.md). Calls of a middle size, too
// long to guess and too short to hide that blocks start one after the other, have four warps a block.
constexpr int64_t kCopyGuessedSlices = 1024, kCopyMiddleSlices = 2048;
constexpr int32_t kCopyMiddleWarps = 4;
// Dynamic shared memory that no block touches: it keeps 24 warps on a multiprocessor instead of 32.
constexpr int32_t kCopyIdleShared = 8 * 1024;
constexpr int32_t kCopyCastLane = 8;  // pool bytes of the widest lane with a cast: 16 bytes on the packed side

}  // namespace kda::cuda
