// kda bench on a device: modes side by side, floors counted in the device's own copy rate.
#pragma once

#include "bench/device_rounds.h"
#include "bench/workload.h"
#include "json_output.h"

namespace kda::tools {

// "NVIDIA H200, sm_90, 132 multiprocessors, driver 13.0"
std::string device_text(kda_device device);
// What a finished workload is printed and kept as.
void print_device(const bench::Workload& workload, const bench::DeviceRounds& rounds);
Json device_json(const bench::Workload& workload, const bench::DeviceRounds& rounds);

}  // namespace kda::tools
