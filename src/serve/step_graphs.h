// Steps without chunk rows as graphs of a device that has them: one graph for each number of recurrent rows, in
// strides of kRows, all recorded before the first step. A graph reads tables, token rows and pools where they always
// lie (StepTables), so that a launch does what the step of that moment says.
#pragma once

#include <algorithm>
#include <vector>

#include "serve/span_recorder.h"
#include "serve/step_tables.h"

namespace kda::serve {

class StepGraphs {
 public:
  // `body(views)` puts the work of a step into the device's stream. Nothing is recorded for the CPU.
  template <class Body>
  Status record(const Device& device, const ExecutorOptions& options, StepTables& tables, const Body& body) {
    device_ = &device;
    options_ = options;
    if (device.is_host()) return {};
    const Step nothing;
    for (int64_t rows = 1; rows <= options.max_requests; rows += kRows) {
      StepViews views;
      KDA_SERVE_TRY(tables.place(nothing, padded(rows), tokens_of(rows), views));
      KDA_SERVE_TRY(device.synchronize());
      KDA_SERVE_TRY(from_kda(kda_graph_begin(device.context(), device.stream())));
      const Status status = body(views);
      kda_graph* graph = nullptr;
      const Status ended = from_kda(kda_graph_end(device.context(), device.stream(), &graph));
      if (ended.ok()) graphs_.emplace_back(graph);
      KDA_SERVE_TRY(status);
      KDA_SERVE_TRY(ended);
    }
    return {};
  }

  bool serves(const Step& step) const { return step.chunk.empty() && !graphs_.empty(); }
  // A step that it serves.
  Status launch(const Step& step, StepTables& tables, SpanRecorder& spans) const {
    const auto rows = static_cast<int64_t>(step.recurrent.size());
    StepViews views;
    KDA_SERVE_TRY(tables.place(step, padded(rows), tokens_of(rows), views));
    kda_graph* const graph = graphs_[static_cast<size_t>((rows - 1) / kRows)].get();
    return spans.timed("decode graph", -1, step.tokens, rows,
                       [&] { return from_kda(kda_graph_launch(graph, device_->stream())); });
  }

 private:
  static constexpr int64_t kRows = 16;
  struct Deleter {
    void operator()(kda_graph* graph) const { kda_graph_destroy(graph); }
  };

  int64_t padded(int64_t rows) const { return std::min((rows + kRows - 1) / kRows * kRows, options_.max_requests); }
  int64_t tokens_of(int64_t rows) const {
    return std::min(padded(rows) * options_.width(), options_.max_recurrent_tokens());
  }

  const Device* device_ = nullptr;
  ExecutorOptions options_;
  std::vector<std::unique_ptr<kda_graph, Deleter>> graphs_;  // [i]: of (i + 1) * kRows rows
};

}  // namespace kda::serve
