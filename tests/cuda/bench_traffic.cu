#include <algorithm>
#include <utility>

#include "bench_traffic.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/mbarrier.h"
#include "runtime.h"

namespace kda::cuda_test {
namespace {

namespace ptx = kda::cuda::ptx;

constexpr int kMultiprocessors = 132;  // of the device that the forms are for; others run them too

__device__ __forceinline__ char* written_stream(const Traffic& t, int i) {
  return t.in_place && i == 0 ? const_cast<char*>(t.from) : t.to + i * t.bytes;
}

template <bool kLeaving>
__device__ __forceinline__ uint4 load(const char* p) {
  const auto* const from = reinterpret_cast<const uint4*>(p);
  return kLeaving ? __ldcs(from) : __ldcg(from);
}

template <bool kLeaving>
__device__ __forceinline__ void store(char* p, uint4 x) {
  auto* const to = reinterpret_cast<uint4*>(p);
  if (kLeaving) __stcs(to, x);
  else __stcg(to, x);
}

template <int kPieces, bool kLeaving>
__global__ void registers_kernel(Traffic t, bool early) {
  ptx::launch_dependents();
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x * kPieces + threadIdx.x) * 16;
  const int64_t step = int64_t{blockDim.x} * 16;
  if (early && threadIdx.x % 8 == 0) {  // one request a line
    for (int u = 0; u < kPieces; ++u) ptx::prefetch_to_l2(t.from + first + u * step);
  }
  ptx::wait_for_prerequisites();
  uint4 x[kPieces];
#pragma unroll
  for (int u = 0; u < kPieces; ++u) x[u] = load<kLeaving>(t.from + first + u * step);
  for (int r = 1; r < t.reads; ++r) {
#pragma unroll
    for (int u = 0; u < kPieces; ++u) {
      const uint4 y = load<kLeaving>(t.from + r * t.bytes + first + u * step);
      x[u] = make_uint4(x[u].x ^ y.x, x[u].y ^ y.y, x[u].z ^ y.z, x[u].w ^ y.w);
    }
  }
  for (int w = 0; w < t.writes; ++w) {
#pragma unroll
    for (int u = 0; u < kPieces; ++u) store<kLeaving>(written_stream(t, w) + first + u * step, x[u]);
  }
}

constexpr int kMostStages = 16;

// One thread a block moves every gridDim.x-th chunk through a ring of shared memory.
__global__ void bulk_kernel(Traffic t, int chunk, int stages) {
  extern __shared__ __align__(128) char ring[];
  __shared__ uint64_t barriers[kMostStages];
  ptx::launch_dependents();
  if (threadIdx.x != 0) return;
  for (int s = 0; s < stages; ++s) ptx::mbarrier_init(ptx::shared_address(barriers + s), 1);
  ptx::fence_mbarrier_init();
  const int64_t chunks = t.bytes / chunk;
  const int64_t mine = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const uint32_t stage_bytes = static_cast<uint32_t>(chunk) * t.reads;
  const auto ask = [&](int64_t i) {
    const uint32_t barrier = ptx::shared_address(barriers + i % stages);
    const uint32_t target = ptx::shared_address(ring) + static_cast<uint32_t>(i % stages) * stage_bytes;
    ptx::mbarrier_arrive_expect(barrier, stage_bytes);
    for (int r = 0; r < t.reads; ++r) {
      ptx::bulk_load(target + r * chunk, t.from + r * t.bytes + (blockIdx.x + i * gridDim.x) * chunk, chunk, barrier);
    }
  };
  ptx::wait_for_prerequisites();
  for (int64_t i = 0; i < min(int64_t{stages}, mine); ++i) ask(i);
  for (int64_t i = 0; i < mine; ++i) {
    ptx::mbarrier_wait(ptx::shared_address(barriers + i % stages), (i / stages) & 1);
    const uint32_t source = ptx::shared_address(ring) + static_cast<uint32_t>(i % stages) * stage_bytes;
    for (int w = 0; w < t.writes; ++w) {
      ptx::bulk_store(written_stream(t, w) + (blockIdx.x + i * gridDim.x) * chunk, source, chunk);
    }
    ptx::bulk_store_commit();
    ptx::bulk_store_wait_read<1>();  // the stage before this one may be filled again
    if (i > 0 && i - 1 + stages < mine) ask(i - 1 + stages);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

using RegistersKernel = void (*)(Traffic, bool);

template <int kPieces>
RegistersKernel registers_kernel_of(bool leaving) {
  return leaving ? registers_kernel<kPieces, true> : registers_kernel<kPieces, false>;
}

RegistersKernel find(const TrafficForm& form) {
  switch (form.pieces) {
    case 1: return registers_kernel_of<1>(form.leaving);
    case 2: return registers_kernel_of<2>(form.leaving);
    case 4: return registers_kernel_of<4>(form.leaving);
    default: return registers_kernel_of<8>(form.leaving);
  }
}

void launch(const void* kernel, int64_t blocks, int threads, int shared, cudaStream_t stream, void** arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  KDA_REQUIRE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  KDA_REQUIRE_CUDA(cudaLaunchKernelExC(&config, kernel, arguments));
}

}  // namespace

std::string TrafficForm::label() const {
  if (kind == kBulk) {
    return "bulk " + std::to_string(blocks) + " blocks " + std::to_string(chunk / 1024) + "K x" +
           std::to_string(stages);
  }
  return std::to_string(threads) + " threads x" + std::to_string(pieces) + (leaving ? " leaving" : "") +
         (early ? " early" : "") + (shared > 0 ? " shared " + std::to_string(shared / 1024) + "K" : "");
}

std::vector<TrafficForm> traffic_forms(const Traffic& t) {
  std::vector<TrafficForm> all;
  TrafficForm form{TrafficForm::kRegisters};
  for (const auto& [threads, pieces] : {std::pair{32, 8},
                                        {128, 1},
                                        {128, 2},
                                        {128, 4},
                                        {128, 8},
                                        {256, 1},
                                        {256, 2},
                                        {256, 4},
                                        {256, 8},
                                        {512, 1},
                                        {512, 2},
                                        {512, 4}}) {
    for (const int hints : {0, 1, 2, 3}) {
      form.threads = threads, form.pieces = pieces, form.leaving = hints % 2 != 0, form.early = hints / 2 != 0;
      for (const int shared : {0, 44 << 10}) {
        form.shared = shared;
        if (shared == 0 || threads == 256) all.push_back(form);
      }
    }
  }
  form = {TrafficForm::kBulk};
  for (const int blocks : {1, 2, 4}) {
    for (const int chunk : {4096, 8192, 16384, 32768}) {
      for (const int stages : {2, 4, 8, 16}) {
        form.blocks = blocks, form.chunk = chunk, form.stages = stages, form.shared = chunk * t.reads * stages;
        if (form.shared <= (224 << 10) / blocks - 1024) all.push_back(form);
      }
    }
  }
  return all;
}

void move_bytes(const Traffic& t, const TrafficForm& form, cudaStream_t stream) {
  Traffic traffic = t;
  if (form.kind == TrafficForm::kBulk) {
    int chunk = form.chunk, stages = form.stages;
    void* arguments[] = {&traffic, &chunk, &stages};
    const int64_t blocks = std::min<int64_t>(t.bytes / chunk, int64_t{kMultiprocessors} * form.blocks);
    launch(reinterpret_cast<const void*>(bulk_kernel), blocks, 32, form.shared, stream, arguments);
    return;
  }
  bool early = form.early;
  void* arguments[] = {&traffic, &early};
  launch(reinterpret_cast<const void*>(find(form)), t.bytes / (form.threads * form.pieces * 16), form.threads,
         form.shared, stream, arguments);
}

}  // namespace kda::cuda_test
