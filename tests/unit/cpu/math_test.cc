// The vector functions against fp64, on every ISA of the machine: accuracy over random arguments, edges, F02.
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "unit/cpu/math_test.cc"
#include <hwy/foreach_target.h>

#include "cpu/simd/math-inl.h"

#ifndef KDA_TESTS_UNIT_CPU_MATH_TEST_
#define KDA_TESTS_UNIT_CPU_MATH_TEST_
namespace kda::cpu {

struct MathFunctions {
  void (*exp)(const float* x, float* y, int64_t n);
  void (*sigmoid)(const float* x, float* y, int64_t n);
  void (*silu)(const float* x, float* y, int64_t n);
  void (*norm_gate)(const float* x, float* y, int64_t n);
  void (*softplus)(const float* x, float* y, int64_t n);
  void (*log_decay)(const GateHead& head, const float* raw, const float* bias, float* y, int64_t n);
  float (*sigmoid1)(float x);
  float (*dot)(const float* a, const float* b, int64_t n);
  void (*load_bf16)(const bf16* x, int64_t n, float* y);
  void (*load_fp16)(const fp16* x, int64_t n, float* y);
  void (*load_fp32)(const float* x, int64_t n, float* y);
  void (*store_bf16)(const float* x, int64_t n, bf16* y);
  void (*store_fp16)(const float* x, int64_t n, fp16* y);
  void (*store_fp32)(const float* x, int64_t n, float* y);
};

}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

#define KDA_MAP(NAME)                                                        \
  inline void map_##NAME(const float* x, float* y, int64_t n) {              \
    const F32 d;                                                             \
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));                   \
    for (int64_t i = 0; i < n; i += lanes) {                                 \
      const auto count = static_cast<size_t>(n - i < lanes ? n - i : lanes); \
      store_n(d, NAME(d, load_n(d, x + i, count)), y + i, count);            \
    }                                                                        \
  }
KDA_MAP(exp)
KDA_MAP(sigmoid)
KDA_MAP(silu)
KDA_MAP(norm_gate)
KDA_MAP(softplus)
#undef KDA_MAP

inline void map_log_decay(const GateHead& head, const float* raw, const float* bias, float* y, int64_t n) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < n; i += lanes) {
    const auto count = static_cast<size_t>(n - i < lanes ? n - i : lanes);
    store_n(d, log_decay(d, head, load_n(d, raw + i, count), load_n(d, bias + i, count)), y + i, count);
  }
}

inline float call_sigmoid1(float x) { return sigmoid1(x); }
inline float call_dot(const float* a, const float* b, int64_t n) { return dot(a, b, n); }

const MathFunctions* math_table() {
  static constexpr MathFunctions table = {
      map_exp,  map_sigmoid,    map_silu,       map_norm_gate,   map_softplus,    map_log_decay,   call_sigmoid1,
      call_dot, load_row<bf16>, load_row<fp16>, load_row<float>, store_row<bf16>, store_row<fp16>, store_row<float>};
  return &table;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cpu/denormals.h"

namespace kda::cpu {
HWY_EXPORT(math_table);

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Math : public testing::TestWithParam<Isa> {
 protected:
  const MathFunctions& f = *KDA_CPU_TABLE(math_table, GetParam())();
};
INSTANTIATE_TEST_SUITE_P(Isa, Math, testing::ValuesIn(available_isas()),
                         [](const auto& test) { return std::string(isa_name(test.param)); });

// Arguments spread evenly over [low, high], plus as many close to zero on a logarithmic scale.
std::vector<float> arguments(float low, float high, size_t n) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> even(low, high), decade(-40, 0);
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) {
    x[i] = static_cast<float>(even(random));
    if (i % 4 == 3) x[i] = static_cast<float>((i % 8 == 3 ? high : low) * std::pow(10.0, decade(random)));
  }
  return x;
}

template <class F, class Ref>
double worst(F f, Ref reference, const std::vector<float>& x, float* at) {
  std::vector<float> y(x.size());
  f(x.data(), y.data(), static_cast<int64_t>(x.size()));
  double largest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = reference(static_cast<double>(x[i]));
    if (std::fabs(want) < 0x1p-126) {
      if (std::fabs(y[i]) > 0x1p-125) largest = 1, *at = x[i];
      continue;
    }
    const double error = std::fabs(static_cast<double>(y[i]) - want) / std::fabs(want);
    if (!(error <= largest)) largest = error, *at = x[i];
  }
  return largest;
}

