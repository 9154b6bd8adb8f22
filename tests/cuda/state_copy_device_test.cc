// What only a device shows of the state copies: addresses past 4 GiB, graphs, streams, sets, the loader's settings
// (spec T-4, T-8, T-14..T-17, Y-19..Y-29). The numerical contract itself is
// tests/unit/core/state_copy_contract_test.cc, built into the same program.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

#include "device_copy.h"

namespace kda::conformance::test {
namespace {

kda_state_copy_args device_args(const kda_tensor& pool, const kda_tensor& indices, const kda_tensor& packed,
                                const kda_tensor& flags = {}) {
  auto a = sized<kda_state_copy_args>();
  a.pool = pool;
  a.indices = indices;
  a.packed = packed;
  a.has_initial_state = flags;
  return a;
}

// A pool whose rows lie anywhere in address space that nobody fills.
struct HugePool {
  HugePool(int64_t rows, int64_t hv, int64_t stride_elements) : payload(hv * 128 * 128) {
    const auto bytes = static_cast<size_t>(((rows - 1) * stride_elements + payload) * 4);
    ok = cudaMalloc(&data, bytes) == cudaSuccess;
    if (!ok) (void)cudaGetLastError();
    view = make_tensor(data, KDA_FP32, {rows, hv, 128, 128}, kDevice);
    view.strides[0] = stride_elements;
  }
  ~HugePool() { (void)cudaFree(data); }
  char* row(int64_t r) const { return static_cast<char*>(data) + r * view.strides[0] * 4; }
  int64_t payload;
  void* data = nullptr;
  bool ok = false;
  kda_tensor view{};
};

void expect_rows_there_and_back(const HugePool& pool, const std::vector<int64_t>& rows) {
  const auto n = static_cast<int64_t>(rows.size()), hv = pool.view.shape[1];
  const auto bytes = static_cast<size_t>(pool.payload * 4);
  // The neighbours of the named rows keep a canary.
  std::vector<int64_t> neighbours;
  for (int64_t r : rows) {
    for (int64_t x : {r - 1, r + 1}) {
      if (x >= 0 && x < pool.view.shape[0] && std::find(rows.begin(), rows.end(), x) == rows.end()) {
        neighbours.push_back(x);
        KDA_REQUIRE_CUDA(cudaMemset(pool.row(x), 0x5a, bytes));
      }
    }
  }
  const Plan plan = device_copy_plan(device_copy_desc(pool.view, n));
  ASSERT_TRUE(plan.ok()) << plan.message();
  DeviceBytes source(bytes * rows.size(), 3), back(bytes * rows.size(), 4), index(rows);
  auto args = device_args(pool.view, index.view(KDA_INT64, {n}), source.view(KDA_FP32, {n, hv, 128, 128}));
  ASSERT_EQ(kda_state_scatter(plan.get(), &args, nullptr), KDA_OK) << kda_last_error();
  args.packed = back.view(KDA_FP32, {n, hv, 128, 128});
  ASSERT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_OK) << kda_last_error();
  KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(back.download() == source.host());
  std::vector<char> row(bytes);
  for (size_t i = 0; i < rows.size(); ++i) {
    KDA_REQUIRE_CUDA(cudaMemcpy(row.data(), pool.row(rows[i]), bytes, cudaMemcpyDeviceToHost));
    EXPECT_EQ(std::memcmp(row.data(), source.host().data() + i * bytes, bytes), 0) << rows[i];
  }
  for (int64_t x : neighbours) {
    KDA_REQUIRE_CUDA(cudaMemcpy(row.data(), pool.row(x), bytes, cudaMemcpyDeviceToHost));
    EXPECT_TRUE(std::all_of(row.begin(), row.end(), [](char c) { return c == 0x5a; })) << x;
  }
}

TEST(StateCopyDevice, T04_C15_F24_RowProductsAreFormedIn64Bits) {
  const int64_t cases[][2] = {{12, 10923}, {24, 5462}, {32, 4096}, {64, 2048}, {96, 1366}};
  for (const auto& c : cases) {
    const HugePool pool(2 * c[1] + 2, c[0], c[0] * 128 * 128);
    if (!pool.ok) GTEST_SKIP() << "the pool of 17 GB finds no memory";
    expect_rows_there_and_back(pool, {c[1] - 1, c[1], 2 * c[1]});
  }
  // Rows more than 4 GiB apart.
  const HugePool apart(6, 1, (int64_t{1} << 30) + 512);
  if (apart.ok) expect_rows_there_and_back(apart, {5, 2});
}

// A small pool with a gap, both kinds.
struct Small {
  static constexpr int64_t kRows = 9, kPayload = 2 * 4 * 32, kStride = kPayload + 8;
  explicit Small(kda_dtype dtype)
      : type(dtype),
        size(static_cast<int64_t>(dtype_size(dtype))),
        pool_bytes(static_cast<size_t>(kRows * kStride * size), 5),
        pool(pool_bytes.view(dtype, {kRows, 2, 4, 32})) {
    pool.strides[0] = kStride;
  }
  size_t row_bytes() const { return static_cast<size_t>(kPayload * size); }
  // The definition on the host images.
  std::vector<unsigned char> gathered(const std::vector<int32_t>& idx, const std::vector<uint8_t>& flags) {
    std::vector<unsigned char> out(idx.size() * row_bytes(), 0);
    for (size_t i = 0; i < idx.size(); ++i) {
      if (idx[i] < 0 || idx[i] >= kRows || !flags[i]) continue;
      std::memcpy(&out[i * row_bytes()], &pool_bytes.host()[static_cast<size_t>(idx[i] * kStride * size)],
                  row_bytes());
    }
    return out;
  }
  void scattered(const std::vector<int32_t>& idx, const std::vector<unsigned char>& packed) {
    for (size_t i = 0; i < idx.size(); ++i) {
      if (idx[i] < 0 || idx[i] >= kRows) continue;
      std::memcpy(&pool_bytes.host()[static_cast<size_t>(idx[i] * kStride * size)], &packed[i * row_bytes()],
                  row_bytes());
    }
  }
  kda_dtype type;
  int64_t size;
  DeviceBytes pool_bytes;
  kda_tensor pool;
};

// A gather and a scatter, captured before any other call (Y-29) and replayed with values that change (Y-27).
TEST(StateCopyDevice, T16_Y27_Y29_F52_ReplaysFollowTheDevice) {
  for (const kda_dtype dtype : {KDA_FP32, KDA_BF16, KDA_INT8, KDA_INT64}) {
    Small from(dtype), to(dtype);
    const DeviceContext own;
    const Plan plan = device_copy_plan(device_copy_desc(from.pool, 6), own);
    ASSERT_TRUE(plan.ok()) << plan.message();
    EXPECT_EQ(plan.backend(), dtype == KDA_FP32 || dtype == KDA_BF16 ? "fused" : "bytes");
    DeviceBytes indices(std::vector<int32_t>(6, 0)), flags(std::vector<uint8_t>(6, 1)), packed(6 * from.row_bytes());
    auto in = device_args(from.pool, indices.view(KDA_INT32, {6}), packed.view(dtype, {6, 2, 4, 32}),
                          flags.view(KDA_BOOL, {6}));
    auto out = in;
    out.pool = to.pool;
    const CapturedCalls graph([&](cudaStream_t s) {
      ASSERT_EQ(kda_state_gather(plan.get(), &in, s), KDA_OK) << kda_last_error();
      ASSERT_EQ(kda_state_scatter(plan.get(), &out, s), KDA_OK) << kda_last_error();
    });
    EXPECT_EQ(graph.nodes(), 2u);  // Y-23
    std::mt19937 random(3);
    for (int replay = 0; replay < 1000; ++replay) {
      std::vector<int32_t> idx;
      std::vector<uint8_t> live;
      std::vector<int32_t> order(Small::kRows);
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
      std::shuffle(order.begin(), order.end(), random);
      constexpr int32_t kBad[] = {-1, Small::kRows, INT32_MIN, INT32_MAX};
      for (size_t i = 0; i < 6; ++i) {
        idx.push_back(random() % 4 == 0 ? kBad[random() % 4] : order[i]);
        live.push_back(random() % 3 != 0);
      }
      indices.assign(idx);
      flags.assign(live);
      graph.replay();
      if (replay % 50 != 0 && replay != 999) {
        to.scattered(idx, from.gathered(idx, live));  // keeps the model in step
        continue;
      }
      const auto wanted = from.gathered(idx, live);
      ASSERT_TRUE(packed.download() == wanted) << replay;
      to.scattered(idx, wanted);
      const auto model = to.pool_bytes.host();
      ASSERT_TRUE(to.pool_bytes.download() == model) << replay;
    }
    EXPECT_TRUE(std::vector<unsigned char>(from.pool_bytes.host()) == from.pool_bytes.download());
  }
}

// Indices and flags that the grid before writes while this one's blocks may already run, and guess.
TEST(StateCopyDevice, Y27_WhatTheGridBeforeWritesCounts) {
  constexpr int64_t kSets = 3, kN = 4;
  const std::vector<int32_t> sets = {3, -1, 0, 5, 1, 2, Small::kRows, 8, 7, 6, 5, 4};
  const DeviceBytes tables(sets), numbers(std::vector<int32_t>{0, 1, 2});
  for (const kda_dtype dtype : {KDA_FP32, KDA_BF16}) {
    Small from(dtype);
    const kda_tensor rows = tables.view(KDA_INT32, {kSets, 1, 1, kN});
    const Plan choose = device_copy_plan(device_copy_desc(rows, 1));
    const Plan plan = device_copy_plan(device_copy_desc(from.pool, kN));
    ASSERT_TRUE(choose.ok() && plan.ok()) << choose.message() << plan.message();
    DeviceBytes index(std::vector<int32_t>(kN, 0)), packed(kSets * kN * from.row_bytes());
    const kda_tensor all = packed.view(dtype, {kSets * kN, 2, 4, 32});
    const CapturedCalls graph([&](cudaStream_t s) {
      for (int64_t set = 0; set < kSets; ++set) {
        auto a = device_args(rows, numbers.view(KDA_INT32, {1}), index.view(KDA_INT32, {1, 1, 1, kN}));
        a.indices.data = numbers.data() + 4 * set;
        ASSERT_EQ(kda_state_gather(choose.get(), &a, s), KDA_OK) << kda_last_error();
        auto b = device_args(from.pool, index.view(KDA_INT32, {kN}), all);
        b.packed.data = packed.data() + set * kN * static_cast<int64_t>(from.row_bytes());
        b.packed.shape[0] = kN;
        ASSERT_EQ(kda_state_gather(plan.get(), &b, s), KDA_OK) << kda_last_error();
      }
    });
    const auto wanted = from.gathered(sets, std::vector<uint8_t>(sets.size(), 1));
    for (int replay = 0; replay < 200; ++replay) {
      packed.fill(9);
      graph.replay();
      ASSERT_TRUE(packed.download() == wanted) << replay;
    }
  }
}

TEST(StateCopyDevice, Y28_AGraphOutlivesItsPlan) {
  Small from(KDA_FP32);
  DeviceBytes indices(std::vector<int32_t>{3, 1}), packed(2 * from.row_bytes());
  auto plan = std::make_unique<Plan>(device_copy_plan(device_copy_desc(from.pool, 2)));
  const auto args = device_args(from.pool, indices.view(KDA_INT32, {2}), packed.view(KDA_FP32, {2, 2, 4, 32}));
  const CapturedCalls graph(
      [&](cudaStream_t s) { ASSERT_EQ(kda_state_gather(plan->get(), &args, s), KDA_OK) << kda_last_error(); });
  plan.reset();
  graph.replay();
  EXPECT_TRUE(packed.download() == from.gathered({3, 1}, {1, 1}));
}

TEST(StateCopyDevice, T16_Y22_ALaunchThatFailsUnderCaptureIsReported) {
  Small from(KDA_FP32);
  DeviceBytes indices(std::vector<int32_t>{3}), packed(from.row_bytes());
  const Plan plan = device_copy_plan(device_copy_desc(from.pool, 2));
  const auto args = device_args(from.pool, indices.view(KDA_INT32, {1}), packed.view(KDA_FP32, {1, 2, 4, 32}));
  cudaStream_t blocking = nullptr;
  KDA_REQUIRE_CUDA(cudaStreamCreate(&blocking));
  KDA_REQUIRE_CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal));
  // The legacy stream may not be used while a blocking stream is captured.
  EXPECT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_DEVICE_ERROR);
  EXPECT_NE(std::string(kda_last_error()).find("state_gather_kernel"), std::string::npos) << kda_last_error();
  cudaGraph_t graph = nullptr;
  (void)cudaStreamEndCapture(blocking, &graph);
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();
  KDA_REQUIRE_CUDA(cudaStreamDestroy(blocking));
  // And nothing of it is left behind.
  EXPECT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_OK) << kda_last_error();
  KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(packed.download() == from.gathered({3}, {1}));
}

