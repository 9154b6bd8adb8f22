// What kda check found: as text and as JSON.
#pragma once

#include <string>
#include <vector>

#include "conformance/cases.h"
#include "json_output.h"

namespace kda::tools {

struct CheckedCase {
  kda_operator op;
  std::string name;
  conformance::Report report;
  double seconds;
};

struct CheckResults {
  std::string backend, isa;
  int threads = 0;
  bool declining_fails = true;
  std::vector<CheckedCase> cases;
  std::vector<std::string> skipped, unknown;  // vector files

  bool ok(const CheckedCase& c) const { return c.report.declined() ? !declining_fails : c.report.passed(); }
  // Every case is, and something ran.
  bool ok() const;
};

void print_head(const CheckResults& results);
void print_case(const CheckedCase& c, bool ok);
void print_table(const CheckResults& results);
Json to_json(const CheckResults& results);

}  // namespace kda::tools
