// Fail-closed at use and at preparation (spec Y-8, Y-10, Y-13, Y-24..Y-26, T-8, T-15).
#include "core/state_copy.h"
#include "state_copy_fixture.h"
#include "state_copy_stub.h"

namespace kda::conformance::test {
namespace {

class Refusal : public ::testing::Test {
 protected:
  Refusal()
      : shape{5, 2, 3, 4, KDA_FP32, 6, 2}, pool(shape), packed(shape, 3), idx({3, 0, -1}, KDA_INT32), flags{1, 1, 1} {
    plan = copy_plan(copy_desc(pool.view(), 4));
    EXPECT_TRUE(plan.ok()) << plan.message();
    args = copy_args(pool.view(), idx.view(), packed.view(), flags_view(flags));
  }
  // Both directions answer alike, nothing is written.
  void refused(const kda_state_copy_args& a, kda_status status, const std::string& text, bool gather_only = false) {
    const Pool pool_before = pool;
    const Packed packed_before = packed;
    EXPECT_EQ(kda_state_gather(plan.get(), &a, nullptr), status);
    EXPECT_NE(std::string(kda_last_error()).find(text), std::string::npos) << kda_last_error();
    if (!gather_only) {
      EXPECT_EQ(kda_state_scatter(plan.get(), &a, nullptr), status);
      EXPECT_NE(std::string(kda_last_error()).find(text), std::string::npos) << kda_last_error();
    }
    EXPECT_TRUE(pool.memory == pool_before.memory);
    EXPECT_TRUE(packed.memory == packed_before.memory);
  }
  PoolShape shape;
  Pool pool;
  Packed packed;
  Indices idx;
  std::vector<uint8_t> flags;
  Plan plan;
  kda_state_copy_args args{};
};

TEST_F(Refusal, T08_Y24_LayoutThatWasNotPrepared) {
  const auto with = [&](auto&& change) {
    kda_state_copy_args a = args;
    change(a.pool);
    refused(a, KDA_FAILED_PRECONDITION, "layout not prepared");
  };
  with([](kda_tensor& t) { t.dtype = KDA_INT32; });
  with([](kda_tensor& t) { t.shape[0] = 4; });
  with([](kda_tensor& t) { t.strides[0] += 2; });
  with([](kda_tensor& t) { t.data = static_cast<char*>(t.data) + 4; });
  with([](kda_tensor& t) { t.device.type = KDA_CUDA; });
  with([](kda_tensor& t) { t.rank = 3; });
  with([](kda_tensor& t) { t = {}; });
  with([](kda_tensor& t) { t.data = nullptr; });
}

TEST_F(Refusal, Y13_APoolThatMovedIsUsedWhereItIs) {
  Pool other(shape, 99);
  Packed wanted = packed;
  model_gather(other, idx, flags, wanted);
  args.pool = other.view();
  ASSERT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_OK) << kda_last_error();
  EXPECT_TRUE(packed.memory == wanted.memory);
}

TEST_F(Refusal, T08_Y24_MoreRowsThanTheLimit) {
  const Indices five({0, 1, 2, 3, 4}, KDA_INT64);
  Packed wide(shape, 5);
  refused(copy_args(pool.view(), five.view(), wide.view()), KDA_INVALID_ARGUMENT, "max_selected = 4, got 5");
}

TEST_F(Refusal, T08_Y24_C19_Indices) {
  const auto with = [&](const char* text, auto&& change) {
    kda_state_copy_args a = args;
    change(a.indices);
    refused(a, KDA_INVALID_ARGUMENT, text);
  };
  with("indices: wanted int32 or int64 [n]", [](kda_tensor& t) { t = {}; });
  with("indices: wanted int32 or int64 [n]", [](kda_tensor& t) { t.rank = 2, t.shape[1] = 1, t.strides[1] = 1; });
  with("indices: wanted int32 or int64 [n]", [](kda_tensor& t) { t.dtype = KDA_INT16; });
  with("indices: wanted int32 or int64 [n]", [](kda_tensor& t) { t.dtype = KDA_FP32; });
  with("indices: wanted a tensor on cpu:0", [](kda_tensor& t) { t.device.type = KDA_CUDA; });
  with("indices: wanted a stride >= 1", [](kda_tensor& t) { t.strides[0] = 0; });
  with("indices: wanted a stride >= 1", [](kda_tensor& t) { t.strides[0] = -1; });
  with("indices: wanted an address aligned", [](kda_tensor& t) { t.data = static_cast<char*>(t.data) + 1; });
  with("indices: wanted an address", [](kda_tensor& t) { t.data = nullptr; });
}

TEST_F(Refusal, T08_Y24_C06_Flags) {
  const auto with = [&](const char* text, auto&& change) {
    kda_state_copy_args a = args;
    change(a.has_initial_state);
    refused(a, KDA_INVALID_ARGUMENT, text, true);
  };
  with("has_initial_state: wanted bool [3]", [](kda_tensor& t) { t.dtype = KDA_UINT8; });
  with("has_initial_state: wanted bool [3]", [](kda_tensor& t) { t.shape[0] = 2; });
  with("has_initial_state: wanted bool [3]", [](kda_tensor& t) { t.rank = 2, t.shape[1] = 1, t.strides[1] = 1; });
  with("has_initial_state: wanted a contiguous", [](kda_tensor& t) { t.strides[0] = 2; });
  with("has_initial_state: wanted a tensor on", [](kda_tensor& t) { t.device.type = KDA_CUDA; });
  with("has_initial_state: wanted memory", [](kda_tensor& t) { t.data = nullptr; });
}

TEST_F(Refusal, T08_Y24_C04_Packed) {
  const auto with = [&](const char* text, auto&& change) {
    kda_state_copy_args a = args;
    change(a.packed);
    refused(a, KDA_INVALID_ARGUMENT, text);
  };
  with("packed: wanted [3, 2, 3, 4]", [](kda_tensor& t) { t = {}; });
  with("packed: wanted [3, 2, 3, 4]", [](kda_tensor& t) { t.shape[0] = 2; });
  with("packed: wanted [3, 2, 3, 4]", [](kda_tensor& t) { t.shape[2] = 4; });
  with("packed: wanted fp32, got bf16", [](kda_tensor& t) { t.dtype = KDA_BF16; });
  with("packed: wanted a tensor on cpu", [](kda_tensor& t) { t.device.type = KDA_CUDA; });
  with("packed: wanted the inner three dimensions dense", [](kda_tensor& t) { t.strides[2] = 5; });
  with("packed: wanted a row stride >= 24", [](kda_tensor& t) { t.strides[0] = 23; });
  with("packed: wanted memory", [](kda_tensor& t) { t.data = nullptr; });
}

TEST_F(Refusal, C21_PackedOverlapsThePool) {
  kda_state_copy_args a = args;
  a.packed.data = static_cast<char*>(args.pool.data) + 4 * shape.stride();
  refused(a, KDA_INVALID_ARGUMENT, "overlapping bytes");
  // Touching ranges are apart.
  std::vector<float> memory(3 * 4 + 2 * 4);
  const kda_tensor p = make_tensor(memory.data(), KDA_FP32, {3, 1, 1, 4});
  const kda_tensor q = make_tensor(memory.data() + 12, KDA_FP32, {2, 1, 1, 4});
  const Plan near = copy_plan(copy_desc(p, 2));
  const Indices two_rows({0, 1}, KDA_INT32);
  const auto touching = copy_args(p, two_rows.view(), q);
  EXPECT_EQ(kda_state_gather(near.get(), &touching, nullptr), KDA_OK) << kda_last_error();
}

TEST_F(Refusal, G09_OutputsOverlapNoInput) {
  kda_state_copy_args a = args;
  a.indices.data = packed.row(1);
  refused(a, KDA_INVALID_ARGUMENT, "packed: wanted memory apart from indices", true);
  a = args;
  a.has_initial_state.data = packed.row(2);
  refused(a, KDA_INVALID_ARGUMENT, "packed: wanted memory apart from has_initial_state", true);
  a = args;
  a.indices.data = pool.row(1);
  const Pool before = pool;
  EXPECT_EQ(kda_state_scatter(plan.get(), &a, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_TRUE(pool.memory == before.memory);
}

TEST_F(Refusal, Y08_TheLimitIsAtLeastOne) {
  for (int64_t bad : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    const Plan p = copy_plan(copy_desc(pool.view(), bad));
    EXPECT_EQ(p.status(), KDA_INVALID_ARGUMENT);
    EXPECT_NE(p.message().find("max_selected"), std::string::npos);
  }
}

TEST_F(Refusal, Convention4_StructSizesAndWrongPlans) {
  kda_state_copy_args a = args;
  a.struct_size = 0;
  refused(a, KDA_INVALID_ARGUMENT, "struct_size");
  EXPECT_EQ(kda_state_gather(nullptr, &args, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_state_gather(plan.get(), nullptr, nullptr), KDA_INVALID_ARGUMENT);
  auto info = sized<kda_state_copy_info>();
  EXPECT_EQ(kda_state_copy_plan_info(nullptr, &info), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_state_copy_plan_info(plan.get(), nullptr), KDA_INVALID_ARGUMENT);
  // An older caller's struct, without the last member.
  kda_state_copy_desc desc = copy_desc(pool.view(), 4);
  desc.struct_size = offsetof(kda_state_copy_desc, flags);
  EXPECT_TRUE(copy_plan(desc).ok());
}

// ---- Preparation, against the stub.

class Preparation : public ::testing::Test {
 protected:
  Preparation() : pool(make_tensor(memory_, KDA_FP32, {3, 2, 4, 8}, {KDA_CUDA, 0})) {}
  Status create(const StubWorld& world) {
    const auto desc = copy_desc(pool, 4);
    const auto plan = create_state_copy_plan(world.context, &desc);
    return plan.status();
  }
  alignas(64) char memory_[1024] = {};
  kda_tensor pool;
};

TEST_F(Preparation, Y10_EveryVariantRunsOnceOnScratchAndThePoolIsUntouched) {
  StubWorld world;
  std::memset(memory_, 0x5a, sizeof memory_);
  EXPECT_TRUE(create(world).ok());
  EXPECT_EQ(world.device.loads, 1);
  EXPECT_EQ(world.device.launches, 4);
  EXPECT_EQ(world.device.syncs, 1);
  EXPECT_GT(world.device.allocations, 0);
  EXPECT_EQ(world.device.live_allocations, 0);
  for (char c : memory_) ASSERT_EQ(c, 0x5a);
}

TEST_F(Preparation, T08_Y26_FaultsAreReportedAndScratchIsFreed) {
  const struct {
    kda_status status;
    void (*spoil)(StubCopyBackend&);
  } cases[] = {
      {KDA_OUT_OF_MEMORY, [](StubCopyBackend& d) { d.no_memory = true; }},
      {KDA_DEVICE_ERROR, [](StubCopyBackend& d) { d.load_fault = Status(KDA_DEVICE_ERROR, "no kernel image"); }},
      {KDA_DEVICE_ERROR, [](StubCopyBackend& d) { d.launch_fault = Status(KDA_DEVICE_ERROR, "launch"); }},
      {KDA_DEVICE_ERROR, [](StubCopyBackend& d) { d.late_fault = Status(KDA_DEVICE_ERROR, "late"); }},
      {KDA_INTERNAL, [](StubCopyBackend& d) { d.scratch_shift = 4; }},
  };
  for (const auto& c : cases) {
    StubWorld world;
    c.spoil(world.device);
    EXPECT_EQ(create(world).code(), c.status);
    EXPECT_EQ(world.device.live_allocations, 0);
  }
}

TEST_F(Preparation, T15_Y25_ObserverDuringPrepareIsRefusedUnlessAllowed) {
  StubWorld world;
  int seen = 0;
  world.context.observer = [](void* user, const char*) { ++*static_cast<int*>(user); };
  world.context.observer_user = &seen;
  const Status refused = create(world);
  EXPECT_EQ(refused.code(), KDA_FAILED_PRECONDITION);
  EXPECT_NE(refused.message().find("observer"), std::string::npos);
  EXPECT_EQ(world.device.loads, 0);
  world.context.allow_observers = true;
  EXPECT_TRUE(create(world).ok());
  EXPECT_EQ(seen, 4);
}

TEST_F(Preparation, Y16_SealedContextMakesNoPlan) {
  StubWorld world;
  world.context.sealed = true;
  EXPECT_EQ(create(world).code(), KDA_FAILED_PRECONDITION);
  world.context.allow_late_plans = true;
  EXPECT_TRUE(create(world).ok());
}

TEST_F(Preparation, T08_Y24_LaunchRefusedByTheRuntimeIsReturned) {
  StubWorld world;
  const auto desc = copy_desc(pool, 4);
  const auto plan = create_state_copy_plan(world.context, &desc);
  ASSERT_TRUE(plan.ok());
  world.device.launch_fault = Status(KDA_DEVICE_ERROR, "invalid configuration");
  int32_t row = 0;
  float out[64];
  const auto args = copy_args(pool, make_tensor(&row, KDA_INT32, {1}, {KDA_CUDA, 0}),
                              make_tensor(out, KDA_FP32, {1, 2, 4, 8}, {KDA_CUDA, 0}));
  EXPECT_EQ(run_state_copy(plan.value().get(), CopyDirection::gather, &args, nullptr).code(), KDA_DEVICE_ERROR);
}

// ---- Observers on a real context (T-15).

struct OwnContext {
  explicit OwnContext(bool allow_observers) {
    auto options = sized<kda_context_options>();
    options.num_threads = 1;
    options.allow_observers = allow_observers;
    EXPECT_EQ(kda_context_create(&options, &context), KDA_OK);
  }
  ~OwnContext() { kda_context_destroy(context); }
  kda_context* context = nullptr;
};

void count_launches(void* user, const char* kernel) {
  auto& names = *static_cast<std::vector<std::string>*>(user);
  names.emplace_back(kernel);
}

TEST_F(Refusal, T15_Y25_ObserverAfterPreparationRefusesEachCall) {
  const OwnContext own(false);
  plan = copy_plan(copy_desc(pool.view(), 4), own.context);
  ASSERT_TRUE(plan.ok());
  std::vector<std::string> seen;
  ASSERT_EQ(kda_context_set_launch_observer(own.context, count_launches, &seen), KDA_OK);
  refused(args, KDA_FAILED_PRECONDITION, "observer");
  EXPECT_TRUE(seen.empty());
  ASSERT_EQ(kda_context_set_launch_observer(own.context, nullptr, nullptr), KDA_OK);
  EXPECT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_OK);
}

TEST_F(Refusal, T15_T07_Y25_AllowedObserverCountsLaunchesAndAnEmptyCallHasNone) {
  const OwnContext own(true);
  plan = copy_plan(copy_desc(pool.view(), 4), own.context);
  std::vector<std::string> seen;
  ASSERT_EQ(kda_context_set_launch_observer(own.context, count_launches, &seen), KDA_OK);
  ASSERT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_OK);
  ASSERT_EQ(kda_state_scatter(plan.get(), &args, nullptr), KDA_OK);
  EXPECT_EQ(seen, (std::vector<std::string>{"state_gather", "state_scatter"}));
  const Indices none({}, KDA_INT32);
  const Packed empty(shape, 0);
  const auto nothing = copy_args(pool.view(), none.view(), empty.view());
  ASSERT_EQ(kda_state_gather(plan.get(), &nothing, nullptr), KDA_OK);
  ASSERT_EQ(kda_state_scatter(plan.get(), &nothing, nullptr), KDA_OK);
  EXPECT_EQ(seen.size(), 2u);
}

}  // namespace
}  // namespace kda::conformance::test
