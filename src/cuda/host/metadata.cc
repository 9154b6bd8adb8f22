// Step metadata on CUDA (spec M-18, M-22, M-23): all tables of a step in one launch, chunk tables alone in another,
// and the `host` hook, whose offsets travel inside its launches: nothing is staged, nothing is waited for, and a
// captured build keeps them.
#include "core/metadata.h"

#include <algorithm>

#include "base/checked.h"
#include "base/tensor.h"
#include "core/device_values.h"
#include "cuda/host/backend.h"
#include "cuda/host/gates.h"
#include "cuda/host/launch.h"
#include "cuda/host/metadata_params.h"

namespace kda::cuda {
namespace {

class CudaMetadata final : public MetadataDevice {
 public:
  kda_device_type type() const override { return KDA_CUDA; }

  void check(const Context& context, Refusals& refusals) const override { check_device(context, refusals); }

  Status prepare(const kda_metadata_desc&, const Context& context) const override {
    const DeviceGuard guard(context.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    for (const KernelInfo& kernel :
         {metadata_kernel_info(false), metadata_kernel_info(true), chunk_kernel_info(), chunk_piece_kernel_info()}) {
      KDA_RETURN_IF_ERROR(prepare_kernel(kernel.function, kernel.name));
    }
    return {};
  }

  bool builds_chunks_with_rows() const override { return true; }

  Result<std::optional<StepCounts>> build_rows(const kda_metadata_desc& desc, const kda_metadata_args& args,
                                               bool chunks, const WorkspaceGrant&, void* stream) const override {
    MetadataParams p = metadata_params(desc, args, chunks);
    const DeviceGuard guard(args.step.query_start_loc.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    const int64_t entries = desc.max_tokens + p.chunks.rows;
    const bool wide = args.step.query_start_loc.dtype == KDA_INT64;
    const int64_t blocks = metadata_blocks(desc.max_sequences, entries);
    share_rows(p, blocks);
    KDA_RETURN_IF_ERROR(launch(metadata_kernel_info(wide), {blocks}, p, stream));
    return std::optional<StepCounts>();
  }

  Status build_chunks(const kda_chunk_request& r) const override {
    const ChunkParams p = chunk_params(r);
    const DeviceGuard guard(r.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    return launch(chunk_kernel_info(), {metadata_blocks(r.num_sequences, p.chunks.rows)}, p, r.stream);
  }

  Status build_chunks_from_host(const kda_chunk_request& r) const override {
    const DeviceGuard guard(r.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    LengthReader lengths(index_view(r.cu_seqlens_host), r.num_tokens);
    ChunkPieceParams p;
    p.chunks = chunk_tables_of(r);
    p.wide = r.cu_seqlens.dtype == KDA_INT64;
    int64_t chunks = 0;
    do {
      p.count = static_cast<int32_t>(std::min<int64_t>(kHostPiece, r.num_sequences - p.first));
      p.last = p.first + p.count == r.num_sequences;
      p.offset[0] = chunks;
      for (int32_t i = 0; i < p.count; ++i) {
        chunks += ceil_div(lengths.next(p.first + i).length, r.chunk);
        p.offset[i + 1] = chunks;
      }
      const int64_t rows = (p.last ? p.chunks.rows : chunks) - p.offset[0];
      KDA_RETURN_IF_ERROR(launch(chunk_piece_kernel_info(), {metadata_blocks(p.count, rows)}, p, r.stream));
      p.first += p.count;
    } while (!p.last);
    return {};
  }

  Status check_values(const kda_metadata_desc& desc, const kda_metadata_args& args, void* stream) const override {
    kda_metadata_args host = args;
    HostCopies copies(device_runtime(args.step.query_start_loc.device.index), stream);
    for (kda_tensor* t : {&host.step.query_start_loc, &host.step.computed, &host.step.has_state,
                          &host.step.prefilling, &host.step.drafts, &host.step.num_active, &host.accepted}) {
      if (present(*t) && t->device.type != KDA_CPU) copies.take(*t);
    }
    KDA_RETURN_IF_ERROR(copies.status());
    return check_step_values(desc, host);
  }
};

}  // namespace

const MetadataDevice* metadata_device() {
  static const CudaMetadata device;
  return &device;
}

}  // namespace kda::cuda