double softplus64(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }
double sigmoid64(double x) { return 1 / (1 + std::exp(-x)); }

TEST_P(Math, ExpIsWithinTwoUlp) {
  float at = 0;
  const double error = worst(
      f.exp, [](double x) { return std::exp(x); }, arguments(-87.3f, 88.7f, 2000000), &at);
  EXPECT_LE(error, 2 * 0x1p-24) << "at " << at;
  RecordProperty("relative_error", std::to_string(error));
}

TEST_P(Math, ExpEdges) {
  const std::vector<float> x = {0.0f,     -0.0f, -kInf,      kInf,       kNan,   -87.3366f, -104.0f,
                                -2613.0f, 89.0f, -87.33654f, 88.722831f, 1e-45f, 3e38f,     -3e38f};
  std::vector<float> y(x.size());
  f.exp(x.data(), y.data(), static_cast<int64_t>(x.size()));
  EXPECT_EQ(y[0], 1.0f);
  EXPECT_EQ(y[1], 1.0f);
  EXPECT_EQ(y[2], 0.0f);
  EXPECT_EQ(y[3], kInf);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_EQ(y[5], 0.0f);
  EXPECT_EQ(y[6], 0.0f);
  EXPECT_EQ(y[7], 0.0f);
  EXPECT_EQ(y[8], kInf);
  EXPECT_NEAR(y[9] / std::exp(static_cast<double>(x[9])), 1, 2e-7);
  EXPECT_NEAR(y[10] / std::exp(static_cast<double>(x[10])), 1, 2e-7);
  EXPECT_EQ(y[11], 1.0f);
  EXPECT_EQ(y[12], kInf);
  EXPECT_EQ(y[13], 0.0f);
}

TEST_P(Math, ExpRaisesNoOverflowOrInvalid) {
  const std::vector<float> x = {-kInf, -2613.0f, -104.0f, -87.5f, -0.0f, 5.0f};
  std::vector<float> y(x.size());
  std::feclearexcept(FE_ALL_EXCEPT);
  f.exp(x.data(), y.data(), static_cast<int64_t>(x.size()));
  EXPECT_EQ(std::fetestexcept(FE_OVERFLOW | FE_INVALID | FE_DIVBYZERO), 0);
}

TEST_P(Math, E05_SigmoidRelativeError) {
  float at = 0;
  const double error = worst(f.sigmoid, sigmoid64, arguments(-87.0f, 87.0f, 2000000), &at);
  EXPECT_LE(error, 1e-6) << "at " << at;
  EXPECT_LE(error, 3e-7) << "at " << at;
  const std::vector<float> x = {-1000.0f, 1000.0f, 0.0f, kNan, -kInf, kInf};
  std::vector<float> y(x.size());
  f.sigmoid(x.data(), y.data(), 6);
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(y[1], 1.0f);
  EXPECT_EQ(y[2], 0.5f);
  EXPECT_TRUE(std::isnan(y[3]));
  EXPECT_EQ(y[4], 0.0f);
  EXPECT_EQ(y[5], 1.0f);
  for (float v : {-3.0f, 0.25f, 11.0f}) {
    f.sigmoid(&v, y.data(), 1);
    EXPECT_EQ(f.sigmoid1(v), y[0]);
  }
}

// The activations of conv and gated norm: 3e-7 + 1.5e-7·|y|, far inside N-9's 1e-5.
double worst_activation(void (*f)(const float*, float*, int64_t), double (*reference)(double), float* at) {
  const auto x = arguments(-80.0f, 80.0f, 2000000);
  std::vector<float> y(x.size());
  f(x.data(), y.data(), static_cast<int64_t>(x.size()));
  double largest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = reference(static_cast<double>(x[i]));
    if (std::fabs(want) < 0x1p-120) continue;
    const double error = std::fabs(y[i] - want) / std::fabs(want) / (3e-7 + 1.5e-7 * std::fabs(x[i]));
    if (!(error <= largest)) largest = error, *at = x[i];
  }
  return largest;
}

