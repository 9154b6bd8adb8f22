// decode_step's common call (one token a row, HV = H, K = V = 128, W = 4, aligned 16-bit io), which backends may
// serve by kernels of its own: the bits of the same call with output rows named one by one, and of the chain (L-8).
#include <cmath>

#include "harness.h"

namespace kda::conformance::test {
namespace {

#ifndef KDA_TEST_MANY_HEADS
#define KDA_TEST_MANY_HEADS 80
#endif
constexpr int64_t kDim = 128;

struct Form {
  int64_t heads = 2;
  kda_dtype pool = KDA_FP32, io = KDA_BF16, gate = KDA_BF16, beta = KDA_BF16;
  kda_gate_family family = KDA_GATE_BOUNDED;
  kda_initial_state initial = KDA_INITIAL_ALL;
  bool bare = false;  // no A_log and no dt_bias
  int64_t null_slot = -1;
};

}  // namespace

class CommonStepTest : public BackendTest {
 protected:
  struct Call {
    Tensor x, gate, beta, z, offsets, begin, length, active, slots, accepted, flags;
    bool packed = false;
  };
  struct State {
    Tensor pool, window;
  };

  void SetUp() override {
    const kda_decode_step_desc d = desc_of({});
    require(KDA_OP_DECODE_STEP, &d);
  }

  kda_decode_step_desc desc_of(const Form& f) const {
    kda_decode_step_desc d;
    kda_decode_step_desc_init(&d);
    kda_attention_spec& a = d.decode.attention;
    a.num_heads = a.num_value_heads = f.heads;
    a.key_dim = a.value_dim = kDim;
    a.io_dtype = f.io;
    a.gate_dtype = f.gate;
    a.beta_dtype = f.beta;
    a.state_dtype = f.pool;
    a.gate_family = f.family;
    if (f.family == KDA_GATE_BOUNDED) a.lower_bound = -5;
    d.decode.backend = backend();
    d.decode.max_tokens = d.decode.max_sequences = 512;
    d.decode.initial_state = f.initial;
    d.decode.null_slot = f.null_slot;
    d.conv_width = 4;
    d.conv_parts = 1;
    d.conv_layout = KDA_CONV_SD;
    return d;
  }

  // Heads of which few rows occupy a device.
  int64_t many() const { return on_device() ? KDA_TEST_MANY_HEADS : 4; }

  static Tensor random(kda_dtype dtype, Shape shape, uint32_t stream, int64_t seed, double factor, double shift = 0) {
    std::vector<double> x(static_cast<size_t>(product(shape)));
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = shift + factor * uniform(stream, i + static_cast<uint64_t>(seed) * 1000003);
    return Tensor::of(dtype, std::move(shape), x);
  }
  static Call call_of(const Form& f, int64_t seed, const std::vector<int64_t>& lengths,
                      const std::vector<int64_t>& slots) {
    Call c;
    std::vector<int64_t> cu = {0};
    for (int64_t n : lengths) cu.push_back(cu.back() + n);
    const int64_t T = cu.back(), H = f.heads;
    c.x = random(f.io, {T, 3 * H * kDim}, 1, seed, 1);
    c.gate = f.family == KDA_GATE_PLAIN ? random(f.gate, {T, H, kDim}, 4, seed, 1, -1.5)
                                        : random(f.gate, {T, H, kDim}, 4, seed, 4);
    c.beta = random(f.beta, {T, H}, 5, seed, 3);
    c.z = random(f.io, {T, H, kDim}, 11, seed, 2);
    c.offsets = Tensor::ints(cu);
    c.slots = Tensor::ints(slots);
    return c;
  }
  static State state_of(const Form& f, int64_t slots) {
    return {canary_pool(f.pool, {slots, f.heads, kDim, kDim}), canary_pool(f.io, {slots, 3, 3 * f.heads * kDim})};
  }

