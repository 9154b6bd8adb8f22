// Attention inputs from named choices: what the tables of prefill, decode and the segment maps have in common.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/covering.h"
#include "conformance/distributions.h"
#include "conformance/tensor.h"

namespace kda::conformance {

struct Heads {
  const char* name;
  int64_t H, HV;
};
struct Dims {
  const char* name;
  int64_t K, V;
};
enum class Family { kSoftplus, kSoftplusNoBias, kBounded, kBoundedShallow, kBoundedNoA, kPlain, kPlainForget };
enum class Raw { kRandom, kOff, kLow, kZero, kHigh, kLinear, kFull, kMixed };
enum class Beta { kLogits, kSaturated, kPlain, kNegative };
enum class Layout { kDense, kSlices, kPadded };

// One table row's attention part.
struct AttentionChoice {
  Heads heads{"", 1, 1};
  Dims dims{"", 128, 128};
  kda_dtype io = KDA_FP32;
  bool fp32_gate = false, fp32_beta = false, no_qk_norm = false;
  Family family = Family::kSoftplus;
  Raw raw = Raw::kRandom;
  Beta beta = Beta::kLogits;
  Layout layout = Layout::kDense;
};

// A parameter of a table: its name and its values' names.
struct Axis {
  const char* name;
  std::vector<std::string> values;
};
std::vector<int> sizes_of(const std::vector<Axis>& axes);
// "op/axis=value,axis=value"
std::string case_name(const char* op, const std::vector<Axis>& axes, const std::vector<int>& chosen);
template <class T>
std::vector<std::string> names_of(const std::vector<T>& values) {
  std::vector<std::string> names;
  for (const T& v : values) names.push_back(v.name);
  return names;
}

// The attention part as axes, in this order from `first` on, and back.
std::vector<Axis> attention_axes(const std::vector<Heads>& heads, const std::vector<Dims>& dims);
constexpr size_t kAttentionAxes = 10;
AttentionChoice attention_choice(const std::vector<int>& chosen, size_t first, const std::vector<Heads>& heads,
                                 const std::vector<Dims>& dims);

// Token tensors with `rows` rows; sequence n has rows [begins[n], begins[n] + lengths[n]). Rows of no sequence hold
// NaN, and so do the gaps that the layout leaves. Initial states are the caller's.
Problem attention_problem(const AttentionChoice& choice, int64_t rows, const std::vector<int64_t>& begins,
                          const std::vector<int64_t>& lengths);

}  // namespace kda::conformance
