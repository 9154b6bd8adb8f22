#include "base/safetensors.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <tuple>

#include "base/checked.h"
#include "base/json.h"
#include "base/tensor.h"

namespace kda {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxHeader = 100 << 20;  // the format's own limit

struct ElementType {
  const char* name;
  kda_dtype dtype;
  int64_t size;
};
constexpr ElementType kTypes[] = {
    {"F64", KDA_FP64, 8},           {"F32", KDA_FP32, 4},
    {"F16", KDA_FP16, 2},           {"BF16", KDA_BF16, 2},
    {"I64", KDA_INT64, 8},          {"I32", KDA_INT32, 4},
    {"I16", KDA_INT16, 2},          {"I8", KDA_INT8, 1},
    {"U8", KDA_UINT8, 1},           {"BOOL", KDA_BOOL, 1},
    {"U16", KDA_DTYPE_NONE, 2},     {"U32", KDA_DTYPE_NONE, 4},
    {"U64", KDA_DTYPE_NONE, 8},     {"F8_E4M3", KDA_DTYPE_NONE, 1},
    {"F8_E5M2", KDA_DTYPE_NONE, 1}, {"F8_E8M0", KDA_DTYPE_NONE, 1},
    {"C64", KDA_DTYPE_NONE, 8},
};

const ElementType* find_type(std::string_view name) {
  for (const ElementType& t : kTypes) {
    if (name == t.name) return &t;
  }
  return nullptr;
}

// A number of the header as int64, or -1: anything but an integer in [0, 2^63).
int64_t size_of(const Json& j) {
  if (!j.is_number_integer()) return -1;
  if (j.is_number_unsigned()) {
    const auto u = j.get<uint64_t>();
    return u <= INT64_MAX ? static_cast<int64_t>(u) : -1;
  }
  const auto i = j.get<int64_t>();
  return i >= 0 ? i : -1;
}

const Json* member(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() ? nullptr : &*it;
}

Status check_extent(SafetensorsEntry& e, int64_t data_bytes) {
  if (e.begin > e.end || e.end > data_bytes) {
    return invalid_argument("data_offsets: wanted 0 <= begin <= end <= ", data_bytes, ", got [", e.begin, ", ", e.end,
                            "]");
  }
  const ElementType* type = find_type(e.type);
  if (type == nullptr) return {};
  e.dtype = type->dtype;
  // A tensor without elements, too, must have strides: sizes of 0 count as 1 for the limit (make_dense).
  int64_t bytes = type->size;
  bool empty = false;
  for (int64_t d : e.shape) {
    const auto product = checked_mul(bytes, std::max<int64_t>(d, 1));
    if (!product) return invalid_argument("shape: wanted a size below 2^63 bytes, got more");
    bytes = *product;
    empty = empty || d == 0;
  }
  if (empty) bytes = 0;
  if (bytes == e.end - e.begin) return {};
  return invalid_argument("data_offsets: wanted ", bytes, " bytes for its shape and dtype ", e.type, ", got ",
                          e.end - e.begin);
}

Status parse_entry(const Json& value, int64_t data_bytes, SafetensorsEntry& e) {
  if (!value.is_object()) return invalid_argument("wanted an object, got ", value.type_name());
  const Json *type = member(value, "dtype"), *shape = member(value, "shape"),
             *offsets = member(value, "data_offsets");
  if (type == nullptr || !type->is_string()) return invalid_argument("dtype: wanted a string");
  if (shape == nullptr || !shape->is_array()) return invalid_argument("shape: wanted an array");
  if (offsets == nullptr || !offsets->is_array() || offsets->size() != 2) {
    return invalid_argument("data_offsets: wanted two numbers");
  }
  e.type = type->get<std::string>();
  for (const Json& d : *shape) {
    const int64_t size = size_of(d);
    if (size < 0) return invalid_argument("shape: wanted integers from 0 to 2^63-1, got ", brief(d));
    e.shape.push_back(size);
  }
  e.begin = size_of((*offsets)[0]);
  e.end = size_of((*offsets)[1]);
  if (e.begin < 0 || e.end < 0) {
    return invalid_argument("data_offsets: wanted integers from 0 to 2^63-1, got ", brief((*offsets)[0]), " and ",
                            brief((*offsets)[1]));
  }
  return check_extent(e, data_bytes);
}

Status parse_metadata(const Json& value, std::map<std::string, std::string>& metadata) {
  if (!value.is_object()) return invalid_argument("wanted an object of strings, got ", value.type_name());
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) return invalid_argument("'", key, "': wanted a string, got ", text.type_name());
    metadata[key] = text.get<std::string>();
  }
  return {};
}

