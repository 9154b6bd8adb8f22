// Stands in for libcublasLt.so.13 where "device" memory is the host's: products are computed when they are called,
// and what a caller may do wrong is an error. The algorithms that it proposes differ as cuBLASLt's may: one cuts the
// inner dimension, one gives a row other bits by its place, one cannot run, and only then come those that are plain.
//
// The environment's FAKE_CUBLASLT: "version" an unknown version, "create" no handle, "none" no algorithms, "uneven"
// none that gives a row the same bits at every place.
#include "cuda/host/cublaslt.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/half.h"
#include "fake_cublaslt.h"

namespace lt = kda::cuda::lt;

namespace kda::cuda::lt {
struct Handle {};
struct Desc {
  Compute compute;
  int32_t transpose_a = 0, transpose_b = 0;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t reductions = 7;
  uint32_t alignment[4] = {256, 256, 256, 256};  // A, B, C, D
};
}  // namespace kda::cuda::lt

namespace {

enum Status : int32_t { kOk = 0, kNotInitialized = 1, kInvalid = 7, kNotSupported = 15 };
enum Kind : uint64_t { kCut = 1, kUneven = 2, kBroken = 3, kPlainWay = 4 };

FakeCublasLtCounts counts;

bool asked_for(const char* what) {
  const char* mode = std::getenv("FAKE_CUBLASLT");
  return mode != nullptr && std::strcmp(mode, what) == 0;
}

struct LayoutView {
  int32_t type;
  uint64_t rows, cols;
  int64_t ld;
};
LayoutView view(const lt::Layout* layout) {
  return {static_cast<int32_t>(layout->data[0]), layout->data[1], layout->data[2],
          static_cast<int64_t>(layout->data[3])};
}

struct AlgorithmView {
  uint64_t kind, alignment_b, alignment_d, workspace;
};
AlgorithmView view(const lt::Algorithm* a) { return {a->data[0], a->data[1], a->data[2], a->data[3]}; }

uint64_t size_of(int32_t type) { return type == lt::kFp32 ? 4 : 2; }

float load(const void* p, int64_t i, int32_t type) {
  if (type == lt::kFp32) return static_cast<const float*>(p)[i];
  if (type == lt::kBf16) return kda::to_float(static_cast<const kda::bf16*>(p)[i]);
  return kda::to_float(static_cast<const kda::fp16*>(p)[i]);
}
void store(void* p, int64_t i, int32_t type, float x) {
  if (type == lt::kFp32) static_cast<float*>(p)[i] = x;
  else if (type == lt::kBf16) static_cast<kda::bf16*>(p)[i] = kda::to_bf16(x);
  else static_cast<kda::fp16*>(p)[i] = kda::to_fp16(x);
}

// What a tensor core keeps of an fp32 operand when nobody forbids it.
float tf32(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  u &= 0xffffe000u;
  std::memcpy(&x, &u, 4);
  return x;
}

// Sum over k, in one piece or in several that are added at the end.
float dot(const std::vector<float>& a, const float* b, int pieces) {
  const size_t k = a.size(), piece = (k + static_cast<size_t>(pieces) - 1) / static_cast<size_t>(pieces);
  float total = 0;
  for (size_t first = 0; first < k; first += piece) {
    float sum = 0;
    for (size_t i = first; i < k && i < first + piece; ++i) sum += a[i] * b[i];
    total += sum;
  }
  return total;
}

int pieces_of(const AlgorithmView& a, uint64_t row) {
  return a.kind == kCut ? 4 : a.kind == kUneven && row % 2 == 1 ? 3 : 1;
}

}  // namespace

