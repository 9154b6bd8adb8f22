// Conv prefill and gated norm on the CPU against memcpy of the same bytes, same threads, same process.
//
//   bench_cpu_conv [--operator conv|gated_norm] [--tokens 8192] [--heads 12] [--rounds 40] [--threads 0]
//                  [--layout sd|ds] [--length 0 (one sequence) | tokens a sequence] [--mode prefill|columns]
#include "cpu_memory.h"

namespace {

constexpr int64_t kDim = 128;

std::vector<int64_t> even_offsets(int64_t tokens, int64_t length) {
  std::vector<int64_t> offsets = {0};
  while (offsets.back() < tokens)
    offsets.push_back(std::min(tokens, offsets.back() + (length > 0 ? length : tokens)));
  return offsets;
}

}  // namespace

int main(int argc, char** argv) {
  const bench::Options o(argc, argv);
  const int64_t T = o.number("tokens", 8192), H = o.number("heads", 12), channels = 3 * H * kDim;
  kda_context* context = bench::make_context(o);
  const int threads = kda_context_num_threads(context);
  bench::Arena arena;
  kda_plan* plan = nullptr;
  const bool norm = o.text("operator", "conv") == "gated_norm";
  kda_conv_args conv{};
  kda_gated_norm_args gated{};
  size_t bytes;
  if (norm) {
    kda_gated_norm_desc d{};
    d.struct_size = sizeof d;
    d.num_value_heads = H;
    d.value_dim = kDim;
    d.max_tokens = T;
    bench::check(kda_gated_norm_plan_create(context, &d, &plan), "plan");
    gated.struct_size = sizeof gated;
    gated.o = arena.random(KDA_BF16, {T, H, kDim});
    gated.z = arena.random(KDA_BF16, {T, H, kDim});
    gated.weight = arena.random(KDA_FP32, {kDim});
    gated.out = arena.zeros(KDA_BF16, {T, H, kDim});
    bytes = static_cast<size_t>(T * H * kDim) * 6;
  } else {
    const auto offsets = even_offsets(T, o.number("length", 0));
    const auto N = static_cast<int64_t>(offsets.size()) - 1;
    const bool sd = o.text("layout", "sd") == "sd";
    kda_conv_desc d;
    kda_conv_desc_init(&d);
    d.mode = o.text("mode", "prefill") == "prefill" ? KDA_CONV_PREFILL : KDA_CONV_COLUMNS;
    d.width = 4;
    d.channels[0] = channels;
    d.layout = sd ? KDA_CONV_SD : KDA_CONV_DS;
    d.max_tokens = T;
    d.max_sequences = N;
    d.initial_state = KDA_INITIAL_ALL;
    bench::check(kda_conv_plan_create(context, &d, &plan), "plan");
    conv.struct_size = sizeof conv;
    conv.x[0] = arena.random(KDA_BF16, {T, channels});
    conv.weight[0] = arena.random(KDA_FP32, {channels, 4});
    conv.state[0] = sd ? arena.random(KDA_BF16, {N, 3, channels}) : arena.random(KDA_BF16, {N, channels, 3});
    conv.out[0] = arena.zeros(KDA_BF16, {T, channels});
    conv.sequences.cu_seqlens = arena.offsets(offsets);
    bytes = static_cast<size_t>(T * channels) * 4 + static_cast<size_t>(N * channels) * 12;
  }
  const kda_workspace workspace = arena.workspace(plan);
  // A copy that reads and writes `bytes` in all.
  char *const from = arena.bytes(bytes / 2), *const to = arena.bytes(bytes / 2);
  const std::string title = std::string(norm ? "gated_norm" : "conv") + " T=" + std::to_string(T) +
                            " H=" + std::to_string(H) + " threads=" + std::to_string(threads) +
                            " isa=" + kda_plan_isa(plan);
  bench::compare(
      title, static_cast<double>(bytes), static_cast<int>(o.number("rounds", 40)),
      [&] { bench::copy(to, from, bytes / 2, threads); },
      [&] {
        if (norm) bench::check(kda_gated_norm_run(plan, &gated, workspace, nullptr), "run");
        else bench::check(kda_conv_run(plan, &conv, workspace, nullptr), "run");
      });
  kda_plan_destroy(plan);
  kda_context_destroy(context);
  return 0;
}
