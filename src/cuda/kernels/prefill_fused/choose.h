// Which form of the prefill serves a call (S-8), from what the host knows.
#pragma once

#include "cuda/kernels/prefill_fused/params.h"

namespace kda::cuda::prefill_fused {

struct CallFacts {
  int64_t sequences = 0;
  int32_t value_heads = 0;
  int64_t tokens = 0;  // of all sequences
  int sm_count = 0;
  bool may_cut = true;                      // sequences into segments
  bool may_stage = true;                    // see may_be_staged
  Diagonal diagonal = Diagonal::kAnchored;  // of the gate
  bool is_even = false;                     // sequences are known to be equally long
};

struct Form {
  int segments = 1;  // most of a sequence; 1: none is cut
  bool is_staged = false;
  int wave = 0, prepare_ctas = 0;  // see Params; staged and uncut only
  bool is_balanced = false;        // works shared out by time; fused and uncut only
};

// What a cost model that takes sequences as equally long expects of a form; its constants were measured on an H200.
double expected_microseconds(const CallFacts& call, const Form& form);
// The cheapest form by that model. The fused one is balanced where that is expected to save 1.5 %, or may, with
// lengths that are not known.
Form choose_form(const CallFacts& call);
// All chains at once, two SMs each or one, the preparation beside them on the rest; wave 0 where these are too few.
// More works than that in waves were measured too, and lose (docs/kernels/prefill.md).
Form beside_form(const CallFacts& call, int chain_sms = 2);

}  // namespace kda::cuda::prefill_fused
