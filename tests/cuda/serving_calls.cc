#include "serving_calls.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<int> armed{0}, watching_memory{0};
std::atomic<bool> fail_launch{false};
std::atomic<long> launches{0}, allocations{0};
thread_local int inside_launch = 0;

struct Counter {
  const char* name;
  std::atomic<long> count{0};
};

// ---- The driver, by way of the runtime's look-ups.

constexpr int kSlots = 96;
struct Slot {
  char name[64] = {};
  void* real = nullptr;
  std::atomic<long> count{0};
};
std::array<Slot, kSlots> slots;
int used_slots = 0;

using Word = uint64_t;
using Any = int (*)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);
// Hands on six register and four stack arguments: enough for every function counted here, harmless for shorter ones.
template <int kSlot>
int forward(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i, Word j) {
  if (armed.load(std::memory_order_relaxed) > 0) slots[kSlot].count.fetch_add(1, std::memory_order_relaxed);
  return reinterpret_cast<Any>(slots[kSlot].real)(a, b, c, d, e, f, g, h, i, j);
}
template <size_t... kIndex>
constexpr std::array<Any, kSlots> forwarders(std::index_sequence<kIndex...>) {
  return {&forward<static_cast<int>(kIndex)>...};
}
constexpr std::array<Any, kSlots> kForward = forwarders(std::make_index_sequence<kSlots>());

bool counted(const char* name) {
  for (const char* prefix : {"cuModuleLoad", "cuModuleGetFunction", "cuLibraryLoad", "cuLibraryGet", "cuKernelGet",
                             "cuKernelSet", "cuFuncGet", "cuFuncSet", "cuFuncLoad", "cuMemAlloc", "cuMemHostAlloc",
                             "cuMemFree", "cuMemCreate", "cuCtxSynchronize", "cuStreamSynchronize",
                             "cuEventSynchronize", "cuDeviceGetAttribute", "cuMemcpy", "cuLinkCreate"}) {
    if (std::strncmp(name, prefix, std::strlen(prefix)) == 0) return true;
  }
  return false;
}

void* counted_version(const char* name, void* real) {
  if (real == nullptr || !counted(name) || std::strlen(name) >= sizeof(Slot::name)) return real;
  for (int i = 0; i < used_slots; ++i) {
    if (slots[i].real == real) return reinterpret_cast<void*>(kForward[i]);
  }
  if (used_slots == kSlots) return real;
  Slot& slot = slots[used_slots];
  std::strcpy(slot.name, name);
  slot.real = real;
  return reinterpret_cast<void*>(kForward[used_slots++]);
}

using GetProcAddress = int (*)(const char*, void**, int, uint64_t, void*);
GetProcAddress real_get_proc_address = nullptr;
int get_proc_address(const char* symbol, void** pointer, int version, uint64_t flags, void* status) {
  const int result = real_get_proc_address(symbol, pointer, version, flags, status);
  if (result != 0 || pointer == nullptr) return result;
  if (std::strncmp(symbol, "cuGetProcAddress", 16) == 0) {
    real_get_proc_address = reinterpret_cast<GetProcAddress>(*pointer);
    *pointer = reinterpret_cast<void*>(&get_proc_address);
  } else {
    *pointer = counted_version(symbol, *pointer);
  }
  return result;
}

}  // namespace

extern "C" {

void* __real_dlsym(void* handle, const char* name);
void* __wrap_dlsym(void* handle, const char* name) {
  void* found = __real_dlsym(handle, name);
  if (found != nullptr && std::strcmp(name, "cuGetProcAddress_v2") == 0) {
    real_get_proc_address = reinterpret_cast<GetProcAddress>(found);
    return reinterpret_cast<void*>(&get_proc_address);
  }
  return found == nullptr || std::strncmp(name, "cu", 2) != 0 ? found : counted_version(name, found);
}

// ---- The runtime, by --wrap at link time.

#define KDA_COUNTED(name, parameters, arguments)                                      \
  cudaError_t __real_##name parameters;                                               \
  static Counter counter_##name{#name};                                               \
  cudaError_t __wrap_##name parameters {                                              \
    if (armed.load(std::memory_order_relaxed) > 0) counter_##name.count.fetch_add(1); \
    return __real_##name arguments;                                                   \
  }

KDA_COUNTED(cudaMalloc, (void** p, size_t n), (p, n))
KDA_COUNTED(cudaFree, (void* p), (p))
KDA_COUNTED(cudaHostAlloc, (void** p, size_t n, unsigned flags), (p, n, flags))
KDA_COUNTED(cudaMallocAsync, (void** p, size_t n, cudaStream_t s), (p, n, s))
KDA_COUNTED(cudaMemset, (void* p, int value, size_t n), (p, value, n))
KDA_COUNTED(cudaMemcpy, (void* to, const void* from, size_t n, cudaMemcpyKind kind), (to, from, n, kind))
KDA_COUNTED(cudaMemcpyAsync, (void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t s),
            (to, from, n, kind, s))
