// Spans of operators on the device's own clock, for the timeline. Events are taken in the stream's order and read
// once the stream is done.
#pragma once

#include <memory>
#include <vector>

#include "serve/device.h"
#include "serve/timeline.h"

namespace kda::serve {

class SpanRecorder {
 public:
  // `timeline` may be null: nothing is recorded.
  SpanRecorder(const Device& device, Timeline* timeline) : device_(device), timeline_(timeline) {}

  Status start_step(int64_t step);
  // Runs `body` between two events.
  template <class Body>
  Status timed(const char* name, int32_t layer, int64_t tokens, int64_t sequences, const Body& body) {
    if (timeline_ == nullptr) return body();
    KDA_SERVE_TRY(mark());
    KDA_SERVE_TRY(body());
    KDA_SERVE_TRY(mark());
    spans_.push_back({name, 0, 0, step_, layer, tokens, sequences});
    return {};
  }
  // After the stream was waited for: hands the spans to the timeline.
  Status finish_step();

 private:
  struct EventDeleter {
    void operator()(kda_event* event) const { kda_event_destroy(event); }
  };

  Status mark();

  const Device& device_;
  Timeline* timeline_;
  int64_t step_ = 0;
  double base_s_ = 0;  // the host's clock when event 0 was put into an idle stream
  std::vector<std::unique_ptr<kda_event, EventDeleter>> events_;  // reused by every step
  size_t used_ = 0;
  std::vector<Timeline::Span> spans_;  // span i lies between events 1 + 2i and 2 + 2i
};

}  // namespace kda::serve
