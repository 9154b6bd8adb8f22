#include "bench/device_report.h"

#include <fmt/format.h>

#include <kda/kda.hpp>

namespace kda::bench {
namespace {

double micros(const DeviceRounds& rounds, const std::string& label, Mode mode, double q = 0.5) {
  return 1e6 * quantile(rounds.seconds(label, mode), q);
}

// Kernels are judged by graphs; events stand in where there are none (they include what the host leaves between).
Mode judged_by(const DeviceRounds& rounds) {
  for (const DeviceSample& s : rounds.samples) {
    if (s.mode == Mode::kGraph) return Mode::kGraph;
  }
  return Mode::kEvent;
}

// Microseconds that the bytes of a call take at the copy rate; 0: none is named.
double floor_us(const DeviceRounds& rounds, const Variant& v) {
  const double rate = rounds.copy_rate();
  return rate > 0 ? 1e6 * v.floor_bytes / rate : 0;
}

double limit_us(const DeviceRounds& rounds, const Variant& v, const Limit& limit) {
  return limit.floors * floor_us(rounds, v) + limit.microseconds;
}

}  // namespace

const Variant& judged(const Workload& w, const Limit& limit) {
  for (const Variant& v : w.variants) {
    if (v.label == limit.variant) return v;
  }
  return w.variants.front();
}

std::string device_text(kda_device device) {
  auto info = make<kda_device_info>();
  check(kda_device_get_info(device, &info));
  return fmt::format("{}, sm_{}{}, {} multiprocessors, driver {}.{}", info.name, info.compute_major,
                     info.compute_minor, info.multiprocessors, info.driver_version / 1000,
                     info.driver_version % 1000 / 10);
}

void print_device(const Workload& w, const DeviceRounds& rounds, const Limit& limit) {
  fmt::print("\n{}:", w.name);
  for (const auto& [key, value] : w.parameters) fmt::print(" {} {}", key, value);
  fmt::print("; {} ({}); copy rate {:.0f} GB/s\n", w.backend, w.isa, 1e-9 * rounds.copy_rate());
  fmt::print("  {:<20} {:>11} {:>17} {:>10} {:>8} {:>11} {:>11} {:>11}\n", "", "graph us", "5 - 95 %", "floor us",
             "x floor", "event us", "enqueue us", "wall us");
  const Mode judge = judged_by(rounds);
  for (const Variant& v : rounds.variants) {
    const double us = micros(rounds, v.label, judge), floor = floor_us(rounds, v);
    fmt::print(
        "  {:<20} {:>11.2f} {:>17} {:>10} {:>8} {:>11.2f} {:>11.2f} {:>11.2f}\n", v.label, us,
        fmt::format("{:.2f} - {:.2f}", micros(rounds, v.label, judge, 0.05), micros(rounds, v.label, judge, 0.95)),
        floor > 0 ? fmt::format("{:.2f}", floor) : "", floor > 0 ? fmt::format("{:.3f}", us / floor) : "",
        micros(rounds, v.label, Mode::kEvent), micros(rounds, v.label, Mode::kEnqueue),
        micros(rounds, v.label, Mode::kWall));
  }
  if (judge != Mode::kGraph) fmt::print("  the device has no graphs: the first columns are events\n");
  for (const auto& r : w.ratios) {
    const std::vector<double> x = rounds.ratios(r.of, r.over, judge);
    fmt::print("  {:<32} {:>8.3f}   5-95 %: {:.3f} .. {:.3f}, {} rounds\n", r.name, median(x), quantile(x, 0.05),
               quantile(x, 0.95), x.size());
  }
  if (limit.none() || judge != Mode::kGraph) return;
  const Variant& v = judged(w, limit);
  fmt::print("  {}: {:.2f} us, wanted <= {:.2f}: {}\n", v.label, micros(rounds, v.label, judge),
             limit_us(rounds, v, limit), meets(w, rounds, limit) ? "met" : "MISSED");
}

bool meets(const Workload& w, const DeviceRounds& rounds, const Limit& limit) {
  if (limit.none() || judged_by(rounds) != Mode::kGraph) return true;
  const Variant& v = judged(w, limit);
  return micros(rounds, v.label, Mode::kGraph) <= limit_us(rounds, v, limit);
}

Json device_json(const Workload& w, const DeviceRounds& rounds, const Limit& limit) {
  Json j = {{"name", w.name}, {"parameters", Json::object()}, {"backend", w.backend}, {"isa", w.isa}};
  for (const auto& [key, value] : w.parameters) j["parameters"][key] = value;
  const Mode judge = judged_by(rounds);
  j["copy_bytes_per_second"] = rounds.copy_rate();
  j["judged_by"] = mode_name(judge);
  if (!limit.none()) {
    const Variant& v = judged(w, limit);
    j["limit"] = {{"variant", v.label},
                  {"floors", limit.floors},
                  {"microseconds", limit.microseconds},
                  {"limit_us", limit_us(rounds, v, limit)},
                  {"met", meets(w, rounds, limit)}};
  }
  j["variants"] = Json::array();
  for (size_t i = 0; i < rounds.variants.size(); ++i) {
    const Variant& v = rounds.variants[i];
    Json one = {{"label", v.label},
                {"detail", v.detail},
                {"floor_bytes", v.floor_bytes},
                {"floor_us", floor_us(rounds, v)},
                {"calls_in_graph", rounds.calls[i]}};
    for (const Mode mode : kModes) {
      const std::vector<double> x = rounds.seconds(v.label, mode);
      if (!x.empty()) one[std::string(mode_name(mode)) + "_us"] = 1e6 * median(x);
    }
    j["variants"].push_back(std::move(one));
  }
  j["ratios"] = Json::array();
  for (const auto& r : w.ratios) {
    const std::vector<double> x = rounds.ratios(r.of, r.over, judge);
    j["ratios"].push_back({{"name", r.name},
                           {"of", r.of},
                           {"over", r.over},
                           {"median", median(x)},
                           {"p05", quantile(x, 0.05)},
                           {"p95", quantile(x, 0.95)}});
  }
  j["samples"] = Json::array();
  for (const DeviceSample& s : rounds.samples) {
    j["samples"].push_back({{"round", s.round},
                            {"order", s.order},
                            {"mode", mode_name(s.mode)},
                            {"variant", rounds.variants[static_cast<size_t>(s.variant)].label},
                            {"seconds", s.seconds}});
  }
  return j;
}

}  // namespace kda::bench
