// Paired benchmark of the state copies on the CPU (spec state-copy.md U-1..U-10): kda_state_gather and
// kda_state_scatter against a memcpy per row, in one process, every round all variants in a freshly shuffled order.
//
//   bench_state_copy --out FILE.json [--seed 1] [--rounds 100] [--threads 1] [--shape SUBSTRING] [--max-mib 2048]
//
// FILE must not exist (one process and one file a seed). Timed: output allocation (gather, table `fresh`), checks,
// the copy; freeing comes after the clock has stopped. Table `kept` uses one output again and again: support, not a
// substitute. CPU mode is wall only. Variants:
//   memcpy     the baseline: bounds and flag test, then memcpy or memset, row by row
//   libkda     the call           libkda_again  the same call under another label (A/A control)
//   unchecked  memcpy per row without any test (what the validity predicates cost; only with valid indices)
//   stream     one memcpy of as many bytes between two dense buffers (bandwidth control)
#include <fcntl.h>
#include <kda/kda.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#ifndef KDA_BENCH_SOURCE_HASH
#define KDA_BENCH_SOURCE_HASH "unknown"
#endif

namespace {

struct Options {
  std::string out, shape;
  uint64_t seed = 1;
  int rounds = 100, threads = 1;
  int64_t max_mib = 2048;
};

[[noreturn]] void fail(const std::string& text, int code = 2) {
  std::fprintf(stderr, "bench_state_copy: %s\n", text.c_str());
  std::exit(code);
}
void check(kda_status status, const char* what) {
  if (status != KDA_OK) fail(std::string(what) + ": " + kda_last_error(), 1);
}
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--out") o.out = value;
    else if (name == "--shape") o.shape = value;
    else if (name == "--seed") o.seed = std::stoull(value);
    else if (name == "--rounds") o.rounds = std::stoi(value);
    else if (name == "--threads") o.threads = std::stoi(value);
    else if (name == "--max-mib") o.max_mib = std::stoll(value);
    else fail("unknown option " + name);
  }
  if (o.out.empty() || argc % 2 == 0) fail("wanted --out FILE and a value after every option");
  if (o.rounds < 1) fail("wanted --rounds of at least 1");
  return o;
}

// Lazily backed memory: only touched pages exist, so that a pool of huge row strides costs its payload.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) fail("no address space", 1);
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

struct Shape {
  const char* name;
  int64_t hv;
  kda_dtype dtype;
  int64_t stride, offset;  // elements; stride 0 = dense
};
constexpr Shape kShapes[] = {{"12x128x128 fp32 paged", 12, KDA_FP32, 5308416, 393216},
                             {"32x128x128 fp32", 32, KDA_FP32, 0, 0},
                             {"32x128x128 bf16", 32, KDA_BF16, 0, 0}};
constexpr int64_t kCounts[] = {1, 8, 32, 128, 256};
constexpr int64_t kRotate = int64_t{96} << 20;  // rows of a call come from a pool of at least this size: past the L3

struct Config {
  const Shape* shape;
  int64_t n;
  kda_dtype index;
  bool flags, scatter;
};

kda_tensor tensor(void* data, kda_dtype dtype, std::initializer_list<int64_t> shape) {
  kda_tensor t{};
  t.data = data;
  t.dtype = dtype;
  for (int64_t s : shape) t.shape[t.rank++] = s;
  return kda_tensor_make_dense(&t) == KDA_OK ? t : kda_tensor{};
}

// One configuration's memory and callables. Every round draws new rows.
class Copies {
 public:
  Copies(const Config& c, kda_context* context)
      : c_(c),
        size_(static_cast<int64_t>(kda_dtype_size(c.shape->dtype))),
        payload_(c.shape->hv * 128 * 128),
        row_bytes_(payload_ * size_),
        stride_(c.shape->stride > 0 ? c.shape->stride : payload_),
        rows_(std::max(c.n, kRotate / row_bytes_ + 1)),
        pool_(static_cast<size_t>((c.shape->offset + (rows_ - 1) * stride_ + payload_) * size_)),
        packed_(static_cast<size_t>(c.n * row_bytes_)),
        control_(static_cast<size_t>(2 * c.n * row_bytes_)),
        index32_(static_cast<size_t>(c.n)),
        index64_(index32_.size()),
        flags_(index32_.size(), 1) {
    std::mt19937_64 random(99);
    for (int64_t r = 0; r < rows_; ++r) fill(row(r), row_bytes_, random());
    fill(packed_.data(), c.n * row_bytes_, random());
    fill(control_.data(), 2 * c.n * row_bytes_, random());
    kda_state_copy_desc desc{};
    desc.struct_size = sizeof desc;
    desc.pool = pool_view();
    desc.max_selected = c.n;
    check(kda_state_copy_plan_create(context, &desc, &plan_), "plan");
  }
  ~Copies() { kda_plan_destroy(plan_); }

