// R-61's tables as a pairwise covering, and R-62 on each of its rows: canary pool, poisoned gaps and workspace,
// guards behind every buffer, inputs unchanged, the second call bit-equal.
#include <algorithm>
#include <cmath>
#include <thread>

#include "conformance/covering.h"
#include "harness.h"

namespace kda::conformance::test {
namespace {

// Lengths in a batch. Together they hold every length of R-61 up to 1000; 8192 has its own test.
const std::vector<std::vector<int64_t>> kLengths = {
    {0, 1, 2, 3, 15, 16, 17}, {31, 0, 33, 63, 64}, {65, 127, 129, 0}, {1}, {64}, {0, 0, 1}, {257, 1, 1, 1}};
struct Heads {
  int64_t H, HV;
};
const std::vector<Heads> kHeads = {{1, 1}, {2, 2}, {1, 4}, {3, 6}, {4, 12}};
struct Dims {
  int64_t K, V;
};
const std::vector<Dims> kDims = {{128, 128}, {64, 64}, {128, 64}, {48, 100}, {33, 3}};
const std::vector<kda_dtype> kIo = {KDA_BF16, KDA_FP32, KDA_FP16};
const std::vector<kda_dtype> kPools = {KDA_FP32, KDA_BF16, KDA_FP16};
enum Family { kBounded, kBoundedSteep, kSoftplus, kPlain };
enum Slots { kIdentity, kPermuted, kGapped, kSomeDead };
enum Initial { kNone, kAll, kFlags };
enum Sequences { kOffsets32, kOffsets64, kRanges };

struct Case {
  std::vector<int64_t> lengths;
  Heads heads;
  Dims dims;
  kda_dtype io, pool;
  int family, slots, initial, sequences;
  bool fp32_gate, strided;
};

std::vector<Case> cases() {
  const auto size = [](const auto& x) { return static_cast<int>(x.size()); };
  std::vector<Case> result;
  for (const std::vector<int>& r :
       covering_pairs({size(kLengths), size(kHeads), size(kDims), size(kIo), size(kPools), 4, 4, 3, 3, 2, 2})) {
    const auto at = [&](const auto& x, size_t f) { return x[static_cast<size_t>(r[f])]; };
    result.push_back({at(kLengths, 0), at(kHeads, 1), at(kDims, 2), at(kIo, 3), at(kPools, 4), r[5], r[6], r[7], r[8],
                      r[9] == 1, r[10] == 1});
  }
  return result;
}

std::string describe(const Case& c) {
  std::string s = "lengths";
  for (int64_t n : c.lengths) s += " " + std::to_string(n);
  return s + ", heads " + std::to_string(c.heads.H) + "/" + std::to_string(c.heads.HV) + ", K " +
         std::to_string(c.dims.K) + ", V " + std::to_string(c.dims.V) + ", io " + kda_dtype_name(c.io) + ", pool " +
         kda_dtype_name(c.pool) + ", family " + std::to_string(c.family) + ", slots " + std::to_string(c.slots) +
         ", initial " + std::to_string(c.initial) + ", sequences " + std::to_string(c.sequences) +
         (c.fp32_gate ? ", fp32 gate" : "") + (c.strided ? ", strided" : "");
}

Problem problem_of(const Case& c) {
  FieldInput input;
  input.lengths = c.lengths;
  input.heads = c.heads.H;
  input.value_heads = c.heads.HV;
  input.key_dim = c.dims.K;
  input.value_dim = c.dims.V;
  input.io = c.io;
  input.gate_scale = 4;
  input.beta_scale = 3;
  input.state_scale = 0.5;
  Problem p = field_problem(input);
  if (c.io == KDA_FP16) p.spec.scale = 64;  // keeps single small outputs clear of fp16's subnormals
  p.state = p.state.copy(c.pool).copy(KDA_FP32);
  for (int64_t h = 0; h < c.heads.HV; ++h) p.A_log.set({h}, 0.3 * static_cast<double>(h) - 0.5);
  p.dt_bias.assign(uniform_vector(8, p.dt_bias.size()));
  if (c.family == kBoundedSteep) p.spec.lower_bound = -50;
  if (c.family == kSoftplus) {
    p.spec.gate_family = KDA_GATE_SOFTPLUS;
    p.spec.lower_bound = 0;
  }
  if (c.family == kPlain) {
    p.spec.gate_family = KDA_GATE_PLAIN;
    p.spec.lower_bound = 0;
    p.spec.beta_form = KDA_BETA_PLAIN;
    p.spec.beta_dtype = KDA_FP32;
    std::vector<double> g = p.gate.values(), b = p.beta.values();
    for (double& x : g) x = -std::fabs(x);
    for (double& x : b) x = 1 / (1 + std::exp(-x));
    p.gate.assign(g);
    p.beta = Tensor::of(KDA_FP32, p.beta.shape(), b);
    p.A_log = p.dt_bias = Tensor();
  }
  if (c.fp32_gate) {
    p.gate = p.gate.copy(KDA_FP32);
    p.beta = p.beta.copy(KDA_FP32);
    p.spec.gate_dtype = p.spec.beta_dtype = KDA_FP32;
  }
  if (c.strided) {
    const auto padded = [](const Tensor& x, int64_t row_gap, int64_t head_gap) {
      const Shape& s = x.shape();
      const int64_t head = s.size() == 3 ? s[2] + head_gap : 1;
      const int64_t row = s[1] * head + row_gap;
      return s.size() == 3 ? x.copy(x.dtype(), {row, head, 1}, 7) : x.copy(x.dtype(), {row, 1}, 3);
    };
    p.q = padded(p.q, 5, 3);
    p.k = padded(p.k, 0, 1);
    p.v = padded(p.v, 13, 0);
    p.gate = padded(p.gate, 1, 9);
    p.beta = padded(p.beta, 28, 0);
  }
  return p;
}

std::vector<int64_t> slot_ids(const Case& c, int64_t slots) {
  const auto N = static_cast<int64_t>(c.lengths.size());
  std::vector<int64_t> ids = iota(N);
  if (c.slots == kPermuted) std::reverse(ids.begin(), ids.end());
  if (c.slots == kGapped) {
    for (int64_t n = 0; n < N; ++n) ids[static_cast<size_t>(n)] = slots - 1 - 2 * n;  // the last slot among them
  }
  if (c.slots == kSomeDead) {
    for (int64_t n = 0; n < N; n += 3) ids[static_cast<size_t>(n)] = n == 0 ? -1 : slots + n;
  }
  return ids;
}

// Memory of every input, to be compared afterwards.
struct Inputs {
  explicit Inputs(const PrefillCall& c) : call(c), q(c.p.q), k(c.p.k), v(c.p.v), gate(c.p.gate), beta(c.p.beta) {}
  void expect_unchanged() const {
    EXPECT_EQ(q.changes_outside(call.p.q), "");
    EXPECT_EQ(k.changes_outside(call.p.k), "");
    EXPECT_EQ(v.changes_outside(call.p.v), "");
    EXPECT_EQ(gate.changes_outside(call.p.gate), "");
    EXPECT_EQ(beta.changes_outside(call.p.beta), "");
  }
  const PrefillCall& call;
  Snapshot q, k, v, gate, beta;
};

void check_case(const Case& c, const char* backend) {
  const Problem p = problem_of(c);
  const auto N = static_cast<int64_t>(c.lengths.size());
  const int64_t slots = 2 * N + 3, HV = c.heads.HV, VK = c.dims.V * c.dims.K;
  const std::vector<int64_t> ids = slot_ids(c, slots);
  PrefillCall call(p, backend);
  call.use_pool(slots, ids, c.pool, HV * VK + 24, 40);
  std::vector<int64_t> has_state(static_cast<size_t>(N), c.initial == kNone ? 0 : 1);
  call.desc.initial_state = c.initial == kNone  ? KDA_INITIAL_NONE
                            : c.initial == kAll ? KDA_INITIAL_ALL
                                                : KDA_INITIAL_FLAGS;
  if (c.initial == kFlags) {
    for (int64_t n = 0; n < N; ++n) has_state[static_cast<size_t>(n)] = n % 2;
    call.flags = Tensor::flags(has_state);
  }
  call.offsets = Tensor::ints(p.offsets(), c.sequences == kOffsets64 ? KDA_INT64 : KDA_INT32);
  if (c.sequences == kRanges) {
    std::vector<int64_t> begins = p.offsets();
    begins.pop_back();
    call.begin = Tensor::ints(begins, KDA_INT64);
    call.length = Tensor::ints(c.lengths);
  }
  call.out = Tensor(c.io, {p.tokens(), HV, c.dims.V}, {HV * (c.dims.V + 6) + 2, c.dims.V + 6, 1}, 3);
  PrefillCall second = call;
  const Snapshot pool(call.pool);
  const Inputs inputs(call);
  const kda_status status = call.run();
  // The tensor-core kernel refuses rows that it cannot load by name; the general one takes them.
  if (std::string(backend) == "cuda_auto" && status == KDA_UNSUPPORTED && call.message.rfind("layout:", 0) == 0) {
    return check_case(c, "cuda_portable");
  }
  ASSERT_EQ(status, KDA_OK) << call.message;

  inputs.expect_unchanged();
  EXPECT_EQ(call.out.guard_report(), "");
  std::vector<int64_t> live;
  for (int64_t id : ids) {
    if (id >= 0 && id < slots) live.push_back(id);
  }
  EXPECT_EQ(pool.changes_outside(call.pool, live), "");
  ASSERT_EQ(second.run(), KDA_OK) << second.message;
  EXPECT_EQ(first_difference(second.out, call.out), "");
  EXPECT_EQ(first_difference(second.pool, call.pool), "");

  const Outcome reference = oracle_with_flags(p, has_state);
  ASSERT_EQ(reference.status, KDA_OK) << reference.message;
  std::vector<double> wanted = reference.out.values(), got_states, wanted_states;
  for (int64_t n = 0, row = 0; n < N; row += c.lengths[static_cast<size_t>(n)], ++n) {
    const int64_t id = ids[static_cast<size_t>(n)];
    if (id >= 0 && id < slots) {
      const std::vector<double> got = call.slot(id), state = values(select(reference.state, 0, n));
      got_states.insert(got_states.end(), got.begin(), got.end());
      wanted_states.insert(wanted_states.end(), state.begin(), state.end());
      continue;
    }
    const auto first = wanted.begin() + row * HV * c.dims.V;
    std::fill(first, first + c.lengths[static_cast<size_t>(n)] * HV * c.dims.V, 0.0);  // inactive: zeros
  }
  // A few rows of few values: rounding them to 16 bits does not average out as it does in N-9's tensors, so allow
  // the format's own bound (half a unit in the last place of every value) on top.
  const double rounding = c.io == KDA_BF16 ? 0x1p-8 : c.io == KDA_FP16 ? 0x1p-11 : 0;
  EXPECT_WITHIN(compare_outputs(call.out.values(), wanted, c.lengths, HV, c.dims.V),
                limits(KDA_FP32).out + std::max(rounding, limits(c.io).out));
  const double stored = c.pool == KDA_BF16 ? 0x1p-8 : c.pool == KDA_FP16 ? 0x1p-11 : 0;
  EXPECT_WITHIN(compare_states(got_states, wanted_states, HV, VK),
                limits(c.io).state + std::max(stored, pool_rounding(c.pool)));
}

}  // namespace

class ShapesTest : public BackendTest {};
KDA_FOR_BACKENDS(ShapesTest);

TEST_P(ShapesTest, R61_R01_R04_R14_R34_Z05_PairwiseCovering) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(describe(c));
    check_case(c, backend());
    if (HasFatalFailure()) return;
  }
}

