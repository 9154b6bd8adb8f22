// Works of the fused prefill shared out by time, emulated: they have the bits of works that are dealt out, whatever
// the clusters' number.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>

#include "prefill_harness.h"

namespace kda::emulated {
namespace {

using namespace cuda::prefill_fused;

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

}  // namespace
}  // namespace kda::emulated
