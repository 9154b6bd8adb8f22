#include "bench.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

namespace kda::cuda_test {
namespace {

__global__ void copy_kernel(uint4* to, const uint4* from, size_t count) {
  // Four independent 16-byte loads in flight per thread.
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = __ldcs(from + i), b = __ldcs(from + i + stride), c = __ldcs(from + i + 2 * stride),
                d = __ldcs(from + i + 3 * stride);
    __stcs(to + i, a), __stcs(to + i + stride, b), __stcs(to + i + 2 * stride, c), __stcs(to + i + 3 * stride, d);
  }
  for (; i < count; i += stride) __stcs(to + i, __ldcs(from + i));
}

__global__ void fill_kernel(void* p, size_t count, int dtype, float scale, uint64_t seed) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    uint64_t z = (seed << 40) + i + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    const float x = scale * (static_cast<float>(z >> 40) * 0x1p-23f - 1.0f);
    if (dtype == KDA_BF16) static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(x);
    else if (dtype == KDA_FP16) static_cast<__half*>(p)[i] = __float2half(x);
    else static_cast<float*>(p)[i] = x;
  }
}

// What a graph of dependent launches costs when the kernels do nothing, or read one value that the one before wrote.
__global__ void chained_kernel(int* value, int reads) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (reads == 0) return;
  const int x = *static_cast<volatile int*>(value);
  if (blockIdx.x == 0 && threadIdx.x == 0) *value = x + 1;
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x.empty() ? 0 : x[x.size() / 2];
}

std::string list(const std::vector<double>& x, const char* form = "%s%.3f") {
  std::string s = "[";
  char text[32];
  for (size_t i = 0; i < x.size(); ++i) {
    std::snprintf(text, sizeof text, form, i ? "," : "", x[i]);
    s += text;
  }
  return s + "]";
}

