#include "check_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

namespace kda::tools {
namespace {

using conformance::Comparison;
using conformance::Coordinate;
using conformance::Measure;

// Counts and the worst measure of one operator.
struct Summary {
  int cases = 0, failed = 0, declined = 0;
  double seconds = 0;
  std::set<std::string> ran;  // "portable (avx512)"
  const CheckedCase* worst_case = nullptr;
  const Measure* worst = nullptr;
};

std::map<kda_operator, Summary> summarise(const CheckResults& results) {
  std::map<kda_operator, Summary> list;
  for (const CheckedCase& c : results.cases) {
    Summary& s = list[c.op];
    ++s.cases;
    s.failed += !results.ok(c);
    s.declined += c.report.declined();
    s.seconds += c.seconds;
    if (!c.report.backend().empty()) s.ran.insert(fmt::format("{} ({})", c.report.backend(), c.report.isa()));
    const Measure* const m = c.report.worst();
    if (m != nullptr && (s.worst == nullptr || m->share() > s.worst->share())) s.worst = m, s.worst_case = &c;
  }
  return list;
}

std::string place(const Coordinate& at) {
  if (at.head < 0) return "";
  std::string s = fmt::format("sequence {}, head {}", at.sequence, at.head);
  if (at.token >= 0) s += fmt::format(", token {}", at.token);
  return s;
}

Json json_of(const Coordinate& at) {
  Json j = {{"sequence", at.sequence}, {"head", at.head}};
  if (at.token >= 0) j["token"] = at.token;
  return j;
}

// JSON has no infinity: such an error becomes null, and `ok` says what it means.
Json number(double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); }

Json json_of(const Measure& m) {
  Json j = {{"what", m.what},
            {"rel_l2", number(m.error.total)},
            {"limit", m.limit},
            {"worst_head", number(m.error.worst_head)},
            {"head_limit", m.head_limit},
            {"worst_row", number(m.error.worst_row)},
            {"ok", m.ok()}};
  if (m.error.head_at.head >= 0) j["worst_head_at"] = json_of(m.error.head_at);
  if (m.error.row_at.head >= 0) j["worst_row_at"] = json_of(m.error.row_at);
  if (!m.error.mask_fault.empty()) j["masks"] = m.error.mask_fault;
  return j;
}

Json json_of(const CheckedCase& c, bool ok) {
  Json j = {{"operator", kda_operator_name(c.op)}, {"name", c.name}, {"ok", ok}, {"seconds", c.seconds}};
  if (c.report.declined()) {
    j["declined"] = c.report.refusal();
    return j;
  }
  j["backend"] = c.report.backend();
  j["isa"] = c.report.isa();
  j["measures"] = Json::array();
  for (const Measure& m : c.report.measures()) j["measures"].push_back(json_of(m));
  j["faults"] = c.report.faults();
  return j;
}

}  // namespace

bool CheckResults::ok() const {
  const auto ran = [](const CheckedCase& c) { return !c.report.declined(); };
  return std::all_of(cases.begin(), cases.end(), [&](const CheckedCase& c) { return ok(c); }) &&
         std::any_of(cases.begin(), cases.end(), ran);
}

void print_head(const CheckResults& results) {
  fmt::print("libkda {} (sources {}), backend {}, instruction set {}, {} threads\n", kda_version_string(),
             kda_source_hash(), results.backend, results.isa, results.threads);
}

void print_case(const CheckedCase& c, bool ok) {
  fmt::print("{}  {}  ({:.2f} s)\n", ok ? "ok  " : "FAIL", c.name, c.seconds);
  if (c.report.declined()) fmt::print("      declined: {}\n", c.report.refusal());
  for (const std::string& fault : c.report.faults()) fmt::print("      {}\n", fault);
  for (const Measure& m : c.report.measures()) {
    fmt::print("      {}{}: {}; limits {:.1e}, per head {:.1e}\n", m.ok() ? "" : "* ", m.what, m.error.text(),
               m.limit, m.head_limit);
  }
}

void print_table(const CheckResults& results) {
  fmt::print("{:<16} {:>5} {:>6} {:>8} {:>7}  {:<20} {}\n", "operator", "cases", "failed", "declined", "seconds",
             "ran", "nearest to its limit");
  for (const auto& [op, s] : summarise(results)) {
    std::string worst = "-";
    if (s.worst != nullptr) {
      worst = fmt::format("{:.0f} %: {} {:.2e} of {:.1e}, {}", 100 * s.worst->share(), s.worst->what,
                          s.worst->error.total, s.worst->limit, place(s.worst->error.head_at));
    }
    fmt::print("{:<16} {:>5} {:>6} {:>8} {:>7.1f}  {:<20} {}\n", kda_operator_name(op), s.cases, s.failed,
               s.declined, s.seconds, fmt::format("{}", fmt::join(s.ran, " ")), worst);
    if (s.worst_case != nullptr) fmt::print("{:<16} {}\n", "", s.worst_case->name);
  }
  for (const std::string& file : results.skipped) fmt::print("skipped: {}\n", file);
  for (const std::string& file : results.unknown) fmt::print("unknown: {}: no case reads it\n", file);
  const auto failed =
      std::count_if(results.cases.begin(), results.cases.end(), [&](const CheckedCase& c) { return !results.ok(c); });
  if (results.ok()) fmt::print("passed: {} cases\n", results.cases.size());
  else if (failed > 0) fmt::print("FAILED: {} of {} cases\n", failed, results.cases.size());
  else fmt::print("FAILED: the backend declined every case\n");
}

Json to_json(const CheckResults& results) {
  Json j = {{"schema_version", 1},        {"build", build_json()}, {"backend", results.backend}, {"isa", results.isa},
            {"threads", results.threads}, {"ok", results.ok()},    {"cases", Json::array()}};
  for (const CheckedCase& c : results.cases) j["cases"].push_back(json_of(c, results.ok(c)));
  j["skipped"] = results.skipped;
  j["unknown"] = results.unknown;
  return j;
}

}  // namespace kda::tools
