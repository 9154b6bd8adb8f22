// Copy sets through the C ABI, with real copies (spec Y, T-12, T-17).
#include <atomic>
#include <thread>

#include "state_copy_fixture.h"

namespace kda::conformance::test {
namespace {

struct CSet {
  explicit CSet(kda_context* context, const kda_copy_set_options* options = nullptr) {
    EXPECT_EQ(kda_copy_set_create(context, options, &set), KDA_OK);
  }
  ~CSet() { kda_copy_set_destroy(set); }
  kda_status prepare(const char* layer, const kda_tensor& pool, int64_t limit = 4) {
    auto b = sized<kda_copy_binding>();
    b.layer = layer;
    b.pool = pool;
    return kda_copy_set_prepare(set, &b, 1, limit);
  }
  kda_copy_set* set = nullptr;
};

TEST(CopySetApi, T17_Y05_TwoSetsOneResetWhileTheOtherServes) {
  PoolShape s{6, 2, 8, 16, KDA_FP32, 8};
  Pool pool(s);
  CSet a(cpu_context()), b(cpu_context());
  for (CSet* set : {&a, &b}) {
    ASSERT_EQ(set->prepare("layer", pool.view()), KDA_OK) << kda_last_error();
    ASSERT_EQ(kda_copy_set_seal(set->set), KDA_OK);
    ASSERT_EQ(kda_copy_set_publish(set->set), KDA_OK);
  }
  std::atomic<bool> stop{false};
  std::atomic<int> failures{0}, calls{0};
  std::thread server([&] {
    const Indices idx({5, -1, 2}, KDA_INT32);
    Packed packed(s, 3), wanted = packed;
    model_gather(pool, idx, {}, wanted);
    while (!stop) {
      const auto args = copy_args(pool.view(), idx.view(), packed.view());
      failures += kda_copy_set_gather(b.set, "layer", &args, nullptr) != KDA_OK || !(packed.memory == wanted.memory);
      ++calls;
    }
  });
  for (int round = 0; round < 20; ++round) {
    ASSERT_EQ(kda_copy_set_reset(a.set), KDA_OK);
    ASSERT_EQ(a.prepare("layer", pool.view()), KDA_OK);
    ASSERT_EQ(kda_copy_set_seal(a.set), KDA_OK);
    ASSERT_EQ(kda_copy_set_publish(a.set), KDA_OK);
  }
  while (calls < 3) std::this_thread::yield();
  stop = true;
  server.join();
  EXPECT_EQ(failures, 0);
}

TEST(CopySetApi, Y14_AnUnpublishedLayerServesNothingAndTouchesNothing) {
  PoolShape s{3, 1, 2, 4, KDA_FP32};
  Pool pool(s);
  const Pool before = pool;
  CSet set(cpu_context());
  ASSERT_EQ(set.prepare("layer", pool.view()), KDA_OK);
  const Indices idx({0}, KDA_INT32);
  Packed packed(s, 1);
  const Packed packed_before = packed;
  const auto args = copy_args(pool.view(), idx.view(), packed.view());
  EXPECT_EQ(kda_copy_set_gather(set.set, "layer", &args, nullptr), KDA_FAILED_PRECONDITION);
  EXPECT_EQ(kda_copy_set_scatter(set.set, "layer", &args, nullptr), KDA_FAILED_PRECONDITION);
  ASSERT_EQ(kda_copy_set_seal(set.set), KDA_OK);
  EXPECT_EQ(kda_copy_set_scatter(set.set, "layer", &args, nullptr), KDA_FAILED_PRECONDITION);
  EXPECT_NE(std::string(kda_last_error()).find("state SEALED"), std::string::npos) << kda_last_error();
  EXPECT_TRUE(pool.memory == before.memory && packed.memory == packed_before.memory);
}

TEST(CopySetApi, T12_ARealVariableChangedBeforeSealIsNamed) {
  PoolShape s{3, 1, 2, 4, KDA_FP32};
  Pool pool(s);
  CSet set(cpu_context());
  ASSERT_EQ(set.prepare("layer", pool.view()), KDA_OK);
  setenv("OMP_KDA_TEST", "4", 1);
  EXPECT_EQ(kda_copy_set_seal(set.set), KDA_FAILED_PRECONDITION);
  EXPECT_NE(std::string(kda_last_error()).find("OMP_KDA_TEST: wanted unset, got \"4\""), std::string::npos)
      << kda_last_error();
  EXPECT_EQ(kda_copy_set_get_state(set.set), KDA_COPY_SET_FAILED);
  EXPECT_NE(std::string(kda_copy_set_last_error(set.set)).find("OMP_KDA_TEST"), std::string::npos);
  unsetenv("OMP_KDA_TEST");
  ASSERT_EQ(kda_copy_set_reset(set.set), KDA_OK);
  EXPECT_STREQ(kda_copy_set_last_error(set.set), "");
  ASSERT_EQ(set.prepare("layer", pool.view()), KDA_OK);
  ASSERT_EQ(kda_copy_set_seal(set.set), KDA_OK);
  ASSERT_EQ(kda_copy_set_publish(set.set), KDA_OK);
  setenv("OMP_KDA_TEST", "4", 1);  // after publish: no effect
  const Indices idx({0}, KDA_INT32);
  Packed packed(s, 1);
  const auto args = copy_args(pool.view(), idx.view(), packed.view());
  EXPECT_EQ(kda_copy_set_gather(set.set, "layer", &args, nullptr), KDA_OK);
  unsetenv("OMP_KDA_TEST");
}

TEST(CopySetApi, Convention4_BindingsOfANewerCallerAreReadByTheirOwnSize) {
  struct Newer {
    kda_copy_binding known;
    int64_t later;
  };
  PoolShape s{3, 1, 2, 4, KDA_FP32};
  Pool pool(s);
  CSet set(cpu_context());
  Newer list[2]{};
  for (int i = 0; i < 2; ++i) {
    list[i].known.struct_size = sizeof(Newer);
    list[i].known.layer = i == 0 ? "a" : "b";
    list[i].known.pool = pool.view();
  }
  EXPECT_EQ(kda_copy_set_prepare(set.set, &list[0].known, 2, 4), KDA_OK) << kda_last_error();
  auto info = sized<kda_copy_set_info>();
  ASSERT_EQ(kda_copy_set_get_info(set.set, &info), KDA_OK);
  EXPECT_EQ(info.layers, 2);
}

TEST(CopySetApi, NullIsAnErrorOrANoOp) {
  kda_copy_set_destroy(nullptr);
  kda_copy_set* set = nullptr;
  EXPECT_EQ(kda_copy_set_create(nullptr, nullptr, &set), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_copy_set_create(cpu_context(), nullptr, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_copy_set_seal(nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_copy_set_gather(nullptr, "x", nullptr, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_copy_set_ready(nullptr), 0);
  CSet own(cpu_context());
  EXPECT_EQ(kda_copy_set_prepare(own.set, nullptr, 2, 4), KDA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kda::conformance::test
