// One-token decode on the CPU against an in-place scale of the same state bytes (x *= c: each byte read once and
// written once, as decode must), same threads, same process, paired rounds in shuffled order.
//
//   bench_cpu_decode [--heads 1024] [--rounds 40] [--threads 0] [--state fp32|bf16|fp16] [--sequences 32]
//
// Prints the median of the rounds' ratios scale time / decode time (1 = decode moves its state as fast as a plain
// scale) and the raw samples.
#include <kda/kda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kDim = 128;

struct Options {
  int64_t heads = 1024, sequences = 32;
  int rounds = 40, threads = 0;
  kda_dtype state = KDA_FP32;
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--heads") o.heads = std::atoll(argv[i + 1]);
    else if (name == "--sequences") o.sequences = std::atoll(argv[i + 1]);
    else if (name == "--rounds") o.rounds = std::atoi(argv[i + 1]);
    else if (name == "--threads") o.threads = std::atoi(argv[i + 1]);
    else if (name == "--state") o.state = value == "bf16" ? KDA_BF16 : value == "fp16" ? KDA_FP16 : KDA_FP32;
    else std::fprintf(stderr, "unknown option %s\n", argv[i]), std::exit(2);
  }
  return o;
}

void check(kda_status status, const char* what) {
  if (status == KDA_OK) return;
  std::fprintf(stderr, "%s: %s: %s\n", what, kda_status_name(status), kda_last_error());
  std::exit(1);
}

// Pages that were touched once and are aligned as a server's pool is.
std::shared_ptr<char> allocate(size_t bytes) {
  char* p = static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  std::memset(p, 0, bytes);
  return {p, std::free};
}

kda_tensor dense(void* data, kda_dtype dtype, std::vector<int64_t> shape) {
  kda_tensor t{};
  t.data = data;
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = shape[static_cast<size_t>(i)];
    t.strides[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

// Dense random bf16 tensor; owns its memory through `keep`.
kda_tensor random_bf16(std::vector<std::shared_ptr<char>>& keep, std::vector<int64_t> shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  keep.push_back(allocate(static_cast<size_t>(n) * 2));
  auto* p = reinterpret_cast<uint16_t*>(keep.back().get());
  std::mt19937 random(static_cast<uint32_t>(n));
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (int64_t i = 0; i < n; ++i) {
    const float x = uniform(random);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p[i] = static_cast<uint16_t>(bits >> 16);
  }
  return dense(p, KDA_BF16, std::move(shape));
}

double seconds(const std::function<void()>& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// x *= c over `bytes`, split evenly over the threads.
void scale(char* data, size_t bytes, int threads) {
  const auto part = [&](int i) {
    auto* x = reinterpret_cast<float*>(data);
    const size_t n = bytes / 4, begin = n * static_cast<size_t>(i) / static_cast<size_t>(threads),
                 end = n * static_cast<size_t>(i + 1) / static_cast<size_t>(threads);
    for (size_t j = begin; j < end; ++j) x[j] *= 0.9999f;
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(part, i);
  part(0);
  for (auto& t : others) t.join();
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  const int64_t N = o.sequences, H = o.heads / o.sequences;
  kda_context_options context_options{};
  context_options.struct_size = sizeof context_options;
  context_options.num_threads = o.threads;
  kda_context* context = nullptr;
  check(kda_context_create(&context_options, &context), "context");
  const int threads = kda_context_num_threads(context);

  kda_decode_desc desc;
  kda_decode_desc_init(&desc);
  desc.attention.num_heads = H;
  desc.attention.key_dim = desc.attention.value_dim = kDim;
  desc.attention.gate_family = KDA_GATE_BOUNDED;
  desc.attention.lower_bound = -5;
  desc.attention.state_dtype = o.state;
  desc.max_tokens = desc.max_sequences = N;
  kda_plan* plan = nullptr;
  check(kda_decode_plan_create(context, &desc, &plan), "plan");

  std::vector<std::shared_ptr<char>> keep;
  kda_decode_args args{};
  args.struct_size = sizeof args;
  args.q = random_bf16(keep, {N, H, kDim});
  args.k = random_bf16(keep, {N, H, kDim});
  args.v = random_bf16(keep, {N, H, kDim});
  args.gate = random_bf16(keep, {N, H, kDim});
  args.beta = random_bf16(keep, {N, H});
  args.out = random_bf16(keep, {N, H, kDim});
  const size_t state_bytes = static_cast<size_t>(N * H * kDim * kDim) * kda_dtype_size(o.state);
  keep.push_back(allocate(state_bytes));
  args.state = dense(keep.back().get(), o.state, {N, H, kDim, kDim});
  keep.push_back(allocate(static_cast<size_t>(N + 1) * 4));
  auto* offsets = reinterpret_cast<int32_t*>(keep.back().get());
  for (int64_t n = 0; n <= N; ++n) offsets[n] = static_cast<int32_t>(n);
  args.sequences.cu_seqlens = dense(offsets, KDA_INT32, {N + 1});
  size_t workspace_bytes = 0;
  check(kda_plan_workspace_size(plan, &workspace_bytes), "workspace");
  keep.push_back(allocate(workspace_bytes + KDA_WORKSPACE_ALIGNMENT));
  const kda_workspace workspace{keep.back().get(), workspace_bytes};

  const auto scaled = allocate(state_bytes);
  const auto run_decode = [&] { check(kda_decode_run(plan, &args, workspace, nullptr), "run"); };
  const auto run_scale = [&] { scale(scaled.get(), state_bytes, threads); };
  std::mt19937 random(1);
  std::vector<double> ratios, decode_times, scale_times;
  for (int i = 0; i < o.rounds + 3; ++i) {
    double decode, scale_time;
    if (random() & 1) decode = seconds(run_decode), scale_time = seconds(run_scale);
    else scale_time = seconds(run_scale), decode = seconds(run_decode);
    if (i < 3) continue;
    decode_times.push_back(decode);
    scale_times.push_back(scale_time);
    ratios.push_back(scale_time / decode);
  }
  const auto median = [](std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
  };
  std::printf("decode N*H=%lld state=%s %.1f MiB threads=%d isa=%s source=%s\n", static_cast<long long>(N * H),
              kda_dtype_name(o.state), static_cast<double>(state_bytes) / 1048576, threads, kda_plan_isa(plan),
              kda_source_hash());
  std::printf("scale %.3f ms (%.1f GB/s)  decode %.3f ms (%.1f GB/s)  ratio %.3f\n", 1e3 * median(scale_times),
              2e-9 * static_cast<double>(state_bytes) / median(scale_times), 1e3 * median(decode_times),
              2e-9 * static_cast<double>(state_bytes) / median(decode_times), median(ratios));
  std::printf("samples (scale ms, decode ms):");
  for (size_t i = 0; i < ratios.size(); ++i) std::printf(" %.3f,%.3f", 1e3 * scale_times[i], 1e3 * decode_times[i]);
  std::printf("\n");
  kda_plan_destroy(plan);
  kda_context_destroy(context);
  return 0;
}
