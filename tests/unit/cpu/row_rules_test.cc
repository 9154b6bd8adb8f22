// Random rows, bad index values included, through the portable candidates on every ISA and through the oracle's own
// implementation: the same rows are active, the same memory is written, windows have the same bits, numbers agree
// within N-9 (spec P, V-2..V-6, V-10, W-2..W-4, K-2).
#include <gtest/gtest.h>

#include "conformance/compare.h"
#include "conformance/rounding.h"
#include "unit/cpu/isa_contexts.h"
#include "unit/cpu/random_rows.h"

namespace kda::conformance::test {
namespace {

double limit(kda_dtype io) { return io == KDA_FP32 ? 1e-5 : 1.8e-3; }

// Memory of two tensors that started alike: "" if untouched bytes are the same in both and the rest is close, with
// one more number of the size `common` that agrees: a sum that cancels is exact to the size of its terms alone.
std::string disagreement(const Tensor& got, const Tensor& want, const Tensor& before, double tolerance,
                         double common) {
  if (!got.guard_report().empty()) return got.guard_report();
  std::vector<double> x, y;
  const auto size = static_cast<size_t>(kda_dtype_size(got.dtype()));
  const auto a = got.values(), b = want.values();
  for (int64_t i = 0; i < got.size(); ++i) {
    const auto bytes = [&](const Tensor& t) { return std::string(element(t.view(), i), size); };
    if (bytes(want) == bytes(before)) {
      if (bytes(got) != bytes(before)) return "element " + std::to_string(i) + " was written";
    } else {
      x.push_back(a[static_cast<size_t>(i)]);
      y.push_back(b[static_cast<size_t>(i)]);
    }
  }
  if (x.empty()) return "";
  x.push_back(common);
  y.push_back(common);
  const Comparison c = compare_flat(x, y);
  return c.within(tolerance) ? "" : c.text();
}

std::vector<double> scaled(uint32_t stream, int64_t n, double scale) {
  auto x = uniform_vector(stream, n);
  for (double& value : x) value *= scale;
  return x;
}

// ---- Decode ---------------------------------------------------------------------------------------------

struct DecodeInput {
  int64_t H, HV, K, V;
  kda_dtype io, gate, pool;
  Tensor q, k, v, raw, beta, A_log, dt_bias;
};

DecodeInput decode_input(int64_t T) {
  DecodeInput p;
  p.H = *rc::gen::inRange<int64_t>(1, 3);
  p.HV = p.H * *rc::gen::inRange<int64_t>(1, 3);
  p.K = *rc::gen::element<int64_t>(1, 3, 16, 24, 100, 128);
  p.V = *rc::gen::element<int64_t>(1, 5, 16, 60);
  p.io = *rc::gen::element(KDA_FP32, KDA_BF16, KDA_FP16);
  p.gate = *rc::gen::element(p.io, KDA_FP32);
  p.pool = *rc::gen::element(KDA_FP32, KDA_FP32, KDA_BF16, KDA_FP16);
  // q, k, v as slices of one buffer would be: gaps between heads and rows hold poison.
  const auto token = [&](kda_dtype dtype, int64_t heads, int64_t dim, uint32_t stream, double scale) {
    Tensor t(dtype, {T, heads, dim}, {heads * (dim + 3) + 5, dim + 3, 1}, 2);
    t.assign(scaled(stream, T * heads * dim, scale));
    return t;
  };
  p.q = token(p.io, p.H, p.K, 1, 1);
  p.k = token(p.io, p.H, p.K, 2, 1);
  p.v = token(p.io, p.HV, p.V, 3, 1);
  p.raw = token(p.gate, p.HV, p.K, 4, 3);
  p.beta = Tensor(p.io, {T, p.HV}, {3 * p.HV + 1, 2}, 1);
  p.beta.assign(scaled(5, T * p.HV, 3));
  p.A_log = Tensor::of(KDA_FP32, {p.HV}, scaled(7, p.HV, 1));
  p.dt_bias = Tensor::of(KDA_FP32, {p.HV * p.K}, uniform_vector(8, p.HV * p.K));
  return p;
}

struct DecodeResult {
  Tensor out, pool, u, kg, count;
};

DecodeResult run_decode(const DecodeInput& p, const RandomRows& rows, kda_decode_desc d, const Tensor& pool,
                        const char* backend, kda_context* context) {
  DecodeResult r;
  r.pool = pool;
  r.out = Tensor(p.io, {rows.out_count(), p.HV, p.V}, {p.HV * p.V + 4, p.V, 1}, 3);
  d.backend = backend;
  kda_decode_args args = sized<kda_decode_args>();
  args.q = p.q, args.k = p.k, args.v = p.v, args.gate = p.raw, args.beta = p.beta;
  args.A_log = p.A_log, args.dt_bias = p.dt_bias;
  args.sequences = rows.sequences();
  args.state = r.pool;
  args.slots = rows.slots, args.write_slots = rows.write_slots, args.accepted = rows.accepted;
  args.has_initial_state = rows.flags;
  args.out = r.out, args.out_rows = rows.out_rows;
  if (d.mode == KDA_DECODE_RECORDS) {
    const int64_t n = rows.count.shape()[0];
    // Old records as an earlier verify would have left them.
    r.u = Tensor::of(KDA_FP32, {n, p.HV, d.width, p.V}, scaled(9, n * p.HV * d.width * p.V, 0.3));
    r.kg = Tensor::of(p.gate, {n, p.HV, d.width, 2 * p.K}, uniform_vector(10, n * p.HV * d.width * 2 * p.K));
    r.count = rows.count;
    args.records = {r.u, r.kg, r.count, rows.record_rows};
  }
  Plan plan = make_plan(d, context);
  const kda_status status = plan.run(args);
  if (status != KDA_OK) RC_FAIL(plan.message());
  return r;
}

void compare_decode(kda_decode_mode mode, const std::string& isa) {
  RowShape s;
  s.width = *rc::gen::inRange<int32_t>(1, 6);
  const bool records = mode == KDA_DECODE_RECORDS;
  const bool final = !records && *rc::gen::inRange(0, 3) == 0;
  s.max_length = final ? 20 : s.width + 1;
  s.table = !records && !final;
  s.slots = 4 * s.width * 2 + 5;
  s.flags = !records && *rc::gen::inRange(0, 2);
  s.write = !records && *rc::gen::inRange(0, 2);
  s.counts = records;
  s.out_rows = *rc::gen::inRange(0, 2) != 0;
  const RandomRows rows(s);
  const DecodeInput p = decode_input(rows.T);
  kda_decode_desc d;
  kda_decode_desc_init(&d);
  d.attention.num_heads = p.H, d.attention.num_value_heads = p.HV;
  d.attention.key_dim = p.K, d.attention.value_dim = p.V;
  d.attention.io_dtype = p.io, d.attention.gate_dtype = p.gate, d.attention.state_dtype = p.pool;
  d.attention.gate_family = *rc::gen::element(KDA_GATE_BOUNDED, KDA_GATE_SOFTPLUS);
  d.attention.lower_bound = d.attention.gate_family == KDA_GATE_BOUNDED ? -5 : 0;
  d.attention.allow_neg_eigval = *rc::gen::inRange(0, 2);
  d.max_tokens = rows.T, d.max_sequences = rows.N;
  d.width = s.width;
  d.mode = mode;
  d.store = final ? KDA_STORE_FINAL : KDA_STORE_PER_TOKEN;
  d.fold = records ? *rc::gen::inRange(0, 2) : 0;
  d.initial_state = s.flags ? KDA_INITIAL_FLAGS : KDA_INITIAL_ALL;
  d.null_slot = rows.null_slot;

  const Tensor before = canary_pool(p.pool, {s.slots, p.HV, p.V, p.K}, p.HV * p.V * p.K + 9, 4);
  const DecodeResult want = run_decode(p, rows, d, before, "reference", nullptr);
  const DecodeResult got = run_decode(p, rows, d, before, "portable", isa_context(isa, *rc::gen::inRange(1, 4)));
  // A 16-bit pool may round a nearly tied value the other way.
  const double state_limit = p.pool == KDA_FP32 ? 1e-5 : p.pool == KDA_BF16 ? 1.8e-3 : 2.3e-4;
  // A folded step starts from the committed state as the pool has rounded it.
  const double start = d.fold != 0 && p.pool != KDA_FP32 ? state_limit : 0;
  const Tensor poison(p.io, want.out.shape(), {p.HV * p.V + 4, p.V, 1}, 3);
  RC_ASSERT(disagreement(got.out, want.out, poison, std::max(limit(p.io), start), 0) == "");
  RC_ASSERT(disagreement(got.pool, want.pool, before, state_limit, 0) == "");
  if (!records) return;
  RC_ASSERT(got.count.values() == want.count.values());
  RC_ASSERT(first_difference(got.kg, want.kg) == "");
  RC_ASSERT(compare_flat(got.u.values(), want.u.values()).within(std::max(1e-5, start)));
}

// ---- Conv -----------------------------------------------------------------------------------------------

struct ConvResult {
  std::vector<Tensor> out, pool;
};

struct ConvInput {
  kda_conv_desc desc;
  std::vector<Tensor> x, weight, bias, pool;
  Tensor checkpoint_offsets, checkpoint_slots;
};

ConvResult run_conv(const ConvInput& p, const RandomRows& rows, const char* backend, kda_context* context) {
  ConvResult r;
  r.pool = p.pool;
  kda_conv_desc d = p.desc;
  d.backend = backend;
  auto args = sized<kda_conv_args>();
  for (int i = 0; i < d.parts; ++i) {
    const auto part = static_cast<size_t>(i);
    r.out.emplace_back(d.io_dtype, Shape{rows.out_count(), d.channels[i]}, Shape{d.channels[i] + 3, 1}, 1);
    args.x[i] = p.x[part], args.weight[i] = p.weight[part], args.bias[i] = p.bias[part];
    args.state[i] = r.pool[part], args.out[i] = r.out[part];
  }
  args.sequences = rows.sequences();
  args.slots = rows.slots, args.write_slots = rows.write_slots, args.has_initial_state = rows.flags;
  args.accepted = rows.accepted;
  if (d.fold) args.record_count = rows.count, args.record_rows = rows.record_rows;
  args.checkpoint_offsets = p.checkpoint_offsets, args.checkpoint_slots = p.checkpoint_slots;
  args.out_rows = rows.out_rows;
  Plan plan = make_plan(d, context);
  const kda_status status = plan.run(args);
  if (status != KDA_OK) RC_FAIL(plan.message());
  return r;
}

ConvInput conv_input(const RandomRows& rows, const RowShape& s, kda_conv_mode mode) {
  ConvInput p;
  kda_conv_desc& d = p.desc;
  kda_conv_desc_init(&d);
  d.mode = mode;
  d.width = *rc::gen::inRange(2, 9);
  d.parts = *rc::gen::element(1, 3);
  d.io_dtype = *rc::gen::element(KDA_FP32, KDA_BF16, KDA_FP16);
  d.state_dtype = *rc::gen::element(d.io_dtype, KDA_FP32);
  d.layout = *rc::gen::element(KDA_CONV_SD, KDA_CONV_DS);
  d.verify_width = s.width;
  d.fold = s.counts;
  d.max_tokens = rows.T, d.max_sequences = rows.N;
  d.initial_state = s.flags ? KDA_INITIAL_FLAGS : KDA_INITIAL_ALL;
  d.null_slot = rows.null_slot;
  d.no_activation = *rc::gen::inRange(0, 4) == 0;
  const bool sd = d.layout == KDA_CONV_SD;
  const int64_t L = d.width + s.width + 1;
  for (int i = 0; i < d.parts; ++i) {
    const int64_t n = *rc::gen::element<int64_t>(1, 5, 16, 33, 64, 530);
    d.channels[i] = n;
    p.x.emplace_back(d.io_dtype, Shape{rows.T, n}, Shape{n + 6, 1}, 5);
    p.x.back().assign(uniform_vector(1, rows.T * n));
    p.weight.push_back(Tensor::of(KDA_FP32, {n, d.width}, uniform_vector(2, n * d.width)));
    p.bias.push_back(*rc::gen::inRange(0, 2) ? Tensor::of(KDA_FP32, {n}, uniform_vector(3, n)) : Tensor());
    p.pool.push_back(canary_pool(d.state_dtype, sd ? Shape{s.slots, L, n} : Shape{s.slots, n, L}, L * n + 11, 2));
  }
  if (mode != KDA_CONV_PREFILL || *rc::gen::inRange(0, 2)) return p;
  // Checkpoints into slots of their own, behind those of the rows.
  d.max_checkpoints = 2;
  std::vector<int64_t> offsets, slots;
  for (int64_t i = 0; i < 2 * rows.N; ++i) {
    offsets.push_back(*rc::gen::inRange<int64_t>(-1, s.max_length + 3));
    slots.push_back(*rc::gen::inRange(0, 4) ? s.slots - 1 - i : -1);
  }
  p.checkpoint_offsets = Tensor(KDA_INT32, {rows.N, 2});
  p.checkpoint_slots = Tensor(KDA_INT64, {rows.N, 2});
  p.checkpoint_offsets.assign({offsets.begin(), offsets.end()});
  p.checkpoint_slots.assign({slots.begin(), slots.end()});
  return p;
}

void compare_conv(kda_conv_mode mode, const std::string& isa) {
  RowShape s;
  s.width = mode == KDA_CONV_PREFILL ? 1 : *rc::gen::inRange<int32_t>(1, 6);
  s.max_length = mode == KDA_CONV_PREFILL ? *rc::gen::element<int64_t>(5, 12, 150) : s.width + 1;
  s.table = mode == KDA_CONV_COLUMNS && *rc::gen::inRange(0, 2);
  s.flags = mode != KDA_CONV_RECORDS && *rc::gen::inRange(0, 2);
  s.write = mode != KDA_CONV_RECORDS && *rc::gen::inRange(0, 2);
  s.counts = mode == KDA_CONV_RECORDS && *rc::gen::inRange(0, 2);
  s.out_rows = *rc::gen::inRange(0, 2) != 0;
  s.slots = 4 * s.width * 2 + 13;
  s.reserved = 8;  // the last ones belong to checkpoints
  const RandomRows rows(s);
  const ConvInput p = conv_input(rows, s, mode);
  const ConvResult want = run_conv(p, rows, "reference", nullptr);
  const ConvResult got = run_conv(p, rows, "portable", isa_context(isa, *rc::gen::inRange(1, 4)));
  for (size_t i = 0; i < want.out.size(); ++i) {
    const Tensor poison(p.desc.io_dtype, want.out[i].shape(), {want.out[i].shape()[1] + 3, 1}, 1);
    RC_ASSERT(disagreement(got.out[i], want.out[i], poison, limit(p.desc.io_dtype), 0.1) == "");
    RC_ASSERT(first_difference(got.pool[i], want.pool[i]) == "");  // windows are copies (W-1)
    RC_ASSERT(got.pool[i].guard_report() == "");
  }
}

class RowRules : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Isa, RowRules, testing::ValuesIn(isas()), [](const auto& test) { return test.param; });

TEST_P(RowRules, V06_DecodeColumns) {
  EXPECT_TRUE(rc::check("columns", [&] { compare_decode(KDA_DECODE_COLUMNS, GetParam()); }));
}
TEST_P(RowRules, V10_VerifyRecords) {
  EXPECT_TRUE(rc::check("records", [&] { compare_decode(KDA_DECODE_RECORDS, GetParam()); }));
}
TEST_P(RowRules, W02_ConvPrefill) {
  EXPECT_TRUE(rc::check("prefill", [&] { compare_conv(KDA_CONV_PREFILL, GetParam()); }));
}
TEST_P(RowRules, W03_ConvColumns) {
  EXPECT_TRUE(rc::check("columns", [&] { compare_conv(KDA_CONV_COLUMNS, GetParam()); }));
}
TEST_P(RowRules, W04_ConvRecords) {
  EXPECT_TRUE(rc::check("records", [&] { compare_conv(KDA_CONV_RECORDS, GetParam()); }));
}

}  // namespace
}  // namespace kda::conformance::test
