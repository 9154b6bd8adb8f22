// T-14: after seal, 10,000 mixed steps of everything this backend has make launches and nothing else: no allocation,
// no module or function load, no synchronising call, no attribute call. And a launch that fails is reported (Y-22).
#include <cstdio>
#include <random>

#include "device_copy.h"
#include "harness.h"
#include "serving_calls.h"
#include "unit/core/metadata_fixture.h"

namespace kda::conformance::test {
namespace {

using cuda_test::CudaCalls;

// Arguments with device memory of their own.
template <class Args>
struct Served {
  Served(Args a, std::vector<kda_tensor*> (*list)(Args&)) : args(a), mirror(memory, list(args), 0) {}
  Args args;
  cuda_test::Memory memory;
  conformance::Mirror mirror;
};

std::vector<kda_tensor*> copy_tensors(kda_state_copy_args& a) {
  return {&a.pool, &a.indices, &a.has_initial_state, &a.packed};
}
std::vector<kda_tensor*> metadata_tensors(kda_metadata_args& a) {
  std::vector<kda_tensor*> out{&a.step.query_start_loc, &a.step.computed, &a.step.prefilling, &a.slot_table};
  auto* tables = reinterpret_cast<kda_tensor*>(&a.tables);
  for (size_t i = 0; i < sizeof(a.tables) / sizeof(kda_tensor); ++i) out.push_back(tables + i);
  return out;
}

kda_state_copy_args host_copy_args(const Tensor& pool, const Tensor& indices, const Tensor& packed,
                                   const Tensor& flags) {
  auto a = sized<kda_state_copy_args>();
  a.pool = pool;
  a.indices = indices;
  a.packed = packed;
  a.has_initial_state = flags;
  return a;
}

class Serving : public testing::Test {
 protected:
  Serving()
      : pool(canary_pool(KDA_FP32, {12, 2, 128, 128})),
        packed(KDA_FP32, {6, 2, 128, 128}),
        narrow(Tensor::ints({3, 1, -1, 7, 99, 0}, KDA_INT32)),
        wide(Tensor::ints({3, 1, -1, 7, 99, 0}, KDA_INT64)),
        flags(Tensor::ints({1, 0, 1, 1, 1, 1}, KDA_BOOL)),
        copy32(host_copy_args(pool, narrow, packed, flags), copy_tensors),
        copy64(host_copy_args(pool, wide, packed, Tensor()), copy_tensors),
        metadata_description(metadata_desc(300, 16, 2)),
        tables(metadata_description, KDA_INT32),
        step(step_input()),
        metadata(metadata_args(), metadata_tensors) {
    EXPECT_EQ(kda_copy_set_create(context, nullptr, &set), KDA_OK);
    auto binding = sized<kda_copy_binding>();
    binding.layer = "layer";
    binding.pool = copy32.args.pool;
    EXPECT_EQ(kda_copy_set_prepare(set, &binding, 1, 6), KDA_OK) << kda_last_error();
    EXPECT_EQ(kda_copy_set_seal(set), KDA_OK) << kda_last_error();
    EXPECT_EQ(kda_copy_set_publish(set), KDA_OK) << kda_last_error();
    tables_plan = metadata_plan(metadata_description, context);
    EXPECT_TRUE(tables_plan.ok()) << tables_plan.message();
  }
  ~Serving() override { kda_copy_set_destroy(set); }

  static StepInput step_input() {
    StepInput s = StepInput::of({70, 2, 0, 1, 130, 1}, 2);
    s.prefilling = {1, 0, 0, 0, 1, 0};
    return s;
  }
  kda_metadata_args metadata_args() {
    kda_metadata_args a = step.args;
    a.tables = tables.views();
    return a;
  }
  kda_status gather(Served<kda_state_copy_args>& call, int64_t n, cudaStream_t s) {
    kda_state_copy_args a = call.args;
    a.indices.shape[0] = a.packed.shape[0] = n;
    if (a.has_initial_state.dtype != KDA_DTYPE_NONE) a.has_initial_state.shape[0] = n;
    return kda_copy_set_gather(set, "layer", &a, s);
  }
  kda_status scatter(Served<kda_state_copy_args>& call, int64_t n, cudaStream_t s) {
    kda_state_copy_args a = call.args;
    a.has_initial_state = {};
    a.indices.shape[0] = a.packed.shape[0] = n;
    return kda_copy_set_scatter(set, "layer", &a, s);
  }
  kda_status build(cudaStream_t s) { return kda_metadata_run(tables_plan.get(), &metadata.args, kda_workspace{}, s); }

