// Two devices in one process (T-17): plans, pools, copy sets, streams and threads on each, whatever device the
// calling thread has current; the same bits on both. Skipped with one device.
#include <kda/device.h>

#include <thread>

#include "bench/workload.h"
#include "harness.h"
#include "runtime.h"

namespace kda::conformance::test {
namespace {

class Device {
 public:
  explicit Device(int32_t index)
      : context_(options(index)),
        setting_{context_, bench::Workers(context_), "auto", {KDA_CUDA, index}, 0},
        arena_(setting_),
        pool_(context_, pool_desc()) {
    check(kda_stream_create(context_.get(), &stream_));
    make_prefill();
    make_decode();
    make_copies();
  }
  ~Device() { (void)kda_stream_destroy(context_.get(), stream_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void step() {
    prefill_plan_.run(prefill_, workspace_, stream_);
    decode_plan_.run(decode_, {}, stream_);
    gather();
  }
  void gather() { copies_->gather("layer", copy_, stream_); }
  // A worker that starts anew: its set is emptied and prepared again.
  void reset_copies() {
    copies_->reset();
    prepare_copies();
  }
  std::vector<char> results() {
    check(kda_stream_synchronize(context_.get(), stream_));
    std::vector<char> all;
    for (const kda_tensor& t : {prefill_.out, prefill_.state, decode_.out, copy_.packed}) {
      size_t bytes = kda_dtype_size(t.dtype);
      for (int i = 0; i < t.rank; ++i) bytes *= static_cast<size_t>(t.shape[i]);
      std::vector<char> host(bytes);
      arena_.copy(host.data(), t.data, bytes);
      all.insert(all.end(), host.begin(), host.end());
    }
    return all;
  }

 private:
  static kda_context_options options(int32_t index) {
    auto o = make<kda_context_options>();
    o.device = {KDA_CUDA, index};
    return o;
  }
  static kda_state_pool_desc pool_desc() {
    auto d = make<kda_state_pool_desc>();
    d.num_layers = 1;
    d.pages = 4;
    d.num_value_heads = 2;
    d.key_dim = d.value_dim = 128;
    d.state_dtype = KDA_FP32;
    return d;
  }
  template <class Args>
  void fill(Args& a, int64_t T) {
    a.q = arena_.random(KDA_BF16, {T, 2, 128});
    a.k = arena_.random(KDA_BF16, {T, 2, 128});
    a.v = arena_.random(KDA_BF16, {T, 2, 128});
    a.gate = arena_.random(KDA_BF16, {T, 2, 128});
    a.beta = arena_.random(KDA_BF16, {T, 2});
    a.A_log = arena_.random(KDA_FP32, {2});
    a.out = arena_.zeros(KDA_BF16, {T, 2, 128});
  }
  template <class Desc>
  static void describe(Desc& d, int64_t T, int64_t N) {
    d.attention.num_heads = 2;
    d.attention.key_dim = d.attention.value_dim = 128;
    d.attention.gate_family = KDA_GATE_BOUNDED;
    d.attention.lower_bound = -5;
    d.max_tokens = T;
    d.max_sequences = N;
  }
  void make_prefill() {
    auto d = make<kda_prefill_desc>();
    describe(d, 1000, 2);
    d.initial_state = KDA_INITIAL_ALL;
    prefill_plan_ = kda::Plan(context_, d);
    fill(prefill_, 1000);
    prefill_.sequences.cu_seqlens = arena_.ints({0, 900, 1000});
    prefill_.state = pool_.state(0);
    const kda_tensor zeros = arena_.zeros(KDA_FP32, {4, 2, 128, 128});
    for (int64_t page = 0; page < 4; ++page)
      arena_.copy(static_cast<char*>(prefill_.state.data) + page * prefill_.state.strides[0] * 4,
                  static_cast<char*>(zeros.data) + page * 2 * 128 * 128 * 4, size_t{2} * 128 * 128 * 4);
    prefill_.slots = arena_.ints({2, 0});
    workspace_ = arena_.workspace(prefill_plan_);
  }
  void make_decode() {
    auto d = make<kda_decode_desc>();
    describe(d, 2, 2);
    decode_plan_ = kda::Plan(context_, d);
    fill(decode_, 2);
    decode_.sequences.cu_seqlens = arena_.ints({0, 1, 2});
    decode_.state = prefill_.state;
    decode_.slots = prefill_.slots;
  }
  void make_copies() {
    copy_.pool = prefill_.state;
    copy_.indices = arena_.ints({2, -1, 0});
    copy_.packed = arena_.zeros(KDA_FP32, {3, 2, 128, 128});
    copies_ = std::make_unique<CopySet>(context_);
    prepare_copies();
  }
  void prepare_copies() {
    auto binding = make<kda_copy_binding>();
    binding.layer = "layer";
    binding.pool = copy_.pool;
    copies_->prepare({binding}, 3);
    copies_->seal();
    copies_->publish();
  }

  Context context_;
  bench::Setting setting_;
  bench::Arena arena_;
  StatePool pool_;
  void* stream_ = nullptr;
  kda::Plan prefill_plan_, decode_plan_;
  std::unique_ptr<CopySet> copies_;
  kda_prefill_args prefill_ = make<kda_prefill_args>();
  kda_decode_args decode_ = make<kda_decode_args>();
  kda_state_copy_args copy_ = make<kda_state_copy_args>();
  kda_workspace workspace_{};
};

class TwoDevices : public testing::Test {
 protected:
  void SetUp() override {
    int32_t count = 0;
    check(kda_device_count(KDA_CUDA, &count));
    if (count < 2) GTEST_SKIP() << "one device";
  }
  static int current() {
    int device = -1;
    KDA_REQUIRE_CUDA(cudaGetDevice(&device));
    return device;
  }
};

// Both from one thread whose current device is either, step by step.
TEST_F(TwoDevices, T17_OneThreadAndWhateverDeviceIsCurrent) {
  for (const int mine : {0, 1}) {
    KDA_REQUIRE_CUDA(cudaSetDevice(mine));
    Device first(0), second(1);
    for (int i = 0; i < 20; ++i) {
      first.step();
      ASSERT_EQ(current(), mine);
      second.step();
      ASSERT_EQ(current(), mine);
    }
    EXPECT_EQ(first.results(), second.results());
    EXPECT_EQ(current(), mine);
  }
  KDA_REQUIRE_CUDA(cudaSetDevice(0));
}

// A thread each, on the other's device; one set of copies is reset again and again while the other device serves.
TEST_F(TwoDevices, T17_AThreadEachAndOneResetsWhileTheOtherServes) {
  Device first(0), second(1), alone(0);
  std::thread threads[2];
  for (int i = 0; i < 2; ++i) {
    threads[i] = std::thread([&, i] {
      KDA_REQUIRE_CUDA(cudaSetDevice(1 - i));
      Device& mine = i == 0 ? first : second;
      for (int step = 0; step < 200; ++step) {
        mine.step();
        if (i == 1 && step % 20 == 7) {
          (void)mine.results();
          mine.reset_copies();
          mine.gather();
        }
      }
      EXPECT_EQ(current(), 1 - i);
    });
  }
  for (std::thread& t : threads) t.join();
  for (int step = 0; step < 200; ++step) alone.step();
  const std::vector<char> wanted = alone.results();
  EXPECT_EQ(first.results(), wanted);
  EXPECT_EQ(second.results(), wanted);
}

}  // namespace
}  // namespace kda::conformance::test