TEST_P(Math, W01_SiluRelativeError) {
  float at = 0;
  EXPECT_LE(worst_activation(
                f.silu, [](double x) { return x * sigmoid64(x); }, &at),
            1)
      << "at " << at;
  const std::vector<float> x = {0.0f, 1000.0f, -1000.0f, kInf, -kInf, kNan};
  std::vector<float> y(x.size());
  const FlushDenormals flush;  // as in every kernel
  f.silu(x.data(), y.data(), static_cast<int64_t>(x.size()));
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(y[1], 1000.0f);
  EXPECT_EQ(y[2], 0.0f);
  EXPECT_EQ(y[3], kInf);
  EXPECT_TRUE(std::isnan(y[4]));  // -inf / (1 + inf), as in W-1
  EXPECT_TRUE(std::isnan(y[5]));
}

TEST_P(Math, L07_NormGateRelativeError) {
  float at = 0;
  EXPECT_LE(worst_activation(f.norm_gate, sigmoid64, &at), 1) << "at " << at;
  const std::vector<float> x = {0.0f, 1000.0f, -1000.0f, kInf, -kInf, kNan};
  std::vector<float> y(x.size());
  f.norm_gate(x.data(), y.data(), static_cast<int64_t>(x.size()));
  EXPECT_EQ(y[0], 0.5f);
  EXPECT_EQ(y[1], 1.0f);
  EXPECT_EQ(y[2], 0.0f);
  EXPECT_EQ(y[3], 1.0f);
  EXPECT_EQ(y[4], 0.0f);
  EXPECT_TRUE(std::isnan(y[5]));
}

TEST_P(Math, E01_SoftplusKeepsItsDigits) {
  float at = 0;
  EXPECT_LE(worst(f.softplus, softplus64, arguments(-87.0f, 25.0f, 2000000), &at), 4e-7) << "at " << at;
  const std::vector<float> x = {20.0f, 20.000002f, 1e30f, -kInf, kInf, kNan, -17.0f};
  std::vector<float> y(x.size());
  f.softplus(x.data(), y.data(), static_cast<int64_t>(x.size()));
  EXPECT_NEAR(y[0], 20.0, 2e-6);
  EXPECT_EQ(y[1], x[1]);
  EXPECT_EQ(y[2], 1e30f);
  EXPECT_EQ(y[3], 0.0f);
  EXPECT_EQ(y[4], kInf);
  EXPECT_TRUE(std::isnan(y[5]));
  EXPECT_NEAR(y[6] / softplus64(-17.0), 1, 1e-6);  // log(1 + e^x) would be 0 here
}

// E-2 over random raw gates, biases and A_log.
void check_gate(const MathFunctions& f, kda_gate_family family, double lower_bound) {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<double> wide(-90, 30), small(-3, 3), a_log(-2, 2.8);
  const int64_t n = 20000;
  std::vector<float> raw(n), bias(n), g(n);
  for (int round = 0; round < 100; ++round) {
    const auto log_a = static_cast<float>(a_log(random));
    GateHead head{family, static_cast<float>(std::exp(static_cast<double>(log_a))), static_cast<float>(lower_bound)};
    for (int64_t i = 0; i < n; ++i) {
      raw[i] = static_cast<float>(i % 2 ? wide(random) / (family == KDA_GATE_BOUNDED ? head.a : 1) : small(random));
      bias[i] = static_cast<float>(small(random));
    }
    f.log_decay(head, raw.data(), bias.data(), g.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      const double x = static_cast<double>(raw[i]) + bias[i];
      const double a = std::exp(static_cast<double>(log_a));
      const double y = family == KDA_GATE_BOUNDED ? a * x : x;
      const double want = family == KDA_GATE_BOUNDED ? lower_bound * sigmoid64(y) : -a * softplus64(y);
      if (std::fabs(want) < 0x1p-120) continue;
      ASSERT_LE(std::fabs(g[i] - want), 5e-7 * (1 + std::fabs(y)) * std::fabs(want))
          << "raw " << raw[i] << " bias " << bias[i] << " A_log " << log_a << " got " << g[i] << " want " << want;
    }
  }
}

TEST_P(Math, E02_SoftplusGateAccuracy) { check_gate(f, KDA_GATE_SOFTPLUS, 0); }
TEST_P(Math, E02_BoundedGateAccuracy) { check_gate(f, KDA_GATE_BOUNDED, -5); }

