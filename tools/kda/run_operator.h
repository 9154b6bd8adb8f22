// kda run: an operator's tensors by name, and its call.
#pragma once

#include <kda/layer.h>

#include <functional>
#include <kda/kda.hpp>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "problem.h"

namespace kda::tools {

enum class Role { kIn, kChange, kOut };

struct Binding {
  std::string name;
  kda_tensor* tensor;
  Role role;
};

// One call: where its tensors go, and what runs it. Outputs are views without data until the caller lends them
// memory.
class OperatorCall {
 public:
  virtual ~OperatorCall() = default;
  const std::vector<Binding>& bindings() const { return bindings_; }
  // Once the inputs are bound: fills in bounds and defaults of the problem and the shapes of the outputs. Throws
  // UsageError if an input is missing that they need.
  virtual void prepare(const Context& context, ProblemOptions& problem, const CLI::App& verb) = 0;
  virtual void run(const Context& context, const ProblemOptions& problem) = 0;
  std::string backend;  // that ran, once it did

 protected:
  void bind(const std::string& name, kda_tensor& tensor, Role role = Role::kIn) {
    bindings_.push_back({name, &tensor, role});
  }
  // In ascending order of names.
  void bind(const std::map<std::string, kda_tensor*>& tensors) {
    for (const auto& [name, tensor] : tensors) bind(name, *tensor);
  }
  // What the attention operators' arguments have in common.
  template <class Args>
  void bind_qkv(Args& a) {
    bind({{"q", &a.q}, {"k", &a.k}, {"v", &a.v}});
  }
  template <class Args>
  void bind_gates(Args& a) {
    bind({{"gate", &a.gate}, {"beta", &a.beta}, {"A_log", &a.A_log}, {"dt_bias", &a.dt_bias}});
  }
  void bind(const std::string& prefix, kda_sequences& s);
  void bind(kda_records& r);

 private:
  std::vector<Binding> bindings_;
};

std::unique_ptr<OperatorCall> operator_call(kda_operator op);
// Of these: conv, decode, decode_step and commit.
std::unique_ptr<OperatorCall> recurrent_call(kda_operator op);

// A whole layer of a checkpoint.
struct LayerOptions {
  std::string checkpoint, projection = "auto";
  size_t layer = 0;
  int32_t ranks = 1, rank = 0;
};
std::unique_ptr<OperatorCall> layer_call(const LayerOptions& options);

}  // namespace kda::tools
