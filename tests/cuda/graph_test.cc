// Captured calls follow the device (F52), two streams and two threads agree with one (F27), a spinning neighbour
// changes nothing (F28), and a capture of many mixed calls succeeds, which an allocation or a wait would end (F30,
// G-11).
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "harness.h"
#include "runtime.h"
#include "spin.h"

namespace kda::conformance::test {
namespace {

using conformance::Mirror;

// Arguments of a call on the device, with device memory of their own.
template <class Args>
struct OnDevice {
  explicit OnDevice(Args a) : args(a), mirror(memory, conformance::tensors_of(args), 0) {}
  Args args;
  cuda_test::Memory memory;
  Mirror mirror;
};

class Graph {
 public:
  template <class F>
  explicit Graph(const F& calls) {
    KDA_REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    KDA_REQUIRE_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    calls(stream_);
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(stream_, &graph);
    EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
    if (error != cudaSuccess) return;
    KDA_REQUIRE_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
    KDA_REQUIRE_CUDA(cudaGraphDestroy(graph));
  }
  ~Graph() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
    (void)cudaStreamDestroy(stream_);
  }
  void replay() {
    KDA_REQUIRE_CUDA(cudaGraphLaunch(exec_, stream_));
    KDA_REQUIRE_CUDA(cudaStreamSynchronize(stream_));
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

DecodeCall verify_call(const char* backend, int64_t tokens = 12) {
  FieldInput input;
  input.lengths = {tokens};
  input.heads = 2;
  input.gate_scale = 4;
  Problem p = field_problem(input);
  p.lengths = {4, 4, 4};
  DecodeCall call(p, backend, 4);
  call.pool = canary_pool(KDA_FP32, {9, 2, 128, 128});
  call.slots = Tensor::of(KDA_INT32, {3, 4}, {0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1});
  call.accepted = Tensor::ints({2, 4, 1});
  return call;
}

class GraphTest : public testing::TestWithParam<std::string> {
 protected:
  const char* backend() const { return GetParam().c_str(); }
};
INSTANTIATE_TEST_SUITE_P(Backends, GraphTest, testing::Values("cuda_portable", "cuda_auto"), backend_name);

TEST_P(GraphTest, F52_DecodeFollowsTheDevice) {
  DecodeCall call = verify_call(backend());
  Plan plan = make_plan(call.desc);
  ASSERT_TRUE(plan.ok()) << plan.message();
  OnDevice captured(call.args());
  Graph graph([&](cudaStream_t s) { ASSERT_EQ(kda_decode_run(plan.get(), &captured.args, {}, s), KDA_OK); });
  std::mt19937_64 random(7);
  for (int i = 0; i < 40; ++i) {
    const auto draw = [&](int64_t n) { return static_cast<double>(random() % static_cast<uint64_t>(n)); };
    std::vector<int64_t> ids = iota(9);
    std::shuffle(ids.begin(), ids.end(), random);
    std::vector<double> table;
    for (size_t k = 0; k < 12; ++k) table.push_back(k < 9 ? static_cast<double>(ids[k]) : draw(3) == 0 ? 99 : -1);
    call.slots.assign(table);
    call.accepted.assign({draw(6), draw(6) - 1, draw(5)});
    const double a = draw(5), b = a + draw(5), c = b + draw(4);
    call.offsets.assign({0, a, b, c});
    call.out.fill(7);
    DecodeCall eager = call;
    ASSERT_EQ(eager.run(), KDA_OK) << eager.message;
    ASSERT_TRUE(captured.mirror.refresh());
    graph.replay();
    ASSERT_EQ(captured.mirror.back(), "");
    ASSERT_EQ(first_difference(call.out, eager.out), "") << i;
    ASSERT_EQ(first_difference(call.pool, eager.pool), "") << i;
  }
}

TEST_P(GraphTest, Y29_TheFirstCapturedCallIsTheThousandthReplay) {
  DecodeCall call = verify_call(backend());
  Plan plan = make_plan(call.desc);
  OnDevice captured(call.args());
  DecodeCall eager = call;
  ASSERT_EQ(eager.run(), KDA_OK) << eager.message;
  const Tensor pool = call.pool;
  Graph graph([&](cudaStream_t s) { ASSERT_EQ(kda_decode_run(plan.get(), &captured.args, {}, s), KDA_OK); });
  for (int i = 0; i < 1000; ++i) {
    if (i % 250 == 0 || i == 999) {  // from the same pool again
      call.pool = pool;
      call.out.fill(0);
      ASSERT_TRUE(captured.mirror.refresh());
    }
    graph.replay();
    if (i % 250 != 0 && i != 999) continue;
    ASSERT_EQ(captured.mirror.back(), "");
    ASSERT_EQ(first_difference(call.out, eager.out), "") << i;
    ASSERT_EQ(first_difference(call.pool, eager.pool), "") << i;
  }
}

TEST_P(GraphTest, F30_ManyMixedCallsCanBeCaptured) {
  DecodeCall call = verify_call(backend());
  Plan plan = make_plan(call.desc);
  DecodeCall one = verify_call(backend());
  one.desc.width = 1;
  one.p.lengths = {1, 1, 1};
  one.offsets = Tensor::ints({0, 1, 2, 3});
  one.slots = Tensor::ints({4, 2, 0});
  one.accepted = Tensor();
  Plan plain = make_plan(one.desc);
  ASSERT_TRUE(plan.ok() && plain.ok());
  OnDevice a(call.args());
  OnDevice b(one.args());
  size_t before = 0, after = 0, total = 0;
  KDA_REQUIRE_CUDA(cudaMemGetInfo(&before, &total));
  double worst = 0, sum = 0;
  Graph graph([&](cudaStream_t s) {
    for (int i = 0; i < 1000; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      ASSERT_EQ(i % 2 ? kda_decode_run(plan.get(), &a.args, {}, s) : kda_decode_run(plain.get(), &b.args, {}, s),
                KDA_OK);
      const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
      sum += us;
      worst = std::max(worst, us);
    }
  });
  KDA_REQUIRE_CUDA(cudaMemGetInfo(&after, &total));
  graph.replay();
  std::printf("captured 1000 calls: %.2f us a call on the host, worst %.1f\n", sum / 1000, worst);
}

TEST_P(GraphTest, G07_CheckedModeRefusesUnderCapture) {
  DecodeCall call = verify_call(backend());
  call.desc.flags = KDA_PLAN_CHECKED;
  Plan plan = make_plan(call.desc);
  OnDevice captured(call.args());
  cudaStream_t stream = nullptr;
  KDA_REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  KDA_REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  EXPECT_EQ(kda_decode_run(plan.get(), &captured.args, {}, stream), KDA_FAILED_PRECONDITION);
  cudaGraph_t graph = nullptr;
  (void)cudaStreamEndCapture(stream, &graph);
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();
  KDA_REQUIRE_CUDA(cudaStreamDestroy(stream));
}

// Interleaved calls on two streams, from one and from two host threads, against the serial run.
TEST_P(GraphTest, F27_TwoStreams) {
  DecodeCall first = verify_call(backend()), second = verify_call(backend());
  second.accepted = Tensor::ints({1, 3, 1});
  Plan plan = make_plan(first.desc);
  ASSERT_TRUE(plan.ok());
  for (const int threads : {1, 2}) {
    DecodeCall calls[2] = {first, second}, wanted[2] = {first, second};
    for (DecodeCall& w : wanted) {
      for (int i = 0; i < 50; ++i) ASSERT_EQ(w.run(), KDA_OK);
    }
    OnDevice a(calls[0].args());
    OnDevice b(calls[1].args());
    cudaStream_t streams[2];
    for (cudaStream_t& s : streams) KDA_REQUIRE_CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    const auto run = [&](int which, int count) {
      for (int i = 0; i < count; ++i) {
        EXPECT_EQ(kda_decode_run(plan.get(), which ? &b.args : &a.args, {}, streams[which]), KDA_OK);
      }
    };
    if (threads == 1) {
      for (int i = 0; i < 50; ++i) run(0, 1), run(1, 1);
    } else {
      std::thread other([&] { run(1, 50); });
      run(0, 50);
      other.join();
    }
    for (cudaStream_t& s : streams) KDA_REQUIRE_CUDA(cudaStreamSynchronize(s));
    ASSERT_EQ(a.mirror.back(), "");
    ASSERT_EQ(b.mirror.back(), "");
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(first_difference(calls[i].pool, wanted[i].pool), "") << threads << " threads, stream " << i;
      EXPECT_EQ(first_difference(calls[i].out, wanted[i].out), "");
    }
    for (cudaStream_t& s : streams) KDA_REQUIRE_CUDA(cudaStreamDestroy(s));
  }
}

TEST_P(GraphTest, F28_AnotherKernelHoldsHalfTheChip) {
  DecodeCall call = verify_call(backend()), wanted = call;
  ASSERT_EQ(wanted.run(), KDA_OK);
  Plan plan = make_plan(call.desc);
  OnDevice device(call.args());
  cuda_test::Spinner spinner(66);
  cudaStream_t stream = nullptr;
  KDA_REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ASSERT_EQ(kda_decode_run(plan.get(), &device.args, {}, stream), KDA_OK);
  KDA_REQUIRE_CUDA(cudaStreamSynchronize(stream));
  spinner.stop();
  ASSERT_EQ(device.mirror.back(), "");
  EXPECT_EQ(first_difference(call.out, wanted.out), "");
  EXPECT_EQ(first_difference(call.pool, wanted.pool), "");
  KDA_REQUIRE_CUDA(cudaStreamDestroy(stream));
}

// The tuned kernels and the general ones give the same bits, in every pool dtype and flow.
TEST(CudaBackends, N13_TunedAndGeneralKernelsAgreeBitForBit) {
  for (const kda_dtype pool : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    for (const int32_t width : {1, 4, 16}) {
      // Three value heads a query head: not what the lean kernels serve.
      for (const auto& [records, heads] : {std::pair{false, 4}, {false, 6}, {true, 4}, {true, 6}}) {
        FieldInput input;
        input.lengths = {width, width > 1 ? width - 1 : 1, 0};
        input.heads = 2;
        input.value_heads = heads;
        input.gate_scale = 4;
        const Problem p = field_problem(input);
        std::vector<DecodeCall> calls;
        for (const char* backend : {"cuda_portable", "cuda_fused"}) {
          DecodeCall call(p, backend, width);
          call.desc.attention.state_dtype = pool;
          call.pool = canary_pool(pool, {3 * width + 1, heads, 128, 128});
          std::vector<double> table;
          for (int i = 0; i < 3 * width; ++i) table.push_back((i * 5) % (3 * width));
          if (records) {
            call.desc.mode = KDA_DECODE_RECORDS;
            call.desc.fold = 1;
            call.slots = Tensor::ints({2, 0, 1});
            const int64_t rows = 3 * width + 1;
            call.u = Tensor::of(KDA_FP32, {rows, heads, width, 128}, uniform_vector(11, rows * heads * width * 128));
            call.kg = Tensor::of(KDA_BF16, {rows, heads, width, 256}, uniform_vector(12, rows * heads * width * 256));
            call.count = Tensor(KDA_INT32, {rows});
            call.count.fill(width);
            call.accepted = Tensor::ints({width, width / 2, 0});
          } else {
            call.slots = Tensor::of(KDA_INT32, {3, width}, table);
          }
          calls.push_back(std::move(call));
        }
        for (DecodeCall& call : calls) ASSERT_EQ(call.run(), KDA_OK) << call.message;
        EXPECT_EQ(first_difference(calls[0].out, calls[1].out), "") << pool << " " << width << " " << records;
        EXPECT_EQ(first_difference(calls[0].pool, calls[1].pool), "") << pool << " " << width << " " << records;
        if (records) {
          EXPECT_EQ(first_difference(calls[0].u, calls[1].u), "");
          EXPECT_EQ(first_difference(calls[0].kg, calls[1].kg), "");
          EXPECT_EQ(first_difference(calls[0].count, calls[1].count), "");
        }
      }
    }
  }
}

// A slot stride of 2^20 elements puts slot 2048 at element 2^31 and slot 512 at byte 2^31.
TEST(CudaPools, F24_OffsetsPast2To31) {
  const int64_t stride = int64_t{1} << 20, slots = 4100, state = 128 * 128;
  char* memory = nullptr;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&memory), static_cast<size_t>(slots * stride * 4)), cudaSuccess);
  const kda_tensor pool = {memory, KDA_FP32, {KDA_CUDA, 0}, 4, {slots, 1, 128, 128}, {stride, state, 128, 1}};
  for (const char* backend : {"cuda_portable", "cuda_fused", "cuda_prefill"}) {
    for (const int64_t slot : {511, 512, 2047, 2048, 4099}) {
      char* const at = memory + slot * stride * 4;
      KDA_REQUIRE_CUDA(cudaMemset(at, 0, static_cast<size_t>(state * 4)));
      // Where a 32-bit byte offset would land: a pattern that must stay.
      char* const wrapped = memory + static_cast<uint32_t>(slot * stride * 4);
      if (wrapped != at) KDA_REQUIRE_CUDA(cudaMemset(wrapped, 0x42, static_cast<size_t>(state * 4)));
      KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
      if (std::string(backend) == "cuda_prefill") {
        PrefillCall call(ledger({2}, {3, 4}, 1), "cuda_portable");
        call.slots = Tensor::ints({slot}, KDA_INT64);
        call.desc.initial_state = KDA_INITIAL_ALL;
        OnDevice device(call.args());
        device.args.state = pool;
        Plan plan = make_plan(call.desc);
        EXPECT_EQ(kda_prefill_run(plan.get(), &device.args, {}, nullptr), KDA_OK) << kda_last_error();
        KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
      } else {
        DecodeCall call(ledger({2}, {3, 4}, 1), backend);
        call.desc.store = KDA_STORE_FINAL;
        call.slots = Tensor::ints({slot});
        OnDevice device(call.args());
        device.args.state = pool;
        Plan plan = make_plan(call.desc);
        EXPECT_EQ(kda_decode_run(plan.get(), &device.args, {}, nullptr), KDA_OK) << kda_last_error();
        KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
      }
      std::vector<float> got(static_cast<size_t>(state));
      KDA_REQUIRE_CUDA(cudaMemcpy(got.data(), at, got.size() * 4, cudaMemcpyDeviceToHost));
      expect_ledger(std::vector<double>(got.begin(), got.end()), {3, 4});
      if (wrapped == at) continue;
      std::vector<unsigned char> kept(static_cast<size_t>(state * 4));
      KDA_REQUIRE_CUDA(cudaMemcpy(kept.data(), wrapped, kept.size(), cudaMemcpyDeviceToHost));
      EXPECT_EQ(std::count(kept.begin(), kept.end(), 0x42), state * 4) << backend << " slot " << slot;
    }
  }
  KDA_REQUIRE_CUDA(cudaFree(memory));
}