TEST(StateCopyDevice, G07_CheckedModeRefusesUnderCaptureAndNamesDoubledRows) {
  Small from(KDA_FP32);
  auto desc = device_copy_desc(from.pool, 4);
  desc.flags = KDA_PLAN_CHECKED;
  const Plan plan = device_copy_plan(desc);
  DeviceBytes indices(std::vector<int32_t>{3, 1, 3}), packed(3 * from.row_bytes());
  const auto args = device_args(from.pool, indices.view(KDA_INT32, {3}), packed.view(KDA_FP32, {3, 2, 4, 32}));
  EXPECT_EQ(kda_state_scatter(plan.get(), &args, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("positions 0 and 2"), std::string::npos) << kda_last_error();
  const CapturedCalls graph([&](cudaStream_t s) {
    EXPECT_EQ(kda_state_gather(plan.get(), &args, s), KDA_FAILED_PRECONDITION) << kda_last_error();
  });
  EXPECT_EQ(graph.nodes(), 0u);
}

TEST(StateCopyDevice, T08_Y24_C21_RefusalsTouchNothing) {
  Small from(KDA_FP32);
  const Plan plan = device_copy_plan(device_copy_desc(from.pool, 2));
  DeviceBytes indices(std::vector<int32_t>{3, 1}), packed(2 * from.row_bytes());
  const auto pool_before = from.pool_bytes.host(), packed_before = packed.host();
  const auto args = device_args(from.pool, indices.view(KDA_INT32, {2}), packed.view(KDA_FP32, {2, 2, 4, 32}));
  const auto refused = [&](kda_status status, const char* text, auto&& change) {
    kda_state_copy_args a = args;
    change(a);
    for (const auto call : {kda_state_gather, kda_state_scatter}) {
      EXPECT_EQ(call(plan.get(), &a, nullptr), status) << text;
      EXPECT_NE(std::string(kda_last_error()).find(text), std::string::npos) << kda_last_error();
    }
  };
  using A = kda_state_copy_args;
  refused(KDA_FAILED_PRECONDITION, "layout not prepared", [](A& a) { a.pool.device = {KDA_CPU, 0}; });
  refused(KDA_FAILED_PRECONDITION, "layout not prepared", [](A& a) { a.pool.device.index = 1; });
  refused(KDA_INVALID_ARGUMENT, "indices: wanted a tensor on cuda:0", [](A& a) { a.indices.device = {KDA_CPU, 0}; });
  refused(KDA_INVALID_ARGUMENT, "packed: wanted a tensor on cuda:0", [](A& a) { a.packed.device.index = 3; });
  refused(KDA_INVALID_ARGUMENT, "overlapping bytes",
          [](A& a) { a.packed.data = static_cast<char*>(a.pool.data) + 64; });
  KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(from.pool_bytes.download() == pool_before);
  EXPECT_TRUE(packed.download() == packed_before);
}

TEST(StateCopyDevice, Y03_Y04_KindsByName) {
  Small from(KDA_BF16);
  EXPECT_EQ(device_copy_plan(device_copy_desc(from.pool, 2, "bytes")).backend(), "bytes");
  EXPECT_EQ(device_copy_plan(device_copy_desc(from.pool, 2, "triton")).backend(), "fused");
  EXPECT_EQ(device_copy_plan(device_copy_desc(from.pool, 2, "bytes", KDA_FP32)).status(), KDA_UNSUPPORTED);
  kda_tensor odd = from.pool;
  odd.data = from.pool_bytes.data() + 1;
  odd.shape[0] -= 1;
  EXPECT_EQ(device_copy_plan(device_copy_desc(odd, 2)).backend(), "bytes");
  const Plan named = device_copy_plan(device_copy_desc(odd, 2, "fused"));
  EXPECT_EQ(named.status(), KDA_UNSUPPORTED);
  EXPECT_NE(named.message().find("alignment"), std::string::npos) << named.message();
}

void count_launch(void* user, const char*) { ++*static_cast<int*>(user); }

TEST(StateCopyDevice, T15_T07_Y25_ObserversCountLaunches) {
  Small from(KDA_FP32);
  const DeviceContext own(true);
  int launches = 0;
  ASSERT_EQ(kda_context_set_launch_observer(own, count_launch, &launches), KDA_OK);
  const Plan plan = device_copy_plan(device_copy_desc(from.pool, 2), own);
  EXPECT_EQ(launches, 4);  // Y-20: each variant once
  DeviceBytes indices(std::vector<int32_t>{3, 1}), packed(2 * from.row_bytes());
  auto args = device_args(from.pool, indices.view(KDA_INT32, {2}), packed.view(KDA_FP32, {2, 2, 4, 32}));
  ASSERT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_OK);
  EXPECT_EQ(launches, 5);
  args.indices.shape[0] = args.packed.shape[0] = 0;
  ASSERT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_OK);
  EXPECT_EQ(launches, 5);
}

