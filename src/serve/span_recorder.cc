#include "serve/span_recorder.h"

namespace kda::serve {

Status SpanRecorder::mark() {
  if (used_ == events_.size()) {
    kda_event* event = nullptr;
    KDA_SERVE_TRY(from_kda(kda_event_create(device_.context(), &event)));
    events_.emplace_back(event);
  }
  return from_kda(kda_event_record(events_[used_++].get(), device_.stream()));
}

Status SpanRecorder::start_step(int64_t step) {
  if (timeline_ == nullptr) return {};
  step_ = step;
  used_ = 0;
  spans_.clear();
  base_s_ = timeline_->clock().seconds();
  return mark();
}

Status SpanRecorder::finish_step() {
  if (timeline_ == nullptr) return {};
  for (size_t i = 0; i < spans_.size(); ++i) {
    double begin = 0, end = 0;
    KDA_SERVE_TRY(from_kda(kda_event_elapsed(events_[0].get(), events_[1 + 2 * i].get(), &begin)));
    KDA_SERVE_TRY(from_kda(kda_event_elapsed(events_[0].get(), events_[2 + 2 * i].get(), &end)));
    spans_[i].begin_s = base_s_ + begin;
    spans_[i].end_s = base_s_ + end;
    timeline_->add(spans_[i]);
  }
  return {};
}

}  // namespace kda::serve
