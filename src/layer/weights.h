// One layer's weights, or one rank's share, packed for a context, an io dtype and a projection backend.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/projection.h"
#include "layer/tensors.h"

namespace kda::layer {

struct LoadOptions {
  kda_dtype io = KDA_BF16;
  const char* projection = nullptr;
  int32_t ranks = 1, rank = 0;
};

class Weights {
 public:
  // `tensors` are the whole layer's; `spec` describes it. `origin` for messages.
  static Result<std::unique_ptr<Weights>> create(const Context& context, const kda_layer_spec& spec,
                                                 const LayerTensors& tensors, const LoadOptions& options,
                                                 const std::string& origin);

  const Context& context() const { return *context_; }
  const kda_layer_spec& spec() const { return spec_; }  // the rank's
  kda_dtype io() const { return io_; }
  const ProjectionBackend& backend() const { return *backend_; }
  int64_t bytes() const;
  // A_log, dt_bias, conv, norm.
  Result<kda_tensor> parameter(const std::string& name) const;

  // x -> q, k, v, b, f_a and g_a or g, behind one another.
  const PackedMatrix& in() const { return *in_; }
  const PackedMatrix& f_b() const { return *f_b_; }
  const PackedMatrix* g_b() const { return g_b_.get(); }  // null with the full-rank output gate
  const PackedMatrix& o() const { return *o_; }

 private:
  Weights() = default;
  Status pack(const LayerTensors& share, const std::vector<float>& g_bias);

  const Context* context_ = nullptr;
  kda_layer_spec spec_{};
  kda_dtype io_ = KDA_BF16;
  const ProjectionBackend* backend_ = nullptr;
  std::unique_ptr<PackedMatrix> in_, f_b_, g_b_, o_;
  std::vector<float> A_log_, dt_bias_, conv_, norm_;
};

}  // namespace kda::layer
