#include "bench/machine.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace kda::bench {

void Workers::run(const std::function<void(int)>& part) const {
  (void)kda_context_parallel_for(
      context_.get(), size(), [](void* arg, int32_t i) { (*static_cast<const std::function<void(int)>*>(arg))(i); },
      const_cast<std::function<void(int)>*>(&part));
}

std::shared_ptr<std::byte> pages(size_t bytes) {
  constexpr size_t kPage = 4096;
  const size_t rounded = (bytes + kPage - 1) / kPage * kPage + kPage;
  auto* const p = static_cast<std::byte*>(std::aligned_alloc(kPage, rounded));
  if (p == nullptr) throw std::bad_alloc();
  std::memset(p, 0, rounded);
  return {p, [](std::byte* q) { std::free(q); }};
}

namespace {

constexpr int kSize = 1536;  // n of the n x n products: 28 MB in all, far beyond L2

// Symbols of a library, or why it is not there.
class Library {
 public:
  explicit Library(const char* name) : handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) error_ = dlerror();
  }
  template <class Function>
  Function* find(const char* symbol) {
    if (handle_ == nullptr) return nullptr;
    auto* const f = reinterpret_cast<Function*>(dlsym(handle_, symbol));
    if (f == nullptr) error_ = std::string(symbol) + " is missing";
    return f;
  }
  const std::string& error() const { return error_; }

 private:
  void* handle_;  // never closed: its threads may still run
  std::string error_;
};

struct Matrices {
  explicit Matrices(int threads) : c(static_cast<size_t>(threads), std::vector<float>(kSize * kSize)) {}
  std::vector<float> a = std::vector<float>(kSize * kSize, 0.37f), b = std::vector<float>(kSize * kSize, 0.71f);
  std::vector<std::vector<float>> c;  // one a thread
};

// A product on each of the context's threads at once: no library's own workers, which would be woken in another way
// and would spin into the time of whoever is measured next.
Variant product(const char* label, std::string kernel, const Workers& workers,
                const std::function<void(float* c)>& multiply, const std::shared_ptr<Matrices>& m) {
  const double work = 2.0 * kSize * kSize * kSize * workers.size();
  return {label, [=](int64_t, void*) { workers.run([&](int i) { multiply(m->c[static_cast<size_t>(i)].data()); }); },
          work, Unit::kFlop, std::move(kernel) + ", a product a thread"};
}

using CblasSgemm = void(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*,
                        int);
using CoreName = char*();
using DnnlSgemm = int(char, char, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t,
                      float, float*, int64_t);

}  // namespace

std::vector<Variant> sgemm_variants(const Workers& workers, const std::string& isa,
                                    std::vector<std::string>& missing) {
  // The environment is read when a library is loaded. A core type or cache size that somebody set would spoil the
  // comparison: the machine's own rate is meant, or with AVX2 forced its AVX2 rate.
  unsetenv("OPENBLAS_CORETYPE");
  unsetenv("OPENBLAS_L2_SIZE");
  unsetenv("ONEDNN_MAX_CPU_ISA");
  unsetenv("DNNL_MAX_CPU_ISA");
  if (isa == "avx2") {
    setenv("OPENBLAS_CORETYPE", "Haswell", 1);
    setenv("ONEDNN_MAX_CPU_ISA", "AVX2", 1);
    setenv("DNNL_MAX_CPU_ISA", "AVX2", 1);  // its name before version 3
  }
  setenv("OPENBLAS_NUM_THREADS", "1", 1);
  setenv("OMP_NUM_THREADS", "1", 1);
  const auto m = std::make_shared<Matrices>(workers.size());
  std::vector<Variant> found;

  Library openblas("libopenblas.so.0");
  auto* const cblas = openblas.find<CblasSgemm>("cblas_sgemm");
  auto* const core = openblas.find<CoreName>("openblas_get_corename");
  if (cblas != nullptr && core != nullptr) {
    const auto multiply = [=](float* c) {
      constexpr int kRowMajor = 101, kNoTranspose = 111;
      cblas(kRowMajor, kNoTranspose, kNoTranspose, kSize, kSize, kSize, 1, m->a.data(), kSize, m->b.data(), kSize, 0,
            c, kSize);
    };
    found.push_back(product("sgemm OpenBLAS", core(), workers, multiply, m));
  } else {
    missing.push_back("OpenBLAS: " + openblas.error());
  }
  for (const char* name : {"libdnnl.so.3", "libdnnl.so.2"}) {
    Library onednn(name);
    auto* const sgemm = onednn.find<DnnlSgemm>("dnnl_sgemm");
    if (sgemm == nullptr) {
      if (std::string(name) == "libdnnl.so.2") missing.push_back("oneDNN: " + onednn.error());
      continue;
    }
    const auto multiply = [=](float* c) {
      (void)sgemm('N', 'N', kSize, kSize, kSize, 1, m->a.data(), kSize, m->b.data(), kSize, 0, c, kSize);
    };
    found.push_back(
        product("sgemm oneDNN", std::string(name) + (isa == "avx2" ? ", at most AVX2" : ""), workers, multiply, m));
    break;
  }
  return found;
}

namespace {

struct Part {
  size_t begin, end;
};
// The i-th of n parts, on borders of a cache line's 64 bytes.
Part part_of(size_t size, int i, int n) {
  const auto border = [&](int k) {
    return k == n ? size : size / static_cast<size_t>(n) * static_cast<size_t>(k) / 64 * 64;
  };
  return {border(i), border(i + 1)};
}

}  // namespace

Variant scale_variant(const Workers& workers, size_t bytes) {
  const auto data = pages(bytes);
  return {"in-place scale",
          [=](int64_t, void*) {
            volatile float one = 1;  // a factor that the compiler cannot see
            const float factor = one;
            auto* const x = reinterpret_cast<float*>(data.get());
            workers.run([&](int i) {
              const Part p = part_of(bytes, i, workers.size());
              for (size_t j = p.begin / 4; j < p.end / 4; ++j) x[j] *= factor;
            });
          },
          2.0 * static_cast<double>(bytes), Unit::kByte, ""};
}

Variant copy_variant(const Workers& workers, size_t bytes) {
  const auto from = pages(bytes), to = pages(bytes);
  return {"memcpy",
          [=](int64_t, void*) {
            workers.run([&](int i) {
              const Part p = part_of(bytes, i, workers.size());
              std::memcpy(to.get() + p.begin, from.get() + p.begin, p.end - p.begin);
            });
          },
          2.0 * static_cast<double>(bytes), Unit::kByte, ""};
}

}  // namespace kda::bench