extern "C" {

FakeCublasLtCounts fake_cublaslt_counts() { return counts; }

int32_t cublasLtCreate(lt::Handle** handle) {
  static lt::Handle only;
  if (asked_for("create")) return kNotInitialized;
  *handle = &only;
  return kOk;
}
size_t cublasLtGetVersion() { return asked_for("version") ? 110800 : 130100; }
const char* cublasLtGetStatusString(int32_t status) { return status == kOk ? "no error" : "a fault of the stand-in"; }

int32_t cublasLtMatmulDescCreate(lt::Desc** desc, lt::Compute compute, lt::Type scale) {
  if (scale != lt::kFp32) return kInvalid;
  ++counts.descs;
  *desc = new lt::Desc{compute};
  return kOk;
}
int32_t cublasLtMatmulDescDestroy(lt::Desc* desc) {
  --counts.descs;
  delete desc;
  return kOk;
}
int32_t cublasLtMatmulDescSetAttribute(lt::Desc* desc, lt::DescAttribute attribute, const void* value, size_t bytes) {
  if (bytes != 4) return kInvalid;
  if (attribute == lt::kDescTransA) std::memcpy(&desc->transpose_a, value, 4);
  else if (attribute == lt::kDescTransB) std::memcpy(&desc->transpose_b, value, 4);
  else return kInvalid;
  return kOk;
}

int32_t cublasLtMatrixLayoutInit_internal(lt::Layout* layout, size_t bytes, lt::Type type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
  if (bytes != sizeof *layout || ld < static_cast<int64_t>(rows)) return kInvalid;
  *layout = {{static_cast<uint64_t>(type), rows, cols, static_cast<uint64_t>(ld)}};
  return kOk;
}

int32_t cublasLtMatmulPreferenceCreate(lt::Preference** preference) {
  ++counts.preferences;
  *preference = new lt::Preference;
  return kOk;
}
int32_t cublasLtMatmulPreferenceDestroy(lt::Preference* preference) {
  --counts.preferences;
  delete preference;
  return kOk;
}
int32_t cublasLtMatmulPreferenceSetAttribute(lt::Preference* p, lt::PreferenceAttribute attribute, const void* value,
                                             size_t bytes) {
  const int alignment = attribute - lt::kPreferAlignmentA;
  if (attribute == lt::kPreferWorkspace && bytes == 8) std::memcpy(&p->workspace, value, 8);
  else if (attribute == lt::kPreferReductions && bytes == 4) std::memcpy(&p->reductions, value, 4);
  else if (alignment >= 0 && alignment < 4 && bytes == 4) std::memcpy(&p->alignment[alignment], value, 4);
  else return kInvalid;
  return kOk;
}

int32_t cublasLtMatmulAlgoGetHeuristic(lt::Handle*, lt::Desc*, lt::Layout* a, lt::Layout* b, lt::Layout*,
                                       lt::Layout* d, lt::Preference* p, int32_t wanted, lt::Heuristic* results,
                                       int32_t* count) {
  ++counts.heuristics;
  *count = 0;
  if (asked_for("none")) return kNotSupported;
  const LayoutView w = view(a), y = view(d);
  (void)b;
  const uint64_t partial = 4 * y.rows * y.cols * 4;
  for (const uint64_t kind : {kCut, kUneven, kBroken, kPlainWay}) {
    if (*count == wanted) break;
    if (kind == kCut && (p->reductions == lt::kReduceNone || p->workspace < partial)) continue;
    // Partial sums in the output's type round more than once.
    if (kind == kCut && (p->reductions & ~static_cast<uint32_t>(lt::kReduceComputeType)) != 0) return kInvalid;
    if (kind == kPlainWay && asked_for("uneven")) continue;
    lt::Heuristic h{};
    h.algorithm = {{kind, p->alignment[1], p->alignment[3], kind == kCut ? partial : 0}};
    h.workspace = kind == kCut ? partial : 0;
    results[(*count)++] = h;
  }
  return w.ld >= static_cast<int64_t>(w.rows) ? kOk : kInvalid;
}

int32_t cublasLtMatmulAlgoConfigGetAttribute(const lt::Algorithm* a, lt::ConfigAttribute attribute, void* value,
                                             size_t bytes, size_t* written) {
  if (attribute != lt::kConfigSplitK || bytes != 4) return kInvalid;
  const int32_t parts = view(a).kind == kCut ? 4 : 1;
  std::memcpy(value, &parts, 4);
  *written = 4;
  return kOk;
}

int32_t cublasLtMatmul(lt::Handle* handle, lt::Desc* desc, const void* alpha, const void* a, lt::Layout* a_layout,
                       const void* b, lt::Layout* b_layout, const void* beta, const void* c, lt::Layout*, void* d,
                       lt::Layout* d_layout, const lt::Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                       void*) {
  ++counts.products;
  const LayoutView w = view(a_layout), x = view(b_layout), y = view(d_layout);
  const AlgorithmView how = view(algorithm);
  if (handle == nullptr || *static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0 || c != d)
    return kInvalid;
  if (desc->transpose_a != lt::kTransposed || desc->transpose_b != lt::kPlain) return kInvalid;
  if (w.rows != x.rows || w.cols != y.rows || x.cols != y.cols || w.type != x.type || w.type != y.type)
    return kInvalid;
  const auto at_multiple = [](const void* p, const LayoutView& l, uint64_t alignment) {
    return reinterpret_cast<uintptr_t>(p) % alignment == 0 &&
           (l.cols == 1 || static_cast<uint64_t>(l.ld) * size_of(l.type) % alignment == 0);
  };
  // The weight's rows need not be whole multiples, its beginning does.
  if (reinterpret_cast<uintptr_t>(a) % 256 != 0 || !at_multiple(b, x, how.alignment_b) ||
      !at_multiple(d, y, how.alignment_d) || reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
    return kInvalid;
  }
  if (how.kind == kBroken) return kNotSupported;
  if (how.kind == kCut) {
    const uint64_t partial = 4 * y.rows * y.cols * 4;
    if (workspace_bytes < partial) return kInvalid;
    std::memset(workspace, 0xff, partial);
  }
  const bool rounds = w.type == lt::kFp32 && desc->compute != lt::kCompute32Pedantic;
  const auto k = static_cast<int64_t>(w.rows);
  std::vector<float> weights(w.rows * w.cols), row(w.rows);
  for (uint64_t m = 0; m < w.cols; ++m) {
    for (int64_t i = 0; i < k; ++i) {
      const float value = load(a, static_cast<int64_t>(m) * w.ld + i, w.type);
      weights[m * w.rows + static_cast<uint64_t>(i)] = rounds ? tf32(value) : value;
    }
  }
  for (uint64_t n = 0; n < y.cols; ++n) {
    for (int64_t i = 0; i < k; ++i) {
      const float value = load(b, static_cast<int64_t>(n) * x.ld + i, x.type);
      row[static_cast<size_t>(i)] = rounds ? tf32(value) : value;
    }
    for (uint64_t m = 0; m < y.rows; ++m) {
      store(d, static_cast<int64_t>(n) * y.ld + static_cast<int64_t>(m), y.type,
            dot(row, &weights[m * w.rows], pieces_of(how, n)));
    }
  }
  counts.cut_products += how.kind == kCut;
  counts.uneven_products += how.kind == kUneven;
  return kOk;
}

}  // extern "C"
