// Metadata plans, the process's list of metadata backends, host helpers.
#include "kda/metadata.h"

#include "capi/backends.h"
#include "capi/guard.h"
#include "core/metadata.h"

using kda::Status;
using kda::capi::check_pointer;
using kda::capi::guard;

namespace {

// A vendor's entry: the builder that libkda has for the device, with the vendor's chunk hook.
Status make_backend(const kda_metadata_backend& b, kda::MetadataBackend& out) {
  KDA_RETURN_IF_ERROR(check_pointer("name", b.name));
  const kda::MetadataDevice* device = kda::capi::metadata_registry().device_of(b.device);
  if (device == nullptr) {
    return kda::unsupported("device: wanted a device whose backend is in this build, got ",
                            kda::device_name(b.device));
  }
  out.name = b.name;
  out.device = device;
  out.operators = b.operators;
  const auto hook = b.chunk_hook;
  const auto user = b.user;
  out.make_builder = [device, hook, user](const kda_metadata_desc&) {
    return kda::make_hook_builder(*device, hook, user);
  };
  if (b.capable != nullptr) {
    const auto capable = b.capable;
    out.capable = [capable, user](const kda_metadata_desc& desc, kda::Refusals& refusals) {
      char reason[256] = "";
      if (capable(user, &desc, reason, sizeof reason) != 0) return;
      reason[sizeof reason - 1] = '\0';
      refusals.add("capability", "a description that the backend serves", reason[0] != '\0' ? reason : "a refusal");
    };
  }
  return {};
}

}  // namespace

extern "C" {

void kda_metadata_desc_init(kda_metadata_desc* desc) {
  if (desc == nullptr) return;
  *desc = kda_metadata_desc{};
  desc->struct_size = sizeof(*desc);
  desc->null_slot = -1;
}

kda_status kda_metadata_plan_create(kda_context* context, const kda_metadata_desc* desc, kda_plan** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto plan = kda::create_metadata_plan(*context, kda::capi::metadata_registry(), desc);
    if (!plan.ok()) return plan.status();
    *out = plan.value().release();
    return {};
  });
}

kda_status kda_metadata_run(const kda_plan* plan, const kda_metadata_args* args, kda_workspace workspace,
                            void* stream) {
  return guard([&] { return kda::run_metadata(plan, args, workspace, stream); });
}

kda_status kda_metadata_chunk_tables(const kda_plan* plan, const kda_chunk_request* request, void* stream) {
  return guard([&] { return kda::run_chunk_tables(plan, request, stream); });
}

kda_status kda_chunk_bound(int64_t num_tokens, int64_t num_sequences, int64_t chunk, int64_t* rows) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("rows", rows));
    const auto bound = kda::chunk_bound(num_tokens, num_sequences, chunk);
    if (!bound) {
      return kda::invalid_argument("chunk_bound: wanted T >= 0, N >= 0, C >= 1, got ", num_tokens, ", ",
                                   num_sequences, ", ", chunk);
    }
    *rows = *bound;
    return {};
  });
}

kda_status kda_block_column(int64_t tokens, int64_t block, int64_t width, int64_t* column) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("column", column));
    const auto result = kda::block_column(tokens, block, width);
    if (!result.ok()) return result.status();
    *column = result.value();
    return {};
  });
}

kda_status kda_checkpoint_count(int64_t computed, int64_t n, int64_t interval, int64_t* count) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("count", count));
    const auto result = kda::checkpoint_count(computed, n, interval);
    if (!result.ok()) return result.status();
    *count = result.value();
    return {};
  });
}

kda_status kda_metadata_register(const kda_metadata_backend* backend) {
  return guard([&]() -> Status {
    kda_metadata_backend b{};
    KDA_RETURN_IF_ERROR(kda::read_struct(backend, b, "backend"));
    kda::MetadataBackend entry;
    KDA_RETURN_IF_ERROR(make_backend(b, entry));
    return kda::capi::metadata_registry().add(std::move(entry));
  });
}

kda_status kda_metadata_backend_name(size_t i, const char** name) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("name", name));
    const kda::MetadataBackend* backend = kda::capi::metadata_registry().at(i);
    if (backend == nullptr) return kda::not_found("metadata backend: wanted a number below the count, got ", i);
    *name = backend->name.c_str();
    return {};
  });
}

kda_status kda_metadata_find(const char* name, kda_device_type* device, uint32_t* operators) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("name", name));
    const auto backend = kda::capi::metadata_registry().find(name);
    if (!backend.ok()) return backend.status();
    if (device != nullptr) *device = backend.value()->device->type();
    if (operators != nullptr) *operators = backend.value()->operators;
    return {};
  });
}

}  // extern "C"
