// The executor of layer mode: hidden states through whole KDA layers (kda/layer.h), with a residual stream between
// them:
//
//   h = the tokens' hidden rows;   for each layer: x = io(rms_norm(h)), h = io(h + layer(x))
//
// where the sum and the norm before the next layer are one pass (kda/residual_norm.h). Everything of a model that is
// not KDA is left out. With a rank's share of the heads its partial sum is added as if whole. On a device with
// graphs, a step without chunk rows is one graph launch for all layers.
#pragma once

#include <memory>

#include "serve/commits.h"
#include "serve/executor.h"
#include "serve/layer_plans.h"
#include "serve/model_weights.h"
#include "serve/span_recorder.h"
#include "serve/step_graphs.h"
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
  // What a layer reads and gives, dense: x and out [T, D], y [T, HV, V] after the gated norm.
  struct Rows {
    char *x = nullptr, *y = nullptr, *out = nullptr;
  };
  // Memory for them.
  struct RowBuffers {
    DeviceBuffer x, y, out;
    Rows rows() const { return {x.data(), y.data(), out.data()}; }
  };
  struct Layer {
    LayerWeightsHandle weights;
    kda_tensor state, conv;  // views of the pool
    DeviceBuffer u, kg, count;
    kda_records records{};
    RowBuffers graph;  // of steps that are a graph: all layers' rows are looked at after all of them ran
  };

  ModelExecutor(const Device& device, const Model& model, const ExecutorOptions& options, Timeline* timeline)
      : device_(device), model_(model), options_(options), spans_(device, timeline) {}

  Status create_plans();
  Status create_rows(int64_t tokens, kda_memory_kind kind, RowBuffers& out) const;
  Status add_layer(const ModelWeights& weights, const kda_state_pool* pool, int32_t number);
  Status add_records(Layer& layer) const;
  int64_t row_bytes(int64_t elements) const;
  kda_workspace workspace() const { return {workspace_.data(), workspace_.bytes()}; }
  // The residual sum with what the layer before gave (null: the first layer), the norm, and the layer.
  Status run_layer(const StepViews& step, const Layer& layer, const char* before, const Rows& rows) const;
  // All layers of a step without chunk rows, for a graph.
  Status run_recorded(const StepViews& step) const;
  Status run_kda(const StepViews& step, const Layer& layer, const Rows& rows) const;
  // Shows a layer's rows to the observer, on a device those that it wants.
  Status show(const Step& step, const Rows& rows, int32_t number, LayerObserver& observer) const;
  Status show_from_device(const Step& step, const Rows& rows, int32_t number, LayerObserver& observer) const;
  bool wanted(const Step& step, const LayerObserver& observer) const;

  const Device& device_;
  Model model_;
  ExecutorOptions options_;
  SpanRecorder spans_;
  PlanHandle plan_, norm_, commit_;
  StepTables tables_;
  TokenRows rows_;      // the residual stream
  int64_t stride_ = 0;  // of its rows, in elements
  std::vector<Layer> layers_;
  std::vector<CommitLayer> commit_layers_;  // records mode
  StepGraphs graphs_;
  Commits commits_;
  int64_t weight_bytes_ = 0;
  RowBuffers eager_;  // [Tmax] of the layer that runs
  RowBuffers shown_;  // the same in host memory; of a device other than the CPU
  DeviceBuffer workspace_;
};

}  // namespace kda::serve
