// What the decode cases have in common.
#pragma once

#include <utility>
#include <vector>

#include "harness.h"

namespace kda::conformance::test {

class DecodeFixture : public DecodeBackendTest {
 protected:
  static Problem inputs(std::vector<int64_t> lengths, int64_t heads = 2, kda_dtype io = KDA_BF16) {
    FieldInput i;
    i.lengths = std::move(lengths);
    i.heads = heads;
    i.gate_scale = 4;
    i.beta_scale = 3;
    i.io = io;
    return field_problem(i);
  }
  // A zeroed pool: ledger states are read by eye.
  static Tensor zero_pool(int64_t slots, int64_t heads = 1, kda_dtype dtype = KDA_FP32) {
    return Tensor::full(dtype, {slots, heads, 128, 128}, 0);
  }
};
}  // namespace kda::conformance::test
