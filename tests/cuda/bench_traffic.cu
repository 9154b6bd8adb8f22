#include <algorithm>
#include <array>

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

// Where the streams' byte `at` lies in those that are rows of a pool: a block's bytes lie in one row.
__device__ __forceinline__ int64_t in_rows(const Traffic& t, int64_t at) {
  const auto unit = static_cast<uint32_t>(at / kTrafficUnit),
             row = unit / static_cast<uint32_t>(t.row_bytes / kTrafficUnit);
  return at + (__ldcg(t.rows + row) - int64_t{row}) * t.row_bytes;
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

template <int kPieces, int kTurns, bool kLeaving>
__global__ void registers_kernel(Traffic t, bool early) {
  ptx::launch_dependents();
  const int64_t first = int64_t{blockIdx.x} * (blockDim.x * kPieces * kTurns * 16);
  const int own = static_cast<int>(threadIdx.x) * 16, step = static_cast<int>(blockDim.x) * 16;
  if (early && threadIdx.x % 8 == 0) {  // one request a line
    const char* from = t.from + (t.row_bytes > 0 && !t.rows_of_target ? in_rows(t, first) : first) + own;
    for (int u = 0; u < kPieces * kTurns; ++u) ptx::prefetch_to_l2(from + u * step);
  }
  ptx::wait_for_prerequisites();
  const int64_t placed = t.row_bytes > 0 ? in_rows(t, first) : first;
  const char* const from = t.from + (t.rows_of_target ? first : placed) + own;
  const int64_t to = (t.rows_of_target || t.in_place ? placed : first) + own;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    uint4 x[kPieces];
#pragma unroll
    for (int u = 0; u < kPieces; ++u) x[u] = load<kLeaving>(from + (turn * kPieces + u) * step);
    for (int r = 1; r < t.reads; ++r) {
#pragma unroll
      for (int u = 0; u < kPieces; ++u) {
        const uint4 y = load<kLeaving>(from + r * t.bytes + (turn * kPieces + u) * step);
        x[u] = make_uint4(x[u].x ^ y.x, x[u].y ^ y.y, x[u].z ^ y.z, x[u].w ^ y.w);
      }
    }
    for (int w = 0; w < t.writes; ++w) {
#pragma unroll
      for (int u = 0; u < kPieces; ++u)
        store<kLeaving>(written_stream(t, w) + to + (turn * kPieces + u) * step, x[u]);
    }
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

template <int kPieces, int kTurns>
RegistersKernel registers_kernel_of(bool leaving) {
  return leaving ? registers_kernel<kPieces, kTurns, true> : registers_kernel<kPieces, kTurns, false>;
}

RegistersKernel find(const TrafficForm& form) {
  switch (form.pieces * 10 + form.turns) {
    case 11: return registers_kernel_of<1, 1>(form.leaving);
    case 14: return registers_kernel_of<1, 4>(form.leaving);
    case 21: return registers_kernel_of<2, 1>(form.leaving);
    case 22: return registers_kernel_of<2, 2>(form.leaving);
    case 41: return registers_kernel_of<4, 1>(form.leaving);
    case 42: return registers_kernel_of<4, 2>(form.leaving);
    default: return registers_kernel_of<8, 1>(form.leaving);
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
  return std::to_string(threads) + " threads x" + std::to_string(pieces) +
         (turns > 1 ? " x" + std::to_string(turns) : "") + (leaving ? " leaving" : "") + (early ? " early" : "") +
         (shared > 0 ? " shared " + std::to_string(shared / 1024) + "K" : "");
}

std::vector<TrafficForm> traffic_forms(const Traffic& t) {
  struct Shape {
    int threads, pieces, turns, kilobytes;
  };
  constexpr Shape kShapes[] = {{32, 8, 1, 0},  {32, 8, 1, 8},  {32, 4, 2, 0},  {32, 4, 2, 8},   {64, 4, 2, 16},
                               {64, 2, 2, 0},  {128, 1, 1, 0}, {128, 2, 1, 0}, {128, 2, 2, 0},  {128, 8, 1, 0},
                               {256, 1, 1, 0}, {256, 1, 4, 0}, {256, 2, 1, 0}, {256, 2, 1, 44}, {256, 4, 1, 0},
                               {512, 1, 1, 0}, {512, 2, 1, 0}, {512, 4, 1, 0}};
  std::vector<TrafficForm> all;
  TrafficForm form{TrafficForm::kRegisters};
  for (const Shape& s : kShapes) {
    form.threads = s.threads, form.pieces = s.pieces, form.turns = s.turns, form.shared = s.kilobytes << 10;
    for (const int hints : {0, 1, 2, 3}) {
      form.leaving = hints % 2 != 0, form.early = hints / 2 != 0;
      all.push_back(form);
    }
  }
  if (t.row_bytes > 0) return all;
  form = {TrafficForm::kBulk};
  for (const auto& [blocks, chunk, stages] :
       {std::array{1, 16, 8}, {1, 32, 4}, {2, 4, 8}, {2, 8, 4}, {4, 4, 8}, {4, 8, 2}}) {
    form.blocks = blocks, form.chunk = chunk << 10, form.stages = stages, form.shared = form.chunk * t.reads * stages;
    if (form.shared <= (224 << 10) / blocks - 1024) all.push_back(form);
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
  launch(reinterpret_cast<const void*>(find(form)), t.bytes / (form.threads * form.pieces * form.turns * 16),
         form.threads, form.shared, stream, arguments);
}

}  // namespace kda::cuda_test
