// kda replay TRACE: real traffic through KDA layers (design.md 4).
#include "serve/replay.h"

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "serve/file.h"
#include "serve/progress.h"
#include "verb.h"

namespace kda::tools {
namespace {

std::atomic<bool> g_stop{false};

// The first Ctrl-C ends the run after its step, the second ends the program.
void on_interrupt(int) {
  g_stop.store(true, std::memory_order_relaxed);
  std::signal(SIGINT, SIG_DFL);
}

struct Arguments {
  serve::ReplayOptions options;
  std::string prefix_cache = "on", batch_invariant = "on";
  std::string json, report, digests, timeline;
  std::vector<serve::OutputFile> outputs;  // those that were asked for
};

// The options by group; 0 stands for "the usual" where the help says so.
void add_trace_options(CLI::App& app, Arguments& a) {
  serve::ReplayOptions& o = a.options;
  app.add_option("trace", o.trace, "Trace file (Mooncake JSON lines, Azure or BurstGPT CSV), - for standard input")
      ->required();
  for (CLI::Option* option : {
           app.add_option("--format", o.input.format, "auto, mooncake, azure or burstgpt"),
           app.add_option("--limit", o.input.limit, "Read only the first N valid lines; 0: all"),
           app.add_flag("--skip-bad", o.input.skip_bad, "Count bad lines instead of stopping at the first"),
           app.add_option("--pace", o.pace, "max (as fast as possible) or trace (keep arrival times)"),
           app.add_option("--speed", o.speed, "With --pace trace: arrival times are divided by it"),
       }) {
    option->group("Traffic");
  }
}

void add_model_options(CLI::App& app, Arguments& a) {
  serve::ReplayOptions& o = a.options;
  for (CLI::Option* option : {
           app.add_option("--mode", o.mode,
                          "core (everything but the dense projections) or layer (whole KDA layers)"),
           app.add_option("--model", o.model.name, "tiny, kimi-linear, kimi-k3 or glm-5.3-flash"),
           app.add_option("--checkpoint", o.checkpoint,
                          "Layer mode: weights and shapes of a safetensors folder, index or file instead of --model")
               ->type_name("PATH"),
           app.add_option("--heads", o.model.heads, "Heads; 0: the model's"),
           app.add_option("--layers", o.model.layers, "KDA layers; 0: one, in layer mode the model's"),
           app.add_option("--tp", o.model.tp, "Run the first rank's share of so many ranks"),
           app.add_option("--io", o.model.io, "Dtype of activations: fp32, bf16 or fp16 (default: the model's)"),
           app.add_option("--pool", o.model.pool, "Dtype of recurrent states: fp32, bf16 or fp16 (default: fp32)"),
           app.add_option("--seed", o.seed, "Seed of tables, weights and every choice"),
       }) {
    option->group("Model");
  }
}

void add_engine_options(CLI::App& app, Arguments& a) {
  serve::ReplayOptions& o = a.options;
  for (CLI::Option* option : {
           app.add_option("--max-batch-tokens", o.max_batch_tokens, "Token budget of a step, at least 64"),
           app.add_option("--max-requests", o.max_requests, "Requests that run at once"),
           app.add_option("--slots", o.slots, "Requests that the state pool holds at once"),
           app.add_option("--prefix-cache", a.prefix_cache, "on or off"),
           app.add_option("--cache-mib", o.cache_mib, "Memory for prefix snapshots"),
           app.add_option("--spec", o.spec, "Drafts per step, at most 15"),
           app.add_option("--spec-mode", o.spec_mode, "columns (a state per draft) or records (recover with fold)"),
           app.add_option("--accept", o.accept, "Probability that a draft is kept"),
           app.add_option("--preempt", o.preempt, "Probability per running request and step of being swapped out"),
           app.add_option("--batch-invariant", a.batch_invariant, "on or off: the same bits whatever the batch"),
           app.add_option("--device", o.device, "cpu or cuda"),
           app.add_option("--threads", o.threads, "Threads; 0: all cores"),
           app.add_option("--backend", o.backend, "Of every operator: auto, portable, fused or reference"),
           app.add_option("--prefill-backend", o.prefill_backend, "Of prefill: auto, portable, fused or reference"),
       }) {
    option->group("Engine");
  }
}

void add_result_options(CLI::App& app, Arguments& a) {
  for (CLI::Option* option : {
           app.add_option("--verify", a.options.verify, "Requests to recompute by the fp64 oracle; 0: none"),
           app.add_option("--json", a.json, "Write the report")->type_name("FILE"),
           app.add_option("--report", a.report, "Write the report as a page with pictures (HTML)")->type_name("FILE"),
           app.add_option("--digests", a.digests,
                          "Write a line per request: index, lengths, 128-bit hash of its results")
               ->type_name("FILE"),
           app.add_option("--timeline", a.timeline, "Write a Chrome trace of steps and operators")->type_name("FILE"),
       }) {
    option->group("Results");
  }
}

int complain(const serve::Status& status, int code) {
  std::fprintf(stderr, "kda replay: %s\n", status.message().c_str());
  return code;
}

// Both switches, and the files that will be written.
serve::Status check(const CLI::App& verb, Arguments& a) {
  struct Switch {
    const char* option;
    const std::string& text;
    bool& value;
  };
  for (const Switch& s : {Switch{"--prefix-cache", a.prefix_cache, a.options.prefix_cache},
                          Switch{"--batch-invariant", a.batch_invariant, a.options.batch_invariant}}) {
    if (s.text != "on" && s.text != "off") {
      return serve::invalid_argument("{}: wanted on or off, got \"{}\"", s.option, s.text);
    }
    s.value = s.text == "on";
  }
  if (verb.count("--checkpoint") != 0 && verb.count("--model") != 0) {
    return serve::invalid_argument("--checkpoint: wanted it or --model, got both");
  }
  if (verb.count("--checkpoint") != 0 && a.options.checkpoint.empty()) {
    return serve::invalid_argument("--checkpoint: wanted a path, got \"\"");
  }
  if (verb.count("--speed") != 0 && a.options.pace != "trace") {
    return serve::invalid_argument("--speed: wanted --pace trace beside it, got --pace {}", a.options.pace);
  }
  for (const auto& [option, path] : {std::pair<const char*, const std::string&>{"--json", a.json},
                                     {"--report", a.report},
                                     {"--digests", a.digests},
                                     {"--timeline", a.timeline}}) {
    if (verb.count(option) != 0) a.outputs.push_back({option, path, ""});
  }
  a.options.digests = verb.count("--digests") != 0;
  a.options.timeline = verb.count("--timeline") != 0;
  return serve::check_outputs(a.outputs, a.options.trace == "-" ? "" : a.options.trace);
}

// The table to standard output and the files. Nothing may end the program between a file's first byte and its name.
serve::Status write_results(const serve::Replay& replay, Arguments& a) {
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  std::fputs(replay.table().c_str(), stdout);
  std::fflush(stdout);  // main() sees whether that worked
  for (serve::OutputFile& file : a.outputs) {
    const std::string option = file.option;
    if (option == "--json") file.text = replay.report_text();
    if (option == "--report") file.text = replay.page_text();
    if (option == "--digests") file.text = replay.digests_text();
    if (option == "--timeline") file.text = replay.timeline_text();
  }
  return serve::write_outputs(a.outputs);
}

// The oracle takes and frees the same hundreds of megabytes for every layer. What is given back to the system comes
// back as pages to be cleared, which on some machines takes longer than the oracle's arithmetic on all cores.
void keep_freed_memory() {
#if defined(M_MMAP_MAX) && defined(M_TRIM_THRESHOLD)
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, 0x7fffffff);
#endif
}

int replay(const CLI::App& verb, Arguments& a) {
  serve::Status status = check(verb, a);
  if (!status.ok()) return complain(status, kUsage);
  auto prepared = serve::Replay::prepare(a.options);
  if (!prepared.ok()) return complain(prepared.status(), kUsage);
  std::signal(SIGINT, on_interrupt);  // until here there is nothing to report
  serve::Replay& r = *prepared.value();
  if (r.trace().skipped > 0) {
    std::fprintf(stderr, "kda replay: skipped %lld bad line%s, the first: %s\n",
                 static_cast<long long>(r.trace().skipped), r.trace().skipped == 1 ? "" : "s",
                 r.trace().first_skipped.c_str());
  }
  serve::Progress progress(stderr, isatty(STDERR_FILENO) != 0);
  status = r.run(g_stop, [&](const serve::Engine& engine) { progress.update(engine); });
  progress.finish();
  if (!status.ok()) return complain(status, kFailed);
  if (!r.stats().interrupted) {
    keep_freed_memory();
    status = r.verify_results(g_stop, [&](const serve::VerifyProgress& v) { progress.update(v); });
    progress.finish();
    if (!status.ok() && !g_stop.load()) return complain(status, kFailed);
  }
  status = write_results(r, a);
  if (!status.ok()) return complain(status, kUsage);
  if (g_stop.load()) return kInterrupted;
  if (!r.stats().first_failure.empty()) std::fprintf(stderr, "kda replay: %s\n", r.stats().first_failure.c_str());
  return r.ok() ? kDone : kFailed;
}

}  // namespace

std::function<int()> add_replay(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* verb = app.add_subcommand("replay", "Replay a serving trace through KDA layers; report speed and error");
  verb->option_defaults()->always_capture_default();
  add_trace_options(*verb, *arguments);
  add_model_options(*verb, *arguments);
  add_engine_options(*verb, *arguments);
  add_result_options(*verb, *arguments);
  verb->get_formatter()->column_width(34);
  return [verb, arguments] { return replay(*verb, *arguments); };
}

}  // namespace kda::tools