  // With `by_rows` every row's place is named: the same places.
  Tensor run(const Form& f, const Call& c, State& state, bool by_rows) {
    const int64_t T = c.x.shape()[0], H = f.heads;
    const Tensor out = Tensor::full(f.io, {T, H, kDim}, 7), rows = Tensor::ints(iota(T));
    const Tensor A_log = random(KDA_FP32, {H}, 7, 1, 0.7), dt_bias = random(KDA_FP32, {H, kDim}, 8, 1, 1);
    const Tensor taps = random(KDA_FP32, {3 * H * kDim, 4}, 9, 1, 1), weight = random(KDA_FP32, {kDim}, 10, 1, 1);
    auto a = sized<kda_decode_step_args>();
    a.decode.struct_size = sizeof a.decode;
    a.decode.gate = c.gate;
    a.decode.beta = c.beta;
    if (f.family != KDA_GATE_PLAIN && !f.bare) {
      a.decode.A_log = A_log;
      a.decode.dt_bias = dt_bias;
    }
    a.decode.sequences.cu_seqlens = c.offsets;
    a.decode.sequences.begin = c.begin;
    a.decode.sequences.length = c.length;
    a.decode.sequences.num_active = c.active;
    a.decode.state = state.pool;
    if (!c.packed) a.decode.slots = c.slots;
    a.decode.accepted = c.accepted;
    a.decode.has_initial_state = c.flags;
    a.decode.out = out;
    if (by_rows) a.decode.out_rows = rows;
    a.x[0] = c.x;
    a.conv_weight[0] = taps;
    a.conv_state[0] = state.window;
    a.z = c.z;
    a.norm_weight = weight;
    Plan plan = make_plan(desc_of(f));
    EXPECT_EQ(plan.run(a), KDA_OK) << plan.message();
    return out;
  }

