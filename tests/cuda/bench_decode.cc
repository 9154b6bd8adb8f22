// Decode, verify and records against the byte floor.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "bench.h"

namespace kda::cuda_test {

kda_tensor view(const Buffer& b, kda_dtype dtype, std::initializer_list<int64_t> shape, int64_t offset) {
  kda_tensor t{};
  t.data = static_cast<char*>(b.data()) + offset * static_cast<int64_t>(kda_dtype_size(dtype));
  t.dtype = dtype;
  t.device = {KDA_CUDA, 0};
  for (int64_t s : shape) t.shape[t.rank++] = s;
  int64_t stride = 1;
  for (int i = t.rank; i-- > 0; stride *= t.shape[i]) t.strides[i] = stride;
  return t;
}

void check(kda_status status) {
  if (status == KDA_OK) return;
  std::fprintf(stderr, "%s: %s\n", kda_status_name(status), kda_last_error());
  std::exit(2);
}

std::unique_ptr<Buffer> random_buffer(size_t bytes, kda_dtype dtype, uint32_t seed) {
  auto b = std::make_unique<Buffer>(bytes);
  fill_uniform(*b, dtype, 0.5f, seed);
  return b;
}

std::unique_ptr<Buffer> int_buffer(const std::vector<int32_t>& x) {
  auto b = std::make_unique<Buffer>(x.size() * 4);
  upload(*b, x.data(), x.size() * 4);
  return b;
}

namespace {

// One decode problem with `sets` disjoint sets of slots that calls go through in turn.
class DecodeBench {
 public:
  DecodeBench(int64_t H, int64_t N, kda_dtype pool, int width, kda_decode_mode mode, bool fold)
      : H_(H), N_(N), width_(width), mode_(mode), state_bytes_(128 * 128 * static_cast<double>(kda_dtype_size(pool))) {
    const int64_t columns = mode == KDA_DECODE_COLUMNS ? width : 1;
    const auto set_bytes = static_cast<size_t>(static_cast<double>(N * columns * H) * state_bytes_);
    sets_ = static_cast<int>((kColdBytes + set_bytes - 1) / set_bytes);
    if (sets_ < 2) sets_ = 2;
    const int64_t T = N * width, slots = sets_ * N * columns;
    kda_decode_desc d;
    kda_decode_desc_init(&d);
    d.attention.num_heads = H;
    d.attention.key_dim = d.attention.value_dim = 128;
    d.attention.gate_family = KDA_GATE_BOUNDED;
    d.attention.lower_bound = -5;
    d.attention.state_dtype = pool;
    d.max_tokens = T;
    d.max_sequences = N;
    d.width = width;
    d.mode = mode;
    d.fold = fold;
    check(kda_decode_plan_create(context(), &d, &plan_));
    const auto half = static_cast<size_t>(T * H * 128) * 2;
    for (int i = 0; i < 5; ++i) {
      tokens_.push_back(std::make_unique<Buffer>(half));
      fill_uniform(*tokens_.back(), KDA_BF16, 1, 10 + static_cast<uint32_t>(i));
    }
    beta_ = buffer(static_cast<size_t>(T * H) * 2, KDA_BF16);
    A_log_ = buffer(static_cast<size_t>(H) * 4, KDA_FP32);
    bias_ = buffer(static_cast<size_t>(H) * 512, KDA_FP32);
    pool_ = buffer(static_cast<size_t>(static_cast<double>(slots * H) * state_bytes_), pool);
    kda_decode_args a{};
    a.struct_size = sizeof(a);
    a.q = view(*tokens_[0], KDA_BF16, {T, H, 128});
    a.k = view(*tokens_[1], KDA_BF16, {T, H, 128});
    a.v = view(*tokens_[2], KDA_BF16, {T, H, 128});
    a.gate = view(*tokens_[3], KDA_BF16, {T, H, 128});
    a.out = view(*tokens_[4], KDA_BF16, {T, H, 128});
    a.beta = view(*beta_, KDA_BF16, {T, H});
    a.A_log = view(*A_log_, KDA_FP32, {H});
    a.dt_bias = view(*bias_, KDA_FP32, {H, 128});
    std::vector<int32_t> cu;
    for (int64_t n = 0; n <= N; ++n) cu.push_back(static_cast<int32_t>(n * width));
    cu_ = ints(cu);
    a.sequences.cu_seqlens = view(*cu_, KDA_INT32, {N + 1});
    a.state = view(*pool_, pool, {slots, H, 128, 128});
    // Slots of a set are scattered over the pool, as a server's are.
    std::vector<int32_t> order;
    for (int64_t i = 0; i < slots; ++i) order.push_back(static_cast<int32_t>(i * 7919 % slots));
    slots_ = ints(order);
    accepted_ = ints(std::vector<int32_t>(static_cast<size_t>(N), width > 1 ? width - 1 : 1));
    if (mode == KDA_DECODE_RECORDS) {
      u_ = buffer(static_cast<size_t>(slots * H * width) * 512, KDA_FP32);
      kg_ = buffer(static_cast<size_t>(slots * H * width) * 512, KDA_BF16);
      count_ = ints(std::vector<int32_t>(static_cast<size_t>(slots), width));
      a.records.u = view(*u_, KDA_FP32, {slots, H, width, 128});
      a.records.kg = view(*kg_, KDA_BF16, {slots, H, width, 256});
      a.records.count = view(*count_, KDA_INT32, {slots});
    }
    if (width > 1) a.accepted = view(*accepted_, KDA_INT32, {N});
    for (int s = 0; s < sets_; ++s) {
      a.slots = view(*slots_, KDA_INT32, {N, columns}, s * N * columns);
      args_.push_back(a);
    }
  }
  ~DecodeBench() { kda_plan_destroy(plan_); }
  DecodeBench(const DecodeBench&) = delete;
  DecodeBench& operator=(const DecodeBench&) = delete;