TEST_P(ShapesTest, R61_LongSequenceAndManyHeads) {
  struct Long {
    std::vector<int64_t> lengths;
    int64_t heads;
  };
  // T * HV stays below 2^15 here: the oracle runs beside it.
  for (const Long& l : {Long{{8192}, 1}, {{1000, 0, 24}, 4}, {{65, 1}, 96}, {{40}, 64}, {{0, 70, 33}, 24}}) {
    FieldInput input;
    input.lengths = l.lengths;
    input.heads = l.heads;
    input.gate_scale = 4;
    input.beta_scale = 3;
    input.state_scale = 0.1;
    const Problem p = field_problem(input);
    PrefillOptions options;
    options.backend = backend();
    const Outcome r = prefill(p, options), reference = oracle(p);
    ASSERT_EQ(r.status, KDA_OK) << r.message;
    EXPECT_WITHIN(compare_outputs(r.out.values(), reference.out.values(), l.lengths, l.heads, 128),
                  limits(KDA_BF16).out);
    EXPECT_WITHIN(compare_states(r.state.values(), reference.state.values(), l.heads, 128 * 128),
                  limits(KDA_BF16).state);
  }
}

TEST_P(ShapesTest, R61_ManySequences) {
  std::vector<int64_t> lengths;
  for (int64_t n = 0; n < 256; ++n)
    lengths.push_back(static_cast<int64_t>(splitmix64(static_cast<uint64_t>(n)) % 20));
  FieldInput input;
  input.lengths = lengths;
  input.heads = 1;
  input.key_dim = input.value_dim = 32;
  input.beta_scale = 3;
  input.state_scale = 0.5;
  const Problem p = field_problem(input);
  PrefillOptions options;
  options.backend = backend();
  const Outcome r = prefill(p, options), reference = oracle(p);
  ASSERT_EQ(r.status, KDA_OK) << r.message;
  EXPECT_WITHIN(compare_states(r.state.values(), reference.state.values(), 1, 32 * 32), limits(KDA_BF16).state);
  EXPECT_LE(compare_outputs(r.out.values(), reference.out.values(), lengths, 1, 32).total, limits(KDA_BF16).out);
}

