// Version, names, errors, logging.
#include "base/log.h"
#include "base/tensor.h"
#include "capi/guard.h"
#include "cpu/isa.h"
#include "kda/kda.h"

namespace kda::capi {
namespace {
thread_local std::string last_error;
}

void set_last_error(const std::string& message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
}

}  // namespace kda::capi

#define KDA_STRINGIFY_(x) #x
#define KDA_STRINGIFY(x) KDA_STRINGIFY_(x)

extern "C" {

uint32_t kda_version(void) { return (KDA_VERSION_MAJOR << 16) | (KDA_VERSION_MINOR << 8) | KDA_VERSION_PATCH; }

const char* kda_version_string(void) {
  return KDA_STRINGIFY(KDA_VERSION_MAJOR) "." KDA_STRINGIFY(KDA_VERSION_MINOR) "." KDA_STRINGIFY(KDA_VERSION_PATCH);
}

const char* kda_source_hash(void) { return KDA_SOURCE_HASH; }

const char* kda_status_name(kda_status status) {
  switch (status) {
    case KDA_OK: return "OK";
    case KDA_INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case KDA_UNSUPPORTED: return "UNSUPPORTED";
    case KDA_OUT_OF_MEMORY: return "OUT_OF_MEMORY";
    case KDA_WORKSPACE_TOO_SMALL: return "WORKSPACE_TOO_SMALL";
    case KDA_DEVICE_ERROR: return "DEVICE_ERROR";
    case KDA_NOT_FOUND: return "NOT_FOUND";
    case KDA_INTERNAL: return "INTERNAL";
    case KDA_FAILED_PRECONDITION: return "FAILED_PRECONDITION";
  }
  return "UNKNOWN";
}

const char* kda_last_error(void) { return kda::capi::last_error.c_str(); }
const char* kda_dtype_name(kda_dtype dtype) { return kda::dtype_name(dtype); }
size_t kda_dtype_size(kda_dtype dtype) { return kda::dtype_size(dtype); }
kda_status kda_tensor_make_dense(kda_tensor* tensor) {
  return kda::capi::guard([&]() -> kda::Status {
    KDA_RETURN_IF_ERROR(kda::capi::check_pointer("tensor", tensor));
    return kda::make_dense(*tensor);
  });
}
int32_t kda_max_verify(void) { return KDA_MAX_VERIFY; }
const char* kda_cpu_isas(void) { return kda::cpu::available_isa_names(); }

kda_status kda_set_log_callback(kda_log_fn callback, void* user) {
  return kda::capi::guard([&]() -> kda::Status {
    kda::set_log_callback(callback, user);
    return {};
  });
}

}  // extern "C"
