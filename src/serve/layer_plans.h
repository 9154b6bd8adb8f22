// The plans of one KDA layer in core mode, and the choices behind them.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "serve/executor.h"
#include "serve/handles.h"
#include "serve/model.h"

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

  int32_t width() const { return 1 + spec; }
  // Most tokens of the recurrent rows of a step.
  int64_t max_recurrent_tokens() const { return std::min(max_batch_tokens, max_requests * width()); }
};

// What a plan chose, under a name of the caller's.
OperatorChoice choice_of(const char* op, const kda_plan* plan);

// The commit of records mode.
Result<PlanHandle> make_commit_plan(kda_context* context, const Model& model, const ExecutorOptions& options);

// Layers differ in weights alone: one set of plans serves them all.
struct LayerPlans {
  PlanHandle conv, prefill, norm, decode_step;
  PlanHandle commit;     // records mode
  size_t workspace = 0;  // bytes that any of their runs needs

  static Result<LayerPlans> create(kda_context* context, const Model& model, const ExecutorOptions& options);
  std::vector<OperatorChoice> choices() const;
};

}  // namespace kda::serve
