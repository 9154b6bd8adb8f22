#include "conformance/windows.h"

#include <algorithm>
#include <cmath>

#include "conformance/random.h"

namespace kda::conformance {

WindowPools make_windows(kda_conv_layout layout, const std::vector<int64_t>& channels, int64_t slots, int64_t columns,
                         kda_dtype dtype, bool gapped) {
  WindowPools pools;
  pools.layout = layout;
  for (size_t i = 0; i < channels.size(); ++i) {
    const int64_t C = channels[i];
    const Shape shape = layout == KDA_CONV_SD ? Shape{slots, columns, C} : Shape{slots, C, columns};
    Shape strides = dense_strides(shape);
    if (gapped) strides[0] += 13;
    Tensor pool(dtype, shape, strides, gapped ? 6 : 0);
    std::vector<double> x = uniform_vector(static_cast<uint32_t>(20 + i), pool.size());
    if (C < 16) {  // sums of few terms that may cancel have no relative accuracy
      for (double& v : x) v = std::fabs(v) + 0.1;
    }
    pool.assign(x);
    pools.parts.push_back(std::move(pool));
  }
  return pools;
}

void check_windows(Report& report, const std::string& what, const WindowPools& before, const WindowPools& after,
                   const WindowPools& oracle, const std::vector<int64_t>& columns) {
  for (size_t i = 0; i < before.parts.size(); ++i) {
    const std::string name = what + "[" + std::to_string(i) + "]";
    std::vector<int64_t> written;
    const int64_t slots = before.parts[i].shape()[0];
    const int column_dim = before.layout == KDA_CONV_SD ? 0 : 1;
    for (int64_t s = 0; s < slots; ++s) {
      const kda_tensor was = select(before.parts[i], 0, s), wanted = select(oracle.parts[i], 0, s);
      if (same_bits(was, wanted)) continue;
      written.push_back(s);
      const int64_t count = std::min(columns[static_cast<size_t>(s)], was.shape[column_dim]);
      report.expect_none(name + ", slot " + std::to_string(s),
                         conformance::first_difference(narrow(select(after.parts[i], 0, s), column_dim, 0, count),
                                                       narrow(wanted, column_dim, 0, count)));
    }
    report.expect_none(name + ": memory that the call does not name",
                       Snapshot(before.parts[i]).changes_outside(after.parts[i], written));
  }
}

std::string first_difference(const WindowPools& a, const WindowPools& b) {
  for (size_t i = 0; i < a.parts.size(); ++i) {
    const std::string difference = first_difference(a.parts[i].view(), b.parts[i].view());
    if (!difference.empty()) return "part " + std::to_string(i) + ", " + difference;
  }
  return "";
}

}  // namespace kda::conformance
