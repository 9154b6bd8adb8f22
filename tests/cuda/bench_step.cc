// decode_step, conv prefill and gated norm against the byte floor.
#include <cstdio>

#include "bench.h"

namespace kda::cuda_test {
namespace {

class StepBench {
 public:
  StepBench(int64_t H, int64_t N, kda_dtype pool) : H_(H), N_(N), pool_dtype_(pool) {
    const int64_t channels = 3 * H * 128;
    const auto set_bytes = static_cast<size_t>(N * H * 16384) * kda_dtype_size(pool);
    sets_ = static_cast<int>((kColdBytes + set_bytes - 1) / set_bytes);
    if (sets_ < 2) sets_ = 2;
    const int64_t slots = sets_ * N;
    kda_decode_step_desc d;
    kda_decode_step_desc_init(&d);
    d.decode.attention.num_heads = H;
    d.decode.attention.key_dim = d.decode.attention.value_dim = 128;
    d.decode.attention.gate_family = KDA_GATE_BOUNDED;
    d.decode.attention.lower_bound = -5;
    d.decode.attention.state_dtype = pool;
    d.decode.max_tokens = d.decode.max_sequences = N;
    d.conv_width = 4;
    d.conv_parts = 1;
    d.conv_layout = KDA_CONV_SD;
    check(kda_decode_step_plan_create(context(), &d, &plan_));
    size_t bytes = 0;
    check(kda_plan_workspace_size(plan_, &bytes));
    workspace_ = std::make_unique<Buffer>(bytes + 256);
    workspace_bytes_ = bytes;
    const auto row = static_cast<size_t>(N * H * 128) * 2;
    x_ = random_buffer(3 * row, KDA_BF16, 1);
    gate_ = random_buffer(row, KDA_BF16, 2);
    z_ = random_buffer(row, KDA_BF16, 3);
    out_ = random_buffer(row, KDA_BF16, 4);
    beta_ = random_buffer(static_cast<size_t>(N * H) * 2, KDA_BF16, 5);
    A_log_ = random_buffer(static_cast<size_t>(H) * 4, KDA_FP32, 6);
    bias_ = random_buffer(static_cast<size_t>(H) * 512, KDA_FP32, 7);
    weight_ = random_buffer(static_cast<size_t>(channels) * 16, KDA_FP32, 8);
    norm_ = random_buffer(512, KDA_FP32, 9);
    window_ = random_buffer(static_cast<size_t>(slots * channels) * 6, KDA_BF16, 10);
    state_ = random_buffer(static_cast<size_t>(slots * H * 16384) * kda_dtype_size(pool), pool, 11);
    std::vector<int32_t> cu, order;
    for (int64_t n = 0; n <= N; ++n) cu.push_back(static_cast<int32_t>(n));
    for (int64_t i = 0; i < slots; ++i) order.push_back(static_cast<int32_t>(i * 7919 % slots));
    cu_ = int_buffer(cu);
    slots_ = int_buffer(order);
    kda_decode_step_args a{};
    a.struct_size = sizeof(a);
    a.decode.struct_size = sizeof(a.decode);
    a.decode.gate = view(*gate_, KDA_BF16, {N, H, 128});
    a.decode.beta = view(*beta_, KDA_BF16, {N, H});
    a.decode.A_log = view(*A_log_, KDA_FP32, {H});
    a.decode.dt_bias = view(*bias_, KDA_FP32, {H, 128});
    a.decode.sequences.cu_seqlens = view(*cu_, KDA_INT32, {N + 1});
    a.decode.state = view(*state_, pool, {slots, H, 128, 128});
    a.decode.out = view(*out_, KDA_BF16, {N, H, 128});
    a.x[0] = view(*x_, KDA_BF16, {N, channels});
    a.conv_weight[0] = view(*weight_, KDA_FP32, {channels, 4});
    a.conv_state[0] = view(*window_, KDA_BF16, {slots, 3, channels});
    a.z = view(*z_, KDA_BF16, {N, H, 128});
    a.norm_weight = view(*norm_, KDA_FP32, {128});
    for (int s = 0; s < sets_; ++s) {
      a.decode.slots = view(*slots_, KDA_INT32, {N}, s * N);
      args_.push_back(a);
    }
  }
  ~StepBench() { kda_plan_destroy(plan_); }
  StepBench(const StepBench&) = delete;
  StepBench& operator=(const StepBench&) = delete;

