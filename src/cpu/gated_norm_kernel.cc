// Gated norm over token rows (spec L-7.4); the row itself is in cpu/simd/norm-inl.h.
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gated_norm_kernel.cc"
#include <hwy/foreach_target.h>

#include "cpu/gated_norm_call.h"
#include "cpu/simd/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace {

void run(const GatedNormCall& c, int64_t r0, int64_t r1, float* scratch) {
  const kda_gated_norm_desc& d = *c.desc;
  const kda_tensor& x = c.args->o;
  const int64_t V = d.value_dim;
  float* const o = scratch;
  float* const weight = scratch + padded(V);
  load_row(static_cast<const float*>(c.args->weight.data), V, weight);
  const int64_t tokens = x.shape[x.rank - 3];
  for (int64_t r = r0; r < r1; ++r) {
    const TokenSpan span{r / tokens, r % tokens, 1};
    for (int64_t h = 0; h < d.num_value_heads; ++h) {
      load_any(d.io_dtype, head_row(x, span, 3, 0, h), V, o);
      norm_any(d.io_dtype, o, head_row(c.args->z, span, 3, 0, h), weight, V, static_cast<float>(d.eps),
               const_cast<char*>(head_row(c.args->out, span, 3, 0, h)));
    }
  }
}

}  // namespace

const GatedNormFunctions* gated_norm_table() {
  static constexpr GatedNormFunctions table = {run};
  return &table;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {
HWY_EXPORT(gated_norm_table);
const GatedNormFunctions& gated_norm_functions(Isa isa) { return *KDA_CPU_TABLE(gated_norm_table, isa)(); }
}  // namespace kda::cpu
#endif
