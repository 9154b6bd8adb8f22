// Memory, streams, events and graphs of a CUDA device.
#include "cuda/host/runtime.h"

#include <mutex>
#include <vector>

#include "cuda/host/device.h"
#include "cuda/host/error.h"
#include "cuda/host/launch.h"
#include "cuda/kernels/projection_rows/params.h"

namespace kda::cuda {
namespace {

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

class Event final : public DeviceEvent {
 public:
  ~Event() override { (void)cudaEventDestroy(event_); }
  Status create() { return to_status(cudaEventCreate(&event_), "event: create"); }
  Status record(void* stream) override {
    return to_status(cudaEventRecord(event_, stream_of(stream)), "event: record");
  }
  Result<double> seconds_until(const DeviceEvent& later) const override {
    float ms = 0;
    KDA_RETURN_IF_ERROR(
        to_status(cudaEventElapsedTime(&ms, event_, static_cast<const Event&>(later).event_), "event: elapsed time"));
    return ms * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class Graph final : public DeviceGraph {
 public:
  ~Graph() override { (void)cudaGraphExecDestroy(graph_); }
  Status create(cudaGraph_t graph) {
    return to_status(cudaGraphInstantiate(&graph_, graph, 0), "graph: instantiate");
  }
  Status launch(void* stream) override {
    return to_status(cudaGraphLaunch(graph_, stream_of(stream)), "graph: launch");
  }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

class Runtime final : public DeviceRuntime {
 public:
  explicit Runtime(int32_t device) : device_(device) {}

  Result<void*> allocate(kda_memory_kind kind, size_t bytes) const override {
    if (bytes == 0) return nullptr;
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    void* memory = nullptr;
    const cudaError_t error =
        kind == KDA_MEMORY_HOST ? cudaHostAlloc(&memory, bytes, cudaHostAllocDefault) : cudaMalloc(&memory, bytes);
    if (error == cudaSuccess) return memory;
    (void)cudaGetLastError();
    return to_status(error, str_cat("memory of ", bytes, " bytes").c_str());
  }

  Status release(kda_memory_kind kind, void* memory) const override {
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    return to_status(kind == KDA_MEMORY_HOST ? cudaFreeHost(memory) : cudaFree(memory), "memory: free");
  }

  Status copy(void* to, const void* from, size_t bytes, void* stream) const override {
    return to_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)), "memory: copy");
  }

  Status copy_rows(void* to, const void* from, const ByteRows& r, void* stream) const override {
    if (r.rows == 1) return copy(to, from, static_cast<size_t>(r.width), stream);
    return to_status(cudaMemcpy2DAsync(to, static_cast<size_t>(r.to_pitch), from, static_cast<size_t>(r.from_pitch),
                                       static_cast<size_t>(r.width), static_cast<size_t>(r.rows), cudaMemcpyDefault,
                                       stream_of(stream)),
                     "memory: copy of rows");
  }

  // By a kernel of this library: in a captured graph its programmatic launches follow kernels alone.
  Status zero_rows(void* to, int64_t width, int64_t rows, int64_t pitch, void* stream) const override {
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    ProjectionRowsParams p;
    p.to = to;
    p.to_dtype = Dtype::kBf16;
    p.to_stride = pitch / 2;
    p.rows = rows;
    p.cols = static_cast<int32_t>(width / 2);
    return launch(projection_rows_kernel_info(),
                  {(p.cols + kProjectionRowsColumns - 1) / kProjectionRowsColumns, rows}, p, stream);
  }

  Status read(void* host, const void* device, size_t bytes, void* stream) const override {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    KDA_RETURN_IF_CUDA_ERROR(cudaStreamIsCapturing(stream_of(stream), &capture));
    if (capture != cudaStreamCaptureStatusNone) {
      return failed_precondition("checked mode: wanted a stream outside capture, got one that is being captured");
    }
    KDA_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_of(stream)));
    return to_status(cudaStreamSynchronize(stream_of(stream)), "checked mode");
  }

  Result<void*> create_stream() const override {
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    cudaStream_t stream = nullptr;
    KDA_RETURN_IF_ERROR(to_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream: create"));
    return static_cast<void*>(stream);
  }
  Status destroy_stream(void* stream) const override {
    return stream == nullptr ? Status() : to_status(cudaStreamDestroy(stream_of(stream)), "stream: destroy");
  }
  Status synchronize(void* stream) const override {
    return to_status(cudaStreamSynchronize(stream_of(stream)), "stream: synchronize");
  }

  Result<std::unique_ptr<DeviceEvent>> create_event() const override {
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    auto event = std::make_unique<Event>();
    KDA_RETURN_IF_ERROR(event->create());
    return std::unique_ptr<DeviceEvent>(std::move(event));
  }

  Status begin_graph(void* stream) const override {
    return to_status(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal), "graph: begin");
  }

  Result<std::unique_ptr<DeviceGraph>> end_graph(void* stream) const override {
    cudaGraph_t recorded = nullptr;
    KDA_RETURN_IF_ERROR(to_status(cudaStreamEndCapture(stream_of(stream), &recorded), "graph: end"));
    auto graph = std::make_unique<Graph>();
    const Status status = graph->create(recorded);
    (void)cudaGraphDestroy(recorded);
    if (!status.ok()) return status;
    return std::unique_ptr<DeviceGraph>(std::move(graph));
  }

 private:
  int32_t device_;
};

}  // namespace

const DeviceRuntime& device_runtime(int32_t index) {
  static std::mutex mutex;
  static auto& runtimes = *new std::vector<std::unique_ptr<Runtime>>;  // never destroyed: handles outlive main
  const std::lock_guard<std::mutex> lock(mutex);
  while (runtimes.size() <= static_cast<size_t>(index)) {
    runtimes.push_back(std::make_unique<Runtime>(static_cast<int32_t>(runtimes.size())));
  }
  return *runtimes[static_cast<size_t>(index)];
}

}  // namespace kda::cuda
