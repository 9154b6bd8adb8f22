// What a prefill's bits may not depend on (H-9, H-10, N-12, N-13, K-5, R-34, G-8), on every ISA of the machine.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>

#include "conformance/compare.h"
#include "unit/cpu/isa_contexts.h"

namespace kda::conformance::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class Bits : public testing::TestWithParam<std::string> {
 protected:
  // Results of one call over packed states; fails the test on any status but OK.
  Outcome run(const Problem& p, int threads = 2) const {
    PrefillOptions options;
    options.backend = "portable";
    options.context = isa_context(GetParam(), threads);
    Outcome r = prefill(p, options);
    EXPECT_EQ(r.status, KDA_OK) << r.message;
    return r;
  }
};

// Odd sizes, so that every row and panel has a tail; all gates of the bounded family.
Problem small_problem(std::vector<int64_t> lengths, int64_t K = 40, int64_t V = 27, double state_scale = 1) {
  FieldInput input;
  input.lengths = std::move(lengths);
  input.heads = 2;
  input.value_heads = 4;
  input.key_dim = K;
  input.value_dim = V;
  input.io = KDA_FP32;
  input.gate_scale = 4;
  input.beta_scale = 3;
  input.state_scale = state_scale;
  return field_problem(input);
}

// Rows [begin, begin + length) of a problem with one sequence, starting from `state` (absent: fresh).
Problem cut(const Problem& p, int64_t begin, int64_t length, const Tensor& state) {
  Problem part = p;
  for (Tensor Problem::*member : {&Problem::q, &Problem::k, &Problem::v, &Problem::gate, &Problem::beta}) {
    const Tensor& whole = p.*member;
    Shape shape = whole.shape();
    shape[0] = length;
    part.*member = Tensor::of(whole.dtype(), shape, values(narrow(whole, 0, begin, length)));
  }
  part.lengths = {length};
  part.state = state;
  return part;
}

void expect_same_rows(const Tensor& a, int64_t a_first, const Tensor& b, int64_t b_first, int64_t rows,
                      const std::string& what) {
  const kda_tensor x = narrow(a, 0, a_first, rows), y = narrow(b, 0, b_first, rows);
  EXPECT_TRUE(same_bits(x, y)) << what << ": " << first_difference(x, y);
}
void expect_same(const Tensor& a, const Tensor& b, const std::string& what) {
  EXPECT_TRUE(same_bits(a, b)) << what << ": " << first_difference(a, b);
}

Problem f05(int64_t T, kda_dtype io) {
  FieldInput input;
  input.lengths = {T};
  input.heads = 4;
  input.io = io;
  Problem p = field_problem(input);
  p.gate.fill(-0.7);
  if (io == KDA_FP32) p.gate.fill(-0.69921875);
  p.beta.fill(1000);
  for (int64_t h = 0; h < 4; ++h) p.A_log.set({h}, 2 * std::log(h + 1.0));
  return p;
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Isa, Bits, testing::ValuesIn(isas()), [](const auto& p) { return p.param; });

TEST_P(Bits, F05_ALaterGateDoesNotReachBack) {
  for (kda_dtype io : {KDA_FP32, KDA_BF16}) {
    const Outcome first = run(f05(22, io));
    const double o20[] = {3.231037e-3, 7.144846e-3, -1.362309e-2, 2.086213e-2};
    for (int64_t h = 0; h < 4; ++h) EXPECT_NEAR(first.out.get({20, h, 0}) / o20[h], 1, io == KDA_FP32 ? 2e-5 : 4e-3);
    Problem changed = f05(22, io);
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t k = 0; k < 128; ++k) changed.gate.set({21, h, k}, 1000);
    }
    const Outcome second = run(changed);
    expect_same_rows(first.out, 0, second.out, 0, 21, "another gate in token 21");
    EXPECT_NEAR(second.out.get({21, 0, 0}) / 1.567355e-3, 1, io == KDA_FP32 ? 2e-5 : 4e-3);
    for (int64_t T : {21, 23, 24, 25, 31, 32}) {
      expect_same_rows(first.out, 0, run(f05(T, io)).out, 0, 21, "T = " + std::to_string(T));
    }
  }
}

TEST_P(Bits, H07_H09_LengthDoesNotReachBack) {
  const Problem p = small_problem({131});
  const Outcome whole = run(p);
  for (int64_t T = 1; T < 131; T += T < 70 ? 1 : 7) {
    const Outcome part = run(cut(p, 0, T, p.state));
    expect_same_rows(whole.out, 0, part.out, 0, T, "T = " + std::to_string(T));
  }
}

