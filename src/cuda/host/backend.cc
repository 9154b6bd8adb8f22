// The list of CUDA candidates.
#include "cuda/host/backend.h"

#include "cuda/host/candidates.h"
#include "cuda/host/error.h"
#include "cuda/host/not_built.h"

namespace kda::cuda {
namespace {

class Reader final : public DeviceReader {
 public:
  Status read(void* host, const void* device, size_t bytes, void* stream) const override {
    auto* s = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    KDA_RETURN_IF_CUDA_ERROR(cudaStreamIsCapturing(s, &capture));
    if (capture != cudaStreamCaptureStatusNone) {
      return failed_precondition("checked mode: wanted a stream outside capture, got one that is being captured");
    }
    KDA_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, s));
    return to_status(cudaStreamSynchronize(s), "checked mode");
  }
};

}  // namespace

const DeviceReader* device_reader() {
  static const Reader reader;
  return &reader;
}

void add_candidates(Backends& list) {
  list.add(fused_prefill());
  list.add(portable_prefill());
  list.add(fused_decode());
  list.add(portable_decode());
  list.add(fused_commit());
  list.add(portable_commit());
  list.add(fused_decode_step());
  list.add(portable_decode_step());
  list.add(portable_conv());
  list.add(portable_gated_norm());
  add_not_built<SegmentSummary>(list);
  add_not_built<SegmentMerge>(list);
}

}  // namespace kda::cuda
