// cuBLASLt as far as libkda uses it, loaded at run time and never linked, so that the library loads on a machine that
// has none. The declarations are this file's own; a test compares them with the toolkit's header where there is one.
// In every build; needs no CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace kda::cuda::lt {

// Values as cublasLt.h, cublas_api.h and library_types.h have them.
enum Type : int32_t { kFp32 = 0, kFp16 = 2, kBf16 = 14 };
enum Compute : int32_t { kCompute32 = 68, kCompute32Pedantic = 69 };
enum Transpose : int32_t { kPlain = 0, kTransposed = 1 };
enum DescAttribute : int32_t { kDescTransA = 3, kDescTransB = 4 };
enum PreferenceAttribute : int32_t {
  kPreferWorkspace = 1,
  kPreferReductions = 3,
  kPreferAlignmentA = 5,
  kPreferAlignmentB = 6,
  kPreferAlignmentC = 7,
  kPreferAlignmentD = 8
};
enum ConfigAttribute : int32_t { kConfigSplitK = 2 };
// Sums of parts of the inner dimension: in the compute type, so that there is one rounding to the output's.
enum Reduction : uint32_t { kReduceNone = 0, kReduceComputeType = 2 };

struct Handle;
struct Desc;
struct Preference;
struct Layout {
  uint64_t data[8];
};
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int32_t state;
  float waves;
  int32_t reserved[4];
};

// Every function returns 0 when it has done its work.
struct Functions {
  int32_t (*create)(Handle** handle) = nullptr;
  size_t (*get_version)() = nullptr;
  const char* (*get_status_string)(int32_t status) = nullptr;
  int32_t (*desc_create)(Desc** desc, Compute compute, Type scale) = nullptr;
  int32_t (*desc_destroy)(Desc* desc) = nullptr;
  int32_t (*desc_set)(Desc* desc, DescAttribute attribute, const void* value, size_t bytes) = nullptr;
  int32_t (*layout_init)(Layout* layout, size_t bytes, Type type, uint64_t rows, uint64_t cols, int64_t ld) = nullptr;
  int32_t (*preference_create)(Preference** preference) = nullptr;
  int32_t (*preference_destroy)(Preference* preference) = nullptr;
  int32_t (*preference_set)(Preference* preference, PreferenceAttribute attribute, const void* value,
                            size_t bytes) = nullptr;
  int32_t (*get_heuristic)(Handle* handle, Desc* desc, Layout* a, Layout* b, Layout* c, Layout* d,
                           Preference* preference, int32_t wanted, Heuristic* results, int32_t* count) = nullptr;
  int32_t (*config_get)(const Algorithm* algorithm, ConfigAttribute attribute, void* value, size_t bytes,
                        size_t* written) = nullptr;
  int32_t (*matmul)(Handle* handle, Desc* desc, const void* alpha, const void* a, Layout* a_layout, const void* b,
                    Layout* b_layout, const void* beta, const void* c, Layout* c_layout, void* d, Layout* d_layout,
                    const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) = nullptr;
};

// A loaded library, or why there is none.
struct Library {
  Functions call;
  std::string file;     // what was loaded
  size_t version = 0;   // 130100
  std::string missing;  // empty: it can be used
};

// Looks for libcublasLt.so.13, then .12: in `folder` alone if that is given, else where the dynamic loader looks (one
// that the process has loaded already comes first), then in /usr/local/cuda/lib64. A library of another version than
// 12 or 13, or without one of the functions, is passed over.
Library load(const char* folder);

// The process's, loaded at the first call; `folder` is the environment's KDA_CUBLASLT_DIR. Stays loaded.
const Library& library();

// A handle of the calling thread's device, made once for each index.
Result<Handle*> handle(int32_t device);

Status to_status(int32_t status, const char* what);

}  // namespace kda::cuda::lt