// A head's bits do not depend on how many others there are, and so not on how it is cut into blocks.
TEST(CudaBackends, N13_AloneOrAmongMany) {
  for (const kda_dtype pool : {KDA_FP32, KDA_BF16}) {
    FieldInput input;
    input.heads = 8;
    input.lengths.assign(64, 2);
    input.gate_scale = 4;
    const Problem p = field_problem(input);
    DecodeCall many(p, "cuda_auto", 2);
    many.desc.attention.state_dtype = pool;
    many.pool = canary_pool(pool, {64, 8, 128, 128});
    many.slots = Tensor(KDA_INT32, {64, 2});
    for (int64_t n = 0; n < 64; ++n) many.slots.set({n, 0}, static_cast<double>(n)), many.slots.set({n, 1}, -1);
    DecodeCall alone(cut(p, 2 * 63, 2), "cuda_auto", 2);
    alone.desc.attention.state_dtype = pool;
    alone.pool = many.pool;
    alone.slots = Tensor::of(KDA_INT32, {1, 2}, {63, -1});
    ASSERT_EQ(many.run(), KDA_OK) << many.message;
    ASSERT_EQ(alone.run(), KDA_OK) << alone.message;
    EXPECT_EQ(rows(many.out, 2 * 63, 2), alone.out.values());
    EXPECT_EQ(many.slot(63), alone.slot(63));
  }
}

}  // namespace
}  // namespace kda::conformance::test