class Graph {
 public:
  Graph(const Variant& v, cudaStream_t stream) {
    KDA_REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < v.calls; ++i) v.call(i, stream);
    cudaGraph_t graph = nullptr;
    KDA_REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
    KDA_REQUIRE_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
    KDA_REQUIRE_CUDA(cudaGraphDestroy(graph));
    KDA_REQUIRE_CUDA(cudaEventCreate(&begin_));
    KDA_REQUIRE_CUDA(cudaEventCreate(&end_));
  }
  ~Graph() {
    (void)cudaGraphExecDestroy(exec_);
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  // Microseconds of one replay.
  double replay(cudaStream_t stream) {
    KDA_REQUIRE_CUDA(cudaEventRecord(begin_, stream));
    KDA_REQUIRE_CUDA(cudaGraphLaunch(exec_, stream));
    KDA_REQUIRE_CUDA(cudaEventRecord(end_, stream));
    KDA_REQUIRE_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    KDA_REQUIRE_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1000.0;
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// The ruler: 256 MB read and 256 MB written, rotating over four buffers.
constexpr size_t kCopyBytes = size_t{256} << 20;

std::vector<Variant> copies() {
  static Buffer& block = *new Buffer(4 * kCopyBytes);
  static const bool filled = (fill_uniform(block, KDA_FP32, 1, 99), true);
  (void)filled;
  const auto part = [](int i) { return static_cast<char*>(block.data()) + (i & 3) * kCopyBytes; };
  return {{"copy: cudaMemcpyAsync",
           [=](int i, cudaStream_t s) {
             KDA_REQUIRE_CUDA(cudaMemcpyAsync(part(i + 1), part(i), kCopyBytes, cudaMemcpyDeviceToDevice, s));
           },
           4, 2.0 * kCopyBytes},
          {"copy: 16-byte kernel", [=](int i, cudaStream_t s) { copy_16(part(i + 1), part(i), kCopyBytes, s); }, 4,
           2.0 * kCopyBytes}};
}

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes) { KDA_REQUIRE_CUDA(cudaMalloc(&data_, bytes)); }
Buffer::~Buffer() { (void)cudaFree(data_); }

void fill_uniform(const Buffer& buffer, kda_dtype dtype, float scale, uint32_t seed) {
  fill_kernel<<<1024, 256>>>(buffer.data(), buffer.bytes() / kda_dtype_size(dtype), dtype, scale, seed);
  KDA_REQUIRE_CUDA(cudaGetLastError());
}

void upload(const Buffer& buffer, const void* data, size_t bytes) {
  KDA_REQUIRE_CUDA(cudaMemcpy(buffer.data(), data, bytes, cudaMemcpyHostToDevice));
}

void copy_16(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  copy_kernel<<<132 * 8, 256, 0, stream>>>(static_cast<uint4*>(to), static_cast<const uint4*>(from), bytes / 16);
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

void Bench::measure(const std::string& group, std::vector<Variant> variants) {
  if (!wants(group)) return;
  auto all = copies();
  all.insert(all.end(), variants.begin(), variants.end());
  cudaStream_t stream = nullptr;
  KDA_REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
  std::vector<std::unique_ptr<Graph>> graphs;
  std::vector<std::vector<double>> samples(all.size()), places(all.size());
  for (const Variant& v : all) graphs.push_back(std::make_unique<Graph>(v, stream));
  for (auto& g : graphs) g->replay(stream), g->replay(stream);
  std::mt19937_64 random(seed_);
  std::vector<size_t> order(all.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int round = 0; round < rounds_; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t at = 0; at < order.size(); ++at) {
      const size_t i = order[at];
      samples[i].push_back(graphs[i]->replay(stream) / all[i].calls);
      places[i].push_back(static_cast<double>(at));
    }
  }
  double rate = 0;  // bytes per microsecond
  for (size_t i = 0; i < 2; ++i) rate = std::max(rate, all[i].bytes / median(samples[i]));
  std::printf("%s (copy rate %.0f GB/s: memcpy %.0f, kernel %.0f)\n", group.c_str(), rate / 1000,
              all[0].bytes / median(samples[0]) / 1000, all[1].bytes / median(samples[1]) / 1000);
  for (size_t i = 0; i < all.size(); ++i) {
    const Variant& v = all[i];
    std::vector<double> sorted = samples[i];
    std::sort(sorted.begin(), sorted.end());
    const double us = median(sorted), floor = v.bytes / rate;
    const double limit = v.absolute ? v.target : v.target * floor;
    if (i >= 2) {
      std::printf("  %-44s %9.2f us  floor %8.2f  x %.3f", v.name.c_str(), us, floor, us / floor);
      if (limit > 0) std::printf("  wanted <= %8.2f  %s", limit, us <= limit ? "met" : "MISSED");
      std::printf("  [%.2f, %.2f]\n", sorted[sorted.size() / 20], sorted[sorted.size() - 1 - sorted.size() / 20]);
    }
    char text[320];
    std::snprintf(text, sizeof text,
                  "{\"group\":\"%s\",\"name\":\"%s\",\"us\":%.4f,\"floor_us\":%.4f,\"bytes\":%.0f,\"copy_gb_s\":%.1f,"
                  "\"limit_us\":%.4f,\"samples\":",
                  group.c_str(), v.name.c_str(), us, floor, v.bytes, rate / 1000, limit);
    records_.push_back(text + list(samples[i]) + ",\"order\":" + list(places[i], "%s%.0f") + "}");
  }
  std::fflush(stdout);
  KDA_REQUIRE_CUDA(cudaStreamDestroy(stream));
}

void Bench::eager(const std::string& group, const std::vector<Variant>& variants) {
  if (!wants(group)) return;
  constexpr const char* kModes[] = {"enqueue", "wall", "event"};
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  KDA_REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  KDA_REQUIRE_CUDA(cudaEventCreate(&begin));
  KDA_REQUIRE_CUDA(cudaEventCreate(&end));
  std::vector<std::vector<double>> samples(variants.size() * 3);
  std::vector<size_t> order(variants.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::mt19937_64 random(seed_ + 1);
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto us = [](auto x) { return std::chrono::duration<double, std::micro>(x).count(); };
  for (int round = -2; round < rounds_; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i : order) {
      KDA_REQUIRE_CUDA(cudaEventRecord(begin, stream));
      KDA_REQUIRE_CUDA(cudaStreamSynchronize(stream));
      const auto start = now();
      variants[i].call(round + 2, stream);
      const auto returned = now();
      KDA_REQUIRE_CUDA(cudaStreamSynchronize(stream));
      const auto done = now();
      KDA_REQUIRE_CUDA(cudaEventRecord(begin, stream));
      variants[i].call(round + 3, stream);
      KDA_REQUIRE_CUDA(cudaEventRecord(end, stream));
      KDA_REQUIRE_CUDA(cudaEventSynchronize(end));
      float ms = 0;
      KDA_REQUIRE_CUDA(cudaEventElapsedTime(&ms, begin, end));
      if (round < 0) continue;  // warm-up
      samples[3 * i].push_back(us(returned - start));
      samples[3 * i + 1].push_back(us(done - start));
      samples[3 * i + 2].push_back(ms * 1000.0);
    }
  }
  for (size_t i = 0; i < variants.size(); ++i) {
    std::printf("  %-44s", variants[i].name.c_str());
    for (size_t m = 0; m < 3; ++m) std::printf("  %s %.2f us", kModes[m], median(samples[3 * i + m]));
    std::printf("\n");
    for (size_t m = 0; m < 3; ++m) {
      records_.push_back("{\"group\":\"" + group + "\",\"name\":\"" + variants[i].name + "\",\"mode\":\"" + kModes[m] +
                         "\",\"samples\":" + list(samples[3 * i + m]) + "}");
    }
  }
  std::fflush(stdout);
  KDA_REQUIRE_CUDA(cudaEventDestroy(begin));
  KDA_REQUIRE_CUDA(cudaEventDestroy(end));
  KDA_REQUIRE_CUDA(cudaStreamDestroy(stream));
}

void Bench::enqueue(const std::string& name, const std::function<void(cudaStream_t)>& call, int count) {
  if (!wants(name)) return;
  cudaStream_t stream = nullptr;
  KDA_REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<double> samples;
  for (int i = 0; i < count; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call(stream);
    const auto end = std::chrono::steady_clock::now();
    samples.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    if (i % 50 == 49) KDA_REQUIRE_CUDA(cudaStreamSynchronize(stream));
  }
  KDA_REQUIRE_CUDA(cudaStreamSynchronize(stream));
  KDA_REQUIRE_CUDA(cudaStreamDestroy(stream));
  std::printf("%-46s %9.2f us host, median of %d\n", name.c_str(), median(samples), count);
  char text[160];
  std::snprintf(text, sizeof text, "{\"group\":\"enqueue\",\"name\":\"%s\",\"us\":%.4f,\"samples\":", name.c_str(),
                median(samples));
  records_.push_back(text + list(samples) + "}");
}

std::string Bench::json(const std::string& command) const {
  std::string s = "{\"device\":\"" + device_text() + "\",\"command\":\"" + command +
                  "\",\"rounds\":" + std::to_string(rounds_) + ",\"seed\":" + std::to_string(seed_) +
                  ",\"results\":[\n";
  for (size_t i = 0; i < records_.size(); ++i) s += records_[i] + (i + 1 < records_.size() ? ",\n" : "\n");
  return s + "]}\n";
}

}  // namespace kda::cuda_test