  void draw(std::mt19937_64& random) {
    std::vector<int64_t> order(static_cast<size_t>(rows_));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    for (size_t i = 0; i < index64_.size(); ++i) {
      std::swap(order[i], order[i + random() % (order.size() - i)]);
      index64_[i] = order[i];
      index32_[i] = static_cast<int32_t>(order[i]);
    }
  }

  void baseline(char* packed) const {
    c_.index == KDA_INT64 ? by_row(packed, index64_.data()) : by_row(packed, index32_.data());
  }
  void unchecked(char* packed) const {
    for (int64_t i = 0; i < c_.n; ++i) {
      char* p = packed + i * row_bytes_;
      char* r = row(c_.index == KDA_INT64 ? index64_[static_cast<size_t>(i)] : index32_[static_cast<size_t>(i)]);
      std::memcpy(c_.scatter ? r : p, c_.scatter ? p : r, static_cast<size_t>(row_bytes_));
    }
  }
  void library(char* packed) const {
    kda_state_copy_args args{};
    args.struct_size = sizeof args;
    args.pool = pool_view();
    args.indices = tensor(c_.index == KDA_INT64 ? static_cast<void*>(const_cast<int64_t*>(index64_.data()))
                                                : static_cast<void*>(const_cast<int32_t*>(index32_.data())),
                          c_.index, {c_.n});
    args.packed = tensor(packed, c_.shape->dtype, {c_.n, c_.shape->hv, 128, 128});
    if (c_.flags) args.has_initial_state = tensor(const_cast<uint8_t*>(flags_.data()), KDA_BOOL, {c_.n});
    check(c_.scatter ? kda_state_scatter(plan_, &args, nullptr) : kda_state_gather(plan_, &args, nullptr), "copy");
  }
  void control() const { std::memcpy(control_.data(), control_.data() + bytes(), static_cast<size_t>(bytes())); }

  char* packed() const { return packed_.data(); }
  int64_t bytes() const { return c_.n * row_bytes_; }
  uint64_t table() const {
    kda_state_copy_info info{};
    info.struct_size = sizeof info;
    check(kda_state_copy_plan_info(plan_, &info), "info");
    return info.table * 8 + static_cast<uint64_t>(info.variants);
  }

  // Both callables against each other on fresh inputs, invalid rows and a false flag included.
  void verify(std::mt19937_64& random) {
    draw(random);
    const auto spoil = static_cast<size_t>(random() % static_cast<uint64_t>(c_.n));
    index64_[spoil] = index32_[spoil] = -1;
    if (c_.flags) flags_[static_cast<size_t>(random() % static_cast<uint64_t>(c_.n))] = 0;
    if (c_.scatter) {
      baseline(packed());
      std::vector<std::vector<char>> wanted;
      for (int64_t x : index64_) wanted.emplace_back(x < 0 ? row(0) : row(x), (x < 0 ? row(0) : row(x)) + row_bytes_);
      for (int64_t x : index64_)
        if (x >= 0) std::memset(row(x), 0x5a, static_cast<size_t>(row_bytes_));
      library(packed());
      for (size_t i = 0; i < wanted.size(); ++i) {
        if (std::memcmp(wanted[i].data(), row(std::max<int64_t>(0, index64_[i])), wanted[i].size()) != 0)
          fail("scatter differs from the loop", 1);
      }
    } else {
      baseline(packed());
      std::vector<char> wanted(packed(), packed() + bytes());
      std::memset(packed(), 0x5a, wanted.size());
      library(packed());
      if (std::memcmp(wanted.data(), packed(), wanted.size()) != 0) fail("gather differs from the loop", 1);
    }
    std::fill(flags_.begin(), flags_.end(), 1);
    draw(random);  // valid rows only from here on
  }

