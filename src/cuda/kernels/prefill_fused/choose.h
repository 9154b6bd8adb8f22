// Which form of the prefill serves a call (S-8), from what the host knows.
#pragma once

#include <cstdint>

namespace kda::cuda::prefill_fused {

struct CallFacts {
  int64_t sequences = 0;
  int32_t value_heads = 0;
  int64_t tokens = 0;  // of all sequences
  int sm_count = 0;
  bool may_cut = true;    // sequences into segments
  bool may_stage = true;  // see may_be_staged
};

struct Form {
  int segments = 1;  // most of a sequence; 1: none is cut
  bool is_staged = false;
  double microseconds = 0;  // what the model expects
};

// The cheapest form by a cost model that takes sequences as equally long; its constants were measured on an H200.
Form choose_form(const CallFacts& call);

}  // namespace kda::cuda::prefill_fused
