// Decode on the CPU against an in-place scale of the same state bytes (x *= c: each byte read once and written once,
// as one-token decode must), same threads, same process, paired rounds in shuffled order. A verify row of `width`
// tokens reads one state and writes `width`: its floor is the scale of (1 + width) / 2 times the bytes.
//
//   bench_cpu_decode [--heads 1024] [--sequences 32] [--rounds 40] [--threads 0] [--state fp32|bf16|fp16]
//                    [--operator decode|decode_step] [--width 1]
#include "cpu_memory.h"

namespace {

constexpr int64_t kDim = 128;

struct Shape {
  int64_t N, H, width;
  kda_dtype state;
  int64_t T() const { return N * width; }
};

kda_decode_desc decode_desc(const Shape& s) {
  kda_decode_desc d;
  kda_decode_desc_init(&d);
  d.attention.num_heads = s.H;
  d.attention.key_dim = d.attention.value_dim = kDim;
  d.attention.gate_family = KDA_GATE_BOUNDED;
  d.attention.lower_bound = -5;
  d.attention.state_dtype = s.state;
  d.max_tokens = s.T();
  d.max_sequences = s.N;
  d.width = static_cast<int32_t>(s.width);
  return d;
}

kda_decode_args decode_args(const Shape& s, bench::Arena& arena) {
  kda_decode_args args{};
  args.struct_size = sizeof args;
  args.q = arena.random(KDA_BF16, {s.T(), s.H, kDim});
  args.k = arena.random(KDA_BF16, {s.T(), s.H, kDim});
  args.v = arena.random(KDA_BF16, {s.T(), s.H, kDim});
  args.gate = arena.random(KDA_BF16, {s.T(), s.H, kDim});
  args.beta = arena.random(KDA_BF16, {s.T(), s.H});
  args.out = arena.zeros(KDA_BF16, {s.T(), s.H, kDim});
  args.state = arena.zeros(s.state, {s.T(), s.H, kDim, kDim});
  std::vector<int64_t> offsets, slots;
  for (int64_t n = 0; n <= s.N; ++n) offsets.push_back(n * s.width);
  for (int64_t i = 0; i < s.T(); ++i) slots.push_back(i);
  args.sequences.cu_seqlens = arena.offsets(offsets);
  args.slots = arena.offsets(slots);
  args.slots.rank = 2;
  args.slots.shape[0] = s.N, args.slots.shape[1] = s.width;
  args.slots.strides[0] = s.width, args.slots.strides[1] = 1;
  return args;
}

kda_decode_step_args step_args(const Shape& s, bench::Arena& arena) {
  kda_decode_step_args args{};
  args.struct_size = sizeof args;
  args.decode = decode_args(s, arena);
  args.decode.q = args.decode.k = args.decode.v = kda_tensor{};
  const int64_t channels = 3 * s.H * kDim;
  args.x[0] = arena.random(KDA_BF16, {s.T(), channels});
  args.conv_weight[0] = arena.random(KDA_FP32, {channels, 4});
  args.conv_state[0] = arena.random(KDA_BF16, {s.T(), 2 + s.width, channels});
  args.z = arena.random(KDA_BF16, {s.T(), s.H, kDim});
  args.norm_weight = arena.random(KDA_FP32, {kDim});
  return args;
}

}  // namespace

int main(int argc, char** argv) {
  const bench::Options o(argc, argv);
  const Shape s{o.number("sequences", 32), o.number("heads", 1024) / o.number("sequences", 32), o.number("width", 1),
                o.dtype("state", KDA_FP32)};
  const bool step = o.text("operator", "decode") == "decode_step";
  kda_context* context = bench::make_context(o);
  bench::Arena arena;
  kda_plan* plan = nullptr;
  kda_decode_args args{};
  kda_decode_step_args fused{};
  if (step) {
    kda_decode_step_desc d;
    kda_decode_step_desc_init(&d);
    d.decode = decode_desc(s);
    d.conv_width = 4;
    d.conv_layout = KDA_CONV_SD;
    bench::check(kda_decode_step_plan_create(context, &d, &plan), "plan");
    fused = step_args(s, arena);
  } else {
    const kda_decode_desc d = decode_desc(s);
    bench::check(kda_decode_plan_create(context, &d, &plan), "plan");
    args = decode_args(s, arena);
  }
  const kda_workspace workspace = arena.workspace(plan);
  const size_t bytes = static_cast<size_t>(s.N * s.H * kDim * kDim * (1 + s.width) / 2) * kda_dtype_size(s.state);
  char* const scaled = arena.bytes(bytes);
  const int threads = kda_context_num_threads(context);
  const std::string title = std::string(step ? "decode_step" : "decode") + " N*H=" + std::to_string(s.N * s.H) +
                            " width=" + std::to_string(s.width) + " state=" + kda_dtype_name(s.state) +
                            " threads=" + std::to_string(threads) + " isa=" + kda_plan_isa(plan);
  bench::compare(
      title, 2.0 * static_cast<double>(bytes), static_cast<int>(o.number("rounds", 40)),
      [&] { bench::scale(scaled, bytes, threads); },
      [&] {
        if (step) bench::check(kda_decode_step_run(plan, &fused, workspace, nullptr), "run");
        else bench::check(kda_decode_run(plan, &args, workspace, nullptr), "run");
      });
  kda_plan_destroy(plan);
  kda_context_destroy(context);
  return 0;
}