TEST_P(Math, FieldCases_F02_BoundedGateIsAScaledSigmoid) {
  struct Case {
    float a_log, raw;
    double want;
  };
  const Case bounded[] = {{-1, -8, -0.2731313}, {-1, 1, -3.0648921}, {0, -8, -0.0021528},
                          {0, 0, -2.8108825},   {0, 1, -3.8864993},  {0, 8, -4.9986940},
                          {2, -1, -0.0195210},  {2, 0, -4.3190277},  {2, 1, -4.9995129}};
  for (const Case& c : bounded) {
    const GateHead head{KDA_GATE_BOUNDED, static_cast<float>(std::exp(static_cast<double>(c.a_log))), -5.0f};
    const float bias = 0.25f;
    float g;
    f.log_decay(head, &c.raw, &bias, &g, 1);
    const double exact = -5 * sigmoid64(std::exp(static_cast<double>(c.a_log)) * (c.raw + 0.25));
    EXPECT_NEAR(exact, c.want, 1e-7);  // the table has seven decimals
    EXPECT_LE(std::fabs(g - exact), 2e-6 * std::fabs(exact)) << c.a_log << " " << c.raw;
  }
  const Case soft[] = {{0, -8, -0.0004306}, {0, 8, -8.2502612}, {2, 8, -60.961643}};
  for (const Case& c : soft) {
    const GateHead head{KDA_GATE_SOFTPLUS, static_cast<float>(std::exp(static_cast<double>(c.a_log))), 0};
    const float bias = 0.25f;
    float g;
    f.log_decay(head, &c.raw, &bias, &g, 1);
    EXPECT_NEAR(g, c.want, std::max(1e-6, 2e-7 * std::fabs(c.want))) << c.a_log << " " << c.raw;
  }
}

TEST_P(Math, E01_PlainGatePassesThrough) {
  const std::vector<float> raw = {-kInf, 0.0f, -1.5f, kNan, 3.0f};
  const std::vector<float> bias(5, 9.0f);
  std::vector<float> g(5);
  f.log_decay({KDA_GATE_PLAIN, 1, 0}, raw.data(), bias.data(), g.data(), 5);
  EXPECT_EQ(g[0], -kInf);
  EXPECT_EQ(g[1], 0.0f);
  EXPECT_EQ(g[2], -1.5f);
  EXPECT_TRUE(std::isnan(g[3]));
  EXPECT_EQ(g[4], 3.0f);
}

// Conversions: every 16-bit pattern, and roundings against base/half.h, with and without flushing.
TEST_P(Math, G02_ConversionsRoundToNearestEven) {
  std::vector<bf16> b(65536);
  std::vector<fp16> h(65536);
  for (uint32_t i = 0; i < 65536; ++i) b[i].bits = h[i].bits = static_cast<uint16_t>(i);
  std::vector<float> wide(65536 + kRowPad);
  const FlushDenormals flush;
  f.load_bf16(b.data(), 65536, wide.data());
  for (uint32_t i = 0; i < 65536; ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(to_float(b[i]))) << i;
  }
  f.load_fp16(h.data(), 65536, wide.data());
  for (uint32_t i = 0; i < 65536; ++i) {
    const bool nan = (i & 0x7fff) > 0x7c00;
    if (nan) {
      ASSERT_NE(std::bit_cast<uint32_t>(wide[i]) & 0x7fffffu, 0u) << i;
      continue;
    }
    // Subnormals of fp16 are normal in fp32, so a flush may not touch them.
    const double want = std::ldexp(static_cast<double>((i & 0x7c00) ? (i & 0x3ff) | 0x400 : i & 0x3ff),
                                   std::max<int>(1, (i >> 10) & 31) - 25);
    if ((i & 0x7c00) == 0x7c00) continue;
    ASSERT_EQ(std::fabs(static_cast<double>(wide[i])), want) << i;
  }
  std::mt19937 random(3);
  std::vector<float> x(65536 + kRowPad);
  for (auto& v : x) v = std::bit_cast<float>(static_cast<uint32_t>(random()));
  x[0] = 65504.0f, x[1] = 65519.99f, x[2] = 65520.0f, x[3] = kInf, x[4] = -kInf, x[5] = kNan, x[6] = 3.4e38f;
  x[7] = 5.9604645e-8f, x[8] = 2.9802322e-8f, x[9] = 2.9802326e-8f;
  for (size_t i = 16; i < 4096; ++i) x[i] = std::ldexp(x[i] - std::trunc(x[i]), static_cast<int>(random() % 40) - 30);
  f.store_bf16(x.data(), 65536, b.data());
  f.store_fp16(x.data(), 65536, h.data());
  for (uint32_t i = 0; i < 65536; ++i) {
    ASSERT_EQ(b[i].bits, to_bf16(x[i]).bits) << x[i];
    if (std::fabs(x[i]) < 0x1p-126f && x[i] != 0) continue;
    ASSERT_EQ(h[i].bits, to_fp16(x[i]).bits) << x[i];
  }
}

