#include "cuda/host/cublaslt.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <type_traits>
#include <vector>

namespace kda::cuda::lt {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr const char* kToolkit = "/usr/local/cuda/lib64";

// Fills in `functions`; the first symbol that is not there, or "".
std::string find_symbols(void* library, Functions& functions) {
  std::string missing;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (function == nullptr && missing.empty()) missing = symbol;
  };
  find(functions.create, "cublasLtCreate");
  find(functions.get_version, "cublasLtGetVersion");
  find(functions.get_status_string, "cublasLtGetStatusString");
  find(functions.desc_create, "cublasLtMatmulDescCreate");
  find(functions.desc_destroy, "cublasLtMatmulDescDestroy");
  find(functions.desc_set, "cublasLtMatmulDescSetAttribute");
  find(functions.layout_init, "cublasLtMatrixLayoutInit_internal");
  find(functions.preference_create, "cublasLtMatmulPreferenceCreate");
  find(functions.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(functions.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(functions.get_heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(functions.config_get, "cublasLtMatmulAlgoConfigGetAttribute");
  find(functions.matmul, "cublasLtMatmul");
  return missing;
}

// True if `file` serves; else a line more in `out.missing`.
bool try_file(const std::string& file, Library& out) {
  const auto passed_over = [&](const std::string& why) {
    out.missing += (out.missing.empty() ? "" : "; ") + why;
    return false;
  };
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return passed_over(why != nullptr ? why : file);
  }
  Functions functions;
  const std::string symbol = find_symbols(library, functions);
  const size_t version = symbol.empty() ? functions.get_version() : 0;
  if (symbol.empty() && version >= 120000 && version < 140000) {
    out.call = functions;
    out.file = file;
    out.version = version;
    out.missing.clear();
    return true;
  }
  dlclose(library);
  return passed_over(symbol.empty() ? str_cat(file, ": wanted version 12 or 13, got ", version)
                                    : file + " without " + symbol);
}

}  // namespace

Library load(const char* folder) {
  Library out;
  std::vector<std::string> prefixes = {"", std::string(kToolkit) + "/"};
  if (folder != nullptr && *folder != 0) prefixes = {std::string(folder) + "/"};
  for (const std::string& prefix : prefixes) {
    for (const char* name : kNames) {
      if (try_file(prefix + name, out)) return out;
    }
  }
  return out;
}

const Library& library() {
  static const Library loaded = load(std::getenv("KDA_CUBLASLT_DIR"));
  return loaded;
}

Result<Handle*> handle(int32_t device) {
  static std::mutex mutex;
  static auto& handles = *new std::vector<Handle*>;  // never destroyed: the driver may be gone by then
  const std::lock_guard<std::mutex> lock(mutex);
  if (handles.size() <= static_cast<size_t>(device)) handles.resize(static_cast<size_t>(device) + 1);
  Handle*& made = handles[static_cast<size_t>(device)];
  if (made == nullptr) KDA_RETURN_IF_ERROR(to_status(library().call.create(&made), "cublasLtCreate"));
  return made;
}

Status to_status(int32_t status, const char* what) {
  if (status == 0) return {};
  constexpr int32_t kAllocationFailed = 3, kNotSupported = 15;
  const kda_status code = status == kAllocationFailed ? KDA_OUT_OF_MEMORY
                          : status == kNotSupported   ? KDA_UNSUPPORTED
                                                      : KDA_DEVICE_ERROR;
  return Status(code, str_cat(what, ": wanted success, got ", status, " (", library().call.get_status_string(status),
                              ") from ", library().file));
}

}  // namespace kda::cuda::lt
