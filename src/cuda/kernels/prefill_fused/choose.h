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
  Cut cut;  // staged only, with wave > 0
  bool is_staged = false;
  int wave = 0, prepare_ctas = 0;  // see Params; staged only
  bool is_balanced = false;        // works shared out by time; fused only
};

// What a cost model that takes sequences as equally long expects of a form; its constants were measured on an H200.
double expected_microseconds(const CallFacts& call, const Form& form);
// The cheapest form by that model. The fused one is balanced where that is expected to save 1.5 %, or may, with
// lengths that are not known.
Form choose_form(const CallFacts& call);
// All chains at once, two SMs each or one, the preparation beside them on the rest; wave 0 where these are too few.
// More works than that in waves were measured too, and lose (docs/kernels/prefill.md).
Form beside_form(const CallFacts& call, int sms = 2);

// SMs of a work of the opening and of one of the summaries, `units` sequences x heads: two for their latency, as far
// as the SMs that the preparation leaves are enough; where it leaves none, the chains come behind it and have all.
struct ChainSms {
  int opening, summary;
};
ChainSms chain_sms(int64_t units, const Cut& cut, int sm_count, int prepare_ctas);
// Matrices of the segment space (Cut::matrices) that a call which choose_form cuts takes at most.
int64_t most_segment_matrices(int64_t units);
// The staged form with sequences cut, of the SMs that the preparation takes the best number; `cut` as it is.
Form cut_form(const CallFacts& call, const Cut& cut);

}  // namespace kda::cuda::prefill_fused
