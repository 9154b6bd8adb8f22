// CPU prefill against the machine's own matrix product: useful FLOP rate of kda_prefill_run over the sgemm rate of
// OpenBLAS on as many threads, in one process, in paired rounds. Useful work is 7*K*V FLOP per token and value
// head (114,688 at K = V = 128). The medians of paired ratios are what counts: absolute rates move with other load.
//
//   bench_cpu_prefill [--heads 8] [--tokens 2048] [--sequences 1] [--k 128] [--v 128] [--threads 2] [--rounds 15]
//                     [--io fp32|bf16|fp16] [--gate softplus|bounded|plain] [--no-sgemm]
//
// KDA_FORCE_ISA chooses the instruction set of the prefill, OPENBLAS_CORETYPE (taken from --coretype only) that of
// OpenBLAS; both are printed.
#include <dlfcn.h>
#include <kda/kda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Options {
  int64_t heads = 8, tokens = 2048, sequences = 1, K = 128, V = 128, rounds = 15;
  int threads = 2;
  kda_dtype io = KDA_FP32;
  kda_gate_family gate = KDA_GATE_SOFTPLUS;
  std::string coretype;
  bool sgemm = true;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "bench_cpu_prefill: %s\n", text.c_str());
  std::exit(2);
}

void check(kda_status status, const char* what) {
  if (status != KDA_OK) fail(std::string(what) + ": " + kda_last_error());
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--no-sgemm") {
      o.sgemm = false;
      continue;
    }
    if (i + 1 == argc) fail("wanted a value after " + name);
    const std::string value = argv[++i];
    const int64_t number = std::atoll(value.c_str());
    if (name == "--heads") o.heads = number;
    else if (name == "--tokens") o.tokens = number;
    else if (name == "--sequences") o.sequences = number;
    else if (name == "--k") o.K = number;
    else if (name == "--v") o.V = number;
    else if (name == "--threads") o.threads = static_cast<int>(number);
    else if (name == "--rounds") o.rounds = number;
    else if (name == "--coretype") o.coretype = value;
    else if (name == "--io") o.io = value == "bf16" ? KDA_BF16 : value == "fp16" ? KDA_FP16 : KDA_FP32;
    else if (name == "--gate")
      o.gate = value == "bounded" ? KDA_GATE_BOUNDED : value == "plain" ? KDA_GATE_PLAIN : KDA_GATE_SOFTPLUS;
    else fail("unknown option " + name);
  }
  return o;
}

// OpenBLAS, loaded at run time so that its environment can be set first.
class Sgemm {
 public:
  explicit Sgemm(const Options& o) : threads_(o.threads) {
    unsetenv("OPENBLAS_L2_SIZE");
    if (o.coretype.empty()) unsetenv("OPENBLAS_CORETYPE");
    else setenv("OPENBLAS_CORETYPE", o.coretype.c_str(), 1);
    setenv("OPENBLAS_NUM_THREADS", std::to_string(o.threads).c_str(), 1);
    void* const lib = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (lib == nullptr) fail(std::string("OpenBLAS: ") + dlerror());
    product_ = reinterpret_cast<Product>(dlsym(lib, "cblas_sgemm"));
    const auto core = reinterpret_cast<char* (*)()>(dlsym(lib, "openblas_get_corename"));
    if (product_ == nullptr || core == nullptr) fail("OpenBLAS: cblas_sgemm is missing");
    std::printf("sgemm: OpenBLAS kernel %s, %d threads, n = %d\n", core(), o.threads, kSize);
  }
  double rate() {  // FLOP/s
    const double start = now();
    product_(101, 111, 111, kSize, kSize, kSize, 1.0f, a_.data(), kSize, b_.data(), kSize, 0.0f, c_.data(), kSize);
    const double seconds = now() - start;
    // OpenBLAS's workers go on spinning for a while, and would take cores from whoever is timed next.
    if (threads_ > 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return 2.0 * kSize * kSize * kSize / seconds;
  }

 private:
  using Product = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*,
                           int);
  static constexpr int kSize = 1536;
  const int threads_;
  Product product_;
  std::vector<float> a_ = std::vector<float>(kSize * kSize, 0.37f), b_ = std::vector<float>(kSize * kSize, 0.71f),
                     c_ = std::vector<float>(kSize * kSize);
};

// A dense tensor with pseudo-random contents in [-1, 1) times `scale`.
struct Tensor {
  std::vector<char> bytes;
  kda_tensor view{};
  Tensor(kda_dtype dtype, std::vector<int64_t> shape, float scale) {
    int64_t count = 1;
    view.dtype = dtype;
    view.rank = static_cast<int32_t>(shape.size());
    for (int i = view.rank - 1; i >= 0; --i) {
      view.shape[i] = shape[static_cast<size_t>(i)];
      view.strides[i] = count;
      count *= shape[static_cast<size_t>(i)];
    }
    bytes.resize(static_cast<size_t>(count) * kda_dtype_size(dtype) + 64);
    view.data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
    static uint64_t seed = 1;
    for (int64_t i = 0; i < count; ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      const float x = scale * (static_cast<float>(seed >> 40) * 0x1p-23f - 1.0f);
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      if (dtype == KDA_FP32) std::memcpy(static_cast<float*>(view.data) + i, &x, 4);
      else
        static_cast<uint16_t*>(view.data)[i] =
            static_cast<uint16_t>(dtype == KDA_BF16 ? bits >> 16 : 0x3000 + (bits >> 20 & 0x7ff));
    }
  }
};

