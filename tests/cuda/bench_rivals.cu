#include "bench_rivals.h"
#include "runtime.h"

namespace kda::cuda_test {
namespace {

__device__ __forceinline__ int64_t index_at(const RivalCopy& c, int64_t i) {
  return c.wide ? static_cast<const int64_t*>(c.indices)[i] : static_cast<const int32_t*>(c.indices)[i];
}

// A row a block along y, 16 bytes a thread.
__global__ void index_select_kernel(RivalCopy c, bool clamp) {
  const int64_t i = blockIdx.y, at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 16;
  if (at >= c.row_bytes) return;
  int64_t row = index_at(c, i);
  if (clamp) row = row < 0 ? 0 : row >= c.rows ? c.rows - 1 : row;
  *reinterpret_cast<uint4*>(c.packed + i * c.row_bytes + at) =
      *reinterpret_cast<const uint4*>(c.pool + row * c.pool_stride + at);
}

// masked_fill: reads the mask for every element, writes where it says so.
__global__ void masked_clear_kernel(RivalCopy c) {
  const int64_t i = blockIdx.y, at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 16;
  if (at >= c.row_bytes) return;
  const int64_t row = index_at(c, i);
  if (row >= 0 && row < c.rows && (c.flags == nullptr || c.flags[i] != 0)) return;
  *reinterpret_cast<uint4*>(c.packed + i * c.row_bytes + at) = make_uint4(0, 0, 0, 0);
}

// Four elements a thread, each with its own row and index, as element-wise indexing kernels have them.
template <class T>
__global__ void index_put_kernel(RivalCopy c) {
  const auto elements = c.row_bytes / static_cast<int64_t>(sizeof(T));
  const int64_t first = int64_t{blockIdx.x} * (blockDim.x * 4) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int64_t e = first + u * blockDim.x;
    if (e >= c.n * elements) return;
    const int64_t i = e / elements, within = e % elements, row = index_at(c, i);
    if (row < 0 || row >= c.rows) continue;
    reinterpret_cast<T*>(c.pool + row * c.pool_stride)[within] = reinterpret_cast<const T*>(c.packed)[e];
  }
}

__global__ void unchecked_scatter_kernel(RivalCopy c) {
  const int64_t i = blockIdx.y, at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 16;
  if (at >= c.row_bytes) return;
  *reinterpret_cast<uint4*>(c.pool + index_at(c, i) * c.pool_stride + at) =
      *reinterpret_cast<const uint4*>(c.packed + i * c.row_bytes + at);
}

// What a graph of dependent launches costs when the kernels do nothing, or read one value that the one before wrote.
__global__ void chained_kernel(int* value, int reads) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (reads == 0) return;
  const int x = *static_cast<volatile int*>(value);
  if (blockIdx.x == 0 && threadIdx.x == 0) *value = x + 1;
}

constexpr int kThreads = 256;
dim3 row_grid(const RivalCopy& c) {
  return dim3(static_cast<unsigned>((c.row_bytes / 16 + kThreads - 1) / kThreads), static_cast<unsigned>(c.n));
}

}  // namespace

void index_select(const RivalCopy& c, cudaStream_t stream) {
  index_select_kernel<<<row_grid(c), kThreads, 0, stream>>>(c, true);
  masked_clear_kernel<<<row_grid(c), kThreads, 0, stream>>>(c);
  KDA_REQUIRE_CUDA(cudaGetLastError());
}

void index_put(const RivalCopy& c, cudaStream_t stream) {
  const int64_t elements = c.n * (c.row_bytes / c.element);
  const auto blocks = static_cast<unsigned>((elements + 511) / 512);
  if (c.element == 4) index_put_kernel<uint32_t><<<blocks, 128, 0, stream>>>(c);
  else index_put_kernel<uint16_t><<<blocks, 128, 0, stream>>>(c);
  KDA_REQUIRE_CUDA(cudaGetLastError());
}

void unchecked_copy(const RivalCopy& c, bool scatter, cudaStream_t stream) {
  if (scatter) unchecked_scatter_kernel<<<row_grid(c), kThreads, 0, stream>>>(c);
  else index_select_kernel<<<row_grid(c), kThreads, 0, stream>>>(c, false);
  KDA_REQUIRE_CUDA(cudaGetLastError());
}

void launch_chained(int* value, int reads, bool early, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(128);
  config.blockDim = dim3(128);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  void* arguments[] = {&value, &reads};
  KDA_REQUIRE_CUDA(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(chained_kernel), arguments));
}

}  // namespace kda::cuda_test
