// The `plan` argument of an operator: what does not change from call to call, as words "name=value" with spaces
// between:
//
//   "gate_family=bounded lower_bound=-5 width=3 batch_invariant=1"
//
// Names and defaults are those of the keywords of libkda.torch. A word that the operator has no use for is refused.
#pragma once

#include <kda/kda.h>

#include <string>
#include <string_view>

namespace kda::torch_ops {

struct Words {
  kda_gate_family gate_family = KDA_GATE_SOFTPLUS;
  double lower_bound = 0, scale = 0, norm_eps = 1e-5;
  bool beta_is_logits = true, allow_neg_eigval = false, qk_norm = true;
  bool fresh = false, store_final = true, final_only = false, fold = false, records = false, activation = true;
  bool batch_invariant = false, checked = false;
  int64_t null_slot = -1, max_tokens = 0, max_sequences = 0, width = 1, conv_width = 0;
  kda_conv_layout layout = KDA_CONV_SD;
  std::string backend;
  uint64_t given = 0;  // bit of each word that stood there

  uint32_t flags() const {
    return (batch_invariant ? KDA_PLAN_BATCH_INVARIANT : 0u) | (checked ? KDA_PLAN_CHECKED : 0u);
  }
};

// Names that operators share; a word list is names with spaces between.
#define KDA_FORM_WORDS "gate_family lower_bound beta_is_logits allow_neg_eigval qk_norm scale "
#define KDA_PLAN_WORDS "null_slot batch_invariant checked backend max_tokens max_sequences "

// Parses `text` (once per thread and text). ValueError names what is wrong; `allowed` is the operator's word list, a
// string literal. With gate words allowed, gate_family must be there: no family is ever assumed.
const Words& read_words(std::string_view text, const char* allowed);

}  // namespace kda::torch_ops
