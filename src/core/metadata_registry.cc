#include "core/metadata_registry.h"

namespace kda {
namespace {

class DeviceBuilder final : public MetadataBuilder {
 public:
  using MetadataBuilder::MetadataBuilder;
  bool uses_device_hook() const override { return true; }
};

class HookBuilder final : public MetadataBuilder {
 public:
  HookBuilder(const MetadataDevice& device, kda_chunk_hook_fn hook, void* user)
      : MetadataBuilder(device), hook_(hook), user_(user) {}
  Status build_chunk_metadata(const kda_chunk_request& request) const override {
    const kda_status code = hook_(user_, &request);
    return code == KDA_OK ? Status()
                          : Status(code, str_cat("metadata: the chunk hook failed with status ", int{code}));
  }

 private:
  kda_chunk_hook_fn hook_;
  void* user_;
};

class HostBuilder final : public MetadataBuilder {
 public:
  using MetadataBuilder::MetadataBuilder;
  bool needs_host() const override { return true; }
  Status build_chunk_metadata(const kda_chunk_request& request) const override {
    if (!present(request.cu_seqlens_host)) {
      return invalid_argument("cu_seqlens_host: wanted the host copy that the hook 'host' builds from, got none");
    }
    return device().build_chunks_from_host(request);
  }
};

// The offsets of a step's prefill rows, from the host's copy of the step. A device's builder has its own table in
// device memory; this one lives on the calling thread and grows to the largest step once.
kda_tensor host_prefill_offsets(const kda_metadata_desc& desc, const kda_metadata_args& args) {
  thread_local std::vector<int64_t> offsets;
  offsets.assign(1, 0);
  StepReader(desc, args.host, args.num_tokens).for_each([&](int64_t, const StepReader::Row& row) {
    if (row.group == RowClass::prefill) offsets.push_back(offsets.back() + row.length);
  });
  return make_tensor(offsets.data(), KDA_INT64, {static_cast<int64_t>(offsets.size())});
}

// The first `rows` entries of a dense table.
kda_tensor head(kda_tensor t, int64_t rows) {
  if (present(t)) t.shape[0] = rows;
  return t;
}

}  // namespace

Status MetadataBuilder::build_chunks(const kda_metadata_desc& desc, const kda_metadata_args& args,
                                     const kda_device& device, const std::optional<StepCounts>& counts,
                                     void* stream) const {
  if (!present(args.tables.chunk_indices)) return {};
  kda_chunk_request request{};
  request.struct_size = sizeof request;
  // Without counts the tail of the offsets repeats its last value: empty sequences that give no chunk.
  request.num_sequences = counts ? (*counts)[KDA_COUNT_PREFILLS] : args.step.query_start_loc.shape[0] - 1;
  request.cu_seqlens = head(args.tables.prefill_query_start_loc, request.num_sequences + 1);
  // On the CPU the table just written is host memory; it counts as "given" only if the caller gave lengths.
  if (present(args.host.query_start_loc)) {
    request.cu_seqlens_host = device.type == KDA_CPU ? request.cu_seqlens : host_prefill_offsets(desc, args);
  }
  request.num_tokens = args.num_tokens;
  request.chunk = desc.chunk;
  request.chunk_indices =
      head(args.tables.chunk_indices, *chunk_bound(desc.max_tokens, desc.max_sequences, desc.chunk));
  request.chunk_offsets = head(args.tables.chunk_offsets, desc.max_sequences + 1);
  request.device = device;
  request.stream = stream;
  // A step known to have no prefill row needs padding only, which is not the hook's business.
  if (counts && request.num_sequences == 0) return device_.build_chunks(request);
  return build_chunk_metadata(request);
}

Status MetadataBuilder::build(const kda_metadata_desc& desc, const kda_metadata_args& args, const kda_device& device,
                              const WorkspaceGrant& workspace, void* stream) const {
  const bool together = uses_device_hook() && device_.builds_chunks_with_rows() && present(args.tables.chunk_indices);
  auto rows = device_.build_rows(desc, args, together, workspace, stream);
  if (!rows.ok()) return rows.status();
  std::optional<StepCounts> counts = rows.value();
  if (!counts && present(args.host.query_start_loc)) {
    counts = count_step(desc, StepReader(desc, args.host, args.num_tokens));
  }
  if (args.host_counts != nullptr && counts) {
    for (int i = 0; i < KDA_METADATA_COUNTS; ++i) args.host_counts[i] = static_cast<int32_t>(counts->values[i]);
  }
  return together ? Status() : build_chunks(desc, args, device, counts, stream);
}

std::unique_ptr<MetadataBuilder> make_device_builder(const MetadataDevice& device) {
  return std::make_unique<DeviceBuilder>(device);
}

std::unique_ptr<MetadataBuilder> make_hook_builder(const MetadataDevice& device, kda_chunk_hook_fn hook, void* user) {
  if (hook == nullptr) return make_device_builder(device);
  return std::make_unique<HookBuilder>(device, hook, user);
}

std::unique_ptr<MetadataBuilder> make_host_builder(const MetadataDevice& device) {
  return std::make_unique<HostBuilder>(device);
}

MetadataBackend builtin_metadata_backend(std::string name, const MetadataDevice& device) {
  MetadataBackend backend;
  backend.name = std::move(name);
  backend.device = &device;
  backend.make_builder = [&device](const kda_metadata_desc&) { return make_device_builder(device); };
  for (int op = KDA_OP_PREFILL; op <= KDA_OP_SEGMENT_MERGE; ++op) backend.operators |= 1u << op;
  return backend;
}

Status MetadataRegistry::add(MetadataBackend backend) {
  if (backend.name.empty()) return invalid_argument("name: wanted a name for the metadata backend, got none");
  const std::lock_guard lock(mutex_);
  for (const MetadataBackend& known : backends_) {
    if (known.name == backend.name) {
      return invalid_argument("name: wanted a new name for the metadata backend, got \"", backend.name,
                              "\", which is registered");
    }
  }
  backends_.push_back(std::move(backend));
  return {};
}

Result<const MetadataBackend*> MetadataRegistry::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  std::string known;
  for (const MetadataBackend& backend : backends_) {
    if (backend.name == name) return &backend;
    known += (known.empty() ? "" : ", ") + backend.name;
  }
  return not_found("metadata backend: wanted one of ", known, "; got \"", name, "\"");
}

const MetadataBackend* MetadataRegistry::at(size_t i) const {
  const std::lock_guard lock(mutex_);
  return i < backends_.size() ? &backends_[i] : nullptr;
}

const MetadataBackend* MetadataRegistry::first_of(kda_device_type type) const {
  const std::lock_guard lock(mutex_);
  for (const MetadataBackend& backend : backends_) {
    if (backend.device->type() == type) return &backend;
  }
  return nullptr;
}

const MetadataDevice* MetadataRegistry::device_of(kda_device_type type) const {
  const MetadataBackend* backend = first_of(type);
  return backend != nullptr ? backend->device : nullptr;
}

}  // namespace kda
