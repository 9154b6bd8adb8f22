// kda check: every operator of a backend against the reference, case by case, at the limits of spec N-9.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <kda/kda.hpp>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "check_report.h"
#include "conformance/cases.h"
#include "conformance/device.h"
#include "conformance/vector_cases.h"
#include "json_output.h"
#include "problem.h"
#include "values.h"
#include "verb.h"

namespace kda::tools {
namespace {

using conformance::Case;
using conformance::Report;

struct Options {
  std::string backend = "auto", device = "cpu", vectors, filter;
  std::vector<std::string> operators;
  int threads = 0;
  bool quick = false, list = false, verbose = false;
  JsonOutput json;
};

// Named backends may lack what a case asks for; the portable path and the oracle serve everything, and then so
// does auto.
bool may_decline(const std::string& backend) {
  return backend != "auto" && backend != "portable" && backend != "reference";
}

std::vector<Case> chosen_cases(const Options& o, CheckResults& results) {
  std::vector<Case> all;
  if (o.vectors.empty()) {
    all = conformance::all_cases();
  } else {
    conformance::VectorCases found;
    try {
      found = conformance::vector_cases(o.vectors);
    } catch (const std::exception& e) {
      throw UsageError(e.what());
    }
    all = std::move(found.cases);
    results.skipped = std::move(found.skipped);
    results.unknown = std::move(found.unknown);
  }
  const auto unwanted = [&](const Case& c) {
    const auto& ops = o.operators;
    return (o.quick && !c.quick) || (!o.filter.empty() && c.name.find(o.filter) == std::string::npos) ||
           (!ops.empty() && std::find(ops.begin(), ops.end(), kda_operator_name(c.op)) == ops.end());
  };
  all.erase(std::remove_if(all.begin(), all.end(), unwanted), all.end());
  if (all.empty()) {
    if (o.operators.empty() && o.filter.empty())
      throw UsageError("--vectors: wanted a folder of vector files, got " + o.vectors);
    throw UsageError(
        fmt::format("--operator, --filter, --quick: wanted what some case has, got {}, \"{}\"{}",
                    o.operators.empty() ? "every operator" : fmt::format("{}", fmt::join(o.operators, ", ")),
                    o.filter, o.quick ? ", --quick" : ""));
  }
  return all;
}

// A name that an operator does not know is bad usage, not a case that fails.
void check_backend(const Options& o, const std::vector<Case>& cases, const Context& context) {
  ProblemOptions problem;
  problem.attention.gate_family = KDA_GATE_SOFTPLUS;
  problem.backend = o.backend;
  for (const Operator& op : operators()) {
    if (std::none_of(cases.begin(), cases.end(), [&](const Case& c) { return c.op == op.op; })) continue;
    try {
      const Plan plan = create_plan(context, op.op, problem);
    } catch (const Error& e) {
      if (e.status() != KDA_UNSUPPORTED) throw;  // it is known, and declines: the cases say why
    }
  }
}

CheckedCase run_case(const Case& c, const conformance::Setting& setting) {
  CheckedCase done{c.op, c.name, {}, 0};
  const auto start = std::chrono::steady_clock::now();
  try {
    c.run(setting, done.report);
  } catch (const std::exception& e) {
    done.report.fault(e.what());
  }
  done.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return done;
}

kda_context_options context_options(const Options& o) {
  auto options = make<kda_context_options>();
  options.num_threads = o.threads;
  if (o.device == "cuda") options.device = {KDA_CUDA, 0};
  return options;
}

// Every case runs twice: no result may depend on the number of threads (CPU) or on the run (other devices).
class Contexts {
 public:
  explicit Contexts(const Options& o)
      : options_(context_options(o)),
        first_(options_),
        second_(first_.num_threads() == 1 ? 2 : 1),
        memory_(first_.get()) {
    if (on_device()) conformance::set_device(first_.get(), &memory_);
  }
  ~Contexts() { conformance::set_device(nullptr, nullptr); }
  Contexts(const Contexts&) = delete;
  Contexts& operator=(const Contexts&) = delete;

  const Context& first() const { return first_; }
  conformance::Setting setting(const std::string& backend) const {
    return {backend, first_.get(), on_device() ? first_.get() : second_.get(), {}, options_.device};
  }

 private:
  bool on_device() const { return options_.device.type != KDA_CPU; }

  kda_context_options options_;
  Context first_, second_;
  conformance::ContextMemory memory_;
};

int run(Options& o) {
  CheckResults results;
  const std::vector<Case> cases = chosen_cases(o, results);
  if (o.list) {
    for (const Case& c : cases) fmt::print("{}\n", c.name);
    return kDone;
  }
  o.json.check();
  const Contexts contexts(o);
  const Context& context = contexts.first();
  check_backend(o, cases, context);
  const conformance::Setting setting = contexts.setting(o.backend);
  results.backend = o.backend;
  results.isa = context.isa();
  results.threads = context.num_threads();
  results.declining_fails = !may_decline(o.backend);
  const bool text = !o.json.to_stdout();
  if (text) print_head(results);
  for (const Case& c : cases) {
    results.cases.push_back(run_case(c, setting));
    const CheckedCase& done = results.cases.back();
    if (text && (o.verbose || !results.ok(done))) print_case(done, results.ok(done));
  }
  if (text) print_table(results);
  o.json.write(to_json(results));
  return results.ok() ? kDone : kFailed;
}

}  // namespace

std::function<int()> add_check(CLI::App& app) {
  CLI::App* const verb =
      app.add_subcommand("check", "Conformance: every operator of a backend against the reference, or against files");
  auto o = std::make_shared<Options>();
  verb->add_option("--backend", o->backend, "auto, portable, fused or reference");
  std::vector<std::string> names;
  for (int op = KDA_OP_PREFILL; op <= KDA_OP_RESIDUAL_NORM; ++op) {
    names.push_back(kda_operator_name(static_cast<kda_operator>(op)));
  }
  verb->add_option("--device", o->device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  verb->add_option("--operator", o->operators, "Only these operators (repeatable)")->check(CLI::IsMember(names));
  verb->add_option("--filter", o->filter, "Only cases whose name contains TEXT")->type_name("TEXT");
  verb->add_option("--vectors", o->vectors, "Instead of the tables: the safetensors files of DIR, made by others")
      ->type_name("DIR");
  verb->add_option("--threads", o->threads, "Threads (default: all cores)")->check(whole(0, kMostThreads));
  verb->add_flag("--quick", o->quick, "About an eighth of the cases");
  verb->add_flag("--list", o->list, "Print the cases and run nothing");
  verb->add_flag("-v,--verbose", o->verbose, "Print every case, not only what failed");
  o->json.add_to(*verb);
  return [o] { return run(*o); };
}

}  // namespace kda::tools
