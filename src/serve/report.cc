// The JSON report (schema_version counts incompatible changes; fields are only added) and the summary table.
#include <sys/resource.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "serve/replay.h"

namespace kda::serve {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSchemaVersion = 1;

double peak_rss_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024.0;
}

double rate(int64_t tokens, double seconds) { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }

// Null where there is no sample, so that nobody takes 0 ms for a measurement.
Json latency_json(const std::vector<double>& samples) {
  const Percentiles p = percentiles(samples);
  if (p.count == 0)
    return {{"p50", nullptr}, {"p90", nullptr}, {"p99", nullptr}, {"mean", nullptr}, {"max", nullptr}, {"count", 0}};
  return {{"p50", p.p50}, {"p90", p.p90}, {"p99", p.p99}, {"mean", p.mean}, {"max", p.max}, {"count", p.count}};
}

Json choices_json(const std::vector<OperatorChoice>& choices) {
  Json all = Json::object();
  for (const OperatorChoice& c : choices) {
    Json skipped = Json::array();
    for (const auto& s : c.skipped) skipped.push_back({{"candidate", s.candidate}, {"reasons", s.reasons}});
    all[c.op] = {{"backend", c.backend}, {"isa", c.isa}, {"skipped", skipped}};
  }
  return all;
}

// 1234567 as "1,234,567".
std::string grouped(int64_t n) {
  std::string text = std::to_string(n);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) text.insert(static_cast<size_t>(at), ",");
  return text;
}

std::string grouped_rate(int64_t tokens, double seconds) { return grouped(std::llround(rate(tokens, seconds))); }

const char* family_name(kda_gate_family family) { return family == KDA_GATE_BOUNDED ? "bounded" : "softplus"; }

Json device_use_json(const DeviceUse& u, double wall_s) {
  return {{"steps", u.steps},
          {"busy_s", u.busy_s},
          {"gpu_busy", wall_s > 0 ? u.busy_s / wall_s : 0},
          {"wait_s", u.wait_s},
          {"median_wait_us", 1e6 * u.median_wait_s},
          {"longest_wait_us", 1e6 * u.longest_wait_s},
          {"longest_wait_step", u.longest_wait_step},
          {"starved_steps", u.starved_steps},
          {"starved_wait_s", u.starved_wait_s}};
}

Json config_json(const ReplayOptions& o, const Model& m, const Trace& trace, int threads, int64_t page_bytes) {
  return {{"trace", o.trace},
          {"format", trace.format},
          {"mode", o.mode},
          {"checkpoint", o.checkpoint.empty() ? Json(nullptr) : Json(o.checkpoint)},
          {"model", m.name},
          {"heads", m.total_heads},
          {"tp", o.model.tp},
          {"rank_heads", m.heads},
          {"rank_query_heads", m.query_heads},
          {"layers", m.layers},
          {"key_dim", m.key_dim},
          {"value_dim", m.value_dim},
          {"conv_width", m.conv_width},
          {"gate", family_name(m.gate_family)},
          {"lower_bound", m.gate_family == KDA_GATE_BOUNDED ? Json(m.lower_bound) : Json(nullptr)},
          {"io", kda_dtype_name(m.io_dtype)},
          {"pool", kda_dtype_name(m.state_dtype)},
          {"limit", o.input.limit},
          {"skip_bad", o.input.skip_bad},
          {"max_batch_tokens", o.max_batch_tokens},
          {"max_requests", o.max_requests},
          {"slots", o.slots},
          {"page_bytes", page_bytes},
          {"threads", threads},
          {"device", o.device},
          {"prefix_cache", o.prefix_cache},
          {"cache_mib", o.cache_mib},
          {"spec", o.spec},
          {"spec_mode", o.spec_mode},
          {"accept", o.accept},
          {"preempt", o.preempt},
          {"batch_invariant", o.batch_invariant},
          {"pace", o.pace},
          {"speed", o.speed},
          {"verify", o.verify},
          {"seed", o.seed},
          {"backend", o.backend},
          {"prefill_backend", o.prefill_backend}};
}

// Finite numbers only: JSON has no infinity.
Json number(double x) { return x < 1e300 ? Json(x) : Json("inf"); }

