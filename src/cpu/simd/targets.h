// The instruction sets that a kernel file is compiled for. A kernel file `src/cpu/foo.cc` reads
//
//   #include "cpu/simd/targets.h"        first of all: it limits Highway's list of targets
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "cpu/foo.cc"
//   #include "hwy/foreach_target.h"      includes the file itself again, once per target
//   #include "hwy/highway.h"
//   HWY_BEFORE_NAMESPACE();
//   namespace kda::cpu::HWY_NAMESPACE {
//   namespace { kernels }   // or inline: names of two files may not meet
//   const FooFunctions* foo_table() { static constexpr FooFunctions table{...}; return &table; }
//   }
//   HWY_AFTER_NAMESPACE();
//   #if HWY_ONCE
//   HWY_EXPORT(foo_table);
//   const FooFunctions& foo_functions(Isa isa) { return *KDA_CPU_TABLE(foo_table, isa)(); }
//   #endif
//
// Nothing outside HWY_NAMESPACE is compiled with more than the baseline: whole objects built with -mavx512f
// would leave such code behind in inline functions of the standard library, which the linker may then pick for
// every caller.
#pragma once

// Of x86 (bits 0..13 of Highway's numbering) only the targets of enum Isa; what lies above is the baseline. A
// build for a newer baseline (-march=...) makes that one `portable`. KDA_WITHOUT_AVX512: a build that is run on this
// machine alone, which has none.
#if defined(KDA_WITHOUT_AVX512)
#define HWY_DISABLED_TARGETS (((1LL << 14) - 1) & ~HWY_AVX2)
#elif defined(__x86_64__) || defined(_M_X64)
#define HWY_DISABLED_TARGETS (((1LL << 14) - 1) & ~(HWY_AVX3 | HWY_AVX2))
#else
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

#include <hwy/detect_targets.h>
#include <hwy/targets.h>

#include <cstddef>
#include <cstdint>

#include "cpu/isa.h"

namespace kda::cpu {

// 0: none on this architecture.
inline int64_t target_of(Isa isa) {
  switch (isa) {
#if HWY_ARCH_X86
    case Isa::avx512: return HWY_AVX3;
    case Isa::avx2: return HWY_AVX2;
#elif HWY_ARCH_ARM
    case Isa::portable: return hwy::SupportedTargets() & (HWY_NEON | HWY_STATIC_TARGET);
#endif
    default: return isa == Isa::portable ? HWY_STATIC_TARGET : 0;
  }
}

// Index of an ISA in the tables that HWY_EXPORT makes. A ChosenTarget of our own, not Highway's global one:
// that one belongs to the process, and tests run every ISA. With a single target the table has one entry.
inline size_t dispatch_index(Isa isa) {
  if constexpr ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0) return 0;
  hwy::ChosenTarget chosen;
  chosen.Update(target_of(isa));
  return chosen.GetIndex();
}

}  // namespace kda::cpu

#define KDA_CPU_TABLE(FUNCTION, isa) (HWY_DISPATCH_TABLE(FUNCTION)[::kda::cpu::dispatch_index(isa)])
