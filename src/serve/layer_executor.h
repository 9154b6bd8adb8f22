// The executor that runs real operators: per layer conv, prefill and gated norm on the chunk rows, decode_step
// (conv, attention and gated norm in one pass, bits as the chain's, spec L-8) on the recurrent rows, all in place
// on one token buffer.
#pragma once

#include <memory>

#include "serve/executor.h"
#include "serve/handles.h"
#include "serve/timeline.h"
#include "serve/weights.h"

namespace kda::serve {

struct ExecutorOptions {
  int64_t max_batch_tokens = 8192, max_requests = 256;
  int32_t spec = 0;
  bool records = false;
  int64_t seats = 0;            // records mode: rows of the records
  int32_t max_checkpoints = 0;  // Ck, 0 = no prefix cache
  bool batch_invariant = true;
  std::string prefill_backend = "auto";
  std::string backend = "auto";  // of everything else; tests name "reference"
};

class LayerExecutor : public Executor {
 public:
  // Everything that is passed in must outlive the executor. `timeline` may be null.
  static Result<std::unique_ptr<LayerExecutor>> create(kda_context* context, const Model& model,
                                                       const std::vector<LayerWeights>& weights,
                                                       const Content& content, const kda_state_pool* pool,
                                                       const ExecutorOptions& options, Timeline* timeline);

  Status run(const Step& step, LayerObserver& observer) override;
  Status commit(std::span<Request* const> requests) override;
  std::vector<OperatorChoice> choices() const override;

 private:
  struct Layer {
    kda_tensor state, conv;                 // views of the pool
    kda_tensor taps, A_log, dt_bias, norm;  // of the weights
    Buffer u, kg, count;                    // records
    kda_records records{};
  };

  LayerExecutor(const kda_context* context, const Model& model, const Content& content,
                const ExecutorOptions& options, Timeline* timeline)
      : context_(context), model_(model), content_(content), options_(options), timeline_(timeline) {}

  Status create_plans(kda_context* context);
  Status create_buffers(const std::vector<LayerWeights>& weights, const kda_state_pool* pool);
  Status add_layer(const LayerWeights& weights, const kda_state_pool* pool, int32_t number);
  kda_attention_spec attention() const;
  uint32_t flags() const;

  // Views of the step's raw rows [0, tokens).
  kda_tensor raw(int64_t tokens, int64_t part, int64_t heads, int64_t dim) const;
  kda_tensor raw_flat(int64_t tokens, int64_t part, int64_t size) const;
  Status run_recurrent(const Step& step, const Layer& layer);
  Status run_conv(const Step& step, const Layer& layer);
  Status run_prefill(const Step& step, const Layer& layer);
  Status run_norm(const Step& step, const Layer& layer);
  // Runs `body` and notes its span.
  template <class Body>
  Status timed(const char* name, const Step& step, int32_t layer, int64_t tokens, size_t sequences, const Body& body);

  const kda_context* context_;
  Model model_;
  const Content& content_;
  ExecutorOptions options_;
  Timeline* timeline_;
  PlanHandle conv_, prefill_, norm_, decode_, commit_;
  std::vector<Layer> layers_;
  Buffer raw_;        // [Tmax, row stride]: the token rows, as a fused projection would leave them
  Buffer post_conv_;  // [Tmax, channels]
  Buffer attention_;  // [Tmax, HV, V]
  Buffer out_;        // [Tmax, HV, V] after the gated norm
  Buffer workspace_;
  std::vector<int32_t> commit_slots_, commit_accepted_, commit_seats_;
};

}  // namespace kda::serve
