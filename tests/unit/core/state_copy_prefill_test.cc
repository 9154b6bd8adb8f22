// Gather, prefill over packed states, scatter against prefill by slots in place (spec T-19, R-45).
#include "conformance/distributions.h"
#include "conformance/rounding.h"
#include "state_copy_fixture.h"

namespace kda::conformance::test {
namespace {

// Pools of float states: the fixture's byte pattern would be full of NaN.
void fill_states(const Pool& pool) {
  for (int64_t r = 0; r < pool.shape.rows; ++r) {
    kda_tensor row = make_tensor(pool.row(r), pool.shape.dtype, {pool.shape.hv, pool.shape.v, pool.shape.k});
    for (int64_t i = 0; i < pool.shape.payload(); ++i) {
      store(element(row, i), pool.shape.dtype, static_cast<double>((i * 37 + r * 11) % 101 - 50) / 400.0);
    }
  }
}

TEST(StateCopyPrefill, T19_R45_BothRoutesGiveTheSamePoolBits) {
  for (kda_dtype dtype : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    Problem p =
        field_problem({.lengths = {70, 3, 0, 65, 1}, .heads = 2, .key_dim = 64, .value_dim = 32, .state_scale = 0.1});
    p.spec.state_dtype = dtype;
    const auto n = p.sequences();
    PoolShape s{6, 2, 32, 64, dtype};
    s.gap = 48;
    s.offset = 16;
    s.packed = KDA_FP32;
    Pool direct(s);
    fill_states(direct);
    Pool copied = direct;
    const Indices slots({4, -1, 1, 0, 9}, KDA_INT64, 3);  // two of them dead
    const std::vector<uint8_t> flags{1, 1, 1, 0, 1};
    const Tensor offsets = Tensor::ints(p.offsets());

    auto in_place = prefill_desc(p, "portable");
    in_place.initial_state = KDA_INITIAL_FLAGS;
    Plan plan = make_plan(in_place);
    ASSERT_TRUE(plan.ok()) << plan.message();
    Tensor out(p.q.dtype(), {p.tokens(), 2, 32});
    auto args = prefill_args(p);
    args.sequences.cu_seqlens = offsets;
    args.state = direct.view();
    args.slots = slots.view();
    args.has_initial_state = flags_view(flags);
    args.out = out;
    ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();

    const Plan copies = copy_plan(copy_desc(copied.view(), n, dtype == KDA_FP32 ? KDA_DTYPE_NONE : KDA_FP32));
    ASSERT_TRUE(copies.ok()) << copies.message();
    Packed packed(s, n);
    auto copy = copy_args(copied.view(), slots.view(), packed.view(), flags_view(flags));
    ASSERT_EQ(kda_state_gather(copies.get(), &copy, nullptr), KDA_OK) << kda_last_error();
    p.spec.state_dtype = KDA_FP32;
    auto over_packed = prefill_desc(p, "portable");
    over_packed.initial_state = KDA_INITIAL_ALL;
    Plan packed_plan = make_plan(over_packed);
    ASSERT_TRUE(packed_plan.ok()) << packed_plan.message();
    Tensor packed_out(p.q.dtype(), {p.tokens(), 2, 32});
    args.state = packed.view();
    args.slots = args.has_initial_state = {};
    args.out = packed_out;
    ASSERT_EQ(packed_plan.run(args), KDA_OK) << packed_plan.message();
    ASSERT_EQ(kda_state_scatter(copies.get(), &copy, nullptr), KDA_OK) << kda_last_error();

    EXPECT_TRUE(direct.memory == copied.memory) << dtype_name(dtype);
    // Rows of live sequences agree too; those of dead ones are zero in place.
    for (const auto& [first, length] : {std::pair<int64_t, int64_t>{0, 70}, {73, 65}}) {
      EXPECT_EQ(first_difference(narrow(out, 0, first, length), narrow(packed_out, 0, first, length)), "");
    }
    for (double x : values(narrow(out, 0, 70, 3))) ASSERT_EQ(x, 0.0);
  }
}

}  // namespace
}  // namespace kda::conformance::test
