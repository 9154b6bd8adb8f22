// One matrix product of cuBLASLt: Y [n, m] = X [n, k] · W [m, k]ᵀ, W dense, one dtype for all three, fp32 sums, one
// rounding. cuBLAS counts columns first: to it Yᵀ = W·Xᵀ, with m rows and n columns.
#pragma once

#include <memory>
#include <vector>

#include "core/context.h"
#include "cuda/host/cublaslt.h"
#include "kda/types.h"

namespace kda::cuda {

struct ProductShape {
  kda_dtype dtype = KDA_BF16;
  int64_t m = 0, k = 0;
  int64_t x_stride = 0, y_stride = 0;  // elements; a hint, and the alignment that runs keep to
};

struct ProductOperands {
  const void* w = nullptr;
  const void* x = nullptr;
  void* y = nullptr;
  int64_t x_stride = 0, y_stride = 0;
};

class Product {
 public:
  // Bytes of workspace that an algorithm may ask for.
  static constexpr int64_t kWorkspace = 32 << 20;

  static Result<std::unique_ptr<Product>> create(const Context& context, const ProductShape& shape);
  ~Product();
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  const ProductShape& shape() const { return shape_; }
  // What cuBLASLt proposes for n rows, best first. `whole`: algorithms that do not cut the inner dimension.
  Result<std::vector<lt::Heuristic>> propose(int64_t n, bool whole) const;
  // One launch, or two where the inner dimension is cut. The calling thread's device is the context's.
  Status run(int64_t n, const ProductOperands& operands, const lt::Algorithm& algorithm, void* workspace,
             int64_t workspace_bytes, void* stream) const;
  // Bytes that every row of x, and of y, has to start at a multiple of.
  int64_t x_alignment() const { return x_alignment_; }
  int64_t y_alignment() const { return y_alignment_; }

 private:
  Product(lt::Handle* handle, const ProductShape& shape);
  Status layouts(int64_t n, int64_t x_stride, int64_t y_stride, lt::Layout& w, lt::Layout& x, lt::Layout& y) const;

  lt::Handle* handle_;
  ProductShape shape_;
  int64_t x_alignment_, y_alignment_;
  lt::Desc* desc_ = nullptr;
};

}  // namespace kda::cuda
