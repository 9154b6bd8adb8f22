// One layer's weights, or one rank's share, packed for a context, an io dtype and a projection backend.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/device_block.h"
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
  // fp32, on the context's device.
  struct Parameters {
    kda_tensor A_log{};      // [HV]
    kda_tensor dt_bias{};    // [HV, K]
    kda_tensor conv{};       // [2*H*K + HV*V, W]
    kda_tensor norm{};       // [V]
    kda_tensor conv_bias{};  // [2*H*K + HV*V]; absent where the layer has none
  };
  const Parameters& parameters() const { return parameters_; }
  // One of them by its name.
  Result<kda_tensor> parameter(const std::string& name) const;

  // x -> q, k, v, g_a or g, f_a and b, where in_row() says.
  const PackedMatrix& in() const { return *in_; }
  const PackedMatrix& f_b() const { return *f_b_; }
  const PackedMatrix* g_b() const { return g_b_.get(); }  // null with the full-rank output gate
  const PackedMatrix& o() const { return *o_; }

 private:
  Weights() = default;
  Status pack(const LayerTensors& share, const std::vector<float>& g_bias);
  Status upload(const LayerTensors& share);

  const Context* context_ = nullptr;
  kda_layer_spec spec_{};
  kda_dtype io_ = KDA_BF16;
  const ProjectionBackend* backend_ = nullptr;
  std::unique_ptr<PackedMatrix> in_, f_b_, g_b_, o_;
  DeviceBlock small_;  // the parameters, behind one another
  Parameters parameters_;
};

}  // namespace kda::layer