  void call(int i, cudaStream_t stream) const {
    check(kda_decode_run(plan_, &args_[static_cast<size_t>(i % sets_)], {}, stream));
  }
  // Bytes that must move once: states, token rows, and records where there are any.
  double bytes(bool fold) const {
    const auto heads = static_cast<double>(N_ * H_);
    const double tokens = heads * width_ * (5 * 256 + 2);
    if (mode_ == KDA_DECODE_COLUMNS) return heads * state_bytes_ * (1 + width_) + tokens;
    const double records = heads * width_ * (512 + 512);
    const double committed = heads * (width_ - 1) * (512 + 512);
    return heads * state_bytes_ * (fold ? 2 : 1) + tokens + records + (fold ? committed : 0);
  }

 private:
  std::unique_ptr<Buffer> buffer(size_t bytes, kda_dtype dtype) { return random_buffer(bytes, dtype, ++seed_); }
  static std::unique_ptr<Buffer> ints(const std::vector<int32_t>& x) { return int_buffer(x); }

  int64_t H_, N_;
  int width_, sets_ = 1;
  kda_decode_mode mode_;
  double state_bytes_;
  uint32_t seed_ = 20;
  kda_plan* plan_ = nullptr;
  std::vector<std::unique_ptr<Buffer>> tokens_;
  std::unique_ptr<Buffer> beta_, A_log_, bias_, pool_, cu_, slots_, accepted_, u_, kg_, count_;
  std::vector<kda_decode_args> args_;
};

struct Size {
  int64_t H, N;
  double fp32, half;  // wanted, in floors; 0: none
  double us;          // wanted in microseconds for fp32; 0: none
};

void measure(Bench& bench, const std::string& kind, const Size& size, int width, kda_decode_mode mode, bool fold) {
  char group[96];
  std::snprintf(group, sizeof group, "%s H=%d N=%d", kind.c_str(), static_cast<int>(size.H), static_cast<int>(size.N));
  if (!bench.wants(group)) return;
  std::vector<std::unique_ptr<DecodeBench>> benches;
  std::vector<Variant> variants;
  for (kda_dtype pool : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    benches.push_back(std::make_unique<DecodeBench>(size.H, size.N, pool, width, mode, fold));
    const DecodeBench* b = benches.back().get();
    const bool absolute = pool == KDA_FP32 && size.us > 0;
    const double target = absolute ? size.us : (pool == KDA_FP32 ? size.fp32 : size.half);
    variants.push_back({std::string(group) + " " + kda_dtype_name(pool),
                        [b](int i, cudaStream_t s) { b->call(i, s); }, 20, b->bytes(fold), target, absolute});
  }
  bench.measure(group, variants);
}

}  // namespace

void bench_launch(Bench& bench) {
  if (!bench.wants("launch")) return;
  const auto value = int_buffer({0});
  auto* p = static_cast<int*>(value->data());
  std::vector<Variant> variants;
  for (const bool early : {false, true}) {
    for (const int reads : {0, 1}) {
      const std::string name = std::string("launch: ") + (reads ? "one value" : "nothing") + (early ? ", programmatic" : "");
      variants.push_back({name, [=](int, cudaStream_t s) { launch_chained(p, reads, early, s); }, 20, 0, 0, false});
    }
  }
  bench.measure("launch", variants);
}

void bench_decode(Bench& bench) {
  const Size decode[] = {{32, 1, 0, 0, 2.5},        {12, 1, 0, 0, 2.5},        {32, 32, 1.10, 1.20, 0},
                         {12, 128, 1.10, 1.20, 0},  {32, 128, 1.04, 1.10, 0},  {64, 64, 1.04, 1.10, 0},
                         {96, 256, 1.04, 1.10, 0}};
  for (const Size& s : decode) measure(bench, "decode", s, 1, KDA_DECODE_COLUMNS, false);
  const Size verify[] = {{32, 32, 1.08, 1.20, 0}, {96, 128, 1.08, 1.20, 0}};
  for (const Size& s : verify) measure(bench, "verify S=3 columns", s, 4, KDA_DECODE_COLUMNS, false);
  const Size folded[] = {{32, 32, 0, 0, 45}, {96, 128, 0, 0, 460}};
  for (const Size& s : folded) measure(bench, "verify S=3 folded commit", s, 4, KDA_DECODE_RECORDS, true);
  if (bench.wants("enqueue decode")) {
    const DecodeBench b(12, 32, KDA_FP32, 1, KDA_DECODE_COLUMNS, false);
    bench.enqueue("enqueue decode H=12 N=32", [&b](cudaStream_t s) { b.call(0, s); });
  }
}

}  // namespace kda::cuda_test