// The data section is covered once, without overlap or hole.
Status check_cover(const std::vector<SafetensorsEntry>& sorted, int64_t data_bytes) {
  int64_t at = 0;
  for (const SafetensorsEntry& e : sorted) {
    if (e.begin != at) {
      return invalid_argument("tensor '", e.name, "': wanted data from byte ", at,
                              " (after the tensor before it), got ",
                              e.begin < at ? "an overlap at " : "a hole before ", e.begin);
    }
    at = e.end;
  }
  if (at == data_bytes) return {};
  return invalid_argument("data section: wanted ", at, " bytes as the header describes, got ", data_bytes);
}

struct FileCloser {
  void operator()(std::FILE* f) const { std::fclose(f); }
};
using File = std::unique_ptr<std::FILE, FileCloser>;

Result<SafetensorsHeader> parse(std::string_view text, int64_t data_bytes) {
  const auto parsed = parse_json(text);
  if (!parsed.ok()) return parsed.status().with_context("header");
  const Json& json = parsed.value();
  if (!json.is_object()) return invalid_argument("header: wanted a JSON object, got ", json.type_name());

  SafetensorsHeader header;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      const Status status = parse_metadata(value, header.metadata);
      if (!status.ok()) return status.with_context("__metadata__");
      continue;
    }
    SafetensorsEntry e;
    e.name = name;
    const Status status = parse_entry(value, data_bytes, e);
    if (!status.ok()) return status.with_context("tensor '" + name + "'");
    header.entries.push_back(std::move(e));
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  KDA_RETURN_IF_ERROR(check_cover(header.entries, data_bytes));
  return header;
}

// Size of an open file in bytes, or -1.
int64_t file_size(std::FILE* f) {
  if (fseeko(f, 0, SEEK_END) != 0) return -1;
  const auto size = static_cast<int64_t>(ftello(f));
  return fseeko(f, 0, SEEK_SET) == 0 ? size : -1;
}

}  // namespace

Result<SafetensorsHeader> parse_safetensors_header(std::string_view json, int64_t data_bytes) {
  try {
    return parse(json, data_bytes);
  } catch (const std::bad_alloc&) {
    return Status(KDA_OUT_OF_MEMORY, "header: out of memory while parsing");
  } catch (const std::exception& e) {  // the JSON library's own, on text that parses but cannot be used
    return invalid_argument("header: ", e.what());
  }
}

HostTensor::HostTensor(kda_dtype dtype, std::vector<int64_t> shape, int64_t bytes)
    : dtype_(dtype), shape_(std::move(shape)) {
  const auto size = static_cast<size_t>(round_up(std::max<int64_t>(bytes, 1), 64));
  data_.reset(static_cast<std::byte*>(::operator new[](size, std::align_val_t{64}, std::nothrow)));
}

void HostTensor::Free::operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }

static kda_tensor dense(kda_dtype dtype, const std::vector<int64_t>& shape) {
  kda_tensor t{};
  t.dtype = dtype;
  t.device = {KDA_CPU, 0};
  t.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  return make_dense(t).ok() ? t : kda_tensor{};
}

kda_tensor HostTensor::view() const {
  kda_tensor t = dense(dtype_, shape_);
  t.data = data_.get();
  return t;
}