kda_copy_set* published_set(kda_context* context, const kda_tensor& pool, const char* layer) {
  kda_copy_set* set = nullptr;
  EXPECT_EQ(kda_copy_set_create(context, nullptr, &set), KDA_OK);
  auto binding = sized<kda_copy_binding>();
  binding.layer = layer;
  binding.pool = pool;
  EXPECT_EQ(kda_copy_set_prepare(set, &binding, 1, 4), KDA_OK) << kda_last_error();
  EXPECT_EQ(kda_copy_set_seal(set), KDA_OK) << kda_last_error();
  EXPECT_EQ(kda_copy_set_publish(set), KDA_OK) << kda_last_error();
  return set;
}

TEST(StateCopyDevice, T17_Y05_F27_TwoSetsOnTwoStreamsOneResetWhileTheOtherServes) {
  const DeviceContext first, second;
  Small a(KDA_FP32), b(KDA_BF16);
  kda_copy_set *one = published_set(first, a.pool, "layer"), *two = published_set(second, b.pool, "layer");
  DeviceBytes indices(std::vector<int32_t>{3, -1, 8, 0}), out_a(4 * a.row_bytes()), out_b(4 * b.row_bytes());
  const auto args_a = device_args(a.pool, indices.view(KDA_INT32, {4}), out_a.view(KDA_FP32, {4, 2, 4, 32}));
  const auto args_b = device_args(b.pool, indices.view(KDA_INT32, {4}), out_b.view(KDA_BF16, {4, 2, 4, 32}));
  const Stream s, t;
  std::atomic<int> failures{0};
  std::thread other([&] {
    for (int i = 0; i < 300; ++i) failures += kda_copy_set_gather(two, "layer", &args_b, t) != KDA_OK;
  });
  for (int i = 0; i < 100; ++i) failures += kda_copy_set_gather(one, "layer", &args_a, s) != KDA_OK;
  s.wait();
  EXPECT_EQ(kda_copy_set_reset(one), KDA_OK);
  EXPECT_EQ(kda_copy_set_gather(one, "layer", &args_a, s), KDA_FAILED_PRECONDITION);
  other.join();
  t.wait();
  EXPECT_EQ(failures, 0);
  EXPECT_TRUE(out_a.download() == a.gathered({3, -1, 8, 0}, {1, 1, 1, 1}));
  EXPECT_TRUE(out_b.download() == b.gathered({3, -1, 8, 0}, {1, 1, 1, 1}));
  kda_copy_set_destroy(one);
  kda_copy_set_destroy(two);
}