TEST_P(Bits, H07_H09_NaNAndInfInLaterTokensDoNotReachBack) {
  const Problem clean = small_problem({70});
  const Outcome expected = run(clean);
  for (int64_t t : {1, 7, 8, 15, 16, 17, 31, 40, 63, 64, 69}) {
    for (double x : {kNaN, std::numeric_limits<double>::infinity()}) {
      for (Tensor Problem::*member : {&Problem::q, &Problem::k, &Problem::v, &Problem::gate, &Problem::beta}) {
        Problem p = clean;
        fill(narrow((p.*member).view(), 0, t, 1), x);
        expect_same_rows(expected.out, 0, run(p).out, 0, t, "token " + std::to_string(t));
      }
    }
  }
}

TEST_P(Bits, H10_CutsAtMultiplesOf64KeepEveryBit) {
  const Problem p = small_problem({300});
  const Outcome whole = run(p);
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{64, 236}, {128, 172}, {64, 64, 64, 64, 44}, {256, 44}, {192, 108}}) {
    Tensor state = p.state;
    int64_t begin = 0;
    for (int64_t length : lengths) {
      const Outcome part = run(cut(p, begin, length, state));
      expect_same_rows(whole.out, begin, part.out, 0, length, "rows from " + std::to_string(begin));
      state = part.state;
      begin += length;
    }
    expect_same(whole.state, state, "final state");
  }
}

TEST_P(Bits, N13_OtherSequencesAndOrderChangeNothing) {
  const std::vector<int64_t> lengths = {5, 64, 1, 100, 0, 33, 1, 17};
  const Problem p = small_problem(lengths);
  const Outcome batch = run(p);
  const std::vector<int64_t> offsets = p.offsets();
  for (size_t n = 0; n < lengths.size(); ++n) {
    const auto slot = static_cast<int64_t>(n);
    const Tensor state = Tensor::of(KDA_FP32, {1, 4, 27, 40}, values(narrow(p.state, 0, slot, 1)));
    const Outcome alone = run(cut(p, offsets[n], lengths[n], state));
    const std::string what = "sequence " + std::to_string(n);
    expect_same_rows(batch.out, offsets[n], alone.out, 0, lengths[n], what);
    expect_same_rows(batch.state, slot, alone.state, 0, 1, what);
  }
}

TEST_P(Bits, N12_ThreadsAndColumnBlocksChangeNothing) {
  const Problem shapes[] = {small_problem({77, 5, 130}), small_problem({150}, 33, 200)};
  for (const Problem& p : shapes) {
    const Outcome one = run(p, 1);
    for (int threads : {2, 3, 16}) {  // 16: heads are divided into blocks of columns
      const Outcome more = run(p, threads);
      expect_same(one.out, more.out, std::to_string(threads) + " threads, out");
      expect_same(one.state, more.state, std::to_string(threads) + " threads, state");
    }
  }
}

TEST_P(Bits, K05_H12_CheckpointsEqualCallsThatEndThere) {
  const int64_t T = 130;
  const Problem p = small_problem({T});
  const Outcome plain = run(p);
  kda_prefill_desc d = prefill_desc(p, "portable");
  d.max_checkpoints = T + 3;
  Plan plan = make_plan(d, isa_context(GetParam()));
  ASSERT_TRUE(plan.ok()) << plan.message();
  // Every offset, out of order, and three that write nothing (K-3).
  std::vector<int64_t> offsets;
  for (int64_t c = 0; c < T; ++c) offsets.push_back(1 + c * 37 % T);
  offsets.insert(offsets.end(), {0, -5, T + 1});
  const auto count = static_cast<int64_t>(offsets.size());
  const Tensor list = Tensor::of(KDA_INT64, {1, count}, std::vector<double>(offsets.begin(), offsets.end()));
  Tensor states(KDA_FP32, {1, count, 4, 27, 40}), out(KDA_FP32, {T, 4, 27}), final(KDA_FP32, {1, 4, 27, 40});
  kda_prefill_args args = prefill_args(p);
  args.state = p.state;
  args.final_state = final;
  args.out = out;
  args.checkpoint_offsets = list;
  args.checkpoint_states = states;
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  expect_same(out, plain.out, "out beside checkpoints");
  expect_same(final, plain.state, "final state beside checkpoints");
  const Tensor untouched(KDA_FP32, {1, 1, 4, 27, 40});
  for (int64_t c = 0; c < count; ++c) {
    const int64_t offset = offsets[static_cast<size_t>(c)];
    const bool written = offset >= 1 && offset <= T;
    const Outcome ends = written ? run(cut(p, 0, offset, p.state)) : Outcome{};
    const kda_tensor expected = select(written ? ends.state.view() : select(untouched, 0, 0), 0, 0);
    const kda_tensor got = select(select(states, 0, 0), 0, c);
    EXPECT_TRUE(same_bits(got, expected)) << "offset " << offset << ": " << first_difference(got, expected);
  }
}