 private:
  static void fill(char* p, int64_t bytes, uint64_t state) {
    for (int64_t i = 0; i + 8 <= bytes; i += 8) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      std::memcpy(p + i, &state, 8);
    }
  }
  char* row(int64_t r) const { return pool_.data() + (c_.shape->offset + r * stride_) * size_; }
  kda_tensor pool_view() const {
    kda_tensor t = tensor(row(0), c_.shape->dtype, {rows_, c_.shape->hv, 128, 128});
    t.strides[0] = stride_;
    return t;
  }
  template <class Index>
  void by_row(char* packed, const Index* index) const {
    for (int64_t i = 0; i < c_.n; ++i) {
      char* p = packed + i * row_bytes_;
      const int64_t r = index[i];
      if (r >= 0 && r < rows_ && (!c_.flags || c_.scatter || flags_[static_cast<size_t>(i)] != 0)) {
        std::memcpy(c_.scatter ? row(r) : p, c_.scatter ? p : row(r), static_cast<size_t>(row_bytes_));
      } else if (!c_.scatter) {
        std::memset(p, 0, static_cast<size_t>(row_bytes_));
      }
    }
  }

  Config c_;
  int64_t size_, payload_, row_bytes_, stride_, rows_;
  Memory pool_, packed_, control_;
  std::vector<int32_t> index32_;
  std::vector<int64_t> index64_;
  std::vector<uint8_t> flags_;
  kda_plan* plan_ = nullptr;
};

enum Variant { kMemcpy, kLibkda, kLibkdaAgain, kUnchecked, kStream, kVariants };
constexpr const char* kNames[kVariants] = {"memcpy", "libkda", "libkda_again", "unchecked", "stream"};

double quantile(std::vector<double> x, double q) {
  std::sort(x.begin(), x.end());
  return x[static_cast<size_t>(q * static_cast<double>(x.size() - 1) + 0.5)];
}

// One call, timed; the output is allocated inside the clock if `fresh`, and freed outside it.
double time_call(const Copies& copies, Variant variant, bool fresh) {
  void* own = nullptr;
  const double start = now();
  if (fresh && variant != kStream) own = std::malloc(static_cast<size_t>(copies.bytes()));
  char* packed = own != nullptr ? static_cast<char*>(own) : copies.packed();
  switch (variant) {
    case kMemcpy: copies.baseline(packed); break;
    case kUnchecked: copies.unchecked(packed); break;
    case kStream: copies.control(); break;
    default: copies.library(packed);
  }
  const double seconds = now() - start;
  std::free(own);
  return seconds;
}

class Report {
 public:
  Report(const Options& o, int argc, char** argv, kda_context* context) {
    const int fd = open(o.out.c_str(), O_CREAT | O_EXCL | O_WRONLY, 0644);
    if (fd < 0) fail(o.out + ": cannot be created (an existing file is an error)");
    file_ = fdopen(fd, "w");
    std::string cpu = "unknown", line, command;
    for (std::ifstream info("/proc/cpuinfo"); std::getline(info, line);) {
      if (line.rfind("model name", 0) == 0) cpu = line.substr(line.find(':') + 2);
    }
    for (int i = 0; i < argc; ++i) command += (i ? " " : "") + std::string(argv[i]);
    std::fprintf(
        file_,
        "{\"library\": \"%s\", \"source_hash\": \"%s\", \"bench_hash\": \"%s\", \"device\": \"%s\", \"isa\": "
        "\"%s\",\n"
        " \"threads\": %d, \"seed\": %llu, \"rounds\": %d, \"command\": \"%s\", \"mode\": \"wall\", \"samples\": [",
        kda_version_string(), kda_source_hash(), KDA_BENCH_SOURCE_HASH, cpu.c_str(), kda_context_isa(context),
        o.threads, static_cast<unsigned long long>(o.seed), o.rounds, command.c_str());
  }
  ~Report() {
    std::fprintf(file_, "\n]}\n");
    std::fclose(file_);
  }
  void sample(const std::string& config, bool fresh, int round, int order, Variant v, double seconds) {
    std::fprintf(file_, "%s\n  [\"%s\", \"%s\", %d, %d, \"%s\", %.9f]", first_ ? "" : ",", config.c_str(),
                 fresh ? "fresh" : "kept", round, order, kNames[v], seconds);
    first_ = false;
  }

