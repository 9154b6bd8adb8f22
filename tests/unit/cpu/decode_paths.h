// One speculating server, many ways to run its steps: the same token content through plain decode, columns, records
// with commit and records with fold, each as the chain conv -> decode -> gated norm or as decode_step. All of them
// must hold the same bits (V-9, V-10, V-10b, L-8).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/api.h"
#include "conformance/random.h"
#include "conformance/tensor.h"
#include "unit/cpu/isa_contexts.h"

namespace kda::conformance::test {

struct StepShape {
  int64_t H = 2, HV = 2, K = 16, V = 24, W = 4;
  int32_t width = 3;  // 1 + S
  kda_dtype io = KDA_BF16, gate = KDA_BF16, state = KDA_FP32, conv = KDA_BF16;
  kda_conv_layout layout = KDA_CONV_SD;
  int parts = 1;
  kda_gate_family family = KDA_GATE_BOUNDED;
  bool qk_norm = true;
  std::string isa;
  int threads = 2;

  int64_t qk() const { return H * K; }
  int64_t v() const { return HV * V; }
  int64_t channels() const { return 2 * qk() + v(); }
  kda_attention_spec spec() const;
};

// A token of the text (or, with variant > 0, a draft that is not): all inputs follow from (request, position,
// variant), so that every path sees the same numbers.
struct Content {
  int64_t request, position, variant;
};

enum class Mode { plain, columns, records, fold };
const char* mode_name(Mode mode);

// Weights shared by all paths of a test.
struct StepWeights {
  explicit StepWeights(const StepShape& s);
  Tensor A_log, dt_bias, norm;
  Tensor conv[3];
};

// One step of one request: the text token at `position`, then drafts; `accepted` is what the *previous* step of the
// request got accepted (columns: the start column; fold: the tokens to commit).
struct StepRow {
  int64_t request, position, accepted;
  std::vector<int64_t> variants;  // of the tokens; 0 = the text's own. Empty: no token this step
};

class Path {
 public:
  Path(const StepShape& shape, const StepWeights& weights, Mode mode, bool fused, int64_t requests);

  // Runs the rows as one call (or a chain) and returns each row's outputs [tokens, HV, V] as raw bytes.
  std::vector<std::vector<std::string>> step(const std::vector<StepRow>& rows);
  // Records mode: commits `accepted` tokens of each request named.
  void commit(const std::vector<int64_t>& requests, const std::vector<int64_t>& accepted);

  // State of column `accepted - 1` and the W-1 window columns at that offset, as raw bytes.
  std::string state(int64_t request, int64_t accepted) const;
  // [channel][W-1] of the window, oldest first.
  std::vector<double> window(int64_t request, int64_t accepted) const;
  std::string guards() const;
  std::string name() const;

 private:
  struct Inputs;

  bool records() const { return mode_ == Mode::records || mode_ == Mode::fold; }
  int64_t slot(int64_t request, int64_t column) const;
  kda_decode_step_desc step_desc(int64_t T, int64_t N) const;
  // conv, decode, gated norm instead of decode_step.
  void run_chain(const kda_decode_step_desc& desc, const kda_decode_step_args& step) const;
  void run_conv(const kda_decode_step_desc& desc, const kda_decode_step_args& step, Tensor* post) const;

  StepShape s_;
  const StepWeights& w_;
  Mode mode_;
  bool fused_;
  int64_t requests_, columns_;
  Tensor pool_, conv_[3], u_, kg_, count_;
};

// Inputs of one token as values before rounding.
std::vector<double> token_values(const Content& c, uint32_t stream, int64_t n, double scale);

}  // namespace kda::conformance::test