class Prefill {
 public:
  explicit Prefill(const Options& o)
      : o_(o),
        q_(o.io, {o.tokens, o.heads, o.K}, 1),
        k_(o.io, {o.tokens, o.heads, o.K}, 1),
        v_(o.io, {o.tokens, o.heads, o.V}, 1),
        out_(o.io, {o.tokens, o.heads, o.V}, 0),
        gate_(o.gate == KDA_GATE_PLAIN ? KDA_FP32 : o.io, {o.tokens, o.heads, o.K}, 1),
        beta_(o.io, {o.tokens, o.heads}, 2),
        bias_(KDA_FP32, {o.heads * o.K}, 1),
        a_log_(KDA_FP32, {o.heads}, 1),
        state_(KDA_FP32, {o.sequences, o.heads, o.V, o.K}, 0),
        cu_(KDA_INT32, {o.sequences + 1}, 0) {
    auto* const cu = static_cast<int32_t*>(cu_.view.data);
    for (int64_t n = 0; n <= o.sequences; ++n) cu[n] = static_cast<int32_t>(o.tokens * n / o.sequences);
    if (o.gate == KDA_GATE_PLAIN) {
      auto* const g = static_cast<float*>(gate_.view.data);
      for (int64_t i = 0; i < o.tokens * o.heads * o.K; ++i) g[i] = -g[i] * g[i];
    }
    kda_context_options options{};
    options.struct_size = sizeof options;
    options.num_threads = o.threads;
    check(kda_context_create(&options, &context_), "context");
    kda_prefill_desc desc;
    kda_prefill_desc_init(&desc);
    desc.attention.num_heads = o.heads;
    desc.attention.key_dim = o.K;
    desc.attention.value_dim = o.V;
    desc.attention.io_dtype = o.io;
    desc.attention.gate_dtype = gate_.view.dtype;
    desc.attention.gate_family = o.gate;
    desc.attention.lower_bound = o.gate == KDA_GATE_BOUNDED ? -5.0 : 0.0;
    desc.max_tokens = o.tokens;
    desc.max_sequences = o.sequences;
    check(kda_prefill_plan_create(context_, &desc, &plan_), "plan");
    size_t bytes = 0;
    check(kda_plan_workspace_size(plan_, &bytes), "workspace");
    workspace_.bytes = bytes;
    workspace_.data = std::aligned_alloc(KDA_WORKSPACE_ALIGNMENT, (bytes + 255) / 256 * 256);
    args_.struct_size = sizeof args_;
    args_.q = q_.view;
    args_.k = k_.view;
    args_.v = v_.view;
    args_.gate = gate_.view;
    args_.beta = beta_.view;
    if (o.gate != KDA_GATE_PLAIN) {
      args_.A_log = a_log_.view;
      args_.dt_bias = bias_.view;
    }
    args_.sequences.cu_seqlens = cu_.view;
    args_.state = state_.view;
    args_.out = out_.view;
    std::printf("prefill: %s, H %lld, T %lld, N %lld, K %lld, V %lld, workspace %zu bytes\n", kda_plan_isa(plan_),
                static_cast<long long>(o.heads), static_cast<long long>(o.tokens),
                static_cast<long long>(o.sequences), static_cast<long long>(o.K), static_cast<long long>(o.V), bytes);
  }
  ~Prefill() {
    kda_plan_destroy(plan_);
    kda_context_destroy(context_);
    std::free(workspace_.data);
  }
  double rate() {  // useful FLOP/s
    const double start = now();
    check(kda_prefill_run(plan_, &args_, workspace_, nullptr), "run");
    const double seconds = now() - start;
    return 7.0 * static_cast<double>(o_.K * o_.V * o_.tokens * o_.heads) / seconds;
  }

 private:
  Options o_;
  Tensor q_, k_, v_, out_, gate_, beta_, bias_, a_log_, state_, cu_;
  kda_context* context_ = nullptr;
  kda_plan* plan_ = nullptr;
  kda_workspace workspace_{};
  kda_prefill_args args_{};
};

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  const auto sgemm = o.sgemm ? std::make_unique<Sgemm>(o) : nullptr;
  Prefill prefill(o);
  prefill.rate();
  if (sgemm) sgemm->rate();
  std::vector<double> ratios, ours, theirs;
  for (int64_t i = 0; i < o.rounds; ++i) {
    const double before = sgemm ? sgemm->rate() : 1e9;
    const double rate = prefill.rate();
    const double after = sgemm ? sgemm->rate() : 1e9;
    ours.push_back(rate);
    theirs.push_back(std::max(before, after));
    ratios.push_back(rate / theirs.back());
  }
  const double work = 7e6 * static_cast<double>(o.K * o.V);
  std::printf(
      "useful %.1f GFLOP/s (%.3f us per token-head; fastest %.3f), sgemm %.1f, median ratio %.3f, best %.3f\n",
      median(ours) / 1e9, work / median(ours), work / *std::max_element(ours.begin(), ours.end()),
      median(theirs) / 1e9, median(ratios), *std::max_element(ratios.begin(), ratios.end()));
  return 0;
}
