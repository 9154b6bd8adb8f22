// What kernels on a device are held to (design section 7): workloads, and the limit of one of their variants.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench/device_report.h"

namespace kda::bench {

struct Target {
  std::string name;  // "decode H=32 N=128 fp32"
  std::function<Workload(const Setting&)> make;
  Limit limit;
};

// Those whose names contain `filter`.
std::vector<Target> targets(const std::string& filter = {});

}  // namespace kda::bench