KDA_COUNTED(cudaDeviceSynchronize, (), ())
KDA_COUNTED(cudaStreamSynchronize, (cudaStream_t s), (s))
KDA_COUNTED(cudaEventSynchronize, (cudaEvent_t e), (e))
KDA_COUNTED(cudaStreamIsCapturing, (cudaStream_t s, cudaStreamCaptureStatus* status), (s, status))
KDA_COUNTED(cudaFuncGetAttributes, (cudaFuncAttributes * a, const void* f), (a, f))
KDA_COUNTED(cudaFuncSetAttribute, (const void* f, cudaFuncAttribute a, int value), (f, a, value))
KDA_COUNTED(cudaDeviceGetAttribute, (int* value, cudaDeviceAttr a, int device), (value, a, device))
KDA_COUNTED(cudaGetDeviceProperties, (cudaDeviceProp * p, int device), (p, device))
KDA_COUNTED(cudaGetDeviceCount, (int* n), (n))
KDA_COUNTED(cudaSetDevice, (int device), (device))
#undef KDA_COUNTED

// A node of its own under capture, like a launch.
cudaError_t __real_cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t s);
cudaError_t __wrap_cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t s) {
  if (armed.load(std::memory_order_relaxed) > 0) launches.fetch_add(1);
  return __real_cudaMemsetAsync(p, value, n, s);
}

cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* f, void** arguments);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* f, void** arguments) {
  if (armed.load(std::memory_order_relaxed) > 0) launches.fetch_add(1);
  if (fail_launch.exchange(false)) return cudaErrorLaunchOutOfResources;
  ++inside_launch;
  const cudaError_t error = __real_cudaLaunchKernelExC(config, f, arguments);
  --inside_launch;
  return error;
}

cudaError_t __real_cudaLaunchKernel(const void* f, dim3 grid, dim3 block, void** arguments, size_t shared,
                                    cudaStream_t stream);
cudaError_t __wrap_cudaLaunchKernel(const void* f, dim3 grid, dim3 block, void** arguments, size_t shared,
                                    cudaStream_t stream) {
  if (armed.load(std::memory_order_relaxed) > 0) launches.fetch_add(1);
  ++inside_launch;
  const cudaError_t error = __real_cudaLaunchKernel(f, grid, block, arguments, shared, stream);
  --inside_launch;
  return error;
}

}  // extern "C"

// Not inlined: the compiler would take the two halves for a mismatch.
#define KDA_REPLACES __attribute__((noinline))
KDA_REPLACES void* operator new(size_t n) {
  if (watching_memory.load(std::memory_order_relaxed) > 0 && inside_launch == 0) allocations.fetch_add(1);
  void* p = std::malloc(n == 0 ? 1 : n);
  if (p == nullptr) std::abort();
  return p;
}
KDA_REPLACES void operator delete(void* p) noexcept { std::free(p); }
KDA_REPLACES void operator delete(void* p, size_t) noexcept { std::free(p); }
#undef KDA_REPLACES

namespace kda::cuda_test {
namespace {

Counter* const kRuntime[] = {&counter_cudaMalloc,
                             &counter_cudaFree,
                             &counter_cudaHostAlloc,
                             &counter_cudaMallocAsync,
                             &counter_cudaMemset,
                             &counter_cudaMemcpy,
                             &counter_cudaMemcpyAsync,
                             &counter_cudaDeviceSynchronize,
                             &counter_cudaStreamSynchronize,
                             &counter_cudaEventSynchronize,
                             &counter_cudaStreamIsCapturing,
                             &counter_cudaFuncGetAttributes,
                             &counter_cudaFuncSetAttribute,
                             &counter_cudaDeviceGetAttribute,
                             &counter_cudaGetDeviceProperties,
                             &counter_cudaGetDeviceCount,
                             &counter_cudaSetDevice};

}  // namespace

CudaCalls::CudaCalls() {
  for (Counter* c : kRuntime) c->count = 0;
  for (Slot& s : slots) s.count = 0;
  ::launches = 0;
  ++armed;
}
CudaCalls::~CudaCalls() { --armed; }

std::map<std::string, long> CudaCalls::counts() const {
  std::map<std::string, long> out;
  for (const Counter* c : kRuntime) {
    if (c->count > 0) out[c->name] += c->count;
  }
  for (int i = 0; i < used_slots; ++i) {
    if (slots[i].count > 0) out[slots[i].name] += slots[i].count;
  }
  return out;
}
long CudaCalls::launches() const { return ::launches; }
long CudaCalls::others() const {
  long sum = 0;
  for (const auto& [name, count] : counts()) sum += count;
  return sum;
}
std::string CudaCalls::text() const {
  std::string s = std::to_string(launches()) + " launches";
  for (const auto& [name, count] : counts()) s += ", " + name + " " + std::to_string(count);
  return s;
}

void fail_next_launch() { fail_launch = true; }

HostAllocations::HostAllocations() {
  allocations = 0;
  ++watching_memory;
}
HostAllocations::~HostAllocations() { --watching_memory; }
long HostAllocations::count() const { return allocations; }

}  // namespace kda::cuda_test
