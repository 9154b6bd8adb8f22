#include "arguments.h"

#include <stdexcept>

namespace kda::torch_ops {
namespace {

void must(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("libkda: torch failed in ") + what);
}

// torch's numbers of dtypes and devices are asked for once: they may differ between versions.
struct TorchTypes {
  int32_t fp32 = aoti_torch_dtype_float32(), bf16 = aoti_torch_dtype_bfloat16(), fp16 = aoti_torch_dtype_float16();
  int32_t fp64 = aoti_torch_dtype_float64(), int8 = aoti_torch_dtype_int8(), int16 = aoti_torch_dtype_int16();
  int32_t int32 = aoti_torch_dtype_int32(), int64 = aoti_torch_dtype_int64(), boolean = aoti_torch_dtype_bool();
  int32_t uint8 = aoti_torch_dtype_uint8();
  int32_t cpu = aoti_torch_device_type_cpu(), cuda = aoti_torch_device_type_cuda();

  kda_dtype dtype(int32_t t) const {
    if (t == bf16) return KDA_BF16;
    if (t == fp32) return KDA_FP32;
    if (t == int32) return KDA_INT32;
    if (t == int64) return KDA_INT64;
    if (t == boolean) return KDA_BOOL;
    if (t == fp16) return KDA_FP16;
    if (t == fp64) return KDA_FP64;
    if (t == uint8) return KDA_UINT8;
    if (t == int8) return KDA_INT8;
    return t == int16 ? KDA_INT16 : KDA_DTYPE_NONE;
  }
  int32_t number(kda_dtype t) const {
    switch (t) {
      case KDA_FP32: return fp32;
      case KDA_BF16: return bf16;
      case KDA_FP16: return fp16;
      case KDA_FP64: return fp64;
      case KDA_INT8: return int8;
      case KDA_INT16: return int16;
      case KDA_INT32: return int32;
      case KDA_INT64: return int64;
      case KDA_BOOL: return boolean;
      default: return uint8;
    }
  }
};

const TorchTypes& types() {
  static const TorchTypes t;
  return t;
}

}  // namespace

kda_tensor view(AtenTensorHandle handle) {
  kda_tensor t{};
  int32_t dtype = -1, device = -1, index = 0;
  int64_t rank = 0, *shape = nullptr, *strides = nullptr;
  must(aoti_torch_get_dtype(handle, &dtype), "get_dtype");
  must(aoti_torch_get_dim(handle, &rank), "get_dim");
  must(aoti_torch_get_sizes(handle, &shape), "get_sizes");
  must(aoti_torch_get_strides(handle, &strides), "get_strides");
  must(aoti_torch_get_data_ptr(handle, &t.data), "get_data_ptr");
  must(aoti_torch_get_device_type(handle, &device), "get_device_type");
  t.dtype = types().dtype(dtype);
  t.rank = static_cast<int32_t>(rank);
  for (int64_t i = 0; i < rank && i < KDA_MAX_RANK; ++i) {
    t.shape[i] = shape[i];
    t.strides[i] = strides[i];
  }
  if (device == types().cuda) {
    must(aoti_torch_get_device_index(handle, &index), "get_device_index");
    t.device = {KDA_CUDA, index};
  }
  return t;
}

AtenTensorHandle empty(const int64_t* shape, int32_t rank, kda_dtype dtype, kda_device device) {
  int64_t strides[KDA_MAX_RANK] = {};
  int64_t stride = 1;
  for (int32_t i = rank - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i];
  }
  AtenTensorHandle handle = nullptr;
  must(aoti_torch_empty_strided(rank, shape, strides, types().number(dtype),
                                device.type == KDA_CUDA ? types().cuda : types().cpu, device.index, &handle),
       "empty_strided");
  return handle;
}

Arguments::~Arguments() {
  for (int i = 0; i < num_tensors_; ++i) aoti_torch_delete_tensor_object(tensors_[i]);
  for (int i = 0; i < num_texts_; ++i) torch_delete_string(texts_[i]);
}

void Arguments::note(std::string problem) {
  if (problem_.empty()) problem_ = std::move(problem);
}

