// The layer's dense projections y = x·Wᵀ (spec L-7 steps 1 and 5): what a backend implements.
//
// Weights are packed once, in a form of the backend's own; several matrices that share their input are packed as the
// parts of one PackedMatrix and computed in one pass. Numerics: products and sums in fp32 (reference: fp64), a part's
// bias added to the sum, one rounding to the output's dtype. A row of y depends on its row of x alone, bit for bit,
// whatever the number of rows or its place among them (spec N-13); a backend that cannot show it for a shape refuses
// it.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "core/backend.h"
#include "core/context.h"
#include "core/select.h"

namespace kda {

// A weight [rows, cols] in host memory, dense rows with a free stride; fp32 or bf16.
struct MatrixView {
  const void* data = nullptr;
  kda_dtype dtype = KDA_DTYPE_NONE;
  int64_t rows = 0, cols = 0;
  int64_t stride = 0;  // elements from row to row

  bool present() const { return dtype != KDA_DTYPE_NONE; }
};

struct ProjectionPart {
  MatrixView weight;
  const float* bias = nullptr;  // [rows], may be absent
};

class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;
  virtual int64_t bytes() const = 0;
};

struct ProjectionCall {
  const PackedMatrix* weights = nullptr;
  kda_tensor x{};                       // [T, cols], rows dense
  std::span<const kda_tensor> outputs;  // one [T, rows] a part, rows dense
  void* workspace = nullptr;            // 256-byte aligned
};

class ProjectionBackend {
 public:
  virtual ~ProjectionBackend() = default;
  virtual std::string_view name() const = 0;
  virtual kda_device_type device() const = 0;
  // Adds every unmet gate; gate `device_type` is added by the resolver.
  virtual void check(kda_dtype io, const Context& context, Refusals& refusals) const = 0;
  // The parts have equal cols. `io` is the dtype of the x that runs will bring.
  virtual Result<std::unique_ptr<PackedMatrix>> pack(const Context& context, kda_dtype io,
                                                     std::span<const ProjectionPart> parts) const = 0;
  // Bytes that a run needs for up to `tokens` rows and `cols` columns of x.
  virtual int64_t workspace_bytes(const Context& context, kda_dtype io, int64_t tokens, int64_t cols) const = 0;
  // Allocates nothing of its own; `weights` are this backend's for this context and io.
  virtual Status run(const Context& context, const ProjectionCall& call, void* stream) const = 0;
};

struct ProjectionChoice {
  const ProjectionBackend* backend = nullptr;
  std::vector<Refused> refused;
};
// `name`: auto (null too), or one of the list. UNSUPPORTED with every unmet gate; NOT_FOUND lists the names.
Result<ProjectionChoice> select_projection(const Context& context, kda_dtype io, const char* name);

}  // namespace kda
