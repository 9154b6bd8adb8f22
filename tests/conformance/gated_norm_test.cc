// The gated norm: L-7.4.
#include <algorithm>
#include <cmath>

#include "harness.h"

namespace kda::conformance::test {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

class GatedNormTest : public BackendTest {
 protected:
  kda_gated_norm_desc desc_of(kda_dtype io, int64_t V) const {
    kda_gated_norm_desc d{};
    d.struct_size = sizeof d;
    d.backend = backend();
    d.num_value_heads = 3;
    d.value_dim = V;
    d.io_dtype = io;
    d.max_tokens = 64;
    return d;
  }
  void SetUp() override {
    const kda_gated_norm_desc d = desc_of(KDA_BF16, 128);
    require(KDA_OP_GATED_NORM, &d);
  }
};
KDA_FOR_BACKENDS(GatedNormTest);

TEST_P(GatedNormTest, L07_NormAndLogisticGate) {
  for (const kda_dtype io : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    for (const int64_t V : {128, 64, 7, 300}) {
      const int64_t T = 9;
      const Tensor o = Tensor::of(io, {T, 3, V}, uniform_vector(1, T * 3 * V)).copy(io, {3 * V + 11, V + 1, 1}, 3);
      const Tensor z = Tensor::of(io, {T, 3, V}, [&] {
        std::vector<double> x = uniform_vector(2, T * 3 * V);
        for (double& v : x) v *= 6;
        return x;
      }());
      const Tensor weight = Tensor::of(KDA_FP32, {V}, uniform_vector(3, V));
      const Tensor out(io, {T, 3, V}, {3 * V + 2, V, 1}, 1);
      auto args = sized<kda_gated_norm_args>();
      args.o = o;
      args.z = z;
      args.weight = weight;
      args.out = out;
      Plan plan = make_plan(desc_of(io, V));
      ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
      EXPECT_EQ(out.guard_report(), "");
      const std::vector<double> x = o.values(), gate = z.values(), w = weight.values();
      std::vector<double> wanted(x.size());
      for (int64_t row = 0; row < T * 3; ++row) {
        double sum = 0;
        for (int64_t v = 0; v < V; ++v)
          sum += x[static_cast<size_t>(row * V + v)] * x[static_cast<size_t>(row * V + v)];
        const double factor = 1 / std::sqrt(sum / static_cast<double>(V) + 1e-5);
        for (int64_t v = 0; v < V; ++v) {
          const auto i = static_cast<size_t>(row * V + v);
          wanted[i] = x[i] * factor * w[static_cast<size_t>(v)] * sigmoid(gate[i]);
        }
      }
      const double rounding = io == KDA_BF16 ? 0x1p-8 : io == KDA_FP16 ? 0x1p-11 : 0;
      EXPECT_WITHIN(compare_outputs(out.values(), wanted, {T}, 3, V), 1e-6 + rounding);
    }
  }
}

TEST_P(GatedNormTest, L07_ZeroAndExtremeRows) {
  const int64_t V = 128;
  Tensor o = Tensor::full(KDA_FP32, {2, 3, V}, 0), z = Tensor::full(KDA_FP32, {2, 3, V}, 1000);
  fill(select(o, 0, 1), 1e4);
  fill(select(select(z, 0, 1), 0, 1), -1000);
  const Tensor weight = Tensor::full(KDA_FP32, {V}, 2), out(KDA_FP32, {2, 3, V});
  auto args = sized<kda_gated_norm_args>();
  args.o = o;
  args.z = z;
  args.weight = weight;
  args.out = out;
  Plan plan = make_plan(desc_of(KDA_FP32, V));
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  EXPECT_EQ(out.get({0, 0, 5}), 0);
  EXPECT_NEAR(out.get({1, 0, 5}), 2, 1e-6);
  EXPECT_EQ(out.get({1, 1, 5}), 0);  // sigmoid(-1000) is exactly 0
}

// A backend may cut long calls in other blocks than short ones.
TEST_P(GatedNormTest, N13_LongCallsHaveTheBitsOfShortOnes) {
  const int64_t T = 701, kPiece = 60;
  for (const int64_t V : {128, 7}) {
    const Tensor o = Tensor::of(KDA_BF16, {T, 3, V}, uniform_vector(1, T * 3 * V));
    const Tensor z = Tensor::of(KDA_BF16, {T, 3, V}, uniform_vector(2, T * 3 * V));
    const Tensor weight = Tensor::of(KDA_FP32, {V}, uniform_vector(3, V));
    const Tensor whole(KDA_BF16, {T, 3, V}), pieces(KDA_BF16, {T, 3, V});
    kda_gated_norm_desc desc = desc_of(KDA_BF16, V);
    desc.max_tokens = T;
    const auto run = [&](const Tensor& out, int64_t begin, int64_t count) {
      auto args = sized<kda_gated_norm_args>();
      args.o = narrow(o, 0, begin, count);
      args.z = narrow(z, 0, begin, count);
      args.weight = weight;
      args.out = narrow(out, 0, begin, count);
      Plan plan = make_plan(desc);
      ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
    };
    run(whole, 0, T);
    for (int64_t t = 0; t < T; t += kPiece) run(pieces, t, std::min(kPiece, T - t));
    EXPECT_EQ(first_difference(whole, pieces), "");
    EXPECT_EQ(whole.guard_report(), "");
  }
}

}  // namespace kda::conformance::test
