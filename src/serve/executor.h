// Runs the operators of a step. An interface, so that tests of the engine can run without tensors or let a step
// fail.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "serve/step.h"

namespace kda::serve {

// Sees each layer's gated-norm output before the next layer overwrites it.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  // Whether a row's results will be looked at: on a device only those come to the host.
  virtual bool wants(const StepRow& row) const = 0;
  // Layer mode: whether its rows' inputs and outputs of the layers will be looked at.
  virtual bool wants_hidden(const StepRow&) const { return false; }
  // A device has all of the step's work and nothing is waited for yet: what the next step needs can be made ready.
  virtual void device_works() {}
  // rows: [step.tokens, HV * V] in the io dtype, dense, in host memory; those that are not wanted are unspecified.
  virtual void layer_done(const Step& step, int32_t layer, const char* rows) = 0;
  // Layer mode: what went into the layer and what came out, [step.tokens, D] in the io dtype, dense, in host memory;
  // on a device the rows that are wanted.
  virtual void hidden_done(const Step&, int32_t, const char*, const char*) {}
};

// Which candidate runs an operator, and which ones were passed over and why.
struct OperatorChoice {
  std::string op, backend, isa;
  struct Skipped {
    std::string candidate;
    std::vector<std::string> reasons;
  };
  std::vector<Skipped> skipped;
};

class Executor {
 public:
  virtual ~Executor() = default;
  virtual Status run(const Step& step, LayerObserver& observer) = 0;
  // Records mode: commits what the requests have accepted, so that column 0 holds it (spec V-10, V-11).
  virtual Status commit(std::span<Request* const> requests) = 0;
  virtual std::vector<OperatorChoice> choices() const = 0;
};

}  // namespace kda::serve
