// Metadata backends: what a device builds, the one step that a vendor may override, and the list of names
// (spec M-22..M-24).
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "core/backend.h"
#include "core/step_groups.h"
#include "core/workspace.h"

namespace kda {

// The device half of a build. Immutable; run-time calls allocate nothing.
class MetadataDevice {
 public:
  virtual ~MetadataDevice() = default;
  virtual kda_device_type type() const = 0;
  // Adds what keeps this device from serving (spec R-9): `no_device_image` and the like.
  virtual void check(const Context&, Refusals&) const {}
  // At plan creation: loads what runs will launch (spec Y-20).
  virtual Status prepare(const kda_metadata_desc&, const Context&) const { return {}; }
  virtual void book(const kda_metadata_desc&, WorkspaceBook&) const {}
  // True if build_rows() can write the chunk tables in the same launch (spec M-18).
  virtual bool builds_chunks_with_rows() const { return false; }
  // Every table but the chunk tables; these too if `chunks` is set. Returns the counts if the host knows them now.
  virtual Result<std::optional<StepCounts>> build_rows(const kda_metadata_desc& desc, const kda_metadata_args& args,
                                                       bool chunks, const WorkspaceGrant& workspace,
                                                       void* stream) const = 0;
  // The device's own chunk hook (spec M-23): exact or bounded alike (M-17).
  virtual Status build_chunks(const kda_chunk_request& request) const = 0;
  // The `host` hook: from cu_seqlens_host, which is present; copied without a wait.
  virtual Status build_chunks_from_host(const kda_chunk_request& request) const = 0;
  // Checked mode (spec G-7).
  virtual Status check_values(const kda_metadata_desc& desc, const kda_metadata_args& args, void* stream) const = 0;
};

// The builder of one plan. Everything of a build but build_chunk_metadata() is shared (spec M-22).
class MetadataBuilder {
 public:
  explicit MetadataBuilder(const MetadataDevice& device) : device_(device) {}
  virtual ~MetadataBuilder() = default;

  Status build(const kda_metadata_desc& desc, const kda_metadata_args& args, const kda_device& device,
               const WorkspaceGrant& workspace, void* stream) const;
  // The overridable step.
  virtual Status build_chunk_metadata(const kda_chunk_request& request) const {
    return device_.build_chunks(request);
  }
  // True if every run must bring host offsets.
  virtual bool needs_host() const { return false; }
  // True if the step above is the device's own and nothing else, so that the device may do it along with the rows.
  virtual bool uses_device_hook() const { return false; }

  const MetadataDevice& device() const { return device_; }

 private:
  Status build_chunks(const kda_metadata_desc& desc, const kda_metadata_args& args, const kda_device& device,
                      const std::optional<StepCounts>& counts, void* stream) const;

  const MetadataDevice& device_;
};

struct MetadataBackend {
  std::string name;
  const MetadataDevice* device = nullptr;
  std::function<void(const kda_metadata_desc&, Refusals&)> capable;  // empty = everything
  std::function<std::unique_ptr<MetadataBuilder>(const kda_metadata_desc&)> make_builder;
  uint32_t operators = 0;  // bit per kda_operator
};

// The shared builder with the device's own hook.
std::unique_ptr<MetadataBuilder> make_device_builder(const MetadataDevice& device);
// The shared builder with `hook` in place of the device's own.
std::unique_ptr<MetadataBuilder> make_hook_builder(const MetadataDevice& device, kda_chunk_hook_fn hook, void* user);
// The shared builder with the `host` hook.
std::unique_ptr<MetadataBuilder> make_host_builder(const MetadataDevice& device);
// A built-in: the device's own hook, every operator of this library.
MetadataBackend builtin_metadata_backend(std::string name, const MetadataDevice& device);

class MetadataRegistry {
 public:
  Status add(MetadataBackend backend);
  // Entries stay where they are; the pointers live as long as the registry.
  Result<const MetadataBackend*> find(const std::string& name) const;
  const MetadataBackend* at(size_t i) const;  // null past the last; order of registration
  const MetadataBackend* first_of(kda_device_type type) const;
  const MetadataDevice* device_of(kda_device_type type) const;

 private:
  mutable std::mutex mutex_;
  std::deque<MetadataBackend> backends_;
};

}  // namespace kda