  void expect_same(const Form& f, const Call& c, int64_t slots, int rounds = 2) {
    State one = state_of(f, slots), other = one;
    for (int round = 0; round < rounds; ++round) {
      const Tensor a = run(f, c, one, false), b = run(f, c, other, true);
      EXPECT_EQ(first_difference(a, b), "");
      EXPECT_EQ(first_difference(one.pool, other.pool), "");
      EXPECT_EQ(first_difference(one.window, other.window), "");
    }
  }
};
KDA_FOR_BACKENDS(CommonStepTest);

TEST_P(CommonStepTest, L08_DtypesAndGates) {
  for (const kda_dtype pool : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    for (const int64_t heads : {int64_t{1}, int64_t{2}, many()}) {
      for (int i = 0; i < 3; ++i) {
        SCOPED_TRACE(testing::Message() << "pool " << pool << " heads " << heads << " case " << i);
        Form f;
        f.heads = heads;
        f.pool = pool;
        f.io = i == 1 ? KDA_FP16 : KDA_BF16;
        f.gate = i == 0 ? f.io : KDA_FP32;
        f.beta = i == 2 ? KDA_FP32 : f.io;
        f.family = i == 0 ? KDA_GATE_BOUNDED : i == 1 ? KDA_GATE_SOFTPLUS : KDA_GATE_PLAIN;
        expect_same(f, call_of(f, i, {1, 1, 1, 1, 1}, {3, 0, 5, 1, 4}), 6);
      }
    }
  }
}

TEST_P(CommonStepTest, P05_P09_P11_RowsOfEveryKind) {
  for (const kda_dtype pool : {KDA_FP32, KDA_BF16}) {
    for (const int64_t heads : {int64_t{1}, many()}) {
      SCOPED_TRACE(testing::Message() << "pool " << pool << " heads " << heads);
      Form f;
      f.heads = heads;
      f.pool = pool;
      f.initial = KDA_INITIAL_FLAGS;
      f.null_slot = 2;
      f.bare = heads == 1;
      // Fresh and not, of no token, of one, of two (more than the width); dead, null and far slots; a bad count.
      Call c = call_of(f, 3, {1, 1, 0, 0, 1, 2, 1, 1, 1, 0, 1}, {3, 0, 5, 1, -1, 4, 2, 99, 6, 2, 7});
      c.flags = Tensor::flags({1, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0});
      c.accepted = Tensor::ints({1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1});
      expect_same(f, c, 8);
      c.active = Tensor::ints({10});
      expect_same(f, c, 8, 1);
    }
  }
}

TEST_P(CommonStepTest, P04_P12_PackedAndRanges) {
  for (const int64_t heads : {2, 6}) {
    Form f;
    f.heads = heads;
    Call c = call_of(f, 4, {1, 1, 1, 1}, {0, 1, 2, 3});
    c.packed = true;
    expect_same(f, c, 4);
    c.packed = false;
    c.offsets = {};
    c.begin = Tensor::ints({3, 0, 1, 2}, KDA_INT64);
    c.length = Tensor::ints({1, 1, 0, 1});
    f.initial = KDA_INITIAL_NONE;
    expect_same(f, c, 4);
  }
}

// Views with padding between rows that keeps whole 16-byte pieces, and such that does not.
TEST_P(CommonStepTest, G08_Views) {
  Form f;
  f.heads = 3;
  for (const int64_t pad : {8, 4, 1}) {
    SCOPED_TRACE(testing::Message() << "pad " << pad);
    Call c = call_of(f, 6, {1, 1, 1}, {2, 0, 1});
    const int64_t row = 3 * kDim;
    c.x = c.x.copy(f.io, {3 * row + pad, 1}, pad);
    c.gate = c.gate.copy(f.gate, {row + pad, kDim, 1}, pad);
    c.z = c.z.copy(f.io, {row + pad, kDim, 1}, pad);
    expect_same(f, c, 3);
  }
}

// More heads than a device that takes them one after the other has places for: rings and tables wrap. With few places
// (emulated kernels) heads are so many that all ways of dealing them to blocks are met.
TEST_P(CommonStepTest, N13_ManyRows) {
  Form f;
  f.heads = on_device() ? 8 : 2;
  for (const auto& [pool, rows] : {std::pair{KDA_BF16, 34}, {KDA_BF16, 136}, {KDA_FP32, 60}, {KDA_FP32, 100}}) {
    SCOPED_TRACE(testing::Message() << "pool " << pool << " rows " << rows);
    f.pool = pool;
    const int64_t N = on_device() ? rows : rows / 4;
    std::vector<int64_t> lengths(static_cast<size_t>(N), 1), slots = iota(N);
    for (size_t n = 0; n < slots.size(); ++n) {
      slots[n] = static_cast<int64_t>(n * 7 % slots.size());
      if (n % 11 == 5) slots[n] = -1;
      if (n % 13 == 7) lengths[n] = 0;
    }
    expect_same(f, call_of(f, 7, lengths, slots), N);
  }
}

// A NaN in one row stays there (P-15), and an inactive row's is never looked at.
TEST_P(CommonStepTest, P15_NanStaysInItsRow) {
  for (const int64_t heads : {2, 9}) {
    Form f;
    f.heads = heads;
    Call c = call_of(f, 8, {1, 1, 1}, {1, -1, 0});
    fill(select(c.x, 0, 0), NAN);
    fill(select(c.x, 0, 1), NAN);
    fill(select(c.z, 0, 1), NAN);
    State state = state_of(f, 2);
    const Tensor out = run(f, c, state, false);
    for (const double x : rows(out, 0, 1)) ASSERT_TRUE(std::isnan(x));
    for (const double x : rows(out, 1, 1)) ASSERT_EQ(x, 0);
    for (const double x : rows(out, 2, 1)) ASSERT_TRUE(std::isfinite(x));
    for (const double x : values(select(state.pool, 0, 0))) ASSERT_TRUE(std::isfinite(x));
  }
}

}  // namespace kda::conformance::test
