// The executor that runs real operators: per layer conv, prefill and gated norm on the chunk rows, decode_step
// (conv, attention and gated norm in one pass, bits as the chain's, spec L-8) on the recurrent rows, all in place
// on one token buffer. On a device with graphs, a step without chunk rows is one graph launch.
#pragma once

#include <memory>

#include "serve/commits.h"
#include "serve/executor.h"
#include "serve/layer_plans.h"
#include "serve/span_recorder.h"
#include "serve/step_graphs.h"
#include "serve/step_tables.h"
#include "serve/token_rows.h"
#include "serve/weights.h"

namespace kda::serve {

class LayerExecutor : public Executor {
 public:
  // Everything that is passed in must outlive the executor. `timeline` may be null.
  static Result<std::unique_ptr<LayerExecutor>> create(const Device& device, const Model& model,
                                                       const std::vector<LayerWeights>& weights,
                                                       const Content& content, const kda_state_pool* pool,
                                                       const ExecutorOptions& options, Timeline* timeline);

  Status run(const Step& step, LayerObserver& observer) override;
  Status commit(std::span<Request* const> requests) override;
  std::vector<OperatorChoice> choices() const override { return plans_.choices(); }

 private:
  struct Layer {
    kda_tensor state, conv;                 // views of the pool
    DeviceBuffer weights;                   // taps, A_log, dt_bias, norm behind one another
    kda_tensor taps, A_log, dt_bias, norm;  // views of them
    DeviceBuffer u, kg, count;              // records
    kda_records records{};
    DeviceBuffer own_out;
    char* out = nullptr;  // [Tmax, HV, V] after the gated norm
  };
  LayerExecutor(const Device& device, const Model& model, const Content& content, const ExecutorOptions& options,
                Timeline* timeline)
      : device_(device), model_(model), content_(content), options_(options), spans_(device, timeline) {}

  Status create_buffers(const std::vector<LayerWeights>& weights, const kda_state_pool* pool);
  Status add_layer(const LayerWeights& weights, const kda_state_pool* pool, int32_t number);
  Status add_weights(const LayerWeights& weights, Layer& layer);
  Status add_records(Layer& layer);

  // Views of token rows [first, first + tokens).
  kda_tensor raw(int64_t first, int64_t tokens, int64_t part, int64_t heads, int64_t dim) const;
  kda_tensor raw_flat(int64_t tokens, int64_t part, int64_t size) const;
  kda_workspace workspace() const { return {workspace_.data(), workspace_.bytes()}; }

  Status run_recurrent(const StepViews& step, const Layer& layer);
  Status run_recorded(const StepViews& step);
  Status run_conv(const StepViews& step, const Layer& layer);
  Status run_prefill(const StepViews& step, const Layer& layer);
  Status run_norm(const StepViews& step, const Layer& layer);
  Status run_layer(const StepViews& step, const Layer& layer, int32_t number);
  // Brings the rows that the observer wants to the host, and shows them.
  Status show(const Step& step, const Layer& layer, int32_t number, LayerObserver& observer);

  const Device& device_;
  Model model_;
  const Content& content_;
  ExecutorOptions options_;
  SpanRecorder spans_;
  LayerPlans plans_;
  StepTables tables_;
  TokenRows rows_;
  std::vector<Layer> layers_;
  std::vector<CommitLayer> commit_layers_;  // records mode
  StepGraphs graphs_;
  Commits commits_;
  DeviceBuffer post_conv_;  // [Tmax, channels]
  DeviceBuffer attention_;  // [Tmax, HV, V]
  DeviceBuffer out_;        // of every layer on the CPU, which shows a layer's rows before the next one runs
  DeviceBuffer shown_;      // [Tmax, HV, V] in host memory
  DeviceBuffer workspace_;
};

}  // namespace kda::serve
