// The SIMD kernels of prefill and segment maps, compiled once per instruction set (cpu/simd/targets.h).
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/prefill_simd.cc"
#include <hwy/foreach_target.h>

// After foreach_target.h, which includes this file again.
#include "cpu/denormals.h"
#include "cpu/simd/chunk-inl.h"
#include "cpu/simd/merge-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

int64_t head_scratch_bytes(int64_t key_dim, int64_t columns, int64_t heads) {
  return Scratch(nullptr, key_dim, columns, heads).bytes;
}

void run_heads(const HeadTask* tasks, int64_t heads, void* scratch) {
  const FlushDenormals flush;
  run_group(tasks, heads, scratch);
}

void run_merge(const MergeTask& task, void* scratch) {
  const FlushDenormals flush;
  merge(task, scratch);
}

const PrefillFunctions* prefill_table() {
  static constexpr PrefillFunctions table{kPanel, head_scratch_bytes, run_heads, merge_scratch_bytes, run_merge};
  return &table;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {

HWY_EXPORT(prefill_table);

const PrefillFunctions& prefill_functions(Isa isa) { return *KDA_CPU_TABLE(prefill_table, isa)(); }

}  // namespace kda::cpu
#endif
