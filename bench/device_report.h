// What a workload measured on a device is printed and kept as: modes side by side, floors counted in the device's own
// copy rate, and the limit that it was held to.
#pragma once

#include <nlohmann/json.hpp>

#include "bench/device_rounds.h"
#include "bench/workload.h"

namespace kda::bench {

using Json = nlohmann::ordered_json;

// What a variant is held to in graphs: at most `floors` times its bytes' time at the copy rate, plus `microseconds`.
struct Limit {
  double floors = 0, microseconds = 0;
  std::string variant;  // label; empty: the first

  bool none() const { return floors == 0 && microseconds == 0; }
};

// The variant that a limit is of.
const Variant& judged(const Workload& workload, const Limit& limit);

// "NVIDIA H200, sm_90, 132 multiprocessors, driver 13.0"
std::string device_text(kda_device device);
void print_device(const Workload& workload, const DeviceRounds& rounds, const Limit& limit = {});
Json device_json(const Workload& workload, const DeviceRounds& rounds, const Limit& limit = {});
// True if there is no limit, or no graph to judge by.
bool meets(const Workload& workload, const DeviceRounds& rounds, const Limit& limit);

}  // namespace kda::bench