kda_tensor Arguments::take(AtenTensorHandle handle, const char* name) {
  if (num_tensors_ == kMaxTensors) {
    aoti_torch_delete_tensor_object(handle);
    note("too many tensors");
    return {};
  }
  tensors_[num_tensors_++] = handle;
  kda_tensor t{};
  try {
    t = view(handle);
  } catch (const std::exception& e) {
    note(std::string(name) + ": " + e.what());
    return t;
  }
  if (t.rank > KDA_MAX_RANK) {
    note(std::string(name) + ": wanted at most " + std::to_string(KDA_MAX_RANK) + " dimensions, got " +
         std::to_string(t.rank));
  } else if (t.dtype == KDA_DTYPE_NONE) {
    note(std::string(name) + ": wanted float32, bfloat16, float16, an integer type or bool, got another dtype");
  }
  return t;
}

bool Arguments::next_optional(StableIValue& value) {
  auto* boxed = torch::stable::detail::to<StableIValue*>(next());
  if (boxed == nullptr) return false;
  value = *boxed;
  delete boxed;
  return true;
}

kda_tensor Arguments::tensor(const char* name) {
  return take(torch::stable::detail::to<AtenTensorHandle>(next()), name);
}

kda_tensor Arguments::optional_tensor(const char* name) {
  StableIValue value;
  return next_optional(value) ? take(torch::stable::detail::to<AtenTensorHandle>(value), name) : kda_tensor{};
}

Parts Arguments::take_list(StableIValue value, const char* name) {
  const auto list = torch::stable::detail::to<StableListHandle>(value);
  Parts parts{};
  size_t size = 0;
  torch_list_size(list, &size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue element;
    if (torch_list_get_item(list, i, &element) != AOTI_TORCH_SUCCESS) continue;
    const kda_tensor t = take(torch::stable::detail::to<AtenTensorHandle>(element), name);
    if (i < kMaxParts) parts.part[i] = t;
  }
  torch_delete_list(list);
  parts.count = static_cast<int32_t>(size);
  if (size != 1 && size != kMaxParts) {
    note(std::string(name) + ": wanted one tensor (merged) or three (q, k, v), got " + std::to_string(size));
  }
  return parts;
}

Parts Arguments::parts(const char* name) { return take_list(next(), name); }

Parts Arguments::optional_parts(const char* name) {
  StableIValue value;
  return next_optional(value) ? take_list(value, name) : Parts{};
}

int64_t Arguments::integer() { return torch::stable::detail::to<int64_t>(next()); }
double Arguments::number() { return torch::stable::detail::to<double>(next()); }
bool Arguments::flag() { return torch::stable::detail::to<bool>(next()); }

double Arguments::optional_number(double absent) {
  StableIValue value;
  return next_optional(value) ? torch::stable::detail::to<double>(value) : absent;
}

int32_t Arguments::optional_dtype() {
  StableIValue value;
  if (!next_optional(value)) return KDA_DTYPE_NONE;
  const kda_dtype dtype = types().dtype(torch::stable::detail::to<int32_t>(value));
  if (dtype == KDA_DTYPE_NONE) note("dtype: wanted float32, bfloat16 or float16, got another one");
  return dtype;
}

std::string_view Arguments::take_text(StableIValue value) {
  const auto handle = torch::stable::detail::to<StringHandle>(value);
  const char* data = "";
  size_t length = 0;
  torch_string_c_str(handle, &data);
  torch_string_length(handle, &length);
  if (num_texts_ < kMaxTexts) texts_[num_texts_++] = handle;
  return {data, length};
}

std::string_view Arguments::text() { return take_text(next()); }

std::string_view Arguments::optional_text() {
  StableIValue value;
  return next_optional(value) ? take_text(value) : std::string_view();
}

void Arguments::finish() const {
  if (!problem_.empty()) bad_argument(problem_);
  if (at_ != count_) {
    throw std::runtime_error("libkda: the schema has " + std::to_string(count_) + " arguments, the kernel reads " +
                             std::to_string(at_));
  }
}

// The operator dispatcher's Python binding turns invalid_argument into ValueError and runtime_error into
// RuntimeError.
void bad_argument(const std::string& message) { throw std::invalid_argument(message); }

void check(kda_status status) {
  if (status == KDA_OK) return;
  const std::string message = kda_last_error();
  if (status == KDA_INVALID_ARGUMENT) bad_argument(message);
  throw std::runtime_error(std::string(kda_status_name(status)) + ": " + message);
}

}  // namespace kda::torch_ops
