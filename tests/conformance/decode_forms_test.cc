// The same decode call in other words, which a backend may hand to other kernels: N-13, P-8, P-9, P-12, R-41, G-3.
#include "decode_fixture.h"

namespace kda::conformance::test {
namespace {

struct Form {
  const char* name;
  kda_dtype pool = KDA_FP32, io = KDA_BF16, gate = KDA_BF16;
  kda_gate_family family = KDA_GATE_BOUNDED;
  int64_t value_heads = 2;
  int32_t width = 1;
  kda_decode_mode mode = KDA_DECODE_COLUMNS;
};

constexpr Form kForms[] = {
    {"one token, fp32 states"},
    {"one token, bf16 states, fp32 gates", KDA_BF16, KDA_BF16, KDA_FP32},
    {"one token, fp16 states, fp16 io, softplus", KDA_FP16, KDA_FP16, KDA_FP16, KDA_GATE_SOFTPLUS},
    {"one token, fp32 states, softplus", KDA_FP32, KDA_BF16, KDA_BF16, KDA_GATE_SOFTPLUS, 4},
    {"window, fp32 states", KDA_FP32, KDA_BF16, KDA_BF16, KDA_GATE_BOUNDED, 4, 3},
    {"window, bf16 states, softplus", KDA_BF16, KDA_BF16, KDA_BF16, KDA_GATE_SOFTPLUS, 2, 4},
    {"records, fp32 states, fp32 gates", KDA_FP32, KDA_BF16, KDA_FP32, KDA_GATE_BOUNDED, 2, 3, KDA_DECODE_RECORDS},
    {"records, bf16 states", KDA_BF16, KDA_BF16, KDA_BF16, KDA_GATE_SOFTPLUS, 4, 4, KDA_DECODE_RECORDS},
    {"records, fp16 states, fp16 io", KDA_FP16, KDA_FP16, KDA_FP16, KDA_GATE_BOUNDED, 2, 2, KDA_DECODE_RECORDS},
};

DecodeCall usual_call(const Form& f, const char* backend) {
  FieldInput input;
  input.lengths = {f.width, 1, f.width > 1 ? f.width - 1 : 1, 1};
  input.heads = 2;
  input.value_heads = f.value_heads;
  input.io = f.io;
  input.gate_scale = 4;
  input.beta_scale = 3;
  Problem p = field_problem(input);
  p.spec.gate_family = f.family;
  if (f.family == KDA_GATE_SOFTPLUS) p.spec.lower_bound = 0;
  p.spec.gate_dtype = f.gate;
  p.gate = Tensor::of(f.gate, p.gate.shape(), p.gate.values());
  p.dt_bias.assign(uniform_vector(8, f.value_heads * 128));
  for (int64_t h = 0; h < f.value_heads; ++h) p.A_log.set({h}, 0.2 * static_cast<double>(h));
  DecodeCall call(std::move(p), backend, f.width);
  call.desc.attention.state_dtype = f.pool;
  call.desc.mode = f.mode;
  const int64_t columns = f.mode == KDA_DECODE_COLUMNS ? f.width : 1, rows = 4 * columns + 1;
  call.pool = canary_pool(f.pool, {rows, f.value_heads, 128, 128});
  std::vector<double> table;
  for (int64_t i = 0; i < 4 * columns; ++i) table.push_back(static_cast<double>(i * 3 % (4 * columns + 1)));
  if (f.mode == KDA_DECODE_COLUMNS) table[static_cast<size_t>(columns)] = -1;  // a dead row
  call.slots = Tensor::of(KDA_INT32, {4, columns}, table);
  if (f.width > 1) call.accepted = Tensor::ints({1, 1, f.width - 1, f.mode == KDA_DECODE_COLUMNS ? f.width : 0});
  if (f.mode == KDA_DECODE_RECORDS) {
    call.slots = Tensor::ints({2, 0, 3, 1});
    call.desc.fold = 1;
    call.u = Tensor::of(KDA_FP32, {rows, f.value_heads, f.width, 128},
                        uniform_vector(11, rows * f.value_heads * f.width * 128));
    call.kg = Tensor::of(f.gate, {rows, f.value_heads, f.width, 256},
                         uniform_vector(12, rows * f.value_heads * f.width * 256));
    call.count = Tensor::full(KDA_INT32, {rows}, f.width);
  }
  return call;
}

void expect_same(DecodeCall& one, DecodeCall& other, const char* what) {
  ASSERT_EQ(other.run(), KDA_OK) << other.message;
  EXPECT_EQ(first_difference(one.out, other.out), "") << what;
  EXPECT_EQ(first_difference(one.pool, other.pool), "") << what;
  if (!one.u.present()) return;
  EXPECT_EQ(first_difference(one.u, other.u), "") << what;
  EXPECT_EQ(first_difference(one.kg, other.kg), "") << what;
  EXPECT_EQ(first_difference(one.count, other.count), "") << what;
}

}  // namespace

class DecodeFormsTest : public DecodeFixture {};
KDA_FOR_BACKENDS(DecodeFormsTest);

TEST_P(DecodeFormsTest, N13_P12_G03_OtherWordsSameBits) {
  for (const Form& f : kForms) {
    SCOPED_TRACE(f.name);
    DecodeCall usual = usual_call(f, backend());
    {
      DecodeCall wide = usual_call(f, backend());
      wide.slots = Tensor::of(KDA_INT64, wide.slots.shape(), wide.slots.values());
      ASSERT_EQ(usual.run(), KDA_OK) << usual.message;
      expect_same(usual, wide, "int64 slots");
    }
    DecodeCall ranges = usual_call(f, backend());
    std::vector<int64_t> begin = ranges.p.offsets();
    begin.pop_back();
    ranges.begin = Tensor::ints(begin, KDA_INT64);
    ranges.length = Tensor::ints(ranges.p.lengths);
    expect_same(usual, ranges, "ranges");
    DecodeCall flagged = usual_call(f, backend());
    flagged.desc.initial_state = KDA_INITIAL_FLAGS;
    flagged.flags = Tensor::flags({1, 1, 1, 1});
    if (f.mode == KDA_DECODE_COLUMNS) expect_same(usual, flagged, "flags");
  }
}

}  // namespace kda::conformance::test