TEST(StateCopyDevice, Y11_T12_TheSnapshotHoldsTheDevice) {
  const DeviceContext own;
  Small a(KDA_FP32);
  kda_copy_set* set = nullptr;
  ASSERT_EQ(kda_copy_set_create(own, nullptr, &set), KDA_OK);
  auto binding = sized<kda_copy_binding>();
  binding.layer = "layer";
  binding.pool = a.pool;
  ASSERT_EQ(kda_copy_set_prepare(set, &binding, 1, 4), KDA_OK) << kda_last_error();
  setenv("CUDA_KDA_TEST", "changed", 1);
  EXPECT_EQ(kda_copy_set_seal(set), KDA_FAILED_PRECONDITION);
  EXPECT_NE(std::string(kda_copy_set_last_error(set)).find("CUDA_KDA_TEST"), std::string::npos);
  unsetenv("CUDA_KDA_TEST");
  kda_copy_set_destroy(set);
}

// ---- The loader's settings (T-14, Y-21), each in a process of its own.

// Runs one test of this program with an environment; its exit code.
int run_child(const std::string& environment, const std::string& test) {
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  if (length <= 0) return -1;
  self[length] = 0;
  const std::string command = "env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX " + environment + " '" + self +
                              "' --gtest_also_run_disabled_tests --gtest_brief=1 --gtest_filter=" + test;
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Child, DISABLED_EverythingWorks) {
  Small from(KDA_FP32);
  const Plan plan = device_copy_plan(device_copy_desc(from.pool, 2));
  ASSERT_TRUE(plan.ok()) << plan.message();
  DeviceBytes indices(std::vector<int32_t>{3, 1}), packed(2 * from.row_bytes());
  const auto args = device_args(from.pool, indices.view(KDA_INT32, {2}), packed.view(KDA_FP32, {2, 2, 4, 32}));
  ASSERT_EQ(kda_state_gather(plan.get(), &args, nullptr), KDA_OK);
  KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(packed.download() == from.gathered({3, 1}, {1, 1}));
}

