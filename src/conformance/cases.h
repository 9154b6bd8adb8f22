// Conformance cases: each runs one operator on one row of a table, by a backend and by the reference, and reports
// every error beside its limit (spec N-9, R-60..R-62). `kda check` and tests/conformance run the same tables.
#pragma once

#include <kda/kda.h>

#include <functional>
#include <string>
#include <vector>

#include "conformance/attention.h"
#include "conformance/compare.h"
#include "conformance/covering.h"
#include "conformance/limits.h"
#include "conformance/tensor.h"

namespace kda::conformance {

// Who runs a case.
struct Setting {
  std::string backend = "auto";
  kda_context* context = nullptr;
  kda_context* other = nullptr;  // another number of threads: the bits must be the same (N-12)
  // For tests of the cases themselves: spoils a result of the backend before it is looked at.
  std::function<void(const std::string& what, Tensor&)> spoil;
  kda_device device{KDA_CPU, 0};  // of the contexts; another one than the CPU: named by set_device as well
};

struct Measure {
  std::string what;
  Comparison error;
  double limit = 0, head_limit = 0;
  bool ok() const { return error.within(limit, head_limit); }
  // How much of its limits the error uses: at most 1 is within them; infinite where masks differ.
  double share() const;
};

// What a case found. Errors that are numbers are measures; everything else (wrong bits, a written canary, a status)
// is a fault.
class Report {
 public:
  // `stored`, `elements`, `head_elements`: size and dtype of the compared tensor and of its smallest (sequence,
  // head), for which limits of 16-bit types are adapted (for_size).
  void measure(std::string what, const Comparison& error, double limit, kda_dtype stored, int64_t elements,
               int64_t head_elements);
  void fault(std::string text) { faults_.push_back(std::move(text)); }
  // A fault unless `difference` is empty.
  void expect_none(const std::string& what, const std::string& difference);
  // Notes who runs. False, with a fault or a refusal noted, if there is no plan.
  bool accept(kda_status status, const std::string& message, const kda_plan* plan);
  template <class Plan>
  bool accept(const Plan& plan) {
    return accept(plan.status(), plan.message(), plan.get());
  }
  // False, with a fault or a refusal of the call's layout, unless the call succeeded.
  bool succeeded(const std::string& what, kda_status status, const std::string& message);

  bool passed() const;
  bool declined() const { return !refusal_.empty(); }
  const std::string& refusal() const { return refusal_; }
  const std::string& backend() const { return backend_; }
  // Of the plan that runs: a fused prefill or segment summary on a device takes its products from tensor cores.
  Arithmetic arithmetic() const { return arithmetic_; }
  const std::string& isa() const { return isa_; }
  const std::vector<Measure>& measures() const { return measures_; }
  const std::vector<std::string>& faults() const { return faults_; }
  // The measure with the largest share; null if there is none.
  const Measure* worst() const;

 private:
  std::string backend_, isa_, refusal_;
  Arithmetic arithmetic_ = Arithmetic::kFp32;
  std::vector<Measure> measures_;
  std::vector<std::string> faults_;
};

struct Case {
  kda_operator op;
  std::string name;    // "prefill/io=bf16,heads=6x12,...": every choice by name
  bool quick = false;  // part of `kda check --quick`
  std::function<void(const Setting&, Report&)> run;
};

// The cases of a table: every pair of values of two axes in some case; `choice_of` turns value numbers into what
// `run` takes. Every `quick`-th case is part of `kda check --quick`.
template <class ChoiceOf, class Run>
std::vector<Case> covering_cases(kda_operator op, const std::vector<Axis>& axes, const Allowed& allowed,
                                 ChoiceOf choice_of, Run run, size_t quick = 8) {
  std::vector<Case> cases;
  for (const std::vector<int>& row : covering_pairs(sizes_of(axes), allowed)) {
    cases.push_back(
        {op, case_name(kda_operator_name(op), axes, row), cases.size() % quick == 0,
         [choice = choice_of(row), run](const Setting& setting, Report& report) { run(choice, setting, report); }});
  }
  return cases;
}

std::vector<Case> distribution_cases();  // D1..D11 (N-10), prefill
std::vector<Case> prefill_cases();
std::vector<Case> decode_cases();
std::vector<Case> commit_cases();
std::vector<Case> decode_step_cases();
std::vector<Case> conv_cases();
std::vector<Case> gated_norm_cases();
std::vector<Case> residual_norm_cases();
std::vector<Case> state_copy_cases();
std::vector<Case> metadata_cases();
std::vector<Case> segment_summary_cases();
std::vector<Case> segment_merge_cases();
std::vector<Case> layer_cases();
// All of them, in the order of the operators.
std::vector<Case> all_cases();

}  // namespace kda::conformance
