#include "conformance/limits.h"

#include <algorithm>

namespace kda::conformance {

Limits limits(kda_dtype io, bool degenerate, Arithmetic arithmetic) {
  // The release targets.
  if (arithmetic == Arithmetic::kTensorCores) return degenerate ? Limits{5e-3, 5e-3} : Limits{2.0e-3, 7e-4};
  switch (io) {
    case KDA_FP32: return degenerate ? Limits{1e-4, 2e-4} : Limits{1e-5, 1e-5};
    // fp16 rounds an output eight times finer than bf16: 2.1e-4 for the best result, with bf16's share of slack.
    case KDA_FP16: return degenerate ? Limits{5e-4, 2e-4} : Limits{2.3e-4, 1e-5};
    default: return degenerate ? Limits{2.5e-3, 2e-4} : Limits{1.8e-3, 1e-5};
  }
}

Limits chained_limits(kda_dtype io) { return io == KDA_FP32 ? Limits{1e-5, 1e-5} : Limits{3.5e-3, 1e-3}; }

double pool_rounding(kda_dtype pool) { return pool == KDA_BF16 ? 1.8e-3 : pool == KDA_FP16 ? 2.3e-4 : 0; }

double for_size(double limit, kda_dtype stored, int64_t elements) {
  constexpr int64_t kMany = 8192;  // from here on the mean of the squares is within a tenth of its expectation
  if (elements >= kMany || (stored != KDA_BF16 && stored != KDA_FP16)) return limit;
  return std::max(limit, (stored == KDA_BF16 ? 0x1p-8 : 0x1p-11) + limits(KDA_FP32).out);
}

}  // namespace kda::conformance