TEST_P(Bits, G08_StridesEqualContiguous) {
  const Problem p = small_problem({50, 31});
  const Outcome dense = run(p);
  const int64_t T = 81;
  for (kda_dtype index : {KDA_INT32, KDA_INT64}) {
    Problem s = p;
    s.q = p.q.copy(KDA_FP32, {2 * 43 + 5, 43, 1}, 3);
    s.k = p.k.copy(KDA_FP32, {401, 61, 1}, 1);
    s.v = p.v.copy(KDA_FP32, {27, T * 27 + 2, 1}, 7);  // heads outermost
    s.gate = p.gate.copy(KDA_FP32, {4 * 40 + 64, 40, 1}, 9);
    s.beta = p.beta.copy(KDA_FP32, {40, 3}, 3);
    kda_prefill_desc d = prefill_desc(s, "portable");
    Plan plan = make_plan(d, isa_context(GetParam()));
    Tensor out(KDA_FP32, {T, 4, 27}, {4 * 33 + 1, 33, 1}, 5), final(KDA_FP32, {2, 4, 27, 40}, {5000, 1080, 40, 1}, 4);
    const Tensor cu = Tensor::ints(p.offsets(), index);
    kda_prefill_args args = prefill_args(s);
    args.sequences.cu_seqlens = cu;
    args.state = s.state;
    args.final_state = final;
    args.out = out;
    ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
    expect_same(out, dense.out, "strided out");
    expect_same(final, dense.state, "strided state");
    EXPECT_EQ(out.guard_report(), "");
    EXPECT_EQ(final.guard_report(), "");
  }
}

TEST_P(Bits, F23_InputOffsetsPast2To31) {
  // Tokens 2^30 elements apart in reserved memory, of which a few pages are touched.
  const Problem p = small_problem({4});
  const Outcome dense = run(p);
  const int64_t stride = int64_t{1} << 30;
  const size_t bytes = static_cast<size_t>(3 * stride + 4096) * sizeof(float);
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space";
  kda_prefill_args args = prefill_args(p);
  Tensor final(KDA_FP32, {1, 4, 27, 40});
  kda_tensor out = dense.out;
  int64_t at = 0;
  const auto spread = [&](const kda_tensor& dense_view) {
    kda_tensor t = dense_view;
    t.data = static_cast<float*>(memory) + at;
    t.strides[0] = stride;
    at += 512;
    return t;
  };
  for (kda_tensor* t : {&args.q, &args.k, &args.v, &args.gate, &args.beta}) {
    const kda_tensor far = spread(*t);
    assign(far, values(*t));
    *t = far;
  }
  out = spread(out);
  const Tensor cu = Tensor::ints({0, 4});
  args.sequences.cu_seqlens = cu;
  args.state = p.state;
  args.final_state = final;
  args.out = out;
  Plan plan = make_plan(prefill_desc(p, "portable"), isa_context(GetParam()));
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  EXPECT_TRUE(same_bits(out, dense.out)) << first_difference(out, dense.out);
  expect_same(final, dense.state, "state");
  munmap(memory, bytes);
}

TEST_P(Bits, Z09_NothingBehindARowIsRead) {
  // Poison (NaN) lies behind every row of every input; each K and V has other tails.
  for (int64_t dim : {1, 3, 7, 8, 9, 15, 16, 17, 60, 100}) {
    const Problem p = small_problem({20}, dim, dim + 3);
    const Outcome dense = run(p);
    for (kda_dtype io : {KDA_FP32, KDA_BF16, KDA_FP16}) {
      Problem s = p;
      s.spec.io_dtype = s.spec.gate_dtype = s.spec.beta_dtype = io;
      s.q = p.q.copy(io, {2 * (dim + 1), dim + 1, 1});
      s.k = p.k.copy(io, {2 * (dim + 1), dim + 1, 1});
      s.v = p.v.copy(io, {4 * (dim + 4), dim + 4, 1});
      s.gate = p.gate.copy(io, {4 * (dim + 1), dim + 1, 1});
      s.beta = p.beta.copy(io, {5, 1});
      const Outcome r = run(s);
      for (double x : r.out.values()) ASSERT_TRUE(std::isfinite(x)) << "dim " << dim;
      for (double x : r.state.values()) ASSERT_TRUE(std::isfinite(x)) << "dim " << dim;
      EXPECT_EQ(r.out.guard_report(), "");
      EXPECT_EQ(r.state.guard_report(), "");
      if (io == KDA_FP32) expect_same(r.out, dense.out, "dim " + std::to_string(dim));
    }
  }
}

