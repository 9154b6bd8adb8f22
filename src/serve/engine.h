// The serving engine: takes the requests of a trace through admission, steps and completion.
//
// One step: plan (scheduler) -> build (tables, content) -> run (operators) -> complete. Completion publishes the
// snapshots that the step wrote, moves each request on, lets finished ones go and swaps out those that are
// preempted. A step that fails publishes nothing and fails its requests (spec K-7, R-52); the others go on.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "serve/device.h"
#include "serve/executor.h"
#include "serve/scheduler.h"
#include "serve/stats.h"
#include "serve/step_builder.h"
#include "serve/timeline.h"

namespace kda::serve {

struct EngineOptions {
  SchedulerLimits limits;
  int64_t slots = 256;  // requests that may hold state at once
  bool records = false;
  double accept = 0;   // P of drafts
  double preempt = 0;  // P per running request and step
  uint64_t seed = 0;
  bool pace_trace = false;  // keep arrival times
  double speed = 1;
  bool digests = false;
  bool hidden = false;  // layer mode: requests to be verified keep the layers' inputs and outputs
};

class Engine : private Admission, private LayerObserver {
 public:
  // `pool` has room for slots * (1 + S) pages (columns mode) or slots pages (records mode) beside the cache's;
  // `cache` may be null. Everything outlives the engine. `timeline` may be null.
  Engine(const Device& device, const Model& model, const EngineOptions& options, kda_state_pool* pool,
         PrefixCache* cache, const Content& content, Executor& executor, Timeline* timeline);

  // The requests of a trace; `captured` are the indexes, ascending, whose results are kept for verification.
  Status load(const Trace& trace, const std::vector<int64_t>& captured);
  // Runs until all requests are done or `stop` is set. `on_step` (may be empty) is called after each step. An
  // error is one that no request can be blamed for.
  Status run(const std::atomic<bool>& stop, const std::function<void(const Engine&)>& on_step);

  const RunStats& stats() const { return stats_; }
  const std::vector<std::unique_ptr<Request>>& requests() const { return requests_; }  // in arrival order
  const Scheduler& scheduler() const { return scheduler_; }
  const Clock& clock() const { return clock_; }
  // Pages that a request holds: state columns, or one.
  static int32_t pages_per_request(const EngineOptions& options) {
    return options.records ? 1 : 1 + options.limits.spec;
  }

 private:
  bool admit(Request& request) override;
  bool wants(const StepRow& row) const override { return options_.digests || row.request->capture; }
  bool wants_hidden(const StepRow& row) const override { return options_.hidden && row.request->capture; }
  void device_works() override;
  void layer_done(const Step& step, int32_t layer, const char* rows) override;
  void hidden_done(const Step& step, int32_t layer, const char* in, const char* out) override;

  void take_arrivals();
  bool wait_for_arrival(const std::atomic<bool>& stop);
  Status start(Request& request);
  Status resume(Request& request);
  void run_step();
  void record();
  void complete(const Status& status);
  void fail_step(const Status& status);
  void advance_recurrent(const StepRow& row, double now);
  void advance_chunk(const StepRow& row, double now);
  bool preempted(const Request& request) const;
  Status settle();  // commit, then finish or swap out those that leave
  Status finish(Request& request);
  Status swap_out(Request& request);
  Status read_final(Request& request);
  Status read_column(const Request& request, int32_t layer);
  Status read_prompt_end(Request& request);
  void let_go(Request& request);
  kda_state_columns columns(const Request& request) const;
  void update_stats();

  const Device& device_;
  Model model_;
  EngineOptions options_;
  kda_state_pool* pool_;
  PrefixCache* cache_;
  const Content& content_;
  Executor& executor_;
  Timeline* timeline_;
  Clock clock_;
  Scheduler scheduler_;
  StepBuilder builder_;
  Step step_;
  std::vector<std::unique_ptr<Request>> requests_;
  size_t next_arrival_ = 0;
  std::vector<int32_t> free_seats_;
  std::vector<Request*> finishing_, preempted_;  // of the step being completed
  std::vector<Request*> uncommitted_;
  std::vector<kda_tensor> state_views_, conv_views_;
  std::vector<char> final_state_, final_window_;  // of one layer
  Status fault_;
  RunStats stats_;
  int64_t step_used_slots_ = 0;  // while the step ran
  Interval recorded_;            // sums up to the last step in the history
};

}  // namespace kda::serve
