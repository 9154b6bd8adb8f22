// Buffers of the device tests of state copies and metadata.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/tensor.h"
#include "conformance/api.h"
#include "conformance/tensor.h"
#include "kda/kda.h"
#include "runtime.h"

namespace kda::conformance::test {

constexpr kda_device kDevice{KDA_CUDA, 0};

// Device memory with a host image; a pattern unless said otherwise.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes, unsigned seed = 1) : host_(bytes) {
    uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
    for (size_t i = 0; i < bytes; ++i) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      host_[i] = static_cast<unsigned char>(state);
    }
    KDA_REQUIRE_CUDA(cudaMalloc(&data_, bytes + 1));
    upload();
  }
  template <class T>
  explicit DeviceBytes(const std::vector<T>& x) : DeviceBytes(x.size() * sizeof(T)) {
    assign(x);
  }
  ~DeviceBytes() { (void)cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  template <class T>
  void assign(const std::vector<T>& x) {
    std::memcpy(host_.data(), x.data(), x.size() * sizeof(T));
    upload();
  }
  void fill(int value) {
    std::memset(host_.data(), value, host_.size());
    upload();
  }
  void upload() {
    KDA_REQUIRE_CUDA(cudaMemcpy(data_, host_.data(), host_.size(), cudaMemcpyHostToDevice));
    KDA_REQUIRE_CUDA(cudaDeviceSynchronize());  // the copy out of pageable memory; other streams do not wait for it
  }
  const std::vector<unsigned char>& download() {
    KDA_REQUIRE_CUDA(cudaMemcpy(host_.data(), data_, host_.size(), cudaMemcpyDeviceToHost));
    return host_;
  }
  char* data() const { return static_cast<char*>(data_); }
  std::vector<unsigned char>& host() { return host_; }
  kda_tensor view(kda_dtype dtype, std::initializer_list<int64_t> shape) const {
    return make_tensor(data_, dtype, shape, kDevice);
  }

 private:
  void* data_ = nullptr;
  std::vector<unsigned char> host_;
};

class Stream {
 public:
  Stream() { KDA_REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { KDA_REQUIRE_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// A capture of calls made on its own stream.
class CapturedCalls {
 public:
  template <class F>
  explicit CapturedCalls(const F& calls) {
    KDA_REQUIRE_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    calls(static_cast<cudaStream_t>(stream_));
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(stream_, &graph);
    EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
    if (error != cudaSuccess) return;
    KDA_REQUIRE_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes_));
    KDA_REQUIRE_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
    KDA_REQUIRE_CUDA(cudaGraphDestroy(graph));
  }
  ~CapturedCalls() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
  }
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;
  void replay() const {
    KDA_REQUIRE_CUDA(cudaGraphLaunch(exec_, stream_));
    stream_.wait();
  }
  size_t nodes() const { return nodes_; }

 private:
  Stream stream_;
  cudaGraphExec_t exec_ = nullptr;
  size_t nodes_ = 0;
};

inline kda_state_copy_desc device_copy_desc(const kda_tensor& pool, int64_t max_selected,
                                            const char* backend = nullptr, kda_dtype packed = KDA_DTYPE_NONE) {
  auto d = sized<kda_state_copy_desc>();
  d.pool = pool;
  d.max_selected = max_selected;
  d.backend = backend;
  d.packed_dtype = packed;
  return d;
}
inline Plan device_copy_plan(const kda_state_copy_desc& desc, kda_context* context = nullptr) {
  return Plan(kda_state_copy_plan_create, context != nullptr ? context : cuda_test::context(), desc);
}

// A context of its own on the device.
class DeviceContext {
 public:
  explicit DeviceContext(bool observers = false) {
    auto options = sized<kda_context_options>();
    options.device = kDevice;
    options.allow_observers = observers;
    EXPECT_EQ(kda_context_create(&options, &context_), KDA_OK) << kda_last_error();
  }
  ~DeviceContext() { kda_context_destroy(context_); }
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;
  operator kda_context*() const { return context_; }

 private:
  kda_context* context_ = nullptr;
};

}  // namespace kda::conformance::test
