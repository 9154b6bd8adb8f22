// Which accesses to shared memory come before which: every warp counts the barriers that it has passed (its epoch),
// and every thread knows of each warp how many epochs are over, from the barriers that it has passed itself. An
// access is ordered after another if it is the same thread's, or the other's epoch is known to be over. Bulk copies
// are warps of their own.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace emulation {

constexpr int kActors = 40;  // warps of a cluster, and a copier for each of its CTAs

struct Clock {
  std::array<uint32_t, kActors> over{};  // epochs of each actor that are over
  void learn(const Clock& other) {
    for (int i = 0; i < kActors; ++i) over[i] = std::max(over[i], other.over[i]);
  }
};

// Who accesses, and what it knows; its own current epoch is clock.over[actor].
struct Accessor {
  int actor = 0, lane = 0;
  const Clock& clock;
};

// The accesses to one CTA's shared memory, by 2-byte words.
class AccessLog {
 public:
  explicit AccessLog(uint32_t bytes) : writes_(bytes / 2), reads_(bytes / 2 * kActors) {}
  // Both answer whether an unordered access came before.
  bool read(uint32_t word, const Accessor& who);
  bool write(uint32_t word, const Accessor& who);

 private:
  static constexpr uint8_t kNobody = 255, kManyLanes = 254;
  struct Last {
    uint32_t epoch = 0;
    uint8_t actor = kNobody, lane = 0;
  };
  static bool is_ordered(const Last& before, const Accessor& who) {
    if (before.actor == kNobody) return true;
    return before.epoch < who.clock.over[before.actor] || (before.actor == who.actor && before.lane == who.lane);
  }
  std::vector<Last> writes_;
  std::vector<Last> reads_;  // [word][actor]: the last epoch in which it read, and the lane
};

inline bool AccessLog::read(uint32_t word, const Accessor& who) {
  const bool is_race = !is_ordered(writes_[word], who);
  const uint32_t epoch = who.clock.over[who.actor];
  Last& mine = reads_[word * kActors + who.actor];
  const bool again = mine.actor != kNobody && mine.epoch == epoch;
  const uint8_t lane = static_cast<uint8_t>(who.lane);
  mine = {epoch, static_cast<uint8_t>(who.actor), again && mine.lane != lane ? kManyLanes : lane};
  return is_race;
}

inline bool AccessLog::write(uint32_t word, const Accessor& who) {
  bool is_race = !is_ordered(writes_[word], who);
  for (int actor = 0; actor < kActors; ++actor) is_race = is_race || !is_ordered(reads_[word * kActors + actor], who);
  writes_[word] = {who.clock.over[who.actor], static_cast<uint8_t>(who.actor), static_cast<uint8_t>(who.lane)};
  return is_race;
}

}  // namespace emulation
