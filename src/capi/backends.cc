#include "capi/backends.h"

#include "cpu/candidates.h"
#include "cpu/metadata.h"
#include "cpu/projections.h"
#include "cpu/state_copy.h"
#include "kda/context.h"
#include "reference/candidates.h"
#include "reference/projections.h"

// The one place that asks whether the CUDA backend is in this build.
#ifdef KDA_WITH_CUDA
#include "cuda/host/backend.h"
#else
#include "cuda/host/absent.h"
#endif

namespace kda::capi {
namespace {

Backends make() {
  Backends list;
  list.source_hash = kda_source_hash();
  list.copies.push_back(cpu::copy_backend());
  if (const CopyBackend* copies = cuda::copy_backend()) list.copies.push_back(copies);
  if (const ProjectionBackend* cublaslt = cuda::projection()) list.projections.push_back(cublaslt);
  if (const ProjectionBackend* onednn = cpu::onednn_projection()) list.projections.push_back(onednn);
  list.projections.push_back(cpu::portable_projection());
  list.projections.push_back(reference::projection());
  cuda::add_candidates(list);
  list.add(cpu::portable_prefill());
  list.add(cpu::portable_segment_summary());
  list.add(cpu::portable_segment_merge());
  list.add(cpu::portable_decode());
  list.add(cpu::portable_commit());
  list.add(cpu::portable_decode_step());
  list.add(cpu::portable_conv());
  list.add(cpu::portable_gated_norm());
  list.add(cpu::portable_residual_norm());
  list.add(reference::prefill());
  list.add(reference::decode());
  list.add(reference::commit());
  list.add(reference::decode_step());
  list.add(reference::conv());
  list.add(reference::gated_norm());
  list.add(reference::residual_norm());
  list.add(reference::segment_summary());
  list.add(reference::segment_merge());
  return list;
}

}  // namespace

const Backends& backends() {
  static const Backends list = make();
  return list;
}

MetadataRegistry& metadata_registry() {
  static MetadataRegistry& registry = *[] {
    auto* list = new MetadataRegistry;  // never destroyed: its names live as long as the process
    (void)list->add(builtin_metadata_backend("LIBKDA_CPU", cpu::metadata_device())).ok();
    if (const MetadataDevice* device = cuda::metadata_device()) {
      (void)list->add(builtin_metadata_backend("LIBKDA_CUDA", *device)).ok();
    }
    return list;
  }();
  return registry;
}

Result<int32_t> cuda_device_count() { return cuda::device_count(); }
Result<DeviceFacts> cuda_device_facts(int32_t index) { return cuda::device_facts(index); }
Result<DeviceFacts> cuda_open_device(int32_t index) { return cuda::open_device(index); }
const DeviceRuntime& cuda_device_runtime(int32_t index) { return cuda::device_runtime(index); }

}  // namespace kda::capi