TEST_P(Bits, P12_EveryFormOfSequencesGivesTheSameBits) {
  const Problem p = small_problem({24, 24, 24});
  const Outcome dense = run(p);
  const kda_prefill_desc d = prefill_desc(p, "portable");
  Plan plan = make_plan(d, isa_context(GetParam()));
  // Ranges in another order, states with them.
  const Tensor begin = Tensor::ints({48, 0, 24}), length = Tensor::ints({24, 24, 24}, KDA_INT64);
  Tensor out(KDA_FP32, {72, 4, 27}), final(KDA_FP32, {3, 4, 27, 40}), initial(KDA_FP32, {3, 4, 27, 40});
  for (int64_t n = 0; n < 3; ++n) assign(select(initial, 0, n), values(select(p.state, 0, (n + 2) % 3)));
  kda_prefill_args args = prefill_args(p);
  args.sequences.begin = begin;
  args.sequences.length = length;
  args.state = initial;
  args.final_state = final;
  args.out = out;
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  expect_same(out, dense.out, "ranges");
  for (int64_t n = 0; n < 3; ++n) expect_same_rows(final, n, dense.state, (n + 2) % 3, 1, "ranges, state");
  // Batched [B, T, ...].
  args.sequences = {};
  const auto batched = [](const kda_tensor& t) {
    Shape shape = {3, 24};
    for (int i = 1; i < t.rank; ++i) shape.push_back(t.shape[i]);
    return reshape(t, shape);
  };
  for (kda_tensor kda_prefill_args::*member :
       {&kda_prefill_args::q, &kda_prefill_args::k, &kda_prefill_args::v, &kda_prefill_args::gate,
        &kda_prefill_args::beta, &kda_prefill_args::out}) {
    args.*member = batched(args.*member);
  }
  args.state = p.state;
  out.poison();
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  expect_same(out, dense.out, "batched");
  expect_same(final, dense.state, "batched, state");
}

TEST_P(Bits, R41_OutRowsScatterTheSameBits) {
  const Problem p = small_problem({40});
  const Outcome dense = run(p);
  const kda_prefill_desc d = prefill_desc(p, "portable");
  Plan plan = make_plan(d, isa_context(GetParam()));
  std::vector<int64_t> rows;
  for (int64_t t = 0; t < 40; ++t) rows.push_back(t == 7 ? -1 : t == 9 ? 60 : 49 - t);
  const Tensor list = Tensor::ints(rows), cu = Tensor::ints({0, 40});
  Tensor out = Tensor::full(KDA_FP32, {60, 4, 27}, 7);
  kda_prefill_args args = prefill_args(p);
  args.sequences.cu_seqlens = cu;
  args.state = p.state;
  args.no_final_state = 1;
  args.out = out;
  args.out_rows = list;
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  const Tensor seven = Tensor::full(KDA_FP32, {1, 4, 27}, 7);
  for (int64_t r = 0; r < 60; ++r) {
    const int64_t t = 49 - r;
    if (t >= 0 && t < 40 && t != 7 && t != 9) expect_same_rows(out, r, dense.out, t, 1, "row " + std::to_string(r));
    else expect_same_rows(out, r, seven, 0, 1, "row " + std::to_string(r));
  }
  EXPECT_TRUE(same_bits(p.state, small_problem({40}).state)) << "initial states were written";
}

TEST_P(Bits, N02_StatesAreRoundedOnceAtTheEnd) {
  const Problem p = small_problem({45});
  for (kda_dtype dtype : {KDA_BF16, KDA_FP16}) {
    Problem start = p;  // a state that the pool's dtype holds exactly
    start.state = p.state.copy(dtype).copy(KDA_FP32);
    const Outcome exact = run(start);
    PrefillOptions options;
    options.backend = "portable";
    options.context = isa_context(GetParam());
    options.state_dtype = dtype;
    const Outcome pool = prefill(start, options);
    ASSERT_EQ(pool.status, KDA_OK) << pool.message;
    expect_same(pool.out, exact.out, "out");
    expect_same(pool.state, exact.state.copy(dtype), "state");
  }
}

}  // namespace kda::conformance::test
