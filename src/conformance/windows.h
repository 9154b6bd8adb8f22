// Conv pools (spec P-2, W) of a case: one to three parts in either layout, and which columns a call must have set.
#pragma once

#include <kda/kda.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/cases.h"
#include "conformance/tensor.h"

namespace kda::conformance {

struct WindowPools {
  kda_conv_layout layout = KDA_CONV_SD;
  std::vector<Tensor> parts;

  kda_tensor view(size_t part) const { return part < parts.size() ? parts[part].view() : kda_tensor{}; }
};

// Random raw inputs in every column of every slot; `gapped`: slots apart from one another.
WindowPools make_windows(kda_conv_layout layout, const std::vector<int64_t>& channels, int64_t slots, int64_t columns,
                         kda_dtype dtype, bool gapped);

// Slots that the oracle left alone keep their bits; in the others columns 0..columns[slot]-1 are the oracle's, bit
// for bit (windows are copies), the rest is unspecified (W-2).
void check_windows(Report& report, const std::string& what, const WindowPools& before, const WindowPools& after,
                   const WindowPools& oracle, const std::vector<int64_t>& columns);
// "" if both hold the same bits.
std::string first_difference(const WindowPools& a, const WindowPools& b);

}  // namespace kda::conformance
