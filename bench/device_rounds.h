// Paired measuring on a device (state-copy.md U-2, U-4, U-8): the rounds of rounds.h for variants whose calls go into
// a stream, in four modes that are never mixed, with the copy rate of the device in the same rounds.
#pragma once

#include <kda/kda.h>

#include <iterator>
#include <string>
#include <vector>

#include "bench/rounds.h"

namespace kda::bench {

// graph: one replay of several calls, divided, by the device's clock. event: one call between two events, what the
// host leaves between launches included. enqueue: until a call has returned. wall: until the device is done.
enum class Mode { kGraph, kEvent, kEnqueue, kWall };
constexpr Mode kModes[] = {Mode::kGraph, Mode::kEvent, Mode::kEnqueue, Mode::kWall};
const char* mode_name(Mode mode);

struct DeviceSample {
  int round, order, variant;
  Mode mode;
  double seconds;  // of one call
};

struct DeviceRounds {
  std::vector<Variant> variants;
  std::vector<int> calls;  // in the graph of each
  std::vector<DeviceSample> samples;

  // Seconds of one call, by round; empty for an unknown label and for modes that the device does not have.
  std::vector<double> seconds(const std::string& label, Mode mode) const;
  // Within each round: rate of `of` over the largest rate among `over`.
  std::vector<double> ratios(const std::string& of, const std::vector<std::string>& over, Mode mode) const;
  // Median rate of the faster of the variants whose labels start with "copy rate", bytes a second; 0: there are none.
  double copy_rate() const;
};

// Calls in one graph that take about 1.5 ms at this many bytes, 4 to 100.
int calls_of(double bytes);

// Runs those of the modes that the device has. A graph that cannot be recorded ends in kda::Error.
DeviceRounds run_device_rounds(const kda_context* context, const std::vector<Variant>& variants,
                               const RoundOptions& options,
                               const std::vector<Mode>& modes = {std::begin(kModes), std::end(kModes)});

}  // namespace kda::bench
