#include "cpu/metadata.h"

#include "core/metadata.h"

namespace kda::cpu {
namespace {

class CpuMetadata final : public MetadataDevice {
 public:
  kda_device_type type() const override { return KDA_CPU; }

  Result<std::optional<StepCounts>> build_rows(const kda_metadata_desc& desc, const kda_metadata_args& args,
                                               bool, const WorkspaceGrant&, void*) const override {
    const StepReader step(desc, args.step, args.num_tokens);
    const StepCounts counts = count_step(desc, step);
    fill_step_tables(desc, args, step, counts);
    return std::optional<StepCounts>(counts);
  }

  Status build_chunks(const kda_chunk_request& request) const override {
    fill_chunk_tables(request, request.cu_seqlens);
    return {};
  }
  Status build_chunks_from_host(const kda_chunk_request& request) const override {
    fill_chunk_tables(request, request.cu_seqlens_host);
    return {};
  }

  Status check_values(const kda_metadata_desc& desc, const kda_metadata_args& args, void*) const override {
    return check_step_values(desc, args);
  }
};

}  // namespace

const MetadataDevice& metadata_device() {
  static const CpuMetadata device;
  return device;
}

}  // namespace kda::cpu