template <class T, class Load, class Store>
void check_tails(Load load, Store store) {
  for (int64_t n = 1; n < 40; ++n) {
    std::vector<T> row(static_cast<size_t>(n));  // exactly n elements: the sanitizer sees a read behind it
    for (int64_t i = 0; i < n; ++i) row[static_cast<size_t>(i)] = from_float<T>(static_cast<float>(i + 1));
    std::vector<float> wide(static_cast<size_t>(padded(n)), kNan);
    load(row.data(), n, wide.data());
    for (int64_t i = 0; i < padded(n); ++i) EXPECT_EQ(wide[static_cast<size_t>(i)], i < n ? float(i + 1) : 0.0f);
    std::vector<T> back(static_cast<size_t>(n + 8), from_float<T>(7.0f));
    store(wide.data(), n, back.data());
    for (int64_t i = 0; i < n + 8; ++i) {
      EXPECT_EQ(to_float(back[static_cast<size_t>(i)]), i < n ? float(i + 1) : 7.0f) << n << " " << i;
    }
  }
}

TEST_P(Math, F63_TailsTouchNothingBehindTheRow) {
  check_tails<float>(f.load_fp32, f.store_fp32);
  check_tails<bf16>(f.load_bf16, f.store_bf16);
  check_tails<fp16>(f.load_fp16, f.store_fp16);
}

TEST_P(Math, DotSumsEveryElement) {
  std::vector<float> a(256, 0.0f), b(256, 1.0f);
  for (int64_t n = kRowPad; n <= 256; n += kRowPad) {
    for (int64_t i = 0; i < n; ++i) a[static_cast<size_t>(i)] = static_cast<float>(i + 1);
    EXPECT_EQ(f.dot(a.data(), b.data(), n), static_cast<float>(n * (n + 1) / 2));
  }
}

TEST(Denormals, N14_FlushModeIsRestored) {
  volatile float tiny = 1e-40f;
  std::feclearexcept(FE_ALL_EXCEPT);
  {
    const FlushDenormals flush;
    EXPECT_EQ(tiny * 1.0f, 0.0f);
    volatile float big = 3e38f;
    volatile float result = big * 10.0f;
    EXPECT_EQ(result, kInf);
  }
  EXPECT_NE(tiny * 1.0f, 0.0f);
  EXPECT_NE(std::fetestexcept(FE_OVERFLOW), 0);  // flags raised inside stay visible
}

TEST(Isas, BestFirstAndPortableLast) {
  EXPECT_EQ(available_isas().back(), Isa::portable);
  for (size_t i = 1; i < available_isas().size(); ++i) EXPECT_GT(available_isas()[i - 1], available_isas()[i]);
}

TEST(Isas, ForcedIsaIsTakenOrFails) {
  for (Isa isa : available_isas()) {
    ASSERT_EQ(setenv("KDA_FORCE_ISA", isa_name(isa), 1), 0);
    const auto chosen = choose_isa();
    ASSERT_TRUE(chosen.ok());
    EXPECT_EQ(chosen.value(), isa);
  }
  for (const char* name : {"", "AVX2", "sse", "avx512 "}) {
    setenv("KDA_FORCE_ISA", name, 1);
    const auto chosen = choose_isa();
    ASSERT_FALSE(chosen.ok()) << name;
    EXPECT_EQ(chosen.status().code(), KDA_UNSUPPORTED);
    EXPECT_NE(chosen.status().message().find(available_isa_names()), std::string::npos);
  }
  unsetenv("KDA_FORCE_ISA");
  EXPECT_EQ(choose_isa().value(), available_isas().front());
}

}  // namespace
}  // namespace kda::cpu
#endif  // HWY_ONCE