Json verify_json(const VerifyReport& v) {
  Json worst = Json::array();
  for (const RequestError& e : v.errors) {
    worst.push_back({{"request", e.index},
                     {"rel_l2_out", number(e.rel_out)},
                     {"rel_l2_out_head", number(e.out.worst_head)},
                     {"rel_l2_out_row", number(e.out.worst_row)},
                     {"worst_head", e.out.row_at.head},
                     {"worst_token", e.out.row_at.token},
                     {"rel_l2_state", number(e.rel_state)},
                     {"rel_l2_state_head", number(e.state.worst_head)},
                     {"window_equal", e.window_equal}});
  }
  return {{"requests", v.requests},
          {"max_rel_l2_out", number(v.max_rel_l2_out)},
          {"max_rel_l2_state", number(v.max_rel_l2_state)},
          {"tolerance", v.tolerance.out},
          {"tolerance_state", v.tolerance.state},
          {"ok", v.requests > 0 ? Json(v.ok) : Json(nullptr)},  // null: nothing was verified
          {"seconds", v.seconds},
          {"failures", v.failures},
          {"errors", worst}};
}

}  // namespace

Json Replay::report() const {
  const RunStats& s = stats();
  Json j = Json::object();  // a null that becomes an object does not survive that there is no memory for one
  j["schema_version"] = kSchemaVersion;
  j["complete"] = complete();
  j["build"] = {{"version", kda_version_string()}, {"source_hash", kda_source_hash()}};
  j["config"] = config_json(options_, model_, trace_, threads_, page_bytes_);
  if (layer_mode()) {
    j["layer_mode"] = {{"hidden", model_.hidden},
                       {"weight_bytes", weight_bytes_},
                       {"weights", options_.checkpoint.empty() ? "seeded" : "checkpoint"},
                       {"layer_input", "RMS-normalised residual stream, weight 1"},
                       {"left_out", "everything that is not KDA"},
                       {"partial_sum", options_.model.tp > 1 ? "a rank's, added as if whole" : "none"}};
  }
  j["requests"] = {
      {"total", s.total}, {"finished", s.finished}, {"failed", s.failed}, {"skipped_lines", trace_.skipped}};
  if (!s.first_failure.empty()) j["requests"]["first_failure"] = s.first_failure;
  j["tokens"] = {{"prompt", s.prompt},   {"cached", s.cached},   {"prefilled", s.prefilled},
                 {"decoded", s.decoded}, {"drafted", s.drafted}, {"accepted", s.accepted}};
  j["verify"] = verify_json(verification_);
  j["time"] = {{"wall_s", s.wall_s},
               {"operators_s", s.model_s},
               {"prefill_tokens_per_s", rate(s.prefilled, s.wall_s)},
               {"decode_tokens_per_s", rate(s.decoded, s.wall_s)},
               {"total_tokens_per_s", rate(s.prefilled + s.decoded, s.wall_s)}};
  const bool has_spans = timeline_ != nullptr && !device_->is_host();
  j["device_use"] = has_spans ? device_use_json(timeline_->device_use(), s.wall_s) : Json(nullptr);
  j["latency"] = {{"ttft_from", options_.pace == "trace" ? "arrival" : "admission"},
                  {"ttft_ms", latency_json(s.ttft_ms)},
                  {"tpot_ms", latency_json(s.tpot_ms)}};
  j["steps"] = {
      {"count", s.steps},
      {"mixed", s.mixed_steps},
      {"mean_tokens", s.steps > 0 ? static_cast<double>(s.step_tokens) / static_cast<double>(s.steps) : 0.0},
      {"chunk_rows", s.chunk_rows},
      {"recurrent_rows", s.recurrent_rows}};
  j["pool"] = {{"slots", s.slots}, {"peak_used", s.peak_used}, {"preemptions", s.preemptions}};
  j["cache"] = {{"blocks", s.cache_blocks},      {"peak_blocks", s.cache_peak_blocks},
                {"capacity", s.cache_capacity},  {"lookups", s.cache_lookups},
                {"hits", s.cache_hits},          {"published", s.cache_published},
                {"evictions", s.cache_evictions}};
  j["choices"] = choices_json(executor_->choices());
  j["isa"] = isa_;
  j["memory"] = {{"peak_rss_mib", peak_rss_mib()}};
  return j;
}