  void call(int i, cudaStream_t stream) const {
    check(kda_decode_step_run(plan_, &args_[static_cast<size_t>(i % sets_)], {workspace_->data(), workspace_bytes_}, stream));
  }
  // States, projections, gate, z, output, windows in and out, taps.
  double bytes() const {
    const auto rows = static_cast<double>(N_ * H_), channels = static_cast<double>(3 * H_ * 128);
    return rows * 16384 * 2 * static_cast<double>(kda_dtype_size(pool_dtype_)) + rows * 256 * 6 + rows * 2 +
           static_cast<double>(N_) * channels * 12 + channels * 16;
  }

 private:
  int64_t H_, N_;
  kda_dtype pool_dtype_;
  int sets_ = 2;
  size_t workspace_bytes_ = 0;
  kda_plan* plan_ = nullptr;
  std::unique_ptr<Buffer> workspace_, x_, gate_, z_, out_, beta_, A_log_, bias_, weight_, norm_, window_, state_, cu_, slots_;
  std::vector<kda_decode_step_args> args_;
};

struct Size {
  int64_t H, N;
  double fp32, half, us;
};

class ConvBench {
 public:
  ConvBench(int64_t H, int64_t T) : channels_(3 * H * 128), T_(T) {
    kda_conv_desc d;
    kda_conv_desc_init(&d);
    d.mode = KDA_CONV_PREFILL;
    d.width = 4;
    d.parts = 1;
    d.channels[0] = channels_;
    d.layout = KDA_CONV_DS;
    d.max_tokens = T;
    d.max_sequences = 1;
    check(kda_conv_plan_create(context(), &d, &plan_));
    const auto bytes = static_cast<size_t>(T * channels_) * 2;
    sets_ = static_cast<int>((kColdBytes + bytes - 1) / bytes);
    if (sets_ < 2) sets_ = 2;
    x_ = random_buffer(bytes * static_cast<size_t>(sets_), KDA_BF16, 1);
    out_ = random_buffer(bytes * static_cast<size_t>(sets_), KDA_BF16, 2);
    weight_ = random_buffer(static_cast<size_t>(channels_) * 16, KDA_FP32, 3);
    window_ = random_buffer(static_cast<size_t>(channels_) * 6, KDA_BF16, 4);
    cu_ = int_buffer({0, static_cast<int32_t>(T)});
    slots_ = int_buffer({0});
  }
  ~ConvBench() { kda_plan_destroy(plan_); }
  ConvBench(const ConvBench&) = delete;
  ConvBench& operator=(const ConvBench&) = delete;
  void call(int i, cudaStream_t stream) const {
    kda_conv_args a{};
    a.struct_size = sizeof(a);
    a.x[0] = view(*x_, KDA_BF16, {T_, channels_}, (i % sets_) * T_ * channels_);
    a.out[0] = view(*out_, KDA_BF16, {T_, channels_}, (i % sets_) * T_ * channels_);
    a.weight[0] = view(*weight_, KDA_FP32, {channels_, 4});
    a.state[0] = view(*window_, KDA_BF16, {1, channels_, 3});
    a.sequences.cu_seqlens = view(*cu_, KDA_INT32, {2});
    a.slots = view(*slots_, KDA_INT32, {1});
    check(kda_conv_run(plan_, &a, {}, stream));
  }
  double bytes() const { return static_cast<double>(T_ * channels_) * 4 + static_cast<double>(channels_) * 22; }

