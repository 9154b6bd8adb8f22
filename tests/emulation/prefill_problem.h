// A prefill on host memory for the emulated kernel, and its oracle: token by token in fp64 (spec E-11).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/kernels/prefill_fused/params.h"

namespace kda::emulated {

struct PrefillProblem {
  std::vector<int64_t> lengths;
  int heads = 1;
  cuda::prefill_fused::Gate family = cuda::prefill_fused::Gate::kBounded;
  bool gates_are_f32 = false;
  cuda::prefill_fused::Cut cut;
  bool is_staged = false;  // prepared apart from the chain
  bool is_balanced = false;  // works shared out by time
  int wave = 0;            // works that chains beside the preparation run at once
  float a_log = 0;
  std::vector<uint16_t> q, k, v, beta;  // bf16, [T, H, 128], beta logits [T, H]
  std::vector<float> gate;              // [T, H, 128], values that bf16 holds
  std::vector<float> state;             // [N, H, 128, 128]

  // Random rows; gates around `gate_mean` (log decays in the plain form: small ones).
  PrefillProblem(std::vector<int64_t> sequence_lengths, int head_count, cuda::prefill_fused::Gate gate_family,
                 double gate_mean = 0.0);
  int64_t tokens() const;
};

struct PrefillResult {
  std::vector<uint16_t> out;  // bf16
  std::vector<float> state;   // final
  std::vector<float> checkpoint;
  int handed_over = 0;  // of works shared out: states that clusters left to the next
};

// Relative L2 errors of outputs and final states against the oracle.
struct PrefillErrors {
  double out = 0, state = 0;
};
PrefillErrors compare_with_oracle(const PrefillProblem& problem, const PrefillResult& result);

uint16_t bf16_bits(double x);

}  // namespace kda::emulated
