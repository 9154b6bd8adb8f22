// The layer's plan: the operators' plans and the projections between them (spec L-7).
#pragma once

#include <memory>

#include "core/plan.h"
#include "core/projection.h"
#include "layer/weights.h"

namespace kda::layer {

class LayerPlan final : public kda_plan {
 public:
  static Result<std::unique_ptr<LayerPlan>> create(const Context& context, const kda_layer_desc* raw);
  Status run(const kda_layer_args* raw, const kda_workspace& workspace, void* stream) const;
  // The operators' plans: conv, prefill, gated_norm, then decode_step, or conv and decode in its place; null past the
  // last.
  const kda_plan* part(size_t i) const;

 private:
  LayerPlan() = default;
  Status make_parts();
  Status make_recurrent();
  Status make_projections();
  void book_sections();
  Status check(const kda_layer_args& args, const Weights& weights) const;
  Status check_aliases(const kda_layer_args& args, const kda_workspace& workspace) const;

  // A run's tensors between the operators, in its workspace.
  struct Scratch;
  Scratch scratch(const kda_layer_args& args, const kda_workspace& workspace) const;
  Status project_in(const Weights& w, const kda_layer_args& args, const Scratch& s, void* stream) const;
  Status run_operators(const Weights& w, const kda_layer_args& args, const Scratch& s, void* stream) const;
  Status attend_chunk(const Weights& w, const kda_layer_args& args, const Scratch& s, void* stream) const;
  Status attend_recurrent(const Weights& w, const kda_layer_args& args, const Scratch& s, void* stream) const;
  kda_decode_args decode_args(const Weights& w, const kda_layer_args& args, const Scratch& s) const;
  Status run_norm(const Weights& w, const Scratch& s, void* stream) const;
  Status run_step(const Weights& w, const kda_layer_args& args, const Scratch& s, void* stream) const;
  Status project_out(const Weights& w, const kda_layer_args& args, const Scratch& s, void* stream) const;

  kda_layer_desc desc_{};
  const ProjectionBackend* projection_ = nullptr;
  std::unique_ptr<PreparedProjection> in_, f_b_, g_b_, o_proj_;  // g_b_: low-rank output gate
  std::unique_ptr<Plan<Conv>> conv_;
  std::unique_ptr<Plan<Prefill>> prefill_;
  std::unique_ptr<Plan<GatedNorm>> norm_;
  std::unique_ptr<Plan<DecodeStep>> step_;
  // In its place where the convolution has a bias, which decode_step does not take: equal bit for bit (spec L-8).
  std::unique_ptr<Plan<Conv>> step_conv_;
  std::unique_ptr<Plan<Decode>> step_decode_;
  WorkspaceBook::Id rows_{}, f_{}, z_{}, post_{}, o_{}, y_{}, projections_{}, operators_{};
};

// As kda_mask_sequences.
Status mask_sequences(const kda_tensor& mask, int64_t* begin, int64_t* length);

}  // namespace kda::layer

struct kda_layer_weights {
  std::unique_ptr<kda::layer::Weights> weights;
};
