// The fused prefill for Hopper, emulated: what it computes, against the oracle within N-9's release targets, and the
// bits that its clauses promise. The device tests (tests/cuda/prefill_fused_dev.cu) check the same and more on
// hardware.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cuda/kernels/prefill_fused/work.cuh"
#include "prefill_harness.h"

namespace kda::emulated {
namespace {

using namespace cuda::prefill_fused;

TEST(PrefillFusedEmulated, N09_BoundedGates) {
  const PrefillProblem problem({70}, 1, Gate::kBounded);
  expect_release_targets(problem, run(problem));
}

TEST(PrefillFusedEmulated, N09_Fp32Gates) {
  PrefillProblem problem({33, 100}, 1, Gate::kBounded);
  problem.gates_are_f32 = true;
  expect_release_targets(problem, run(problem));
}

TEST(PrefillFusedEmulated, N09_SoftplusGates) {
  const PrefillProblem problem({100}, 1, Gate::kSoftplus);
  expect_release_targets(problem, run(problem));
}

TEST(PrefillFusedEmulated, N09_BoundedGatesByLevels) {
  const PrefillProblem problem({40}, 1, Gate::kBounded);
  expect_release_targets(problem, run(problem, 1, Diagonal::kDyadic));
}

// Every block's last factor is 2^-115; queries of which normalising leaves 1e-3.
TEST(PrefillFusedEmulated, H05_GatesAtTheirBoundAndSmallQueries) {
  PrefillProblem problem({70}, 1, Gate::kBounded, 100.0);
  expect_release_targets(problem, run(problem));
  for (uint16_t& q : problem.q) q = static_cast<uint16_t>(q == 0 || q == 0x8000 ? q : q - (20 << 7));
  problem.is_staged = true;
  expect_release_targets(problem, run(problem));
}
TEST(PrefillFusedEmulated, P11_PlainGatesHeadsAndAnEmptySequence) {
  const PrefillProblem problem({64, 0, 5}, 2, Gate::kPlain);
  expect_release_targets(problem, run(problem, 2));
}

// A checkpoint that no sequence reaches leaves the usual kernel's bits to the one for any call.
TEST(PrefillFusedEmulated, N12_TheKernelForAnyCall) {
  const PrefillProblem problem({33, 0, 130}, 2, Gate::kBounded);
  const PrefillResult usual = run(problem, 2), any = run(problem, 2, Diagonal::kAnchored, 1000);
  EXPECT_EQ(any.out, usual.out);
  EXPECT_EQ(any.state, usual.state);
}

// A fresh sequence whose slot is dead is inactive, wherever its final state would go (P-5, P-8).
TEST(PrefillFusedEmulated, P05_FreshRowsOfDeadSlots) {
  const int64_t slots[] = {1, -1, 7, 0};
  const uint8_t flags[] = {0, 0, 0, 1};
  float pool[2] = {}, packed[4] = {};
  Params p;
  p.state_in = pool, p.state_in_slots = 2, p.initial = Initial::kFlags, p.has_initial = flags;
  p.slots = Indices{slots, 1, 1};
  for (const bool is_packed : {false, true}) {
    p.state_out = is_packed ? static_cast<void*>(packed) : nullptr;
    p.state_out_is_packed = is_packed, p.state_out_slots = 4;
    for (int n = 0; n < 4; ++n) {
      const Slots row = sequence_slots(p, n);
      const bool active = n == 0 || n == 3;
      EXPECT_EQ(row.is_active, active) << n;
      EXPECT_EQ(row.write, is_packed && active ? n : -1) << n;
    }
  }
}

// Maps of whole sequences (S-3, S-9): the run without outputs from zero and from the identity; applied to the initial
// state they give the final one. An empty sequence is the identity.
TEST(PrefillFusedEmulated, S09_MapsOfSequences) {
  const PrefillProblem problem({70, 0}, 2, Gate::kBounded, -12.0);
  const std::vector<float> maps = run_maps(problem);
  PrefillResult result = run(problem);
  for (int unit = 0; unit < 4; ++unit) {
    const float *B = &maps[unit * 2 * kMatrix], *M = B + kMatrix, *initial = &problem.state[unit * kMatrix];
    for (int row = 0; row < 128; ++row) {
      for (int column = 0; column < 128; ++column) {
        double x = B[row * 128 + column];
        for (int i = 0; i < 128; ++i) x += double{initial[row * 128 + i]} * M[i * 128 + column];
        result.state[unit * kMatrix + row * 128 + column] = static_cast<float>(x);
        if (unit >= 2) {
          ASSERT_EQ(M[row * 128 + column], row == column ? 1 : 0);
          ASSERT_EQ(B[row * 128 + column], 0);
        }
      }
    }
  }
  expect_release_targets(problem, result);
}

// exp(A_log) may pass fp32's range: a gate of zero stays one.
TEST(PrefillFusedEmulated, E01_ScalesBeyondTheRangeOfFp32) {
  for (const Gate family : {Gate::kBounded, Gate::kSoftplus}) {
    PrefillProblem problem({33}, 1, family);
    problem.a_log = 100;
    for (float& x : problem.gate) x = family == Gate::kSoftplus ? -1000 : 0;
    expect_release_targets(problem, run(problem));
  }
}

TEST(PrefillFusedEmulated, H09_LaterTokensDoNotReachBack) {
  const PrefillProblem problem({45}, 1, Gate::kBounded);
  PrefillProblem changed = problem;
  for (int i = 0; i < 128; ++i) {
    const int64_t at = 44 * 128 + i;
    changed.k[at] = 0x7fc0, changed.v[at] = 0x7f80, changed.gate[at] = 1000.0f;
  }
  PrefillResult before = run(problem), after = run(changed);
  before.out.resize(44 * 128), after.out.resize(44 * 128);
  EXPECT_EQ(before.out, after.out);
}

// The same in every block of the solve, whatever of the token is bad.
// No bit of the tokens before one whose key, value, gate or beta is not finite may change, wherever it stands.
void expect_no_trace_of_bad_tokens(Gate gate, Diagonal diagonal) {
  const PrefillProblem problem({64}, 1, gate);
  const PrefillResult before = run(problem, 1, diagonal);
  const auto expect_earlier_bits = [&](const PrefillProblem& changed, int token) {
    const PrefillResult after = run(changed, 1, diagonal);
    EXPECT_TRUE(std::equal(before.out.begin(), before.out.begin() + token * 128, after.out.begin())) << token;
  };
  for (const int token : {33, 40, 47, 55, 59, 63}) {
    PrefillProblem bad_key = problem, bad_value = problem, bad_gate = problem, bad_beta = problem;
    bad_key.k[token * 128 + 5] = 0x7fc0;
    bad_value.v[token * 128 + 5] = 0x7f80;
    bad_gate.gate[token * 128 + 5] = NAN;
    bad_beta.beta[token] = bf16_bits(NAN);
    for (const PrefillProblem* changed : {&bad_key, &bad_value, &bad_gate, &bad_beta})
      expect_earlier_bits(*changed, token);
  }
}
TEST(PrefillFusedEmulated, H09_ABadTokenAnywhereInAChunk) {
  expect_no_trace_of_bad_tokens(Gate::kBounded, Diagonal::kAnchored);
}
TEST(PrefillFusedEmulated, H09_ABadTokenAnywhereInAChunkDyadic) {
  expect_no_trace_of_bad_tokens(Gate::kSoftplus, Diagonal::kDyadic);
}

TEST(PrefillFusedEmulated, N07_ValuesBeyondFp16) {
  PrefillProblem problem({64}, 1, Gate::kBounded);
  for (int i = 0; i < 128; ++i) problem.v[40 * 128 + i] = bf16_bits(3e30);
  expect_release_targets(problem, run(problem));
}

TEST(PrefillFusedEmulated, K05_CheckpointInsideAChunk) {
  const PrefillProblem problem({96}, 1, Gate::kBounded);
  PrefillProblem cut = problem;
  cut.lengths = {41};
  EXPECT_EQ(run(problem, 1, Diagonal::kAnchored, 41).checkpoint, run(cut).state);
}

}  // namespace
}  // namespace kda::emulated
