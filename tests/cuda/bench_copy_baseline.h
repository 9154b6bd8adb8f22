// What the state copies are compared with (spec U-3), written apart from libkda: the calls that frameworks make for
// `packed = pool[idx]` with rows cleared where there is no state, and `pool[idx] = packed`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kda::cuda_test {

struct BaselineCopy {
  char* pool;
  char* packed;
  int64_t pool_stride, row_bytes;  // bytes; packed is dense
  int64_t rows, n;
  const void* indices;
  bool wide;
  const uint8_t* flags;  // null = none
  int element;           // bytes
};

// index_select in 16-byte pieces, then a masked clear in a second launch.
void baseline_gather(const BaselineCopy& c, cudaStream_t stream);
// index_put, element by element.
void baseline_scatter(const BaselineCopy& c, cudaStream_t stream);
// A gather or scatter without any test of index or flag: what the validity predicates cost (U-2).
void unchecked_copy(const BaselineCopy& c, bool scatter, cudaStream_t stream);
// True if two ranges hold the same bytes.
bool same_bytes(const void* a, const void* b, size_t bytes);

}  // namespace kda::cuda_test
