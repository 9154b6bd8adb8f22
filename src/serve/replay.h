// kda replay: a trace through the engine, verification, and everything that is reported about it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "serve/engine.h"
#include "serve/layer_executor.h"
#include "serve/model_executor.h"
#include "serve/verify.h"

namespace kda::serve {

struct ReplayOptions {
  std::string trace;
  TraceOptions input;
  std::string mode = "core";  // or layer
  std::string checkpoint;     // layer mode: instead of a named model's seeded weights
  ModelOptions model;
  int64_t max_batch_tokens = 8192, max_requests = 256, slots = 256;
  int threads = 0;  // 0 = all cores
  bool prefix_cache = true;
  int64_t cache_mib = 1024;
  int32_t spec = 0;
  std::string spec_mode = "columns";
  double accept = 0.7;
  double preempt = 0;
  bool batch_invariant = true;
  std::string pace = "max";
  double speed = 1;
  int64_t verify = 4;
  uint64_t seed = 0;
  std::string device = "cpu";
  std::string prefill_backend = "auto";
  std::string backend = "auto";  // of every operator
  bool digests = false;
  bool timeline = false;
};

// Checks options that no file and no model is needed for. INVALID_ARGUMENT names the option.
Status check_options(const ReplayOptions& options);

class Replay {
 public:
  // Reads the trace and prepares model, pool, plans. Whatever fails here is the caller's input.
  static Result<std::unique_ptr<Replay>> prepare(const ReplayOptions& options);

  // Runs the engine. Ends early, and is then incomplete, when `stop` is set.
  Status run(const std::atomic<bool>& stop, const std::function<void(const Engine&)>& on_step);
  // Recomputes the chosen requests; nothing if the run was interrupted.
  Status verify_results(const std::atomic<bool>& stop, const VerifyObserver& observer = {});

  const ReplayOptions& options() const { return options_; }
  const Model& model() const { return model_; }
  const Trace& trace() const { return trace_; }
  const RunStats& stats() const { return engine_->stats(); }
  const VerifyReport& verification() const { return verification_; }
  const Engine& engine() const { return *engine_; }
  // Everything that was asked for was done.
  bool complete() const { return !stats().interrupted && !verify_interrupted_; }
  bool ok() const { return stats().failed == 0 && verification_.ok; }

  std::string digests_text() const;   // one line per finished request, by index
  std::string timeline_text() const;  // Chrome trace
  nlohmann::ordered_json report() const;
  std::string report_text() const;  // of the JSON file: names that are not UTF-8 with U+FFFD in place of odd bytes
  std::string table() const;
  std::string page_text() const;  // of the HTML report: one file, no script, nothing fetched

 private:
  Replay() = default;
  bool layer_mode() const { return options_.mode == "layer"; }
  Status prepare_device();
  Status prepare_model();
  Status prepare_pool();
  Status prepare_content();
  Status prepare_executor(const ExecutorOptions& options);

  ReplayOptions options_;
  int threads_ = 1;
  std::string isa_;
  Trace trace_;
  Model model_;
  std::vector<LayerWeights> weights_;
  std::unique_ptr<Device> device_;
  PoolHandle pool_;
  int64_t page_bytes_ = 0, cache_pages_ = 0;
  std::unique_ptr<Content> content_;
  std::unique_ptr<PrefixCache> cache_;
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<ModelWeights> model_weights_;  // layer mode
  std::unique_ptr<Executor> executor_;
  int64_t weight_bytes_ = 0;
  std::unique_ptr<Engine> engine_;
  VerifyReport verification_;
  bool verify_interrupted_ = false;
};

}  // namespace kda::serve