kda_tensor layout_of(const SafetensorsEntry& e) {
  const bool readable = e.dtype != KDA_DTYPE_NONE && e.shape.size() <= KDA_MAX_RANK;
  return readable ? dense(e.dtype, e.shape) : kda_tensor{};
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  const File f(std::fopen(path.c_str(), "rb"));
  if (!f) return not_found(path, ": cannot be opened: ", std::strerror(errno));
  const int64_t size = file_size(f.get());
  unsigned char prefix[8];
  if (size < 8 || std::fread(prefix, 1, 8, f.get()) != 8) {
    return invalid_argument(path, ": wanted a safetensors file of at least 8 bytes, got ", size);
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = (length << 8) | prefix[i];
  const auto limit = static_cast<uint64_t>(std::min<int64_t>(size - 8, kMaxHeader));
  if (length > limit) return invalid_argument(path, ": header length: wanted at most ", limit, ", got ", length);
  std::string text(static_cast<size_t>(length), '\0');
  if (std::fread(text.data(), 1, text.size(), f.get()) != text.size()) {
    return invalid_argument(path, ": header: wanted ", length, " bytes, got fewer");
  }
  SafetensorsFile file;
  file.path_ = path;
  file.data_begin_ = 8 + static_cast<int64_t>(length);
  auto header = parse_safetensors_header(text, size - file.data_begin_);
  if (!header.ok()) return header.status().with_context(path);
  file.header_ = std::move(header.value());
  for (size_t i = 0; i < file.header_.entries.size(); ++i) file.index_[file.header_.entries[i].name] = i;
  return file;
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &header_.entries[it->second];
}

Status SafetensorsFile::check_readable(const SafetensorsEntry& e) const {
  if (e.dtype == KDA_DTYPE_NONE) return unsupported(path_, ": tensor '", e.name, "': element type ", e.type);
  if (e.shape.size() <= KDA_MAX_RANK) return {};
  return unsupported(path_, ": tensor '", e.name, "': wanted at most ", KDA_MAX_RANK, " dimensions, got ",
                     e.shape.size());
}

Status SafetensorsFile::read_into(const SafetensorsEntry& e, void* data) const {
  const auto bytes = static_cast<size_t>(e.end - e.begin);
  if (bytes == 0) return {};
  const File f(std::fopen(path_.c_str(), "rb"));
  if (!f || fseeko(f.get(), data_begin_ + e.begin, SEEK_SET) != 0 || std::fread(data, 1, bytes, f.get()) != bytes) {
    return invalid_argument(path_, ": tensor '", e.name, "': wanted ", bytes, " bytes, got fewer (file changed?)");
  }
  return {};
}

Result<std::shared_ptr<HostTensor>> SafetensorsFile::read(std::string_view name) const {
  const SafetensorsEntry* e = find(name);
  if (e == nullptr) return not_found(path_, ": no tensor '", name, "'");
  KDA_RETURN_IF_ERROR(check_readable(*e));
  const int64_t bytes = e->end - e->begin;
  auto tensor = std::make_shared<HostTensor>(e->dtype, e->shape, bytes);
  if (tensor->data() == nullptr) {
    return Status(KDA_OUT_OF_MEMORY, str_cat(path_, ": tensor '", name, "': ", bytes, " bytes"));
  }
  KDA_RETURN_IF_ERROR(read_into(*e, tensor->data()));
  return tensor;
}

namespace {

// All elements of a view in C order.
bool write_elements(std::FILE* f, const kda_tensor& t) {
  const auto size = static_cast<int64_t>(dtype_size(t.dtype));
  const int64_t inner = t.rank > 0 ? t.shape[t.rank - 1] : 1;
  const int64_t step = t.rank > 0 ? t.strides[t.rank - 1] : 1;
  std::vector<char> row(static_cast<size_t>(inner * size));
  for (int64_t first = 0, total = num_elements(t); first < total; first += inner) {
    int64_t offset = 0, rest = first / inner;
    for (int d = t.rank - 2; d >= 0; --d) {
      offset += (rest % t.shape[d]) * t.strides[d];
      rest /= t.shape[d];
    }
    const char* from = static_cast<const char*>(t.data) + offset * size;
    for (int64_t i = 0; i < inner; ++i)
      std::memcpy(row.data() + i * size, from + i * step * size, static_cast<size_t>(size));
    if (std::fwrite(row.data(), 1, row.size(), f) != row.size()) return false;
  }
  return true;
}

Result<std::string> header_text(const std::vector<SafetensorsItem>& items,
                                const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  int64_t at = 0;
  for (const SafetensorsItem& item : items) {
    const kda_tensor& t = item.tensor;
    const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                    [&](const ElementType& e) { return present(t) && e.dtype == t.dtype; });
    if (type == std::end(kTypes))
      return invalid_argument("tensor '", item.name, "': wanted data of a known dtype, got none");
    if (json.contains(item.name) || item.name == "__metadata__") {
      return invalid_argument("tensor '", item.name, "': wanted distinct names, got this one again");
    }
    const int64_t bytes = num_elements(t) * type->size;
    json[item.name] = {{"dtype", type->name},
                       {"shape", std::vector<int64_t>(t.shape, t.shape + t.rank)},
                       {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string text = json.dump();
  text.resize(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()) + 8, 64) - 8), ' ');
  return text;
}

}  // namespace

Status write_safetensors(const std::string& path, const std::vector<SafetensorsItem>& items,
                         const std::map<std::string, std::string>& metadata) {
  std::string text;
  try {
    auto made = header_text(items, metadata);
    if (!made.ok()) return made.status().with_context(path);
    text = std::move(made.value());
  } catch (const std::exception& e) {  // names that are no UTF-8, memory
    return invalid_argument(path, ": header: ", e.what());
  }
  const std::string part = path + ".part";
  File f(std::fopen(part.c_str(), "wb"));
  if (!f) return invalid_argument(part, ": cannot be written: ", std::strerror(errno));
  unsigned char prefix[8];
  for (int i = 0; i < 8; ++i) prefix[i] = static_cast<unsigned char>(uint64_t{text.size()} >> (8 * i));
  bool ok =
      std::fwrite(prefix, 1, 8, f.get()) == 8 && std::fwrite(text.data(), 1, text.size(), f.get()) == text.size();
  for (const SafetensorsItem& item : items) ok = ok && write_elements(f.get(), item.tensor);
  ok = std::fclose(f.release()) == 0 && ok;
  ok = ok && std::rename(part.c_str(), path.c_str()) == 0;
  if (ok) return {};
  std::remove(part.c_str());
  return invalid_argument(path, ": cannot be written: ", std::strerror(errno));
}

}  // namespace kda
