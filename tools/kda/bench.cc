// kda bench: operators beside what the machine itself can do, in the same shuffled rounds; raw samples kept.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <kda/kda.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/device_report.h"
#include "bench/targets.h"
#include "bench/workload.h"
#include "json_output.h"
#include "problem.h"
#include "values.h"
#include "verb.h"

namespace kda::tools {
namespace {

using bench::Rounds;
using bench::Workload;

struct Options {
  std::vector<std::string> what;
  std::string backend = "auto", device = "cpu";
  int threads = 0;
  bench::RoundOptions rounds;
  std::optional<int64_t> heads, tokens, sequences, rows, key_dim, value_dim, width;
  kda_dtype io = KDA_DTYPE_NONE, state = KDA_DTYPE_NONE;
  kda_gate_family gate = KDA_GATE_SOFTPLUS;
  bool ds = false, columns = false, dense = false, batch_invariant = false, int64 = false, flags = false,
       records = false;
  std::string filter;
  std::vector<int> modes;  // of a device; none: all
  JsonOutput json;
  const CLI::App* verb = nullptr;
};

// "cpu" is what the CPU is judged by: prefill and decode.
// "targets": what kernels on a device are held to. The others are workloads.
const char* const kNames[] = {"cpu",  "all",      "targets", "prefill",    "decode",  "decode_step",
                              "copy", "metadata", "conv",    "gated_norm", "segments"};

template <class T>
void set(T& value, const std::optional<int64_t>& option) {
  if (option) value = *option;
}
void set(kda_dtype& value, kda_dtype option) {
  if (option != KDA_DTYPE_NONE) value = option;
}

// One workload of a call. The shapes of `cpu` give way to the options.
struct Item {
  std::string name;
  int64_t heads = 0, tokens = 0;  // 0: the workload's own
};

Workload make_workload(const Item& item, const Options& o, const bench::Setting& setting) {
  const std::string& name = item.name;
  if (name == "prefill") {
    bench::PrefillShape s;
    if (setting.on_device()) s.heads = 32, s.tokens = 8192, s.io = KDA_BF16;
    if (item.heads > 0) s.heads = item.heads, s.tokens = item.tokens;
    set(s.heads, o.heads), set(s.tokens, o.tokens), set(s.sequences, o.sequences);
    set(s.key_dim, o.key_dim), set(s.value_dim, o.value_dim), set(s.io, o.io);
    s.gate = o.gate;
    s.batch_invariant = o.batch_invariant;
    return bench::prefill(setting, s);
  }
  if (name == "decode" || name == "decode_step") {
    bench::DecodeShape s;
    set(s.heads, o.heads), set(s.sequences, o.sequences), set(s.width, o.width);
    set(s.key_dim, o.key_dim), set(s.value_dim, o.value_dim), set(s.io, o.io), set(s.state, o.state);
    s.step = name == "decode_step";
    s.records = o.records;
    return bench::decode(setting, s);
  }
  if (name == "copy") {
    bench::CopyShape s;
    set(s.rows, o.rows), set(s.heads, o.heads), set(s.state, o.state);
    s.gapped = !o.dense;
    s.flags = o.flags;
    s.index = o.int64 ? KDA_INT64 : KDA_INT32;
    return bench::copy(setting, s);
  }
  if (name == "metadata") {
    bench::MetadataShape s;
    set(s.sequences, o.sequences), set(s.width, o.width);
    return bench::metadata(setting, s);
  }
  if (name == "conv") {
    bench::ConvShape s;
    set(s.heads, o.heads), set(s.tokens, o.tokens), set(s.sequences, o.sequences), set(s.io, o.io);
    s.layout = o.ds ? KDA_CONV_DS : KDA_CONV_SD;
    s.columns = o.columns;
    return bench::conv(setting, s);
  }
  if (name == "segments") {
    bench::SegmentShape s;
    if (!setting.on_device()) s.tokens = 4096;
    set(s.heads, o.heads), set(s.tokens, o.tokens), set(s.segments, o.sequences);
    s.gate = o.gate;
    return bench::segments(setting, s);
  }
  bench::NormShape s;
  set(s.heads, o.heads), set(s.tokens, o.tokens), set(s.io, o.io);
  return bench::gated_norm(setting, s);
}

struct Done {
  Workload workload;
  Rounds rounds;
};

// Somebody else's work on the same cores shows as a product that did not get them (design: the sgemm rate is void
// then).
std::string disturbance(const Done& d, int threads) {
  for (const auto& v : d.workload.variants) {
    if (v.label.rfind("sgemm", 0) != 0) continue;
    const double share = d.rounds.core_share(v.label, threads);
    if (share < 0.9) {
      return fmt::format("void: another load ran; {} had {:.0f} % of its {} threads", v.label, 100 * share, threads);
    }
  }
  return "";
}

void print(const Done& d, int threads) {
  const Workload& w = d.workload;
  fmt::print("\n{}:", w.name);
  for (const auto& [key, value] : w.parameters) fmt::print(" {} {}", key, value);
  fmt::print("; {} ({}), {} threads\n", w.backend, w.isa, threads);
  for (const auto& v : w.variants) {
    const std::vector<double> rates = d.rounds.rates(v.label);
    fmt::print("  {:<28} {:>16}   best {:>16}   {}\n", v.label, bench::rate_text(bench::median(rates), v.unit),
               bench::rate_text(bench::quantile(rates, 1), v.unit), v.detail);
  }
  if (w.tokens > 0) {
    const bench::Variant& v = w.variants.front();
    const double runs = bench::median(d.rounds.rates(v.label)) / v.work;
    fmt::print("  {:<28} {:>16.0f} tokens/s, {:.3f} ms a run\n", "", runs * static_cast<double>(w.tokens),
               1e3 / runs);
  }
  for (const auto& r : w.ratios) {
    const std::vector<double> ratios = d.rounds.ratios(r.of, r.over);
    fmt::print("  {:<28} {:>16.3f}   5-95 %: {:.3f} .. {:.3f}, {} rounds\n", r.name, bench::median(ratios),
               bench::quantile(ratios, 0.05), bench::quantile(ratios, 0.95), ratios.size());
  }
  for (const std::string& note : w.notes) fmt::print("  not there: {}\n", note);
  const std::string disturbed = disturbance(d, threads);
  if (!disturbed.empty()) fmt::print("  {}\n", disturbed);
}

const char* unit_name(bench::Unit unit) {
  return unit == bench::Unit::kFlop ? "FLOP" : unit == bench::Unit::kByte ? "byte" : "call";
}

Json to_json(const Done& d, int threads) {
  const Workload& w = d.workload;
  Json j = {{"name", w.name}, {"parameters", Json::object()}, {"backend", w.backend}, {"isa", w.isa}};
  for (const auto& [key, value] : w.parameters) j["parameters"][key] = value;
  j["variants"] = Json::array();
  for (const auto& v : w.variants) {
    j["variants"].push_back({{"label", v.label},
                             {"detail", v.detail},
                             {"work", v.work},
                             {"unit", unit_name(v.unit)},
                             {"median_rate", bench::median(d.rounds.rates(v.label))}});
  }
  j["ratios"] = Json::array();
  for (const auto& r : w.ratios) {
    const std::vector<double> ratios = d.rounds.ratios(r.of, r.over);
    j["ratios"].push_back({{"name", r.name},
                           {"of", r.of},
                           {"over", r.over},
                           {"median", bench::median(ratios)},
                           {"p05", bench::quantile(ratios, 0.05)},
                           {"p95", bench::quantile(ratios, 0.95)}});
  }
  j["samples"] = Json::array();
  for (const auto& s : d.rounds.samples) {
    j["samples"].push_back({{"round", s.round},
                            {"order", s.order},
                            {"variant", w.variants[static_cast<size_t>(s.variant)].label},
                            {"seconds", s.seconds},
                            {"cpu_seconds", s.cpu_seconds}});
  }
  j["notes"] = w.notes;
  const std::string disturbed = disturbance(d, threads);
  if (!disturbed.empty()) j["void"] = disturbed;
  return j;
}

// `cpu`: prefill at few and many heads, short and long, unless the options name a shape; and decode. `all`: every
// one.
std::vector<Item> chosen(const Options& o) {
  std::vector<Item> list;
  const char* const usual = o.device == "cpu" ? "cpu" : "all";
  for (const std::string& name : o.what.empty() ? std::vector<std::string>{usual} : o.what) {
    if (name == "all") {
      for (auto* each = std::begin(kNames) + 3; each != std::end(kNames); ++each) list.push_back({*each});
    } else if (name != "cpu") {
      list.push_back({name});
    } else if (o.heads || o.tokens) {
      list.insert(list.end(), {{"prefill"}, {"decode"}});
    } else {
      list.insert(
          list.end(),
          {{"prefill", 8, 2048}, {"prefill", 8, 8192}, {"prefill", 32, 2048}, {"prefill", 32, 8192}, {"decode"}});
    }
  }
  return list;
}

// Every option that says what is measured; the rest of the document is what came of it.
Json head(const Options& o) {
  return {{"schema_version", 1},
          {"build", build_json()},
          {"options", o.verb->config_to_str()},
          {"seed", o.rounds.seed},
          {"rounds", o.rounds.rounds}};
}

int run_on_cpu(const Options& o) {
  for (const std::string& name : o.what) {
    if (name == "targets") throw UsageError("what: targets are of a device; wanted with --device cuda");
  }
  double load = 0;
  (void)getloadavg(&load, 1);
  const Context context(static_cast<int32_t>(o.threads));
  const int threads = context.num_threads();
  const bench::Setting setting{context, bench::Workers(context), o.backend};
  const bool text = !o.json.to_stdout();
  if (text) {
    fmt::print("libkda {} (sources {}), instruction set {}, {} threads, seed {}, load average {:.2f}\n",
               kda_version_string(), kda_source_hash(), context.isa(), threads, o.rounds.seed, load);
  }
  Json json = head(o);
  json["isa"] = context.isa();
  json["threads"] = threads;
  json["load_average"] = load;
  json["clock"] = o.rounds.cpu_time ? "process CPU time" : "wall";
  json["benches"] = Json::array();
  for (const Item& item : chosen(o)) {
    Done d{make_workload(item, o, setting), {}};
    d.rounds = bench::run_rounds(d.workload.variants, o.rounds);
    if (text) print(d, threads);
    json["benches"].push_back(to_json(d, threads));
  }
  o.json.write(json);
  return kDone;
}

std::vector<bench::Mode> modes_of(const Options& o) {
  if (o.modes.empty()) return {std::begin(bench::kModes), std::end(bench::kModes)};
  std::vector<bench::Mode> modes;
  for (const int mode : o.modes) modes.push_back(static_cast<bench::Mode>(mode));
  return modes;
}

// `targets` is a list of its own; any other word is a workload that is held to nothing.
std::vector<bench::Target> chosen_on_device(const Options& o) {
  std::vector<bench::Target> list;
  for (const Item& item : chosen(o)) {
    if (item.name == "targets") {
      for (bench::Target& t : bench::targets(o.filter)) list.push_back(std::move(t));
    } else {
      list.push_back({"", [item, &o](const bench::Setting& s) { return make_workload(item, o, s); }, {}});
    }
  }
  if (list.empty()) throw UsageError(fmt::format("--filter: no target's name contains {}", o.filter));
  return list;
}

int run_on_device(const Options& o) {
  if (o.rounds.cpu_time) throw UsageError("--cpu-time: wanted with --device cpu");
  auto options = make<kda_context_options>();
  options.device = {KDA_CUDA, 0};
  const Context context(options);
  const bench::Setting setting{context, bench::Workers(context), o.backend, options.device};
  const bool text = !o.json.to_stdout();
  if (text) {
    fmt::print("libkda {} (sources {}), {}, seed {}\n", kda_version_string(), kda_source_hash(),
               bench::device_text(options.device), o.rounds.seed);
  }
  Json json = head(o);
  json["device"] = bench::device_text(options.device);
  json["benches"] = Json::array();
  const std::vector<bench::Variant> rates = bench::copy_rate_variants(setting);
  int held = 0, missed = 0;
  for (const bench::Target& target : chosen_on_device(o)) {
    const Workload workload = target.make(setting);
    std::vector<bench::Variant> variants = workload.variants;
    variants.insert(variants.end(), rates.begin(), rates.end());
    const bench::DeviceRounds rounds = bench::run_device_rounds(context.get(), variants, o.rounds, modes_of(o));
    if (text) bench::print_device(workload, rounds, target.limit);
    Json one = bench::device_json(workload, rounds, target.limit);
    if (!target.name.empty()) one["target"] = target.name;
    json["benches"].push_back(std::move(one));
    held += target.limit.none() ? 0 : 1;
    missed += bench::meets(workload, rounds, target.limit) ? 0 : 1;
  }
  if (text && held > 0) fmt::print("\n{} of {} targets missed\n", missed, held);
  o.json.write(json);
  return kDone;
}

int run(const Options& o) {
  o.json.check();
  return o.device == "cpu" ? run_on_cpu(o) : run_on_device(o);
}

void add_modes(CLI::App& verb, Options& o) {
  std::map<std::string, int> names;
  for (const bench::Mode mode : bench::kModes) names[bench::mode_name(mode)] = static_cast<int>(mode);
  CLI::Option* const option =
      verb.add_option("--modes", o.modes, "Ways of timing on a device, several by commas (default: all)");
  option->delimiter(',');
  set_names(*option, std::move(names));
}

void add_shape_options(CLI::App& verb, Options& o) {
  constexpr int64_t kMost = int64_t{1} << 30;
  verb.add_option("--heads", o.heads, "H")->check(whole(1, kMost));
  verb.add_option("--tokens", o.tokens, "T, of prefill, conv, gated_norm")->check(whole(1, kMost));
  verb.add_option("--sequences", o.sequences, "N; of segments, how many are merged")->check(whole(1, kMost));
  verb.add_option("--rows", o.rows, "Rows of a copy")->check(whole(1, kMost));
  verb.add_option("--key-dim", o.key_dim, "K")->check(whole(1, kMost));
  verb.add_option("--value-dim", o.value_dim, "V")->check(whole(1, kMost));
  verb.add_option("--width", o.width, "1 + drafts, of decode, decode_step and metadata")->check(whole(1, kMost));
  add_dtype(verb, "--io", o.io, "dtype of activations (default: fp32 for prefill, else bf16)");
  add_dtype(verb, "--state-dtype", o.state, "dtype of the recurrent pool (default fp32)");
  add_gate_family(verb, o.gate, "gate of prefill (default softplus)");
  verb.add_flag("--ds", o.ds, "conv: column-fastest windows");
  verb.add_flag("--records", o.records,
                "decode: verify in recover mode, the window before committed in the same call");
  verb.add_flag("--columns", o.columns, "conv: one token a row");
  verb.add_flag("--dense", o.dense, "copy: rows side by side instead of in larger pages");
  verb.add_flag("--int64", o.int64, "copy: indices of 64 bits");
  verb.add_flag("--flags", o.flags, "copy: gather with has_initial_state");
  verb.add_flag("--batch-invariant", o.batch_invariant, "prefill: bits that depend on nothing but the sequence");
}

}  // namespace

std::function<int()> add_bench(CLI::App& app) {
  CLI::App* const verb = app.add_subcommand(
      "bench",
      "Measure operators in paired, shuffled rounds beside what the machine itself can do: sgemm, copy and scale "
      "rates of "
      "the CPU; on a device its copy rate, in graphs, between events, until a call returns and until it is done");
  auto o = std::make_shared<Options>();
  o->verb = verb;
  verb->add_option(
          "what", o->what,
          "cpu (prefill and decode; the default there), all (the default on a device), targets (what kernels "
          "on a device are held to), prefill, decode, decode_step, copy, metadata, conv, gated_norm, segments")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kNames), std::end(kNames))));
  verb->add_option("--backend", o->backend, "auto, portable, fused or reference");
  verb->add_option("--device", o->device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  verb->add_option("--threads", o->threads, "Threads (default: all cores)")->check(whole(0, kMostThreads));
  verb->add_option("--rounds", o->rounds.rounds, "Rounds that are kept (default 15)")->check(whole(1, INT32_MAX));
  verb->add_option("--seed", o->rounds.seed, "Seed of the order within the rounds (default 1)");
  verb->add_option("--filter", o->filter, "targets: those whose names contain this");
  add_modes(*verb, *o);
  verb->add_flag("--cpu-time", o->rounds.cpu_time, "Judge by CPU time: for one thread beside other loads");
  add_shape_options(*verb, *o);
  o->json.add_to(*verb, true);
  return [o] { return run(*o); };
}

}  // namespace kda::tools
