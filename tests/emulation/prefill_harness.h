// Runs a PrefillProblem through the emulated kernels, launched as the library launches them.
#pragma once

#include <functional>
#include <vector>

#include "cuda/kernels/prefill_fused/params.h"
#include "prefill_problem.h"

namespace kda::emulated {

// `checkpoint` > 0: also the state of sequence 0 after so many tokens.
// `kept`: stages that run_maps left. `change`: of what is launched.
PrefillResult run(const PrefillProblem& problem, int clusters = 1,
                  cuda::prefill_fused::Diagonal diagonal = cuda::prefill_fused::Diagonal::kAnchored,
                  int64_t checkpoint = 0, std::vector<char>* kept = nullptr,
                  const std::function<void(cuda::prefill_fused::Params&)>& change = {});

// [N, H, 256, 128], fp32. `stages`: made on the way and kept.
std::vector<float> run_maps(const PrefillProblem& problem, std::vector<char>* stages = nullptr);

// N-9's, against the oracle.
void expect_release_targets(const PrefillProblem& problem, const PrefillResult& result);

}  // namespace kda::emulated
