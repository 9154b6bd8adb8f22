// Which kernels serve a call that several could serve. The conformance cases compare their bits, but only as long as
// each of them is taken.
#include <algorithm>

#include "conv_fixture.h"
#include "cuda/host/launch.h"

namespace kda::conformance::test {
namespace {

const char* const kBackend = "cuda_auto";

template <class Desc, class Args>
std::vector<std::string> launches_of(const Desc& desc, const Args& args) {
  Plan plan = make_plan(desc);
  cuda::launched().clear();
  EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
  return std::move(cuda::launched());
}

bool has(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Tensor random(kda_dtype dtype, const Shape& shape) {
  return Tensor::of(dtype, shape, uniform_vector(1, product(shape)));
}

// decode_step of one head: `samples` rows of `tokens` each, without offsets.
std::vector<std::string> step_launches(int64_t samples, int64_t tokens, kda_dtype pool, bool batched,
                                       kda_dtype windows = KDA_BF16) {
  const int64_t K = 128, width = 4, T = samples * tokens;
  kda_decode_step_desc d;
  kda_decode_step_desc_init(&d);
  kda_attention_spec& a = d.decode.attention;
  a.num_heads = a.num_value_heads = 1;
  a.key_dim = a.value_dim = K;
  a.io_dtype = a.gate_dtype = a.beta_dtype = KDA_BF16;
  a.state_dtype = pool;
  a.gate_family = KDA_GATE_PLAIN;
  d.decode.backend = kBackend;
  d.decode.max_tokens = d.decode.max_sequences = 64;
  d.decode.width = width;
  d.conv_width = 4;
  d.conv_parts = 1;
  d.conv_layout = KDA_CONV_SD;
  d.conv_dtype = windows;
  const auto rows = [&](Shape inner) {
    if (batched) inner.insert(inner.begin(), {samples, tokens});
    else inner.insert(inner.begin(), T);
    return random(KDA_BF16, inner);
  };
  const Tensor x = rows({3 * K}), gate = rows({1, K}), beta = rows({1}), z = rows({1, K}), out = rows({1, K});
  std::vector<int64_t> cu;
  for (int64_t n = 0; n <= samples; ++n) cu.push_back(n * tokens);
  const Tensor offsets = batched ? Tensor() : Tensor::ints(cu);
  Tensor slots(KDA_INT32, {samples, width});
  slots.assign([&] {
    std::vector<double> s(static_cast<size_t>(samples * width));
    for (size_t i = 0; i < s.size(); ++i) s[i] = static_cast<double>(i);
    return s;
  }());
  const Tensor state = random(pool, {samples * width, 1, K, K});
  const Tensor window = random(windows, {samples * width, 3 + width - 1, 3 * K});
  const Tensor taps = random(KDA_FP32, {3 * K, 4}), weight = random(KDA_FP32, {K});
  auto args = sized<kda_decode_step_args>();
  args.decode.struct_size = sizeof args.decode;
  args.decode.gate = gate;
  args.decode.beta = beta;
  args.decode.sequences.cu_seqlens = offsets;
  args.decode.state = state;
  args.decode.slots = slots;
  args.decode.out = out;
  args.x[0] = x;
  args.conv_weight[0] = taps;
  args.conv_state[0] = window;
  args.z = z;
  args.norm_weight = weight;
  return launches_of(d, args);
}

}  // namespace

// Windows of several tokens take the chain, other calls one kernel (docs/kernels/decode_step.md).
TEST(Routes, StepsOfWindows) {
  for (const bool batched : {false, true}) {
    SCOPED_TRACE(batched);
    EXPECT_EQ(step_launches(4, 1, KDA_FP32, batched), std::vector<std::string>{"decode_step_kernel"});
    EXPECT_TRUE(has(step_launches(2, 2, KDA_FP32, batched), "conv_step_kernel"));
    EXPECT_TRUE(has(step_launches(2, 4, KDA_FP32, batched), "conv_step_kernel"));
    EXPECT_EQ(step_launches(2, 4, KDA_FP32, batched, KDA_FP32), std::vector<std::string>{"decode_step_kernel"});
    // States of 16 bits: up to two heads a multiprocessor (main.cc has eight) in one kernel.
    EXPECT_EQ(step_launches(16, 2, KDA_BF16, batched), std::vector<std::string>{"decode_step_kernel"});
    EXPECT_TRUE(has(step_launches(17, 2, KDA_BF16, batched), "conv_step_kernel"));
  }
}

// Channels in groups of four, where the inputs are; windows may lie anywhere (ConvStepTest).
TEST(Routes, ConvSteps) {
  const auto launches = [](int64_t channels, int32_t width, kda_dtype windows) {
    ConvCall call(KDA_CONV_COLUMNS, {channels}, kBackend);
    call.desc.width = width;
    call.make_pool(2, width - 1, windows);
    call.x[0] = inputs({1, 2}, channels);
    call.weight[0] = taps(std::vector<double>(static_cast<size_t>(width), 0.5), channels);
    call.lengths = {1, 1};
    call.slots = Tensor::ints({0, 1});
    call.make_outputs();
    cuda::launched().clear();
    EXPECT_EQ(call.run(), KDA_OK) << call.message;
    return std::move(cuda::launched());
  };
  EXPECT_EQ(launches(64, 4, KDA_BF16), std::vector<std::string>{"conv_step_kernel"});
  for (const auto& names : {launches(66, 4, KDA_BF16), launches(64, 3, KDA_BF16), launches(64, 4, KDA_FP32)})
    EXPECT_EQ(names, std::vector<std::string>{"conv_step_scalars_kernel"});
}

TEST(Routes, Merges) {
  const auto launches = [](int64_t K, int64_t V, int64_t offset) {
    auto desc = sized<kda_segment_merge_desc>();
    desc.backend = kBackend;
    desc.num_value_heads = 1;
    desc.key_dim = K;
    desc.value_dim = V;
    desc.max_segments = 2;
    const Tensor summaries(KDA_FP32, {2, 1, V + K, K}, {}, offset), final(KDA_FP32, {1, V, K});
    auto args = sized<kda_segment_merge_args>();
    args.summaries = summaries;
    args.final_state = final;
    return launches_of(desc, args);
  };
  EXPECT_EQ(launches(128, 32, 0), std::vector<std::string>{"merge_maps_kernel"});
  for (const auto& names : {launches(128, 32, 1), launches(128, 40, 0), launches(64, 32, 0)})
    EXPECT_EQ(names, std::vector<std::string>{"merge_summaries_kernel"});
}

}  // namespace kda::conformance::test
