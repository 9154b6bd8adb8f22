#include "cuda/host/cublaslt_plan.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/half.h"
#include "base/tensor.h"
#include "core/context.h"

namespace kda::cuda {
namespace {

constexpr int64_t kWarmRows = 1024;  // most rows of an algorithm's first run

// A cheap hash: trial data has to be uneven, not random.
float noise(uint64_t i) {
  i = (i + 1) * 0x9e3779b97f4a7c15u;
  i = (i ^ (i >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<float>(static_cast<int32_t>(i >> 40) - (1 << 23)) * 0x1p-23f;
}

template <class T>
void fill(char* to, int64_t count, uint64_t seed) {
  for (int64_t i = 0; i < count; ++i) {
    reinterpret_cast<T*>(to)[i] = from_float<T>(noise(seed + static_cast<uint64_t>(i)));
  }
}
std::vector<char> noise_of(kda_dtype dtype, int64_t count, uint64_t seed) {
  std::vector<char> data(static_cast<size_t>(count) * dtype_size(dtype));
  if (dtype == KDA_FP32) fill<float>(data.data(), count, seed);
  else if (dtype == KDA_BF16) fill<bf16>(data.data(), count, seed);
  else fill<fp16>(data.data(), count, seed);
  return data;
}

// Scratch memory with a weight, rows of x of three kinds in turn, and room for y.
class Trial {
 public:
  Trial(const Context& context, const Product& product)
      : context_(context), product_(product), stream_(context), size_(dtype_size(product.shape().dtype)) {}

  Status create(int64_t rows) {
    const ProductShape& s = product_.shape();
    KDA_RETURN_IF_ERROR(stream_.status());
    KDA_RETURN_IF_ERROR(allocate(s.m * s.k * size_, w_));
    KDA_RETURN_IF_ERROR(allocate(rows * s.x_stride * size_, x_));
    KDA_RETURN_IF_ERROR(allocate(rows * s.y_stride * size_, y_));
    KDA_RETURN_IF_ERROR(allocate(Product::kWorkspace, workspace_));
    const std::vector<char> pattern = noise_of(s.dtype, std::min<int64_t>(s.m * s.k, (1 << 18) + 8), 1);
    for (int64_t at = 0; at < w_.bytes(); at += static_cast<int64_t>(pattern.size())) {
      const auto bytes = std::min(static_cast<int64_t>(pattern.size()), w_.bytes() - at);
      KDA_RETURN_IF_ERROR(
          context_.runtime->copy(w_.data() + at, pattern.data(), static_cast<size_t>(bytes), stream_.get()));
    }
    const std::vector<char> kinds = noise_of(s.dtype, kKinds * s.x_stride, 1u << 30);
    for (int64_t r = 0; r < rows; r += kKinds) {
      const int64_t bytes = std::min(kKinds, rows - r) * s.x_stride * size_;
      KDA_RETURN_IF_ERROR(context_.runtime->copy(x_.data() + r * s.x_stride * size_, kinds.data(),
                                                 static_cast<size_t>(bytes), stream_.get()));
    }
    return stream_.synchronize();
  }

  Status run(int64_t n, const lt::Algorithm& algorithm) {
    const ProductShape& s = product_.shape();
    KDA_RETURN_IF_ERROR(product_.run(n, {w_.data(), x_.data(), y_.data(), s.x_stride, s.y_stride}, algorithm,
                                     workspace_.data(), Product::kWorkspace, stream_.get()));
    return stream_.synchronize();
  }

  // After run(n): rows of one kind have the bits that they had in every run before. forget() begins anew.
  Result<bool> rows_repeat(int64_t n) {
    const ProductShape& s = product_.shape();
    const auto row = static_cast<size_t>(s.m * size_), pitch = static_cast<size_t>(s.y_stride * size_);
    std::vector<char> y(static_cast<size_t>(n) * pitch);
    KDA_RETURN_IF_ERROR(context_.runtime->copy(y.data(), y_.data(), y.size(), stream_.get()));
    KDA_RETURN_IF_ERROR(stream_.synchronize());
    for (size_t r = 0; r < static_cast<size_t>(n); ++r) {
      std::vector<char>& seen = seen_[r % kKinds];
      if (seen.empty()) seen.assign(y.data() + r * pitch, y.data() + r * pitch + row);
      if (std::memcmp(seen.data(), y.data() + r * pitch, row) != 0) return false;
    }
    return true;
  }
  void forget() {
    for (std::vector<char>& kind : seen_) kind.clear();
  }

 private:
  static constexpr int64_t kKinds = 3;  // odd: a kind comes to every place of a tile

  Status allocate(int64_t bytes, DeviceBlock& out) {
    auto block = DeviceBlock::allocate(context_, bytes);
    if (!block.ok()) return block.status().with_context("projection: scratch of the plan's creation");
    out = std::move(block.value());
    return {};
  }

  const Context& context_;
  const Product& product_;
  CreationStream stream_;
  int64_t size_;
  DeviceBlock w_, x_, y_, workspace_;
  std::vector<char> seen_[kKinds];
};

// Numbers of rows of an invariance trial: few, and around the edges of tiles. The same for every plan, so that plans
// of other bounds choose the same algorithm.
constexpr int64_t kInvarianceRows[] = {1, 2, 3, 8, 17, 64, 65, 127, 128, 129, 200, 257};

std::string text(const ProductShape& s) { return str_cat(dtype_name(s.dtype), " product ", s.k, " -> ", s.m); }

}  // namespace

Result<PlannedProduct> PlannedProduct::create(const Context& context, const ProductShape& shape, int64_t most,
                                              bool invariant) {
  PlannedProduct p;
  auto product = Product::create(context, shape);
  if (!product.ok()) return product.status();
  p.product_ = std::move(product.value());
  if (most < 1) return p;
  KDA_RETURN_IF_ERROR(invariant ? p.choose_invariant(context, most) : p.choose_plain(context, most));
  return p;
}

Status PlannedProduct::choose_plain(const Context& context, int64_t most) {
  Trial trial(context, *product_);
  KDA_RETURN_IF_ERROR(trial.create(std::min(most, kWarmRows)));
  for (int64_t rows = 1; choices_.empty() || choices_.back().rows < most; rows *= 2) {
    const int64_t n = std::min(rows, most);
    auto proposed = product_->propose(n, /*whole=*/false);
    if (!proposed.ok()) return proposed.status();
    Status last = unsupported(text(product_->shape()), ": wanted an algorithm for ", n, " rows, got none");
    for (const lt::Heuristic& h : proposed.value()) {
      last = trial.run(std::min(n, kWarmRows), h.algorithm);
      if (!last.ok()) continue;
      choices_.push_back({n, h.algorithm});
      workspace_ = std::max(workspace_, static_cast<int64_t>(h.workspace));
      break;
    }
    KDA_RETURN_IF_ERROR(last);
  }
  return {};
}

Status PlannedProduct::choose_invariant(const Context& context, int64_t most) {
  Trial trial(context, *product_);
  KDA_RETURN_IF_ERROR(trial.create(kInvarianceRows[std::size(kInvarianceRows) - 1]));
  // Tiles for 128 rows serve long prompts nearly as well as larger ones, and a few decoding rows about as fast as the
  // weights can be read.
  int proposals = 0;
  for (const int64_t n : {128, 64, 256, 16}) {
    auto proposed = product_->propose(n, /*whole=*/true);
    if (!proposed.ok()) return proposed.status();
    for (const lt::Heuristic& h : proposed.value()) {
      ++proposals;
      trial.forget();
      bool holds = true;
      for (const int64_t rows : kInvarianceRows) {
        holds = holds && trial.run(rows, h.algorithm).ok();
        if (!holds) break;
        auto repeat = trial.rows_repeat(rows);
        if (!repeat.ok()) return repeat.status();
        holds = repeat.value();
      }
      if (!holds) continue;
      choices_.push_back({most, h.algorithm});
      workspace_ = Product::kWorkspace;  // what it wants may depend on the number of rows
      return {};
    }
  }
  return unsupported(text(product_->shape()), ": batch_invariant: wanted an algorithm of ", lt::library().file,
                     " that gives a row the same bits in every batch, got ", proposals, " that do not");
}

Status PlannedProduct::run(int64_t n, const ProductOperands& operands, void* workspace, void* stream) const {
  const auto choice = std::find_if(choices_.begin(), choices_.end(), [&](const Choice& c) { return n <= c.rows; });
  if (choice == choices_.end()) return internal_error("projection: wanted at most the plan's rows, got ", n);
  return product_->run(n, operands, choice->algorithm, workspace, workspace_, stream);
}

}  // namespace kda::cuda