std::string Replay::report_text() const {
  return report().dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string Replay::table() const {
  const RunStats& s = stats();
  const VerifyReport& v = verification_;
  const Percentiles ttft = percentiles(s.ttft_ms), tpot = percentiles(s.tpot_ms);
  std::string t;
  const auto line = [&t](const char* name, const std::string& value) {
    t += fmt::format("  {:<14}{}\n", name, value);
  };
  t += fmt::format("kda replay {}, {} mode, model {} ({} heads, {} layer{}, {} io, {} pool), {} thread{}, {}{}\n",
                   options_.trace, options_.mode, model_.name, model_.heads, model_.layers,
                   model_.layers == 1 ? "" : "s", kda_dtype_name(model_.io_dtype), kda_dtype_name(model_.state_dtype),
                   threads_, threads_ == 1 ? "" : "s", isa_, complete() ? "" : "  INCOMPLETE");
  if (layer_mode()) {
    line("layers",
         fmt::format(
             "whole KDA layers, {} weights ({:.1f} MiB); inputs RMS-normalised with weight 1; everything else of "
             "the model left out{}",
             options_.checkpoint.empty() ? "seeded" : "the checkpoint's",
             static_cast<double>(weight_bytes_) / 1048576.0,
             options_.model.tp > 1 ? "; a rank's partial sum added as if whole" : ""));
  }
  line("requests", fmt::format("{} of {} finished, {} failed", s.finished, s.total, s.failed));
  line("prompt", fmt::format("{} tokens: {} from the cache, {} prefilled", grouped(s.prompt), grouped(s.cached),
                             grouped(s.prefilled)));
  line("decoded", options_.spec > 0 ? fmt::format("{} tokens; {} of {} drafts accepted", grouped(s.decoded),
                                                  grouped(s.accepted), grouped(s.drafted))
                                    : grouped(s.decoded) + " tokens");
  line("time", fmt::format("{:.2f} s in {} steps: {} prefill and {} decode tokens/s", s.wall_s, grouped(s.steps),
                           grouped_rate(s.prefilled, s.wall_s), grouped_rate(s.decoded, s.wall_s)));
  if (ttft.count > 0) {
    line("first token", fmt::format("p50 {:.2f}  p90 {:.2f}  p99 {:.2f} ms from {}", ttft.p50, ttft.p90, ttft.p99,
                                    options_.pace == "trace" ? "arrival" : "admission"));
  }
  if (tpot.count > 0) {
    line("per token", fmt::format("p50 {:.3f}  p90 {:.3f}  p99 {:.3f} ms", tpot.p50, tpot.p90, tpot.p99));
  }
  line("pool", fmt::format("{} of {} slots at most, {} preemptions", s.peak_used, s.slots, s.preemptions));
  line("cache", cache_ ? fmt::format("{} of {} blocks, {} hits in {} lookups, {} evictions", s.cache_blocks,
                                     s.cache_capacity, s.cache_hits, s.cache_lookups, s.cache_evictions)
                       : "off");
  line("memory", fmt::format("{:.0f} MiB at most", peak_rss_mib()));
  for (const OperatorChoice& c : executor_->choices()) {
    std::string skipped;
    for (const auto& k : c.skipped) {
      // Candidates of another device are no news; the JSON report has them.
      if (!k.reasons.empty() && k.reasons[0].starts_with("device_type:")) continue;
      skipped += fmt::format("; passed over {}: {}", k.candidate, fmt::join(k.reasons, ", "));
    }
    line(c.op.c_str(), fmt::format("{} ({}){}", c.backend, c.isa, skipped));
  }
  if (v.requests > 0) {
    line("verify", fmt::format("{}: {} requests against the fp64 oracle in {:.1f} s, error at most {:.2e} out (limit "
                               "{:.1e}), {:.2e} state (limit {:.1e})",
                               v.ok ? "ok" : "FAILED", v.requests, v.seconds, v.max_rel_l2_out, v.tolerance.out,
                               v.max_rel_l2_state, v.tolerance.state));
    for (size_t i = 0; i < v.failures.size() && i < 5; ++i) line("", v.failures[i]);
  } else {
    line("verify", "nothing was verified");
  }
  return t;
}

}  // namespace kda::serve
