// Reader for safetensors files: an 8-byte little-endian header length, a JSON header, a data section.
//
// Everything in a header is checked before it is believed: lengths against the file, offsets against the data section
// and one another (no overlap, no hole, as the format demands), shapes against bytes with checked arithmetic. Element
// types that libkda has no name for (fp8 weights, say) are kept as opaque bytes, so that a checkpoint which holds
// some can still be opened.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kda/types.h"

namespace kda {

struct SafetensorsEntry {
  std::string name;
  std::string type;                  // as the header says: "BF16"
  kda_dtype dtype = KDA_DTYPE_NONE;  // NONE: opaque
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes in the data section
};

// Dense view of an entry's dtype and shape without data; absent if it cannot be read (opaque, too many dimensions).
kda_tensor layout_of(const SafetensorsEntry& entry);

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

// `json` is the header text, `data_bytes` the size of the data section. INVALID_ARGUMENT names what is wrong.
Result<SafetensorsHeader> parse_safetensors_header(std::string_view json, int64_t data_bytes);

// A tensor in its own dense, 64-byte aligned memory.
class HostTensor {
 public:
  HostTensor(kda_dtype dtype, std::vector<int64_t> shape, int64_t bytes);
  kda_tensor view() const;
  kda_dtype dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  kda_dtype dtype_;
  std::vector<int64_t> shape_;
  std::unique_ptr<std::byte[], Free> data_;
};

class SafetensorsFile {
 public:
  // Reads and checks the header. NOT_FOUND: no such file; INVALID_ARGUMENT: damaged.
  static Result<SafetensorsFile> open(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  int64_t data_begin() const { return data_begin_; }  // of the data section, in the file
  const SafetensorsEntry* find(std::string_view name) const;

  // UNSUPPORTED: an opaque element type or more than KDA_MAX_RANK dimensions.
  Status check_readable(const SafetensorsEntry& entry) const;
  // Reads the data of a readable entry into `bytes` = end - begin bytes. Any thread.
  Status read_into(const SafetensorsEntry& entry, void* data) const;
  // Reads one tensor's data. NOT_FOUND lists nothing but the name; UNSUPPORTED: an opaque element type or more than
  // KDA_MAX_RANK dimensions. May run on several threads at once.
  Result<std::shared_ptr<HostTensor>> read(std::string_view name) const;

 private:
  std::string path_;
  SafetensorsHeader header_;
  std::map<std::string, size_t, std::less<>> index_;
  int64_t data_begin_ = 0;
};

// One tensor to be written: a view with any strides.
struct SafetensorsItem {
  std::string name;
  kda_tensor tensor;
};

// Writes a file that the reader accepts, data in the order given, the section aligned to 64 bytes. The file appears
// under its name only when it is complete. INVALID_ARGUMENT: a name twice, an absent or opaque tensor.
Status write_safetensors(const std::string& path, const std::vector<SafetensorsItem>& items,
                         const std::map<std::string, std::string>& metadata = {});

}  // namespace kda
