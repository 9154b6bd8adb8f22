// The layer's dense projections y = x·Wᵀ (spec L-7 steps 1 and 5): what a backend implements.
//
// Weights are packed once, in a form of the backend's own; several matrices that share their input are packed as the
// parts of one PackedMatrix and computed in one pass. Numerics: products and sums in fp32 (reference: fp64), a part's
// bias added to the sum, one rounding to the output's dtype. A row of y depends on its row of x alone, bit for bit,
// whatever the number of rows or its place among them (spec N-13); a backend that cannot show it for a shape refuses
// it.
//
// A plan prepares each matrix's shape before it has weights: whatever a backend has to choose or load is done then,
// and a run only launches.
#pragma once

#include <cstring>
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

// Element i from an address of any alignment: a mapped file's header may have any length.
template <class T>
T unaligned(const void* data, int64_t i) {
  T element;
  std::memcpy(&element, static_cast<const char*>(data) + i * static_cast<int64_t>(sizeof element), sizeof element);
  return element;
}

struct ProjectionPart {
  MatrixView weight;
  const float* bias = nullptr;  // [rows], may be absent
  int64_t first = 0;            // column of a row of y that the part's result begins at
};

// A packed matrix as a plan knows it: rows of y hold the parts' results, and between them columns that nobody reads
// and the backend may write.
struct ProjectionShape {
  int64_t cols = 0;      // of x
  int64_t width = 0;     // of a row of y, parts and gaps
  int64_t x_stride = 0;  // elements from row to row of x as runs will mostly have it; a hint
  int64_t y_stride = 0;
};

struct ProjectionOptions {
  kda_dtype io = KDA_BF16;
  int64_t max_tokens = 0;
  bool batch_invariant = false;  // spec N-13; a backend whose rows never depend on one another ignores it
};

class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;
  virtual int64_t bytes() const = 0;
};

struct ProjectionCall {
  const PackedMatrix* weights = nullptr;
  kda_tensor x{};                       // [T, cols], rows dense
  std::span<const kda_tensor> outputs;  // one [T, rows] a part, rows dense: columns of rows as ProjectionShape says
  void* workspace = nullptr;            // 256-byte aligned
};

// One shape of a plan: immutable, and run by any number of threads with workspaces of their own.
class PreparedProjection {
 public:
  virtual ~PreparedProjection() = default;
  virtual int64_t workspace_bytes() const = 0;
  // Allocates nothing; `weights` are the backend's for the plan's context and io, of this shape.
  virtual Status run(const ProjectionCall& call, void* stream) const = 0;
};

class ProjectionBackend {
 public:
  virtual ~ProjectionBackend() = default;
  virtual std::string_view name() const = 0;
  virtual kda_device_type device() const = 0;
  // Adds every unmet gate; gate `device_type` is added by the resolver.
  virtual void check(kda_dtype io, const Context& context, Refusals& refusals) const = 0;
  // The parts have equal cols. `io` is the dtype of the x that runs will bring, `width` as in ProjectionShape.
  virtual Result<std::unique_ptr<PackedMatrix>> pack(const Context& context, kda_dtype io,
                                                     std::span<const ProjectionPart> parts, int64_t width) const = 0;
  virtual Result<std::unique_ptr<PreparedProjection>> prepare(const Context& context, const ProjectionShape& shape,
                                                              const ProjectionOptions& options) const = 0;
};

// Of a backend that has nothing to prepare: `workspace_bytes(context, io, tokens, cols)` bytes and
// `run(context, call)`.
template <class Backend>
class PlainProjection final : public PreparedProjection {
 public:
  PlainProjection(const Backend& backend, const Context& context, const ProjectionShape& shape,
                  const ProjectionOptions& options)
      : backend_(backend), context_(context), shape_(shape), options_(options) {}
  int64_t workspace_bytes() const override {
    return backend_.workspace_bytes(context_, options_.io, options_.max_tokens, shape_.cols);
  }
  Status run(const ProjectionCall& call, void*) const override { return backend_.run(context_, call); }

 private:
  const Backend& backend_;
  const Context& context_;
  ProjectionShape shape_;
  ProjectionOptions options_;
};
template <class Backend>
Result<std::unique_ptr<PreparedProjection>> plain_projection(const Backend& backend, const Context& context,
                                                             const ProjectionShape& shape,
                                                             const ProjectionOptions& options) {
  return std::unique_ptr<PreparedProjection>(
      std::make_unique<PlainProjection<Backend>>(backend, context, shape, options));
}

struct ProjectionChoice {
  const ProjectionBackend* backend = nullptr;
  std::vector<Refused> refused;
};
// `name`: auto (null too), or one of the list. UNSUPPORTED with every unmet gate; NOT_FOUND lists the names.
Result<ProjectionChoice> select_projection(const Context& context, kda_dtype io, const char* name);

}  // namespace kda