 private:
  int64_t channels_, T_;
  int sets_ = 2;
  kda_plan* plan_ = nullptr;
  std::unique_ptr<Buffer> x_, out_, weight_, window_, cu_, slots_;
};

class NormBench {
 public:
  NormBench(int64_t H, int64_t T) : H_(H), T_(T) {
    kda_gated_norm_desc d{};
    d.struct_size = sizeof(d);
    d.num_value_heads = H;
    d.value_dim = 128;
    d.max_tokens = T;
    check(kda_gated_norm_plan_create(context(), &d, &plan_));
    const auto bytes = static_cast<size_t>(T * H * 128) * 2;
    sets_ = static_cast<int>((kColdBytes + bytes - 1) / bytes);
    if (sets_ < 2) sets_ = 2;
    o_ = random_buffer(bytes * static_cast<size_t>(sets_), KDA_BF16, 1);
    z_ = random_buffer(bytes * static_cast<size_t>(sets_), KDA_BF16, 2);
    out_ = random_buffer(bytes * static_cast<size_t>(sets_), KDA_BF16, 3);
    weight_ = random_buffer(512, KDA_FP32, 4);
  }
  ~NormBench() { kda_plan_destroy(plan_); }
  NormBench(const NormBench&) = delete;
  NormBench& operator=(const NormBench&) = delete;
  void call(int i, cudaStream_t stream) const {
    const int64_t at = (i % sets_) * T_ * H_ * 128;
    kda_gated_norm_args a{};
    a.struct_size = sizeof(a);
    a.o = view(*o_, KDA_BF16, {T_, H_, 128}, at);
    a.z = view(*z_, KDA_BF16, {T_, H_, 128}, at);
    a.out = view(*out_, KDA_BF16, {T_, H_, 128}, at);
    a.weight = view(*weight_, KDA_FP32, {128});
    check(kda_gated_norm_run(plan_, &a, {}, stream));
  }
  double bytes() const { return static_cast<double>(T_ * H_) * 768; }

 private:
  int64_t H_, T_;
  int sets_ = 2;
  kda_plan* plan_ = nullptr;
  std::unique_ptr<Buffer> o_, z_, out_, weight_;
};

}  // namespace

void bench_step(Bench& bench) {
  const Size sizes[] = {{12, 1, 0, 0, 3.2},      {32, 1, 0, 0, 3.2},      {32, 8, 1.25, 0, 0},     {32, 32, 1.06, 1.15, 0},
                        {12, 128, 1.06, 1.15, 0}, {32, 128, 1.06, 1.15, 0}, {64, 64, 1.06, 1.15, 0}, {96, 256, 1.06, 1.15, 0}};
  for (const Size& size : sizes) {
    char group[64];
    std::snprintf(group, sizeof group, "decode_step H=%d N=%d", static_cast<int>(size.H), static_cast<int>(size.N));
    if (!bench.wants(group)) continue;
    std::vector<std::unique_ptr<StepBench>> benches;
    std::vector<Variant> variants;
    for (kda_dtype pool : {KDA_FP32, KDA_BF16}) {
      benches.push_back(std::make_unique<StepBench>(size.H, size.N, pool));
      const StepBench* b = benches.back().get();
      const bool absolute = size.us > 0;
      const double target = absolute ? size.us : pool == KDA_FP32 ? size.fp32 : size.half;
      variants.push_back({std::string(group) + " " + kda_dtype_name(pool), [b](int i, cudaStream_t s) { b->call(i, s); },
                          20, b->bytes(), target, absolute});
    }
    bench.measure(group, variants);
  }
}

void bench_conv(Bench& bench) {
  for (const int64_t H : {12, 32, 96}) {
    char group[64];
    std::snprintf(group, sizeof group, "conv prefill T=8192 H=%d", static_cast<int>(H));
    if (!bench.wants(group)) continue;
    const ConvBench b(H, 8192);
    bench.measure(group, {{group, [&b](int i, cudaStream_t s) { b.call(i, s); }, 8, b.bytes(), 1.12, false}});
  }
  for (const int64_t H : {12, 32, 96}) {
    char group[64];
    std::snprintf(group, sizeof group, "gated norm T=8192 H=%d", static_cast<int>(H));
    if (!bench.wants(group)) continue;
    const NormBench b(H, 8192);
    bench.measure(group, {{group, [&b](int i, cudaStream_t s) { b.call(i, s); }, 8, b.bytes(), 1.05, false}});
  }
}

}  // namespace kda::cuda_test