 private:
  FILE* file_;
  bool first_ = true;
};

// Median and 5-95 % of the per-round ratios a/b.
std::string ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> r;
  for (size_t i = 0; i < a.size(); ++i) r.push_back(a[i] / b[i]);
  char text[64];
  std::snprintf(text, sizeof text, "%.3f (%.3f-%.3f)", quantile(r, 0.5), quantile(r, 0.05), quantile(r, 0.95));
  return text;
}

void measure(const Config& c, bool fresh, const Options& o, kda_context* context, Report& report) {
  std::mt19937_64 random(o.seed * 1000003 + static_cast<uint64_t>(c.n) * 8 + c.scatter * 4 + c.flags * 2 +
                         (c.index == KDA_INT64));
  Copies copies(c, context);
  copies.verify(random);
  const std::string name = std::string(c.shape->name) + " n" + std::to_string(c.n) +
                           (c.index == KDA_INT64 ? " int64" : " int32") + (c.flags ? " flags" : "") +
                           (c.scatter ? " scatter" : " gather");
  std::vector<double> seconds[kVariants];
  for (int v = 0; v < kVariants; ++v) seconds[v].reserve(static_cast<size_t>(o.rounds));
  const uint64_t table = copies.table();
  for (int v = 0; v < kVariants; ++v) (void)time_call(copies, static_cast<Variant>(v), fresh);  // warm-up
  for (int round = 0; round < o.rounds; ++round) {
    Variant order[kVariants] = {kMemcpy, kLibkda, kLibkdaAgain, kUnchecked, kStream};
    std::shuffle(order, order + kVariants, random);
    for (int i = 0; i < kVariants; ++i) {
      copies.draw(random);
      const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
      const double s = time_call(copies, order[i], fresh);
      if (mallinfo2().uordblks + mallinfo2().hblkhd > before) fail("memory in use grew during a timed call", 1);
      seconds[order[i]].push_back(s);
      report.sample(name, fresh, round, i, order[i], s);
    }
  }
  if (copies.table() != table) fail("the variant table changed", 1);
  const double aa = [&] {
    std::vector<double> r;
    for (size_t i = 0; i < seconds[0].size(); ++i) r.push_back(seconds[kLibkdaAgain][i] / seconds[kLibkda][i]);
    return quantile(r, 0.5);
  }();
  std::printf("%-46s %-5s libkda/memcpy %s  again/libkda %s%s  memcpy/unchecked %s  libkda/stream %s  %.1f GB/s\n",
              name.c_str(), fresh ? "fresh" : "kept", ratio(seconds[kLibkda], seconds[kMemcpy]).c_str(),
              ratio(seconds[kLibkdaAgain], seconds[kLibkda]).c_str(), aa < 0.98 || aa > 1.02 ? " VOID" : "",
              ratio(seconds[kMemcpy], seconds[kUnchecked]).c_str(), ratio(seconds[kLibkda], seconds[kStream]).c_str(),
              static_cast<double>(copies.bytes()) / quantile(seconds[kLibkda], 0.5) * 1e-9);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  kda_context_options options{};
  options.struct_size = sizeof options;
  options.num_threads = o.threads;
  kda_context* context = nullptr;
  check(kda_context_create(&options, &context), "context");
  {
    Report report(o, argc, argv, context);
    for (const Shape& shape : kShapes) {
      for (int64_t n : kCounts) {
        const int64_t mib = (4 * n * shape.hv * 128 * 128 * static_cast<int64_t>(kda_dtype_size(shape.dtype))) >> 20;
        if (std::string(shape.name).find(o.shape) == std::string::npos) continue;
        if (mib > o.max_mib) {
          std::printf("%s n%lld: left out, needs %lld MiB (--max-mib)\n", shape.name, static_cast<long long>(n),
                      static_cast<long long>(mib));
          continue;
        }
        for (kda_dtype index : {KDA_INT32, KDA_INT64}) {
          for (bool flags : {false, true}) {
            for (bool scatter : {false, true}) {
              for (bool fresh : {true, false}) {
                if (scatter && fresh) continue;  // a scatter allocates nothing
                measure({&shape, n, index, flags, scatter}, fresh, o, context, report);
              }
            }
          }
        }
      }
    }
  }
  kda_context_destroy(context);
  return 0;
}
