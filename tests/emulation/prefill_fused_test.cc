// The fused prefill for Hopper, emulated: what it computes, against the oracle within N-9's release targets, and the
// bits that its clauses promise. The device tests (tests/cuda/prefill_fused_dev.cu) check the same and more on
// hardware.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "cuda/kernels/prefill_fused/chain.cuh"
#include "cuda/kernels/prefill_fused/choose.h"
#include "cuda/kernels/prefill_fused/kernel.cuh"
#include "prefill_problem.h"

namespace kda::cuda::prefill_fused {
thread_local __align__(1024) unsigned char s_memory[emulation::kSharedBytes];
}  // namespace kda::cuda::prefill_fused

namespace kda::emulated {
namespace {

using namespace cuda::prefill_fused;

template <int kGroups>
void launch_chains(const Params& p, int works) {
  const int ctas = kChainCtas<kGroups>;
  for (int i = 0; i < works; ++i)
    emulation::run_cluster(
        ctas, kChainThreads<kGroups>, i * ctas, works * ctas,
        [&] {
          const bool makes_states = p.pass == Pass::kSummaries || p.pass == Pass::kMaps;
          makes_states ? chain_kernel<kGroups, false>(p) : chain_kernel<kGroups, true>(p);
        },
        [] { return s_memory; });
}

// Clusters at the same time, the last first, and each of the others only once the one above it waits, or is done.
void run_waiting(int clusters, const std::function<void(int cluster, std::atomic<bool>* waits)>& run) {
  std::deque<std::atomic<bool>> waits(clusters);
  std::vector<std::thread> threads;
  for (int i = clusters - 1; i >= 0; --i) {
    threads.emplace_back([&, i] {
      run(i, &waits[i]);
      waits[i] = true;
    });
    while (!waits[i]) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::thread& thread : threads) thread.join();
}

// The kernel of a launch: the fused one, or with Params::stages the chain, one or two warpgroups a CTA by the number
// of `clusters`; `prepare`: what makes its stages.
template <Gate kGate, class GateType, Diagonal kDiagonal>
void launch(Params p, int clusters, bool prepare) {
  using C = Config<kGate, GateType, kDiagonal>;
  using Usual = Config<kGate, GateType, kDiagonal, Works::kUsual>;
  using Shared = Config<kGate, GateType, kDiagonal, Works::kShares>;
  p.gate_family = kGate, p.gate_type = sizeof(GateType) == 4 ? Real::kBf16 : Real::kF32;
  const auto memory = [] { return s_memory; };
  if (prepare) {
    for (int i = 0; i < clusters; ++i)
      emulation::run_cluster(
          1, kPrepareThreads<C>, i, clusters, [&] { prepare_stages_kernel<C>(p); }, memory);
  } else if (p.stages != nullptr) {
    clusters == 2 ? launch_chains<1>(p, clusters) : launch_chains<2>(p, clusters);
  } else {
    const auto run = [&](int i, std::atomic<bool>* waits) {
      emulation::run_cluster(
          kClusterSize, kThreads, i * kClusterSize, clusters * kClusterSize,
          [&] {
            if (p.balance_space != nullptr) prefill_fused_kernel<Shared>(p);
            else is_usual(p) ? prefill_fused_kernel<Usual>(p) : prefill_fused_kernel<C>(p);
          },
          memory, waits);
    };
    if (p.balance_space != nullptr) run_waiting(clusters, run);
    else
      for (int i = 0; i < clusters; ++i) run(i, nullptr);
  }
  EXPECT_EQ(emulation::race_count(), 0u);
}

void launch_kernel(const PrefillProblem& problem, const Params& p, int clusters, Diagonal diagonal,
                   bool prepare = false) {
  using Bf16 = uint32_t;
  if (problem.family == Gate::kSoftplus)
    return launch<Gate::kSoftplus, Bf16, Diagonal::kDyadic>(p, clusters, prepare);
  if (problem.family == Gate::kPlain) return launch<Gate::kPlain, float2, Diagonal::kDyadic>(p, clusters, prepare);
  if (diagonal == Diagonal::kDyadic) return launch<Gate::kBounded, Bf16, Diagonal::kDyadic>(p, clusters, prepare);
  if (problem.gates_are_f32) return launch<Gate::kBounded, float2, Diagonal::kAnchored>(p, clusters, prepare);
  launch<Gate::kBounded, Bf16, Diagonal::kAnchored>(p, clusters, prepare);
}

// The call's tensors but states; `offsets` and `gate_bits` are what it points to.
struct Call {
  std::vector<int64_t> offsets = {0};
  std::vector<uint16_t> gate_bits;
  std::vector<float> a_log;
  Params p;

