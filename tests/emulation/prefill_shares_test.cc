// Works of the fused prefill shared out by time, emulated: they have the bits of works that are dealt out, whatever
// the clusters' number.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>

#include "prefill_harness.h"

namespace kda::emulated {
namespace {

using namespace cuda::prefill_fused;

// `handed_over`: states that one cluster leaves to the next, which waits for them: it starts first. A work has eight
// items at least where it is cut, and what lies on the line before it decides where (balance.cuh).
void expect_balanced_bits(PrefillProblem problem, const std::vector<int>& clusters, int handed_over,
                          const std::function<void(Params&)>& change = {}) {
  problem.is_balanced = false;
  const PrefillResult wanted = run(problem, 1, Diagonal::kAnchored, 0, nullptr, change);
  problem.is_balanced = true;
  for (const int count : clusters) {
    const PrefillResult got = run(problem, count, Diagonal::kAnchored, 0, nullptr, change);
    EXPECT_EQ(got.handed_over, handed_over) << count;
    EXPECT_EQ(got.out, wanted.out) << count;
    EXPECT_EQ(std::memcmp(got.state.data(), wanted.state.data(), wanted.state.size() * sizeof(float)), 0) << count;
  }
}

// The second cluster takes over and leaves, with nothing between; the third has the short sequences.
TEST(PrefillFusedEmulated, H10_SharesOfUnevenSequences) {
  expect_balanced_bits({{65, 0, 380, 384, 1, 353, 0, 63}, 1, Gate::kBounded}, {3}, 2);
}
// A cluster whose share is the longest work alone, more clusters than works.
TEST(PrefillFusedEmulated, H10_SharesAsLongAsAWork) {
  expect_balanced_bits({{64, 160, 1}, 1, Gate::kBounded}, {2, 4}, 0);
}
TEST(PrefillFusedEmulated, H10_SharesOfDyadicItems) { expect_balanced_bits({{250}, 3, Gate::kSoftplus}, {2}, 1); }
// Cut is value head 2, of key head 1.
TEST(PrefillFusedEmulated, H10_SharesOfGroupedHeadsInPlace) {
  const PrefillProblem problem({0, 256, 0}, 4, Gate::kBounded);
  std::deque<std::vector<float>> pools;
  expect_balanced_bits(problem, {2}, 1, [&](Params& p) {
    p.heads = 2;
    p.state_in = p.state_out = pools.emplace_back(problem.state).data();
  });
  EXPECT_EQ(pools[0], pools[1]);
}
// Slots of other types, dead ones, rows that are not active, and a list of output rows (P-5, P-7, R-41).
TEST(PrefillFusedEmulated, H10_SharesOfBf16SlotsAndListedRows) {
  const PrefillProblem problem({250, 70, 64, 40}, 2, Gate::kBounded);
  const int64_t slots[] = {2, -1, 0, 1}, write_slots[] = {3, 2, -1, 1};
  const int32_t active = 3;
  std::vector<int32_t> rows(problem.tokens());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = i % 50 == 7 ? -1 : static_cast<int32_t>(rows.size() - 1 - i);
  std::deque<std::vector<uint16_t>> pools;
  expect_balanced_bits(problem, {2}, 1, [&](Params& p) {
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
// Cut is the second sample.
TEST(PrefillFusedEmulated, H10_SharesOfABatch) {
  const PrefillProblem problem({256, 256, 256}, 1, Gate::kBounded);
  expect_balanced_bits(problem, {2}, 1, [&](Params& p) {
    p.cu_seqlens = {}, p.tokens = 256;
    p.q_rows.batch = p.k_rows.batch = p.v_rows.batch = p.gate_rows.batch = p.out_rows.batch = 256 * 128;
    p.beta_rows.batch = 256;
  });
}
// In fp32's slow path right before and behind a cut.
TEST(PrefillFusedEmulated, H10_SharesWithValuesBeyondFp16) {
  PrefillProblem problem({256}, 3, Gate::kBounded);
  for (size_t i = 0; i < problem.v.size(); i += 41) problem.v[i] = bf16_bits(i % 2 == 0 ? 3e30 : -2e7);
  expect_balanced_bits(problem, {2}, 1);
}

}  // namespace
}  // namespace kda::emulated
