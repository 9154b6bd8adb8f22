// The executor of layer mode: hidden states through whole KDA layers (kda/layer.h), with a residual stream between
// them:
//
//   h = the tokens' hidden rows;   for each layer: x = io(rms_norm(h)), h = io(h + layer(x))
//
// Everything of a model that is not KDA is left out. With a rank's share of the heads its partial sum is added as if
// whole. On the host alone: the residual stream is this file's own loop.
#pragma once

#include <memory>

#include "serve/executor.h"
#include "serve/layer_plans.h"
#include "serve/model_weights.h"
#include "serve/span_recorder.h"
#include "serve/step_tables.h"
#include "serve/token_rows.h"

namespace kda::serve {

class ModelExecutor : public Executor {
 public:
  // Everything that is passed in must outlive the executor. `timeline` may be null.
  static Result<std::unique_ptr<ModelExecutor>> create(const Device& device, const Model& model,
                                                       const ModelWeights& weights, const Content& content,
                                                       const kda_state_pool* pool, const ExecutorOptions& options,
                                                       Timeline* timeline);

  Status run(const Step& step, LayerObserver& observer) override;
  Status commit(std::span<Request* const> requests) override;
  std::vector<OperatorChoice> choices() const override;
  int64_t weight_bytes() const { return weight_bytes_; }

 private:
  struct Layer {
    LayerWeightsHandle weights;
    kda_tensor state, conv;  // views of the pool
    DeviceBuffer u, kg, count;
    kda_records records{};
  };

  ModelExecutor(const Device& device, const Model& model, const ExecutorOptions& options, Timeline* timeline)
      : device_(device), model_(model), options_(options), spans_(device, timeline) {}

  Status create_plans();
  Status add_layer(const ModelWeights& weights, const kda_state_pool* pool, int32_t number);
  kda_tensor rows(const DeviceBuffer& buffer, int64_t tokens) const;
  void normalise(int64_t tokens);
  void add_residual(int64_t tokens);
  Status run_layer(const StepViews& step, const Layer& layer);

  const Device& device_;
  Model model_;
  ExecutorOptions options_;
  SpanRecorder spans_;
  PlanHandle plan_, commit_;
  StepTables tables_;
  TokenRows rows_;      // the residual stream
  int64_t stride_ = 0;  // of its rows, in elements
  std::vector<Layer> layers_;
  int64_t weight_bytes_ = 0;
  DeviceBuffer x_, y_, out_, workspace_;  // [Tmax, D], [Tmax, HV, V], [Tmax, D]
  std::vector<int32_t> commit_slots_, commit_accepted_, commit_seats_;
};

}  // namespace kda::serve
