#include "prefill_harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <deque>
#include <thread>

#include "cuda/kernels/prefill_fused/chain.cuh"
#include "cuda/kernels/prefill_fused/kernel.cuh"

namespace kda::cuda::prefill_fused {
thread_local __align__(1024) unsigned char s_memory[emulation::kSharedBytes];
}  // namespace kda::cuda::prefill_fused

namespace kda::emulated {

using namespace cuda::prefill_fused;

namespace {

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

}  // namespace

std::vector<float> run_maps(const PrefillProblem& problem, std::vector<char>* stages) {
  Call call(problem);
  std::vector<float> maps(problem.lengths.size() * problem.heads * 2 * kMatrix, NAN);
  Params& p = call.p;
  p.pass = Pass::kMaps;
  p.state_out = maps.data(), p.state_out_stride = problem.heads * 2 * kMatrix, p.state_out_slots = p.sequences;
  p.state_out_is_packed = 1;
  if (stages != nullptr) {
    p.stage_positions = staged_positions(p.sequences, p.tokens);
    stages->assign(p.stage_positions * problem.heads * (Staged::kStride + 4), static_cast<char>(0xff));
    p.stages = stages->data();
    launch_kernel(problem, p, 2, Diagonal::kAnchored, true);
  }
  launch_kernel(problem, p, 2, Diagonal::kAnchored);
  return maps;
}

PrefillResult run(const PrefillProblem& problem, int clusters, Diagonal diagonal, int64_t checkpoint,
                  std::vector<char>* kept, const std::function<void(Params&)>& change) {
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
    p.stage_positions = staged_positions(n, p.tokens);
    p.stages = kept->data(), p.stages_are_ready = 1;
  } else if (problem.is_staged) {
    p.stage_positions = staged_positions(n, p.tokens);
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
    const auto is_there = [](float word) { return std::bit_cast<uint32_t>(word) == 1; };
    for (const float* words = shares.data() + clusters * kMatrix; words != shares.data() + floats;
         words += kLeftFlags)
      result.handed_over += std::all_of(words, words + kLeftFlags, is_there) ? 1 : 0;
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

}  // namespace kda::emulated