TEST(Child, DISABLED_PreparationFails) {
  kda_context* context = nullptr;
  auto options = sized<kda_context_options>();
  options.device = kDevice;
  ASSERT_EQ(kda_context_create(&options, &context), KDA_OK) << kda_last_error();
  alignas(16) static char nowhere[16];
  auto binding = sized<kda_copy_binding>();
  binding.layer = "layer";
  binding.pool = make_tensor(nowhere, KDA_FP32, {3, 1, 2, 4}, kDevice);  // neither read nor written (Y-10)
  kda_copy_set* set = nullptr;
  ASSERT_EQ(kda_copy_set_create(context, nullptr, &set), KDA_OK);
  EXPECT_EQ(kda_copy_set_prepare(set, &binding, 1, 4), KDA_DEVICE_ERROR) << kda_last_error();
  EXPECT_EQ(kda_copy_set_get_state(set), KDA_COPY_SET_FAILED);
}

TEST(StateCopyDevice, T14_Y20_Y21_F29_TheLoadersSettings) {
  namespace fs = std::filesystem;
  const fs::path cache = fs::temp_directory_path() / ("kda_cache_" + std::to_string(getpid()));
  fs::create_directory(cache);
  EXPECT_EQ(run_child("CUDA_DISABLE_PTX_JIT=1 CUDA_CACHE_PATH=" + cache.string(), "Child.DISABLED_EverythingWorks"),
            0);
  EXPECT_TRUE(fs::is_empty(cache)) << "something was compiled";
  fs::remove_all(cache);
  EXPECT_EQ(run_child("CUDA_FORCE_PTX_JIT=1", "Child.DISABLED_PreparationFails"), 0);
  for (const char* loading : {"LAZY", "EAGER"}) {
    EXPECT_EQ(run_child(std::string("CUDA_MODULE_LOADING=") + loading, "Child.DISABLED_EverythingWorks"), 0);
  }
}

}  // namespace
}  // namespace kda::conformance::test
