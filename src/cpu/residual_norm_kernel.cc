// Residual sum and RMS norm over token rows:
//   h = io(h + add);   out = io(h · rsqrt(mean_d(h²) + eps) · weight_d)   in fp32, multiplied in this order.
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/residual_norm_kernel.cc"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <cmath>

#include "cpu/residual_norm_call.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace {

char* row_of(const kda_tensor& t, int64_t r) {
  return static_cast<char*>(t.data) + r * t.strides[0] * static_cast<int64_t>(dtype_size(t.dtype));
}

void run(const ResidualNormCall& c, int64_t r0, int64_t r1, float* h) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const kda_residual_norm_desc& desc = *c.desc;
  const kda_residual_norm_args& a = *c.args;
  const int64_t n = desc.hidden, whole = padded(n);
  float* const other = h + whole;
  const auto* const weight = static_cast<const float*>(a.weight.data);
  for (int64_t r = r0; r < r1; ++r) {
    load_any(desc.io_dtype, row_of(a.residual, r), n, h);
    if (present(a.add)) {
      load_any(desc.io_dtype, row_of(a.add, r), n, other);
      for (int64_t i = 0; i < whole; i += lanes) {
        hn::StoreU(hn::Add(hn::LoadU(d, h + i), hn::LoadU(d, other + i)), d, h + i);
      }
      store_any(desc.io_dtype, h, n, row_of(a.residual, r));
      load_any(desc.io_dtype, row_of(a.residual, r), n, h);
    }
    const float mean = dot(h, h, whole) / static_cast<float>(n);
    const auto scale = hn::Set(d, 1.0f / std::sqrt(mean + static_cast<float>(desc.eps)));
    if (weight != nullptr) load_row(weight, n, other);
    for (int64_t i = 0; i < whole; i += lanes) {
      auto x = hn::Mul(hn::LoadU(d, h + i), scale);
      if (weight != nullptr) x = hn::Mul(x, hn::LoadU(d, other + i));
      hn::StoreU(x, d, h + i);
    }
    store_any(desc.io_dtype, h, n, row_of(a.out, r));
  }
}

}  // namespace

const ResidualNormFunctions* residual_norm_table() {
  static constexpr ResidualNormFunctions table = {run};
  return &table;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {
HWY_EXPORT(residual_norm_table);
const ResidualNormFunctions& residual_norm_functions(Isa isa) { return *KDA_CPU_TABLE(residual_norm_table, isa)(); }
}  // namespace kda::cpu
#endif
