// Which kind serves which pool (spec Y-1..Y-4, T-9), by a stub device; the conditions of C-3 and C-16.
#include "core/state_copy.h"
#include "state_copy_fixture.h"
#include "state_copy_stub.h"

namespace kda::conformance::test {
namespace {

struct Routed {
  kda_status status = KDA_OK;
  std::string text;  // kind, or message
};

Routed route(const StubWorld& world, const kda_tensor& pool, const char* backend = nullptr,
             kda_dtype packed = KDA_DTYPE_NONE) {
  const auto plan = create_state_copy_plan(
      world.context, std::make_unique<kda_state_copy_desc>(copy_desc(pool, 4, packed, backend)).get());
  if (!plan.ok()) return {plan.status().code(), plan.status().message()};
  return {KDA_OK, plan.value()->backend};
}

class Routing : public ::testing::Test {
 protected:
  // A pool view of the stub's device; `shift` bytes off a 16-byte boundary.
  kda_tensor pool(kda_device_type device, kda_dtype dtype, int shift = 0) {
    kda_tensor t = make_tensor(memory_ + shift, dtype, {3, 2, 4, 8}, {device, 0});
    return t;
  }
  alignas(64) char memory_[4096];
};

TEST_F(Routing, T09_Y02_CudaTable) {
  StubWorld world(KDA_CUDA);
  for (kda_dtype dtype : {KDA_FP32, KDA_BF16, KDA_FP16}) EXPECT_EQ(route(world, pool(KDA_CUDA, dtype)).text, "fused");
  for (kda_dtype dtype : {KDA_INT8, KDA_UINT8, KDA_BOOL, KDA_INT16, KDA_INT32, KDA_INT64, KDA_FP64}) {
    EXPECT_EQ(route(world, pool(KDA_CUDA, dtype)).text, "bytes") << dtype_name(dtype);
  }
  // Both ends of the alignment condition.
  EXPECT_EQ(route(world, pool(KDA_CUDA, KDA_FP32, 4)).text, "fused");
  EXPECT_EQ(route(world, pool(KDA_CUDA, KDA_FP32, 2)).text, "bytes");
  EXPECT_EQ(route(world, pool(KDA_CUDA, KDA_BF16, 2)).text, "fused");
  EXPECT_EQ(route(world, pool(KDA_CUDA, KDA_BF16, 1)).text, "bytes");
}

TEST_F(Routing, T09_Y02_NoImageIsRefusedForEveryDtype) {
  StubWorld world(KDA_CUDA);
  world.device.has_image = false;
  for (kda_dtype dtype : {KDA_FP32, KDA_INT8}) {
    const Routed r = route(world, pool(KDA_CUDA, dtype));
    EXPECT_EQ(r.status, KDA_UNSUPPORTED);
    EXPECT_NE(r.text.find("no_device_image"), std::string::npos) << r.text;
    EXPECT_NE(r.text.find("sm_00"), std::string::npos) << r.text;
  }
  EXPECT_EQ(world.device.loads, 0);
}

TEST_F(Routing, T09_Y02_CpuTable) {
  StubWorld world(KDA_CPU);
  for (kda_dtype dtype : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    for (int shift : {0, 1, 2}) EXPECT_EQ(route(world, pool(KDA_CPU, dtype, shift)).text, "fused");
  }
  EXPECT_EQ(route(world, pool(KDA_CPU, KDA_INT16)).text, "bytes");
}

TEST_F(Routing, T09_Y03_I07_NamesAndAliases) {
  StubWorld world(KDA_CUDA);
  const kda_tensor p = pool(KDA_CUDA, KDA_FP32);
  EXPECT_EQ(route(world, p, "auto").text, "fused");
  EXPECT_EQ(route(world, p, "fused").text, "fused");
  EXPECT_EQ(route(world, p, "triton").text, "fused");
  EXPECT_EQ(route(world, p, "bytes").text, "bytes");
  EXPECT_EQ(route(world, p, "torch").text, "bytes");
  for (const char* bad : {"", "Fused", "triton ", "portable", "AUTO"}) {
    const Routed r = route(world, p, bad);
    EXPECT_EQ(r.status, KDA_INVALID_ARGUMENT) << bad;
    EXPECT_NE(r.text.find(std::string("got \"") + bad + "\""), std::string::npos) << r.text;
  }
  // A named kind that does not fit says every unmet condition and no met one.
  world.device.has_image = false;
  const Routed r = route(world, pool(KDA_CUDA, KDA_INT32, 1), "fused");
  EXPECT_EQ(r.status, KDA_UNSUPPORTED);
  for (const char* gate : {"no_device_image", "pool_dtype", "alignment"})
    EXPECT_NE(r.text.find(gate), std::string::npos) << r.text;
  world.device.has_image = true;
  const Routed one = route(world, pool(KDA_CUDA, KDA_INT32), "fused");
  EXPECT_NE(one.text.find("pool_dtype"), std::string::npos);
  EXPECT_EQ(one.text.find("alignment"), std::string::npos) << one.text;
}

TEST_F(Routing, Y03_NoEnvironmentVariableChooses) {
  StubWorld world(KDA_CUDA);
  setenv("KDA_STATE_COPY_BACKEND", "bytes", 1);
  EXPECT_EQ(route(world, pool(KDA_CUDA, KDA_FP32)).text, "fused");
  unsetenv("KDA_STATE_COPY_BACKEND");
}

TEST_F(Routing, T09_Y04_CastHasNoBytesForm) {
  StubWorld world(KDA_CUDA);
  EXPECT_EQ(route(world, pool(KDA_CUDA, KDA_BF16), nullptr, KDA_FP32).text, "fused");
  EXPECT_EQ(route(world, pool(KDA_CUDA, KDA_BF16), "bytes", KDA_FP32).status, KDA_UNSUPPORTED);
  const Routed r = route(world, pool(KDA_CUDA, KDA_FP16, 1), nullptr, KDA_FP32);
  EXPECT_EQ(r.status, KDA_UNSUPPORTED);
  for (const char* gate : {"alignment", "cast"}) EXPECT_NE(r.text.find(gate), std::string::npos) << r.text;
}

TEST_F(Routing, C16_PackedDtypes) {
  StubWorld world(KDA_CPU);
  EXPECT_EQ(route(world, pool(KDA_CPU, KDA_FP32), nullptr, KDA_FP32).text, "fused");
  EXPECT_EQ(route(world, pool(KDA_CPU, KDA_FP32), nullptr, KDA_BF16).status, KDA_INVALID_ARGUMENT);
  EXPECT_EQ(route(world, pool(KDA_CPU, KDA_BF16), nullptr, KDA_FP16).status, KDA_INVALID_ARGUMENT);
  EXPECT_EQ(route(world, pool(KDA_CPU, KDA_INT16), nullptr, KDA_FP32).status, KDA_INVALID_ARGUMENT);
}

TEST_F(Routing, C03_PoolConditionsNameWhatIsBroken) {
  StubWorld world(KDA_CUDA);
  const kda_tensor good = pool(KDA_CUDA, KDA_FP32);
  struct {
    const char* text;
    kda_status status;
    void (*spoil)(kda_tensor&);
  } const cases[] = {
      {"rank 4", KDA_INVALID_ARGUMENT, [](kda_tensor& t) { t.rank = 3; }},
      {"no empty dimension", KDA_INVALID_ARGUMENT, [](kda_tensor& t) { t.shape[2] = 0; }},
      {"no empty dimension", KDA_INVALID_ARGUMENT, [](kda_tensor& t) { t.shape[0] = -1; }},
      {"inner three dimensions dense", KDA_INVALID_ARGUMENT, [](kda_tensor& t) { t.strides[3] = 2; }},
      {"inner three dimensions dense", KDA_INVALID_ARGUMENT, [](kda_tensor& t) { t.strides[1] = 33; }},
      {"stride(0) >= 64", KDA_INVALID_ARGUMENT, [](kda_tensor& t) { t.strides[0] = 63; }},
      {"stride(0) >= 64", KDA_INVALID_ARGUMENT, [](kda_tensor& t) { t.strides[0] = -64; }},
      {"below 2^63", KDA_INVALID_ARGUMENT, [](kda_tensor& t) { t.strides[0] = int64_t{1} << 61; }},
      {"below 2^63", KDA_INVALID_ARGUMENT,
       [](kda_tensor& t) { t.shape[1] = t.shape[2] = t.shape[3] = int64_t{1} << 40; }},
      {"context's device cuda:0", KDA_INVALID_ARGUMENT, [](kda_tensor& t) { t.device.type = KDA_CPU; }},
      {"context's device cuda:0", KDA_INVALID_ARGUMENT, [](kda_tensor& t) { t.device.index = 1; }},
      {"a bound pool", KDA_FAILED_PRECONDITION, [](kda_tensor& t) { t = {}; }},
      {"wanted memory", KDA_FAILED_PRECONDITION, [](kda_tensor& t) { t.data = nullptr; }},
      {"wanted a tensor", KDA_FAILED_PRECONDITION, [](kda_tensor& t) { t.dtype = static_cast<kda_dtype>(99); }},
      {"wanted a tensor", KDA_FAILED_PRECONDITION, [](kda_tensor& t) { t.rank = 77; }},
  };
  for (const auto& c : cases) {
    kda_tensor t = good;
    c.spoil(t);
    const Routed r = route(world, t);
    EXPECT_EQ(r.status, c.status) << r.text;
    EXPECT_NE(r.text.find(c.text), std::string::npos) << r.text;
  }
  // What is allowed: a dimension of size 1 with any stride, row gaps.
  kda_tensor odd = make_tensor(memory_, KDA_FP32, {3, 1, 4, 8}, {KDA_CUDA, 0});
  odd.strides[1] = 12345;
  odd.strides[0] = 40;
  EXPECT_EQ(route(world, odd).status, KDA_OK);
}

TEST_F(Routing, Y01_LaneIsTheLargestThatDividesAddressStrideAndPayload) {
  const struct {
    int64_t k, gap;
    int alignment;
    kda_dtype dtype;
    int32_t lane;
  } cases[] = {{8, 0, 0, KDA_FP32, 16}, {8, 0, 8, KDA_FP32, 8}, {8, 0, 4, KDA_FP32, 4}, {8, 1, 0, KDA_FP32, 4},
               {8, 2, 0, KDA_FP32, 8},  {7, 0, 0, KDA_BF16, 2}, {8, 0, 2, KDA_BF16, 2}, {7, 0, 0, KDA_INT8, 1}};
  for (const auto& c : cases) {
    PoolShape s{3, 1, 1, c.k, c.dtype, c.gap, 0, c.alignment};
    const Pool pool(s);
    const Plan plan = copy_plan(copy_desc(pool.view(), 4));
    ASSERT_TRUE(plan.ok()) << plan.message();
    auto info = sized<kda_state_copy_info>();
    ASSERT_EQ(kda_state_copy_plan_info(plan.get(), &info), KDA_OK);
    EXPECT_EQ(info.lane_bytes, c.lane) << describe(pool.view());
    EXPECT_EQ(info.variants, 4);
    EXPECT_EQ(info.payload, c.k);
    EXPECT_EQ(info.max_selected, 4);
  }
}

TEST_F(Routing, Explain_ListsBothKindsWithTheirConditions) {
  const Pool pool(PoolShape{3, 1, 2, 4, KDA_INT8});
  const auto desc = copy_desc(pool.view(), 4);
  std::string text;
  ASSERT_EQ(kda_explain(
                cpu_context(), KDA_OP_STATE_COPY, &desc,
                [](void* user, const char* name, const char* reasons, int32_t chosen) {
                  *static_cast<std::string*>(user) +=
                      std::string(name) + "|" + reasons + "|" + (chosen ? "yes;" : "no;");
                },
                &text),
            KDA_OK);
  EXPECT_EQ(text, "fused|pool_dtype: wanted fp32, bf16 or fp16, got int8|no;bytes||yes;");
  const Plan plan = copy_plan(desc);
  const char *candidate = nullptr, *reasons = nullptr;
  ASSERT_EQ(kda_plan_refusal(plan.get(), 0, &candidate, &reasons), KDA_OK);
  EXPECT_STREQ(candidate, "fused");
  EXPECT_EQ(kda_plan_operator(plan.get()), KDA_OP_STATE_COPY);
  size_t bytes = 1;
  EXPECT_EQ(kda_plan_workspace_size(plan.get(), &bytes), KDA_OK);
  EXPECT_EQ(bytes, 0u);
}

}  // namespace
}  // namespace kda::conformance::test
