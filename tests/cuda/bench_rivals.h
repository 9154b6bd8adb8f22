// What the state copies are compared with (spec U-3), written apart from libkda: the calls that frameworks make for
// `packed = pool[idx]` with rows cleared where there is no state, and `pool[idx] = packed`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kda::cuda_test {

struct RivalCopy {
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
void index_select(const RivalCopy& c, cudaStream_t stream);
// Element by element.
void index_put(const RivalCopy& c, cudaStream_t stream);
// A gather or scatter without any test of index or flag: what the validity predicates cost (U-2).
void unchecked_copy(const RivalCopy& c, bool scatter, cudaStream_t stream);

// A kernel of 128 blocks that does nothing (`reads` 0) or waits for one value of the grid before; `early`: launched with
// programmatic serialisation.
void launch_chained(int* value, int reads, bool early, cudaStream_t stream);

}  // namespace kda::cuda_test
