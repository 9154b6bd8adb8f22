// kda info: what this build and machine have, and which backend serves a problem, with every reason of the others.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <kda/kda.hpp>
#include <memory>
#include <string>
#include <vector>

#include "json_output.h"
#include "problem.h"
#include "values.h"
#include "verb.h"

namespace kda::tools {
namespace {

struct Options {
  bool isas_only = false;
  int threads = 0;
  std::string operator_name;
  ProblemOptions problem;
  JsonOutput json;
};

std::vector<std::string> isas() {
  std::vector<std::string> list;
  std::string name;
  for (const char* p = kda_cpu_isas();; ++p) {
    if (*p != ',' && *p != '\0') {
      name += *p;
      continue;
    }
    list.push_back(name);
    name.clear();
    if (*p == '\0') return list;
  }
}

// The CPU and every CUDA device that a context can be made on; what the library says where there is none.
std::vector<std::string> devices(std::string& without) {
  std::vector<std::string> list = {"cpu:0"};
  for (int32_t i = 0;; ++i) {
    auto options = make<kda_context_options>();
    options.device = {KDA_CUDA, i};
    kda_context* context = nullptr;
    if (kda_context_create(&options, &context) != KDA_OK) {
      if (i == 0) without = kda_last_error();
      return list;
    }
    list.push_back(fmt::format("cuda:{} ({})", i, kda_context_isa(context)));
    kda_context_destroy(context);
  }
}

Json to_json(const std::vector<Verdict>& verdicts) {
  Json list = Json::array();
  for (const Verdict& v : verdicts) {
    list.push_back({{"candidate", v.candidate}, {"chosen", v.chosen}, {"refusals", v.refusals}});
  }
  return list;
}

void print(const std::vector<Verdict>& verdicts, const std::string& isa) {
  for (const Verdict& v : verdicts) {
    if (v.refusals.empty()) {
      const char* note = v.chosen                     ? "chosen by auto"
                         : v.candidate == "reference" ? "the oracle; by name only"
                                                      : "can serve it";
      fmt::print("  {:<10} {}{}\n", v.candidate, note, v.chosen ? fmt::format(" ({})", isa) : "");
    }
    for (size_t i = 0; i < v.refusals.size(); ++i)
      fmt::print("  {:<10} {}\n", i == 0 ? v.candidate : "", v.refusals[i]);
  }
}

int describe_machine(Options& o, const Context& context) {
  std::string without_cuda;
  const auto found = devices(without_cuda);
  const auto all = isas();
  Json json = build_json();
  json["isas"] = all;
  json["isa"] = context.isa();
  json["threads"] = context.num_threads();
  json["devices"] = found;
  if (!without_cuda.empty()) json["cuda"] = without_cuda;
  if (!o.json.to_stdout()) {
    fmt::print("libkda {} (sources {})\n", kda_version_string(), kda_source_hash());
    fmt::print("instruction sets  {}; in use: {}\nthreads           {}\ndevices           {}\n", fmt::join(all, " "),
               context.isa(), context.num_threads(), fmt::join(found, " "));
    if (!without_cuda.empty()) fmt::print("no CUDA           {}\n", without_cuda);
    fmt::print("\nBackends for Kimi-Linear's attention (describe another problem by --operator and its options):\n");
  }
  for (const Operator& op : operators()) {
    const auto verdicts = explain(context, op.op, o.problem);
    json["operators"][op.name] = to_json(verdicts);
    if (o.json.to_stdout()) continue;
    fmt::print("{}\n", op.name);
    print(verdicts, context.isa());
  }
  o.json.write(json);
  return kDone;
}

// The same text as the error of an explicit choice that is refused (spec R-11): it is that error.
int describe_problem(Options& o, const Context& context) {
  const auto& all = operators();
  const auto op = std::find_if(all.begin(), all.end(), [&](const Operator& x) { return o.operator_name == x.name; });
  const auto verdicts = explain(context, op->op, o.problem);
  Json json = build_json();
  json["operator"] = op->name;
  json["backend"] = o.problem.backend;
  json["candidates"] = to_json(verdicts);
  if (!o.json.to_stdout()) {
    fmt::print("{}\n", op->name);
    print(verdicts, context.isa());
  }
  int code = kDone;
  try {
    const Plan plan = create_plan(context, op->op, o.problem);
    json["chosen"] = {{"backend", plan.backend()}, {"isa", plan.isa()}, {"workspace_bytes", plan.workspace_size()}};
    if (!o.json.to_stdout()) {
      fmt::print("backend '{}': {} ({}), workspace {} bytes\n", o.problem.backend, plan.backend(), plan.isa(),
                 plan.workspace_size());
    }
  } catch (const Error& e) {
    if (e.status() != KDA_UNSUPPORTED) throw;
    json["error"] = e.what();
    std::fflush(stdout);
    fmt::print(stderr, "kda info: {}\n", e.what());
    code = kFailed;
  }
  o.json.write(json);
  return code;
}

int run(Options& o) {
  if (o.isas_only) {
    fmt::print("{}\n", fmt::join(isas(), " "));
    return kDone;
  }
  o.problem.resolve();
  o.json.check();
  const Context context(static_cast<int32_t>(o.threads));
  return o.operator_name.empty() ? describe_machine(o, context) : describe_problem(o, context);
}

}  // namespace

std::function<int()> add_info(CLI::App& app) {
  CLI::App* const verb = app.add_subcommand(
      "info", "Devices, instruction sets, backends; which backend serves a problem, and why not the others");
  auto o = std::make_shared<Options>();
  verb->add_flag("--isas", o->isas_only,
                 "Print the names of the CPU's instruction sets, best first, and nothing else");
  verb->add_option("--threads", o->threads, "Threads (default: all cores)")->check(whole(0, kMostThreads));
  std::vector<std::string> names;
  for (const Operator& op : operators()) names.push_back(op.name);
  verb->add_option("--operator", o->operator_name, "Operator of the problem")->check(CLI::IsMember(names));
  o->problem.add_to(*verb);
  o->json.add_to(*verb);
  return [o] { return run(*o); };
}

}  // namespace kda::tools
