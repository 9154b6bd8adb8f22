// Paired benchmarks on one device (design.md section 7, kernel-notes section 6): every variant is a graph of several
// calls, replayed in rounds of freshly shuffled order together with two plain copies, whose better rate is the ruler.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "runtime.h"

namespace kda::cuda_test {

// Device memory of a benchmark, released with it.
class Buffer {
 public:
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// Fills with reproducible uniform numbers in scale * [-1, 1), in the given dtype (fp32, bf16, fp16).
void fill_uniform(const Buffer& buffer, kda_dtype dtype, float scale, uint32_t seed);
void upload(const Buffer& buffer, const void* data, size_t bytes);
// One launch of the bench's own copy: 16-byte loads and stores, streaming.
void copy_16(void* to, const void* from, size_t bytes, cudaStream_t stream);

// A kernel of 128 blocks that does nothing (`reads` 0) or waits for one value of the grid before; `early`: launched with
// programmatic serialisation.
void launch_chained(int* value, int reads, bool early, cudaStream_t stream);

struct Variant {
  std::string name;
  std::function<void(int, cudaStream_t)> call;  // call number i
  int calls = 20;                               // in one graph
  double bytes = 0;                             // that one call must move (0: no floor is named)
  double target = 0;                            // wanted: at most this many floors, or microseconds if `absolute`
  bool absolute = false;
};

class Bench {
 public:
  Bench(int rounds, uint64_t seed, std::string filter) : rounds_(rounds), seed_(seed), filter_(std::move(filter)) {}
  bool wants(const std::string& name) const { return filter_.empty() || name.find(filter_) != std::string::npos; }
  // Measures the variants of one group beside the two copies; prints a line each and keeps the raw samples.
  void measure(const std::string& group, std::vector<Variant> variants);
  // The same variants one call at a time, shuffled anew in every round: time until the call returns (enqueue), until
  // the device is done (wall), and between two events (event; host gaps included, never called kernel time).
  void eager(const std::string& group, const std::vector<Variant>& variants);
  // Host time of a call until it returns, median of `count`.
  void enqueue(const std::string& name, const std::function<void(cudaStream_t)>& call, int count = 500);
  std::string json(const std::string& command) const;

 private:
  int rounds_;
  uint64_t seed_;
  std::string filter_;
  std::vector<std::string> records_;
};

// Helpers of the benchmarks.
kda_tensor view(const Buffer& b, kda_dtype dtype, std::initializer_list<int64_t> shape, int64_t offset = 0);
void check(kda_status status);
std::unique_ptr<Buffer> random_buffer(size_t bytes, kda_dtype dtype, uint32_t seed);
std::unique_ptr<Buffer> int_buffer(const std::vector<int32_t>& x);
constexpr size_t kColdBytes = size_t{320} << 20;  // what rotates: several times the L2

void bench_launch(Bench& bench);
void bench_decode(Bench& bench);
void bench_step(Bench& bench);
void bench_conv(Bench& bench);
void bench_copy(Bench& bench);
void bench_metadata(Bench& bench);

}  // namespace kda::cuda_test