  explicit Call(const PrefillProblem& problem) : a_log(problem.heads, problem.a_log) {
    const int64_t row = problem.heads * int64_t{128};
    for (const int64_t length : problem.lengths) offsets.push_back(offsets.back() + length);
    for (const float x : problem.gate) gate_bits.push_back(bf16_bits(x));
    const bool f32 = problem.gates_are_f32 || problem.family == Gate::kPlain;
    p.q = problem.q.data(), p.k = problem.k.data(), p.v = problem.v.data(), p.beta = problem.beta.data();
    p.gate = f32 ? static_cast<const void*>(problem.gate.data()) : gate_bits.data();
    p.q_rows = p.k_rows = p.v_rows = p.gate_rows = p.out_rows = Rows{0, row, 128};
    p.beta_rows = Rows{0, problem.heads, 1};
    if (problem.family != Gate::kPlain) p.a_log = a_log.data();
    p.lower_bound = -5.0f, p.scale = 1.0f / std::sqrt(128.0f);
    p.cu_seqlens = Indices{offsets.data(), 1, 1};
    p.sequences = static_cast<int64_t>(problem.lengths.size()), p.tokens = offsets.back();
    p.heads = p.value_heads = problem.heads;
  }
};

// [N, H, 256, 128], fp32. `stages`: made on the way and kept.
std::vector<float> run_maps(const PrefillProblem& problem, std::vector<char>* stages = nullptr) {
  Call call(problem);
  std::vector<float> maps(problem.lengths.size() * problem.heads * 2 * kMatrix, NAN);
  Params& p = call.p;
  p.pass = Pass::kMaps;
  p.state_out = maps.data(), p.state_out_stride = problem.heads * 2 * kMatrix, p.state_out_slots = p.sequences;
  p.state_out_is_packed = 1;
  if (stages != nullptr) {
    p.stage_positions = p.tokens / kChunk + p.sequences;
    stages->assign(p.stage_positions * problem.heads * (Staged::kStride + 4), static_cast<char>(0xff));
    p.stages = stages->data();
    launch_kernel(problem, p, 2, Diagonal::kAnchored, true);
  }
  launch_kernel(problem, p, 2, Diagonal::kAnchored);
  return maps;
}

// `checkpoint` > 0: also the state of sequence 0 after so many tokens.
// `kept`: stages that run_maps left. `change`: of what is launched.
PrefillResult run(const PrefillProblem& problem, int clusters = 1, Diagonal diagonal = Diagonal::kAnchored,
                  int64_t checkpoint = 0, std::vector<char>* kept = nullptr,
                  const std::function<void(Params&)>& change = {}) {
  const int64_t n = static_cast<int64_t>(problem.lengths.size()), row = problem.heads * int64_t{128};
  PrefillResult result;
  result.out.assign(problem.q.size(), 0x7f7f);
  result.state.assign(problem.state.size(), NAN);
  std::vector<int64_t> checkpoints(n, 0);
  Call call(problem);
  Params& p = call.p;
  p.out = result.out.data();
  p.initial = Initial::kAll;
  p.state_in = problem.state.data(), p.state_out = result.state.data();
  p.state_in_stride = p.state_out_stride = row * 128;
  p.state_in_slots = p.state_out_slots = n;
  if (checkpoint > 0) {
    checkpoints[0] = checkpoint;
    result.checkpoint.assign(problem.state.size(), NAN);
    p.checkpoints = 1;
    p.checkpoint_offsets = Table{checkpoints.data(), 1, 1, 1};
    p.checkpoint_out = result.checkpoint.data();
    p.checkpoint_row_stride = p.checkpoint_stride = row * 128;
  }
  if (change) change(p);
  std::vector<char> stages;
  if (kept != nullptr) {
    p.stage_positions = p.tokens / kChunk + n;
    p.stages = kept->data(), p.stages_are_ready = 1;
  } else if (problem.is_staged) {
    p.stage_positions = p.tokens / kChunk + n;
    const int64_t slots = p.stage_positions * problem.heads;
    stages.assign(slots * (Staged::kStride + 4), static_cast<char>(0xff));
    p.stages = stages.data();
    p.wave = problem.wave, p.cut = problem.cut;
    std::fill(stages.end() - 4 * slots, stages.end(), 0);  // as the launcher does
    launch_kernel(problem, p, clusters, diagonal, true);
  }
  if (problem.is_balanced) {
    const size_t floats = clusters * (kMatrix + kLeftFlags);
    std::vector<float> shares(floats + 8, NAN);
    p.balance_space = shares.data();
    std::fill(shares.begin() + clusters * kMatrix, shares.end() - 8, 0.0f);  // as the launcher does
    launch_kernel(problem, p, clusters, diagonal);
    for (size_t i = floats; i < shares.size(); ++i) EXPECT_TRUE(std::isnan(shares[i]));
    return result;
  }
  if (problem.cut.segments <= 1) {
    launch_kernel(problem, p, clusters, diagonal);
    return result;
  }
  std::vector<float> space(n * problem.heads * problem.cut.matrices() * kMatrix, NAN);
  p.segment_space = space.data();
  p.pass = Pass::kOpening;
  launch_kernel(problem, p, 2, diagonal);
  p.pass = Pass::kSummaries;
  launch_kernel(problem, p, clusters, diagonal);
  p.pass = Pass::kSegments;
  launch_kernel(problem, p, 2, diagonal);
  return result;
}

void expect_release_targets(const PrefillProblem& problem, const PrefillResult& result) {
  const PrefillErrors errors = compare_with_oracle(problem, result);
  EXPECT_LE(errors.out, 2.0e-3);
  EXPECT_LE(errors.state, 7e-4);
}

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

// Works shared out by time have the bits of works that are dealt out, whatever the clusters' number.
void expect_balanced_bits(PrefillProblem problem, const std::vector<int>& clusters,
                          const std::function<void(Params&)>& change = {}) {
  problem.is_balanced = false;
  const PrefillResult wanted = run(problem, 1, Diagonal::kAnchored, 0, nullptr, change);
  problem.is_balanced = true;
  for (const int count : clusters) {
    const PrefillResult got = run(problem, count, Diagonal::kAnchored, 0, nullptr, change);
    EXPECT_EQ(got.out, wanted.out) << count;
    EXPECT_EQ(std::memcmp(got.state.data(), wanted.state.data(), wanted.state.size() * sizeof(float)), 0) << count;
  }
}

TEST(PrefillFusedEmulated, H10_SharesOfUnevenSequences) {
  expect_balanced_bits({{64, 0, 330, 65, 1, 300, 63}, 2, Gate::kBounded}, {4});
}
// A cluster whose share is the longest work alone, more clusters than works; one that takes over and leaves, with
// nothing between.
TEST(PrefillFusedEmulated, H10_SharesAsLongAsAWork) {
  expect_balanced_bits({{64, 320, 96}, 1, Gate::kBounded}, {2, 4});
  expect_balanced_bits({{448}, 4, Gate::kBounded}, {3});
}
TEST(PrefillFusedEmulated, H10_SharesOfDyadicItems) { expect_balanced_bits({{320}, 3, Gate::kSoftplus}, {2}); }
TEST(PrefillFusedEmulated, H10_SharesOfGroupedHeadsInPlace) {
  const PrefillProblem problem({300, 33}, 4, Gate::kBounded);
  std::deque<std::vector<float>> pools;
  expect_balanced_bits(problem, {4}, [&](Params& p) {
    p.heads = 2;
    p.state_in = p.state_out = pools.emplace_back(problem.state).data();
  });
  EXPECT_EQ(pools[0], pools[1]);
}
// Slots of other types, dead ones, rows that are not active, and a list of output rows (P-5, P-7, R-41).
TEST(PrefillFusedEmulated, H10_SharesOfBf16SlotsAndListedRows) {
  const PrefillProblem problem({420, 70, 250, 40}, 2, Gate::kBounded);
  const int64_t slots[] = {2, -1, 0, 1}, write_slots[] = {3, 2, -1, 1};
  const int32_t active = 3;
  std::vector<int32_t> rows(problem.tokens());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = i % 50 == 7 ? -1 : static_cast<int32_t>(rows.size() - 1 - i);
  std::deque<std::vector<uint16_t>> pools;
  expect_balanced_bits(problem, {2}, [&](Params& p) {
    std::vector<uint16_t>& pool = pools.emplace_back();
    for (const float x : problem.state) pool.push_back(bf16_bits(x));
    p.state_in = p.state_out = pool.data();
    p.state_in_type = p.state_out_type = Real::kBf16;
    p.slots = Indices{slots, 1, 1}, p.write_slots = Indices{write_slots, 1, 1};
    p.num_active = &active;
    p.out_row_of = Indices{rows.data(), 1, 0}, p.out_row_count = p.tokens;
  });
  EXPECT_EQ(pools[0], pools[1]);
}
TEST(PrefillFusedEmulated, H10_SharesOfABatch) {
  const PrefillProblem problem({256, 256}, 3, Gate::kBounded);
  expect_balanced_bits(problem, {4}, [&](Params& p) {
    p.cu_seqlens = {}, p.tokens = 256;
    p.q_rows.batch = p.k_rows.batch = p.v_rows.batch = p.gate_rows.batch = p.out_rows.batch = 256 * 3 * 128;
    p.beta_rows.batch = 256 * 3;
  });
}
// In fp32's slow path right before and behind a cut.
TEST(PrefillFusedEmulated, H10_SharesWithValuesBeyondFp16) {
  PrefillProblem problem({320}, 3, Gate::kBounded);
  for (size_t i = 0; i < problem.v.size(); i += 41) problem.v[i] = bf16_bits(i % 2 == 0 ? 3e30 : -2e7);
  expect_balanced_bits(problem, {2});
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
