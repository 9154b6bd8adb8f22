// Safetensors files: the C face of base/safetensors.h.
#include "kda/tensor_file.h"

#include <cstring>

#include "base/safetensors.h"
#include "base/tensor.h"
#include "capi/guard.h"
#include "core/validate.h"

struct kda_tensor_file {
  kda::SafetensorsFile file;
};

namespace {

using kda::SafetensorsEntry;
using kda::Status;
using kda::capi::check_pointer;
using kda::capi::guard;

kda::Result<const SafetensorsEntry*> entry_of(const kda_tensor_file* file, size_t i) {
  KDA_RETURN_IF_ERROR(check_pointer("file", file));
  const auto& entries = file->file.entries();
  if (i >= entries.size()) return kda::not_found("tensor: wanted below ", entries.size(), ", got ", i);
  return &entries[i];
}

Status check_destination(const SafetensorsEntry& entry, const kda_tensor& wanted, const kda_tensor& got) {
  bool same = got.dtype == wanted.dtype && got.rank == wanted.rank && got.device.type == KDA_CPU;
  for (int d = 0; same && d < wanted.rank; ++d) same = got.shape[d] == wanted.shape[d];
  if (!same || !kda::inner_dense(got, got.rank)) {
    return kda::invalid_argument("destination: wanted dense ", kda::describe(wanted), " for '", entry.name, "', got ",
                                 kda::describe(got));
  }
  if (entry.end > entry.begin) return check_pointer("destination.data", got.data);
  return {};
}

}  // namespace

extern "C" {

kda_status kda_tensor_file_open(const char* path, kda_tensor_file** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("path", path));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto file = kda::SafetensorsFile::open(path);
    if (!file.ok()) return file.status();
    *out = new kda_tensor_file{std::move(file.value())};
    return {};
  });
}

void kda_tensor_file_close(kda_tensor_file* file) { delete file; }

size_t kda_tensor_file_count(const kda_tensor_file* file) { return file ? file->file.entries().size() : 0; }

kda_status kda_tensor_file_entry(const kda_tensor_file* file, size_t i, const char** name, const char** type,
                                 kda_tensor* layout, int64_t* bytes) {
  return guard([&]() -> Status {
    const auto found = entry_of(file, i);
    if (!found.ok()) return found.status();
    const SafetensorsEntry* const entry = found.value();
    if (name) *name = entry->name.c_str();
    if (type) *type = entry->type.c_str();
    if (layout) *layout = layout_of(*entry);
    if (bytes) *bytes = entry->end - entry->begin;
    return {};
  });
}

kda_status kda_tensor_file_find(const kda_tensor_file* file, const char* name, size_t* i) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("file", file));
    KDA_RETURN_IF_ERROR(check_pointer("name", name));
    KDA_RETURN_IF_ERROR(check_pointer("i", i));
    const SafetensorsEntry* const entry = file->file.find(name);
    if (entry == nullptr) return kda::not_found(file->file.path(), ": no tensor '", name, "'");
    *i = static_cast<size_t>(entry - file->file.entries().data());
    return {};
  });
}

kda_status kda_tensor_file_metadata(const kda_tensor_file* file, size_t i, const char** key, const char** value) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("file", file));
    const auto& metadata = file->file.metadata();
    if (i >= metadata.size()) return kda::not_found("metadata: wanted below ", metadata.size(), ", got ", i);
    const auto pair = std::next(metadata.begin(), static_cast<std::ptrdiff_t>(i));
    if (key) *key = pair->first.c_str();
    if (value) *value = pair->second.c_str();
    return {};
  });
}

kda_status kda_tensor_file_read(const kda_tensor_file* file, size_t i, const kda_tensor* destination) {
  return guard([&]() -> Status {
    const auto found = entry_of(file, i);
    if (!found.ok()) return found.status();
    const SafetensorsEntry* const entry = found.value();
    KDA_RETURN_IF_ERROR(check_pointer("destination", destination));
    KDA_RETURN_IF_ERROR(file->file.check_readable(*entry));
    KDA_RETURN_IF_ERROR(check_destination(*entry, layout_of(*entry), *destination));
    return file->file.read_into(*entry, destination->data);
  });
}

kda_status kda_tensor_file_write(const char* path, const kda_named_tensor* tensors, size_t count) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("path", path));
    KDA_RETURN_IF_ERROR(check_pointer("tensors", tensors));
    std::vector<kda::SafetensorsItem> items;
    for (size_t i = 0; i < count; ++i) {
      if (tensors[i].name == nullptr) return kda::invalid_argument("tensors[", i, "].name: wanted a text, got NULL");
      KDA_RETURN_IF_ERROR(kda::check_view(tensors[i].name, tensors[i].tensor, {KDA_CPU, 0}));
      items.push_back({tensors[i].name, tensors[i].tensor});
    }
    return kda::write_safetensors(path, items);
  });
}

}  // extern "C"
