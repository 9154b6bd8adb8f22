// Pairwise covering arrays: every pair of values of two parameters occurs in some case, in far fewer cases than
// the full product has.
#pragma once

#include <functional>
#include <vector>

namespace kda::conformance {

// Whether a partly chosen case (-1: not chosen yet) may still become one. Must stay false once it is false.
using Allowed = std::function<bool(const std::vector<int>&)>;

// `sizes[p]` = number of values of parameter p. Each case holds one value number per parameter. Deterministic; the
// first cases cover the most pairs. Pairs that no allowed case contains are left out.
std::vector<std::vector<int>> covering_pairs(const std::vector<int>& sizes, const Allowed& allowed = nullptr);

}  // namespace kda::conformance