namespace {

// A caller's own parallel-for (kda_context_options): one thread per body, in reverse order.
void thread_per_body(void*, int32_t n, void (*body)(void*, int32_t), void* arg) {
  std::vector<std::thread> threads;
  for (int32_t i = n; i-- > 0;) threads.emplace_back(body, arg, i);
  for (std::thread& t : threads) t.join();
}

}  // namespace

TEST_P(ShapesTest, N12_SameBitsForAnyNumberOfThreads) {
  if (on_device()) GTEST_SKIP() << "host threads do no work there";
  FieldInput input;
  input.lengths = {130, 0, 33, 1, 64};
  input.heads = 3;
  input.beta_scale = 3;
  input.state_scale = 0.5;
  const Problem p = field_problem(input);
  PrefillOptions options;
  options.backend = backend();
  options.context = cpu_context(1);
  const Outcome one = prefill(p, options);
  ASSERT_EQ(one.status, KDA_OK) << one.message;
  for (const int32_t threads : {2, 5}) {
    auto o = sized<kda_context_options>();
    o.num_threads = threads;
    o.parallel_for = thread_per_body;
    kda_context* context = nullptr;
    ASSERT_EQ(kda_context_create(&o, &context), KDA_OK) << kda_last_error();
    options.context = context;
    const Outcome more = prefill(p, options);
    kda_context_destroy(context);
    ASSERT_EQ(more.status, KDA_OK) << more.message;
    EXPECT_EQ(first_difference(one.out, more.out), "");
    EXPECT_EQ(first_difference(one.state, more.state), "");
  }
}

}  // namespace kda::conformance::test
