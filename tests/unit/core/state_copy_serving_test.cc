// Serving: nothing is allocated, locked, looked up, compiled or changed (spec Y-12, Y-17, Y-18, T-13, T-14, G-11).
#include <thread>

#include "state_copy_fixture.h"
#include "support/serving_guard.h"

namespace kda::conformance::test {
namespace {

struct OwnContext {
  OwnContext() {
    auto options = sized<kda_context_options>();
    options.num_threads = 1;
    EXPECT_EQ(kda_context_create(&options, &context), KDA_OK);
  }
  ~OwnContext() { kda_context_destroy(context); }
  kda_context* context = nullptr;
};

TEST(ServingGuard, CountsWhatItSaysItCounts) {
  const ServingGuard guard;
  auto* p = new std::vector<int>(100);
  delete p;
  (void)std::getenv("KDA_NOTHING");
  EXPECT_EQ(guard.calls().allocations, ServingGuard::counts_allocations() ? 2 : 0) << guard.calls().text();
  EXPECT_EQ(guard.calls().environment, 1);
}

TEST(StateCopyServing, T13_T14_Y12_Y17_Y18_ThousandMixedCallsAllocateNothingAndKeepTheTable) {
  const OwnContext own;
  constexpr int64_t kMax = 9;
  PoolShape s{12, 2, 8, 16, KDA_BF16, 16};
  Pool pools[2] = {Pool(s, 1), Pool(s, 2)};
  PoolShape cast = s;
  cast.packed = KDA_FP32;
  std::vector<std::vector<int64_t>> rows;
  for (int64_t n = 0; n <= kMax; ++n) {
    rows.emplace_back();
    for (int64_t i = 0; i < n; ++i) rows.back().push_back((i * 5 + n) % 14 - 1);
  }
  std::vector<Indices> narrow, wide;
  std::vector<Packed> packed, packed_fp32;
  for (const auto& x : rows) {
    narrow.emplace_back(x, KDA_INT32, 9);
    wide.emplace_back(x, KDA_INT64);
    packed.emplace_back(s, static_cast<int64_t>(x.size()));
    packed_fp32.emplace_back(cast, static_cast<int64_t>(x.size()));
  }
  const std::vector<uint8_t> flags(kMax, 1);

  kda_copy_set* set = nullptr;
  ASSERT_EQ(kda_copy_set_create(own.context, nullptr, &set), KDA_OK);
  kda_copy_binding bindings[2] = {sized<kda_copy_binding>(), sized<kda_copy_binding>()};
  bindings[0].layer = "plain";
  bindings[1].layer = "cast";
  bindings[0].pool = bindings[1].pool = pools[0].view();
  bindings[1].packed_dtype = KDA_FP32;
  ASSERT_EQ(kda_copy_set_prepare(set, bindings, 2, kMax), KDA_OK) << kda_last_error();
  ASSERT_EQ(kda_copy_set_seal(set), KDA_OK);
  ASSERT_EQ(kda_copy_set_publish(set), KDA_OK);
  auto before = sized<kda_copy_set_info>();
  ASSERT_EQ(kda_copy_set_get_info(set, &before), KDA_OK);
  EXPECT_EQ(before.variants, 8);
  const kda_plan* plain = nullptr;
  ASSERT_EQ(kda_copy_set_plan(set, "plain", &plain), KDA_OK);
  auto info_before = sized<kda_state_copy_info>();
  ASSERT_EQ(kda_state_copy_plan_info(plain, &info_before), KDA_OK);

  int failures = 0;
  {
    const ServingGuard guard;
    for (int call = 0; call < 1000; ++call) {
      const auto n = static_cast<size_t>(call % (kMax + 1));
      const bool casts = call % 3 == 0;
      auto args = copy_args(pools[call % 2].view(), call % 2 != 0 ? narrow[n].view() : wide[n].view(),
                            casts ? packed_fp32[n].view() : packed[n].view());
      if (call % 4 == 1)
        args.has_initial_state = make_tensor(const_cast<uint8_t*>(flags.data()), KDA_BOOL, {static_cast<int64_t>(n)});
      const char* layer = casts ? "cast" : "plain";
      void* stream = reinterpret_cast<void*>(static_cast<uintptr_t>(call % 5));
      failures += kda_copy_set_gather(set, layer, &args, stream) != KDA_OK;
      if (call % 2 == 0) failures += kda_copy_set_scatter(set, layer, &args, stream) != KDA_OK;
      failures += kda_copy_set_ready(set) != 2;
    }
    EXPECT_EQ(guard.calls().total(), 0) << guard.calls().text();
  }
  EXPECT_EQ(failures, 0) << kda_last_error();
  auto after = sized<kda_copy_set_info>();
  ASSERT_EQ(kda_copy_set_get_info(set, &after), KDA_OK);
  EXPECT_EQ(after.variants, before.variants);
  EXPECT_EQ(after.tables, before.tables);
  auto info_after = sized<kda_state_copy_info>();
  ASSERT_EQ(kda_state_copy_plan_info(plain, &info_after), KDA_OK);
  EXPECT_EQ(info_after.table, info_before.table);
  kda_copy_set_destroy(set);
}

TEST(StateCopyServing, Y23_AStreamIsNotKept) {
  // A plan of its own: the same promise without a set.
  const OwnContext own;
  PoolShape s{4, 1, 2, 4, KDA_FP32};
  Pool pool(s);
  const Plan plan = copy_plan(copy_desc(pool.view(), 2), own.context);
  const Indices idx({1, 3}, KDA_INT32);
  Packed packed(s, 2);
  const auto args = copy_args(pool.view(), idx.view(), packed.view());
  const ServingGuard guard;
  EXPECT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_OK);
  EXPECT_EQ(kda_state_scatter(plan.get(), &args, reinterpret_cast<void*>(1)), KDA_OK);
  EXPECT_EQ(guard.calls().total(), 0) << guard.calls().text();
}

TEST(StateCopyServing, G11_Y18_ThreadedCallsOfTheCallersPoolAllocateNothing) {
  // A parallel-for of the caller's that uses no memory either: what is left is libkda's own.
  auto options = sized<kda_context_options>();
  options.num_threads = 3;
  options.parallel_for = [](void*, int32_t n, void (*body)(void*, int32_t), void* arg) {
    for (int32_t i = n - 1; i >= 0; --i) body(arg, i);
  };
  kda_context* context = nullptr;
  ASSERT_EQ(kda_context_create(&options, &context), KDA_OK);
  {
    PoolShape s{6, 12, 128, 128, KDA_FP32};
    Pool pool(s);
    const Plan plan = copy_plan(copy_desc(pool.view(), 4), context);
    const Indices idx({1, 5, -1, 0}, KDA_INT32);
    Packed packed(s, 4), wanted = packed;
    model_gather(pool, idx, {}, wanted);
    const auto args = copy_args(pool.view(), idx.view(), packed.view());
    const ServingGuard guard;
    EXPECT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_OK);
    EXPECT_EQ(guard.calls().total(), 0) << guard.calls().text();
    EXPECT_TRUE(packed.memory == wanted.memory);
  }
  kda_context_destroy(context);
}

TEST(StateCopyServing, C22_ManyThreadsShareOnePlan) {
  PoolShape s{16, 2, 8, 16, KDA_FP32, 8};
  Pool pool(s);
  const Plan plan = copy_plan(copy_desc(pool.view(), 4));
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int call = 0; call < 200; ++call) {
        const Indices idx({4 * t + call % 4, -1, 4 * t + (call + 1) % 4}, call % 2 != 0 ? KDA_INT32 : KDA_INT64);
        Packed packed(s, 3), wanted = packed;
        model_gather(pool, idx, {}, wanted);
        auto args = copy_args(pool.view(), idx.view(), packed.view());
        failures += kda_state_gather(plan.get(), &args, nullptr) != KDA_OK || !(packed.memory == wanted.memory);
        const Packed source(s, 3, static_cast<uint64_t>(call) + 40);
        args.packed = source.view();  // own rows: no two threads share one
        failures += kda_state_scatter(plan.get(), &args, nullptr) != KDA_OK;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

}  // namespace
}  // namespace kda::conformance::test
