#include "bench/device_rounds.h"

#include <kda/device.h>

#include <algorithm>
#include <chrono>
#include <kda/kda.hpp>
#include <memory>

namespace kda::bench {
namespace {

class Stream {
 public:
  explicit Stream(const kda_context* context) : context_(context) { check(kda_stream_create(context, &stream_)); }
  ~Stream() { (void)kda_stream_destroy(context_, stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void wait() const { check(kda_stream_synchronize(context_, stream_)); }
  void* get() const { return stream_; }

 private:
  const kda_context* context_;
  void* stream_ = nullptr;
};

struct Event {
  explicit Event(const kda_context* context) { check(kda_event_create(context, &event)); }
  ~Event() { kda_event_destroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  kda_event* event = nullptr;
};

using Graph = std::unique_ptr<kda_graph, void (*)(kda_graph*)>;

Graph record(const kda_context* context, const Variant& v, int calls, const Stream& stream) {
  kda_graph* graph = nullptr;
  check(kda_graph_begin(context, stream.get()));
  for (int i = 0; i < calls; ++i) v.call(i, stream.get());
  check(kda_graph_end(context, stream.get(), &graph));
  return {graph, kda_graph_destroy};
}

class Measure {
 public:
  Measure(const kda_context* context, DeviceRounds& rounds)
      : rounds_(rounds), stream_(context), begin_(context), end_(context) {
    kda_graph* none = nullptr;
    has_graphs_ = kda_graph_begin(context, stream_.get()) == KDA_OK;
    if (!has_graphs_) return;
    if (kda_graph_end(context, stream_.get(), &none) == KDA_OK) kda_graph_destroy(none);
    for (size_t i = 0; i < rounds.variants.size(); ++i)
      graphs_.push_back(record(context, rounds.variants[i], rounds.calls[i], stream_));
  }

  bool has(Mode mode) const { return mode != Mode::kGraph || has_graphs_; }

  double seconds(Mode mode, size_t variant) {
    const Variant& v = rounds_.variants[variant];
    stream_.wait();
    if (mode == Mode::kGraph) {
      return between_events([&] { check(kda_graph_launch(graphs_[variant].get(), stream_.get())); }) /
             rounds_.calls[variant];
    }
    const int64_t number = next_++;
    if (mode == Mode::kEvent) return between_events([&] { v.call(number, stream_.get()); });
    const auto start = std::chrono::steady_clock::now();
    v.call(number, stream_.get());
    if (mode == Mode::kWall) stream_.wait();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    return time.count();
  }
  void wait() const { stream_.wait(); }

 private:
  template <class F>
  double between_events(const F& f) {
    check(kda_event_record(begin_.event, stream_.get()));
    f();
    check(kda_event_record(end_.event, stream_.get()));
    stream_.wait();
    double time = 0;
    check(kda_event_elapsed(begin_.event, end_.event, &time));
    return time;
  }

  DeviceRounds& rounds_;
  Stream stream_;
  Event begin_, end_;
  bool has_graphs_ = false;
  std::vector<Graph> graphs_;
  int64_t next_ = 0;
};

}  // namespace

const char* mode_name(Mode mode) {
  switch (mode) {
    case Mode::kGraph: return "graph";
    case Mode::kEvent: return "event";
    case Mode::kEnqueue: return "enqueue";
    case Mode::kWall: return "wall";
  }
  return "";
}

int calls_of(double bytes) {
  const double seconds = bytes / 4.2e12;
  return seconds > 0 ? static_cast<int>(std::clamp(1.5e-3 / seconds, 4.0, 100.0)) : 100;
}

std::vector<double> DeviceRounds::seconds(const std::string& label, Mode mode) const {
  std::vector<double> found;
  for (const DeviceSample& s : samples) {
    if (s.mode == mode && variants[static_cast<size_t>(s.variant)].label == label) found.push_back(s.seconds);
  }
  return found;
}

std::vector<double> DeviceRounds::ratios(const std::string& of, const std::vector<std::string>& over,
                                         Mode mode) const {
  const auto rates = [&](const std::string& label) {
    std::vector<double> x = seconds(label, mode);
    for (const Variant& v : variants) {
      if (v.label != label) continue;
      for (double& second : x) second = v.work / second;
    }
    return x;
  };
  std::vector<double> best;
  for (const std::string& label : over) {
    const std::vector<double> x = rates(label);
    best.resize(std::max(best.size(), x.size()), 0);
    for (size_t i = 0; i < x.size(); ++i) best[i] = std::max(best[i], x[i]);
  }
  std::vector<double> result = rates(of);
  result.resize(std::min(result.size(), best.size()));
  for (size_t i = 0; i < result.size(); ++i) result[i] /= best[i];
  return result;
}

double DeviceRounds::copy_rate() const {
  double best = 0;
  for (const Variant& v : variants) {
    if (v.label.rfind("copy rate", 0) != 0) continue;
    for (const Mode mode : {Mode::kGraph, Mode::kEvent}) {
      const double time = median(seconds(v.label, mode));
      if (time <= 0) continue;
      best = std::max(best, v.work / time);
      break;
    }
  }
  return best;
}

DeviceRounds run_device_rounds(const kda_context* context, const std::vector<Variant>& variants,
                               const RoundOptions& options, const std::vector<Mode>& modes) {
  DeviceRounds rounds;
  rounds.variants = variants;
  for (const Variant& v : variants) rounds.calls.push_back(calls_of(v.floor_bytes));
  // Work before the recording: whatever a first call prepares, it does now.
  const Stream first(context);
  for (const Variant& v : variants) v.call(0, first.get());
  first.wait();
  Measure measure(context, rounds);
  std::mt19937_64 engine(options.seed);
  std::vector<int> order(variants.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  for (int round = -options.warmup; round < options.rounds; ++round) {
    for (const Mode mode : modes) {
      if (!measure.has(mode)) continue;
      shuffle(order, engine);
      for (size_t at = 0; at < order.size(); ++at) {
        const double time = measure.seconds(mode, static_cast<size_t>(order[at]));
        if (round >= 0) rounds.samples.push_back({round, static_cast<int>(at), order[at], mode, time});
      }
      measure.wait();
    }
  }
  return rounds;
}

}  // namespace kda::bench
