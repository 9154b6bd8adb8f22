// The cuBLASLt projections' host half over a stand-in of the library (../fake_cublaslt): what is looked for and why
// it is passed over, what is chosen when, and that a run only computes.
#include "cuda/host/cublaslt.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "conformance/api.h"
#include "conformance/compare.h"
#include "conformance/device.h"
#include "conformance/layer.h"
#include "fake_cublaslt.h"

namespace kda::conformance::test {
namespace {

namespace lt = kda::cuda::lt;

class Mode {
 public:
  explicit Mode(const char* mode) { ::setenv("FAKE_CUBLASLT", mode, 1); }
  ~Mode() { ::unsetenv("FAKE_CUBLASLT"); }
};

FakeCublasLtCounts counts() {
  static void* const library =
      dlopen(KDA_FAKE_CUBLASLT_DIR "/libcublasLt.so.13", RTLD_NOW);  // stays: so do its counts
  EXPECT_NE(library, nullptr);
  if (library == nullptr) return {};
  return reinterpret_cast<FakeCublasLtCounts (*)()>(dlsym(library, "fake_cublaslt_counts"))();
}

kda_layer_spec small() {
  kda_layer_spec s{};
  s.hidden = 48;
  s.num_heads = s.num_value_heads = 2;
  s.key_dim = s.value_dim = 16;
  s.gate_rank = 16;
  s.output_gate = KDA_OUTPUT_GATE_FULL_RANK;
  s.conv_width = 4;
  s.gate_family = KDA_GATE_SOFTPLUS;
  s.norm_eps = 1e-5;
  return s;
}

conformance::Plan plan_of(uint32_t flags, kda_dtype io = KDA_BF16, int64_t tokens = 200) {
  kda_layer_desc d = conformance::layer_desc(small(), "auto", io);
  d.max_tokens = tokens;
  d.max_sequences = 1;
  d.flags = flags;
  return conformance::Plan(kda_layer_plan_create, conformance::device_context(), d);
}

}  // namespace

TEST(CublasLtLoader, G04_SaysWhatItLookedForAndWhatWasMissing) {
  const lt::Library none = lt::load("/nonexistent");
  EXPECT_NE(none.missing.find("/nonexistent/libcublasLt.so.13"), std::string::npos) << none.missing;
  EXPECT_NE(none.missing.find("/nonexistent/libcublasLt.so.12"), std::string::npos) << none.missing;
  EXPECT_EQ(none.missing.find("/usr/local"), std::string::npos) << "a named folder is the only one: " << none.missing;
  const lt::Library half = lt::load(KDA_FAKE_CUBLASLT_DIR "/../fake_cublaslt_without_matmul");
  EXPECT_NE(half.missing.find("without cublasLtMatmul"), std::string::npos) << half.missing;
  {
    const Mode mode("version");
    const lt::Library old = lt::load(KDA_FAKE_CUBLASLT_DIR);
    EXPECT_NE(old.missing.find("wanted version 12 or 13, got 110800"), std::string::npos) << old.missing;
  }
  const lt::Library good = lt::load(KDA_FAKE_CUBLASLT_DIR);
  EXPECT_EQ(good.missing, "");
  EXPECT_EQ(good.version, 130100u);
}

TEST(CublasLtPlan, Y20_EverythingIsChosenWhenThePlanIsCreated) {
  const FakeCublasLtCounts before = counts();
  const conformance::Plan plan = plan_of(0);
  ASSERT_TRUE(plan.ok()) << plan.message();
  const FakeCublasLtCounts created = counts();
  // Three products (in, f_b, o), each for 1, 2, 4 … 128 and 200 rows, and for the exact way up to 128.
  EXPECT_EQ(created.heuristics - before.heuristics, 3 * (9 + 8));
  EXPECT_EQ(created.products - before.products, 3 * (9 + 8)) << "each algorithm runs once";
  EXPECT_EQ(created.preferences, before.preferences);
  EXPECT_EQ(created.descs - before.descs, 6);

  const conformance::LayerModel m = conformance::layer_model(small(), 3);
  std::string message;
  const auto weights = conformance::pack(m, conformance::device_context(), KDA_BF16, nullptr, message);
  ASSERT_NE(weights, nullptr) << message;
  const conformance::Tensor hidden = conformance::Tensor::full(KDA_BF16, {7, 48}, 1);
  conformance::Tensor out(KDA_BF16, {7, 48}), state(KDA_FP32, {1, 2, 16, 16}), window(KDA_BF16, {1, 3, 96});
  const conformance::Tensor cu = conformance::Tensor::ints({0, 7}), slot = conformance::Tensor::ints({0});
  auto a = conformance::sized<kda_layer_args>();
  a.weights = weights.get();
  a.hidden = hidden;
  a.chunk.sequences.cu_seqlens = cu;
  a.chunk.slots = slot;
  a.state = state;
  a.conv_state = window;
  a.out = out;
  ASSERT_EQ(conformance::run_layer(conformance::device_context(), plan, a, message), KDA_OK) << message;
  const FakeCublasLtCounts ran = counts();
  EXPECT_EQ(ran.products - created.products, 3) << "q, k, v, g, f_a and b are one product (L-10)";
  EXPECT_EQ(ran.heuristics, created.heuristics);
  EXPECT_EQ(ran.descs, created.descs);
  EXPECT_EQ(ran.preferences, created.preferences);
}

TEST(CublasLtPlan, N13_AnInvariantPlanTriesBeforeItTrusts) {
  const FakeCublasLtCounts before = counts();
  const conformance::Plan plan = plan_of(KDA_PLAN_BATCH_INVARIANT);
  ASSERT_TRUE(plan.ok()) << plan.message();
  const FakeCublasLtCounts after = counts();
  EXPECT_EQ(after.cut_products, before.cut_products) << "an inner dimension cut in parts is never tried";
  EXPECT_GT(after.uneven_products, before.uneven_products) << "the first proposal was tried, and passed over";
  {
    const Mode mode("uneven");
    const conformance::Plan none = plan_of(KDA_PLAN_BATCH_INVARIANT);
    EXPECT_EQ(none.status(), KDA_UNSUPPORTED);
    EXPECT_NE(none.message().find("batch_invariant"), std::string::npos) << none.message();
    EXPECT_TRUE(plan_of(0).ok()) << "without the flag it serves";
  }
}

TEST(CublasLtPlan, R05_RefusalsNameTheLibrary) {
  {
    const Mode mode("none");
    const conformance::Plan plan = plan_of(0);
    EXPECT_EQ(plan.status(), KDA_UNSUPPORTED);
    EXPECT_NE(plan.message().find("product of 1 rows, 48"), std::string::npos) << plan.message();
    EXPECT_NE(plan.message().find("libcublasLt.so.13"), std::string::npos) << plan.message();
  }
  EXPECT_FALSE(plan_of(0, KDA_FP64).ok());
}

}  // namespace kda::conformance::test