  DeviceContext context;
  kda_copy_set* set = nullptr;
  Tensor pool, packed, narrow, wide, flags;
  Served<kda_state_copy_args> copy32, copy64;
  kda_metadata_desc metadata_description;
  Tables tables;
  StepViews step;
  Served<kda_metadata_args> metadata;
  Plan tables_plan;
};

DecodeCall verify_call() {
  FieldInput input;
  input.lengths = {12};
  input.heads = 2;
  input.gate_scale = 4;
  Problem p = field_problem(input);
  p.lengths = {4, 4, 4};
  DecodeCall call(p, "auto", 4);
  call.pool = canary_pool(KDA_FP32, {12, 2, 128, 128});
  call.slots = Tensor::of(KDA_INT32, {3, 4}, {0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1});
  call.accepted = Tensor::ints({2, 4, 1});
  return call;
}

TEST_F(Serving, T14_Y20_Y23_M31_F29_TenThousandMixedStepsLaunchAndDoNothingElse) {
  DecodeCall decode = verify_call();
  Plan decode_plan(kda_decode_plan_create, context, decode.desc);
  ASSERT_TRUE(decode_plan.ok()) << decode_plan.message();
  auto list = [](kda_decode_args& a) { return conformance::tensors_of(a); };
  Served<kda_decode_args> decoding(decode.args(), list);
  auto norm = sized<kda_gated_norm_desc>();
  norm.num_value_heads = 2;
  norm.io_dtype = KDA_BF16;
  norm.value_dim = 128;
  norm.max_tokens = 12;
  Plan norm_plan(kda_gated_norm_plan_create, context, norm);
  ASSERT_TRUE(norm_plan.ok()) << norm_plan.message();
  const Tensor o = Tensor::of(KDA_BF16, {12, 2, 128}, uniform_vector(1, 12 * 256)), y(KDA_BF16, {12, 2, 128});
  const Tensor weight = Tensor::full(KDA_FP32, {128}, 1);
  auto norm_args = sized<kda_gated_norm_args>();
  norm_args.o = norm_args.z = o;
  norm_args.weight = weight;
  norm_args.out = y;
  auto norm_list = [](kda_gated_norm_args& a) { return conformance::tensors_of(a); };
  Served<kda_gated_norm_args> norming(norm_args, norm_list);
  ASSERT_EQ(kda_context_seal(context), KDA_OK) << kda_last_error();
  EXPECT_EQ(metadata_plan(metadata_description, context).status(), KDA_FAILED_PRECONDITION);  // Y-16
  KDA_REQUIRE_CUDA(cudaDeviceSynchronize());

  const Stream stream;
  std::mt19937 random(14);
  std::vector<int> kinds(10000);
  for (int& k : kinds) k = static_cast<int>(random() % 32);
  long failures = 0;
  {
    const CudaCalls calls;
    const cuda_test::HostAllocations memory;
    for (const int k : kinds) {
      const int64_t n = k % 7;
      failures += build(stream) != KDA_OK;
      failures += gather(k % 2 ? copy32 : copy64, n, stream) != KDA_OK;
      failures += kda_decode_run(decode_plan.get(), &decoding.args, {}, stream) != KDA_OK;
      failures += kda_gated_norm_run(norm_plan.get(), &norming.args, {}, stream) != KDA_OK;
      failures += scatter(k % 3 ? copy32 : copy64, n, stream) != KDA_OK;
    }
    EXPECT_EQ(calls.others(), 0) << calls.text();
    EXPECT_GE(calls.launches(), 40000 - 2 * 2000);
    EXPECT_EQ(memory.count(), 0);
    std::printf("10,000 steps: %s\n", calls.text().c_str());
  }
  EXPECT_EQ(failures, 0) << kda_last_error();
  stream.wait();
}

// The counters do see what a preparation does, the driver's side included.
TEST_F(Serving, T14_ThePreparationIsSeenByTheCounters) {
  const DeviceContext other;
  const CudaCalls calls;
  const cuda_test::HostAllocations memory;
  auto desc = device_copy_desc(copy32.args.pool, 6);
  const Plan plan = device_copy_plan(desc, other);
  ASSERT_TRUE(plan.ok()) << plan.message();
  const auto counts = calls.counts();
  std::printf("a preparation: %s\n", calls.text().c_str());
  EXPECT_EQ(calls.launches(), 4);  // Y-20
  for (const char* name : {"cudaFuncGetAttributes", "cudaMalloc", "cudaDeviceSynchronize"}) {
    EXPECT_GT(counts.count(name), 0u) << name;
  }
  long driver = 0;
  for (const auto& [name, count] : counts) driver += name.rfind("cuda", 0) != 0 ? count : 0;
  EXPECT_GT(driver, 0) << "the driver's functions are not seen";
  EXPECT_GT(memory.count(), 0);
}

TEST_F(Serving, Y22_Y24_F29_AFailedLaunchIsReturnedAlsoUnderCapture) {
  const Stream stream;
  const auto refused = [&](auto&& call) {
    cuda_test::fail_next_launch();
    EXPECT_EQ(call(), KDA_DEVICE_ERROR);
    EXPECT_NE(std::string(kda_last_error()).find("cudaErrorLaunchOutOfResources"), std::string::npos)
        << kda_last_error();
    EXPECT_EQ(call(), KDA_OK) << kda_last_error();
  };
  refused([&] { return gather(copy32, 6, stream); });
  refused([&] { return scatter(copy64, 6, stream); });
  refused([&] { return build(stream); });
  stream.wait();
  const CapturedCalls graph([&](cudaStream_t s) {
    refused([&] { return gather(copy32, 6, s); });
    refused([&] { return build(s); });
  });
  EXPECT_EQ(graph.nodes(), 2u);
  graph.replay();
}

// T-13 on the device: the table of prepared variants never changes.
TEST_F(Serving, T13_Y17_TheVariantTableIsConstant) {
  auto before = sized<kda_copy_set_info>(), after = sized<kda_copy_set_info>();
  ASSERT_EQ(kda_copy_set_get_info(set, &before), KDA_OK);
  EXPECT_EQ(before.variants, 4);
  const Stream streams[2];
  for (int call = 0; call < 1000; ++call) {
    Served<kda_state_copy_args>& which = call % 2 ? copy32 : copy64;
    ASSERT_EQ(gather(which, call % 7, streams[call % 3 == 0]), KDA_OK);
    ASSERT_EQ(scatter(which, (call + 3) % 7, streams[call % 3 == 0]), KDA_OK);
  }
  for (const Stream& s : streams) s.wait();
  ASSERT_EQ(kda_copy_set_get_info(set, &after), KDA_OK);
  EXPECT_EQ(after.variants, before.variants);
  EXPECT_EQ(after.tables, before.tables);
}

}  // namespace
}  // namespace kda::conformance::test
