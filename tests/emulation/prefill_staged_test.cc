// The staged form of the prefill and its cut sequences, emulated; and the form that is chosen for a call.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "cuda/kernels/prefill_fused/choose.h"
#include "cuda/kernels/prefill_fused/units.cuh"
#include "prefill_harness.h"

namespace kda::emulated {
namespace {

using namespace cuda::prefill_fused;

// The staged form makes the fused form's bits.
void expect_same_bits(PrefillProblem problem, int clusters) {
  const PrefillResult fused = run(problem, clusters);
  problem.is_staged = true;
  const PrefillResult staged = run(problem, clusters);
  EXPECT_EQ(fused.out, staged.out);
  EXPECT_EQ(fused.state, staged.state);
}

TEST(PrefillFusedEmulated, N12_StagedBounded) { expect_same_bits({{33, 0, 200}, 2, Gate::kBounded}, 2); }
TEST(PrefillFusedEmulated, N12_StagedValuesBeyondFp16) {
  PrefillProblem problem({64}, 1, Gate::kBounded);
  for (int i = 0; i < 128; ++i) problem.v[40 * 128 + i] = bf16_bits(3e30);
  expect_same_bits(problem, 1);
}
TEST(PrefillFusedEmulated, N12_StagedSoftplus) { expect_same_bits({{100}, 1, Gate::kSoftplus}, 1); }
TEST(PrefillFusedEmulated, N12_StagedPlain) { expect_same_bits({{5, 64}, 1, Gate::kPlain}, 3); }

// Chains beside their preparation, in waves within a sequence's heads and across sequences, of one and of two
// warpgroups.
TEST(PrefillFusedEmulated, N12_StagedBesideItsChains) {
  PrefillProblem problem({33, 0, 200, 97}, 2, Gate::kBounded);
  const PrefillResult fused = run(problem, 2);
  problem.is_staged = true;
  for (const int wave : {3, 4}) {
    problem.wave = wave;
    const PrefillResult staged = run(problem, wave == 4 ? 2 : 3);
    EXPECT_EQ(fused.out, staged.out) << wave;
    EXPECT_EQ(fused.state, staged.state) << wave;
  }
}

// The same maps by the staged form, and a prefill that goes on from their stages: bits of one that makes its own.
TEST(PrefillFusedEmulated, S09_StagesOfMapsServeThePrefill) {
  const PrefillProblem problem({70, 0}, 2, Gate::kBounded);
  std::vector<char> stages;
  const std::vector<float> staged = run_maps(problem, &stages), fused = run_maps(problem);
  EXPECT_EQ(std::memcmp(staged.data(), fused.data(), fused.size() * sizeof(float)), 0);
  const PrefillResult wanted = run(problem);
  for (const int clusters : {1, 2}) {
    const PrefillResult got = run(problem, clusters, Diagonal::kAnchored, 0, &stages);
    EXPECT_EQ(got.out, wanted.out);
    EXPECT_EQ(std::memcmp(got.state.data(), wanted.state.data(), wanted.state.size() * sizeof(float)), 0);
  }
}

// A run of two segments and one that its sequence's end cuts short, sequences that end with the opening or in it;
// summaries by chains of one and of two warpgroups.
TEST(PrefillFusedEmulated, S06_CutIntoSegments) {
  PrefillProblem problem({1100, 0, 256, 97}, 1, Gate::kBounded, -12.0);  // slow gates: every map matters
  problem.cut = {5, 1, 2}, problem.is_staged = true, problem.wave = 1;
  const PrefillResult one = run(problem, 2), two = run(problem, 3);
  expect_release_targets(problem, one);
  EXPECT_EQ(one.out, two.out);
  EXPECT_EQ(std::memcmp(one.state.data(), two.state.data(), one.state.size() * sizeof(float)), 0);
}

// Offsets that run backwards: nothing is prepared of a sequence that has more items than were booked, and no chain
// may wait for its stages; its rows are cleared (G-7, P-13).
TEST(PrefillFusedEmulated, P13_BackwardOffsetsOfACutCall) {
  PrefillProblem problem({600, 0, 64}, 1, Gate::kBounded);
  problem.cut = {5, 1, 2}, problem.is_staged = true, problem.wave = 1;
  const int64_t offsets[] = {0, 600, 0, 664};
  const PrefillResult result = run(problem, 2, Diagonal::kAnchored, 0, nullptr, [&](Params& p) {
    p.cu_seqlens = Indices{offsets, 1, 1};
  });
  EXPECT_EQ(std::count(result.out.begin() + 600 * 128, result.out.end(), 0), 64 * 128);
}

// What the opening and the runs want at the same time is made at the same time, and every item once.
TEST(PrefillFusedEmulated, S06_OrderOfTheItemsOfACutSequence) {
  Params p;
  p.cut = {9, 3, 2};
  for (const int64_t length : {1, 8000, 8192, 5000, 2700, 2688, 2689, 16001}) {
    const ItemOrder order = item_order(p, length);
    const uint32_t total = item_total(length);
    std::vector<int> made(total, 0);
    std::vector<uint32_t> before(9, 0);  // items of each segment
    for (uint32_t number = 0; number < total; ++number) {
      const uint32_t item = ordered_item(p, order, number);
      ASSERT_LT(item, total);
      ++made[item];
      if (order.items == 0) continue;
      const uint32_t segment = item / order.items;
      if (segment < order.columns) EXPECT_LE(item % order.items, number / order.columns * 3 + 2) << length;
      else EXPECT_GE(number, order.items * order.columns);
    }
    EXPECT_EQ(std::count(made.begin(), made.end(), 1), total) << length;
  }
}

TEST(PrefillFusedEmulated, S08_FormsByHostFacts) {
  const auto choose = [](int64_t n, int32_t heads, int64_t tokens, bool may_cut) {
    return choose_form({n, heads, tokens, 132, may_cut, true});
  };
  EXPECT_GT(choose(1, 12, 65536, true).cut.segments, 1);
  EXPECT_TRUE(choose(1, 12, 65536, true).is_staged);
  EXPECT_EQ(choose(1, 12, 65536, false).cut.segments, 1);  // batch_invariant
  const Form unstaged = choose_form({1, 12, 65536, 132, true, false});
  EXPECT_FALSE(unstaged.is_staged);
  EXPECT_EQ(unstaged.cut.segments, 1);
  EXPECT_EQ(choose(128, 96, 131072, true).cut.segments, 1);
  EXPECT_EQ(choose(0, 12, 0, true).cut.segments, 1);
  EXPECT_EQ(choose(1, 12, 1, true).cut.segments, 1);
  // More works than clusters: time is shared out, in a batch only where whole works leave some idle.
  for (const Diagonal diagonal : {Diagonal::kAnchored, Diagonal::kDyadic}) {
    for (const bool may_cut : {true, false}) {
      EXPECT_TRUE(choose_form({1, 96, 8192, 132, may_cut, true, diagonal}).is_balanced);
      EXPECT_TRUE(choose_form({8, 12, 16384, 132, may_cut, true, diagonal}).is_balanced);
      EXPECT_TRUE(choose_form({6, 64, 8192, 132, may_cut, true, diagonal}).is_balanced);
      EXPECT_FALSE(choose_form({1, 64, 8192, 132, may_cut, true, diagonal}).is_balanced);
      EXPECT_FALSE(choose_form({2, 66, 8192, 132, may_cut, true, diagonal, true}).is_balanced);
      EXPECT_FALSE(choose_form({4, 32, 400, 132, may_cut, true, diagonal}).is_balanced);
      EXPECT_FALSE(choose_form({193, 12, 386000, 132, may_cut, false, diagonal}).is_balanced);
    }
  }
  // The dyadic form's preparation takes longer, in every form.
  const CallFacts bounded{1, 32, 8192, 132, true, true, Diagonal::kAnchored};
  const CallFacts any_gate{1, 32, 8192, 132, true, true, Diagonal::kDyadic};
  for (const Form& form :
       {Form{}, Form{{}, false, 0, 0, true}, Form{{}, true}, cut_form(bounded, {4, 1, 1}), beside_form(bounded)})
    EXPECT_GT(expected_microseconds(any_gate, form), expected_microseconds(bounded, form));
}

// The SMs are divided without rest; works that are too many for two SMs each do not run beside their preparation.
TEST(PrefillFusedEmulated, S08_SmsOfThePreparationAndOfChains) {
  for (const int64_t n : {1, 8, 128}) {
    for (const int32_t heads : {1, 12, 32, 64, 96}) {
      const CallFacts call{n, heads, n * 8192, 132};
      const Form form = beside_form(call);
      EXPECT_EQ(form.wave, 2 * n * heads <= 130 ? n * heads : 0);
      if (form.wave == 0) {
        EXPECT_EQ(choose_form(call).wave, 0);
        continue;
      }
      EXPECT_EQ(2 * form.wave + form.prepare_ctas, 132);
      EXPECT_LE(expected_microseconds(call, choose_form(call)), 1.04 * expected_microseconds(call, form));
    }
  }
  EXPECT_EQ(choose_form({1, 32, 8192, 132}).wave, 32);
  EXPECT_EQ(choose_form({1, 32, 8192, 132, false}).wave, 32);  // the fused form's bits: batch_invariant too
  // The dyadic preparation is the longer part: it gets the SMs that chains of one SM each leave.
  EXPECT_EQ(choose_form({1, 32, 8192, 132, true, true, Diagonal::kDyadic}).prepare_ctas, 100);
  // A plan books the most that any cut takes.
  for (const Diagonal diagonal : {Diagonal::kAnchored, Diagonal::kDyadic}) {
    for (const int32_t heads : {1, 2, 4, 8, 12, 16, 24, 44}) {
      for (int64_t tokens = 200; tokens < 200000; tokens += tokens / 9) {
        const Cut cut = choose_form({1, heads, tokens, 132, true, true, diagonal}).cut;
        EXPECT_LE(cut.segments > 1 ? heads * cut.matrices() : 0, most_segment_matrices(heads));
      }
    }
  }
  // Of a cut, chains of the opening, of the summaries and the preparation have an SM or two each at the same time.
  for (const int32_t heads : {1, 4, 8, 12, 16}) {
    const Form form = choose_form({1, heads, 8192, 132});
    ASSERT_GT(form.cut.segments, 1);
    EXPECT_LT(form.cut.opening, form.cut.segments);
    const ChainSms sms = chain_sms(heads, form.cut, 132, form.prepare_ctas);
    EXPECT_LE(heads * (sms.opening + sms.summary * 2 * form.cut.runs()) + form.prepare_ctas, 132);
  }
  // Sequences of unknown lengths: chains of one SM each beside their preparation, where enough SMs are left.
  // Where these are even, only a short preparation is hidden without loss.
  const CallFacts packed{6, 12, 8192, 132};
  const CallFacts any_gate{6, 12, 8192, 132, true, true, Diagonal::kDyadic};
  CallFacts even = any_gate;
  even.is_even = true;
  for (const CallFacts& call : {packed, any_gate}) {
    EXPECT_EQ(choose_form(call).wave, 72);
    EXPECT_EQ(choose_form(call).prepare_ctas, 60);
  }
  EXPECT_EQ(choose_form(even).wave, 0);
  EXPECT_EQ(choose_form({8, 12, 16384, 132}).wave, 0);
}

}  // namespace
}  // namespace kda::emulated
