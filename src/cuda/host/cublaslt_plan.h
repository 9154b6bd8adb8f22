// A product with an algorithm for every number of rows, chosen and tried when a plan is created.
#pragma once

#include <memory>
#include <vector>

#include "core/device_block.h"
#include "cuda/host/cublaslt_product.h"

namespace kda::cuda {

class PlannedProduct {
 public:
  PlannedProduct() = default;
  // For 1 to `most` rows. Each algorithm has run once on scratch memory when this returns: its code is loaded.
  //
  // Plain: rows are counted up to the next power of two, and the first algorithm that cuBLASLt proposes for that
  // number serves it. Invariant: one algorithm that does not cut the inner dimension serves every number of rows; it
  // has been seen to give equal rows of x equal bits, alone and at any place among others.
  static Result<PlannedProduct> create(const Context& context, const ProductShape& shape, int64_t most,
                                       bool invariant);

  int64_t workspace_bytes() const { return workspace_; }
  const Product& product() const { return *product_; }
  // 1 <= n <= most.
  Status run(int64_t n, const ProductOperands& operands, void* workspace, void* stream) const;

 private:
  struct Choice {
    int64_t rows = 0;  // up to which it serves
    lt::Algorithm algorithm{};
  };
  Status choose_plain(const Context& context, int64_t most);
  Status choose_invariant(const Context& context, int64_t most);

  std::unique_ptr<Product> product_;
  std::vector<Choice> choices_;  // ascending
  int64_t workspace_ = 0;
};

}  // namespace kda::cuda
