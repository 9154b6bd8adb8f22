// Which accesses to shared memory come before which: every warp counts the barriers that it has passed (its epoch),
// and every thread knows of each warp how many epochs are over, from the barriers that it has passed itself. An
// access is ordered after another if it is the same thread's, or the other's epoch is known to be over. Bulk copies
// are warps of their own.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
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

// The accesses to one CTA's shared memory, by 2-byte words. A log is long: clear() takes less than making another.
class AccessLog {
 public:
  explicit AccessLog(uint32_t bytes) : words_(bytes / 2), reads_(new Last[bytes / 2 * kActors]) {}
  void clear() { std::fill(words_.begin(), words_.end(), Word{}); }
  // Both answer whether an unordered access came before.
  bool read(uint32_t word, const Accessor& who);
  bool write(uint32_t word, const Accessor& who);

 private:
  static constexpr uint8_t kNobody = 255, kManyLanes = 254;
  struct Last {
    uint32_t epoch;
    uint8_t actor, lane;
  };
  struct Word {
    Last write = {0, kNobody, 0};
    uint64_t readers = 0;  // a bit for each actor
  };
  static_assert(kActors <= 64);
  static bool is_ordered(const Last& before, const Accessor& who) {
    return before.epoch < who.clock.over[before.actor] || (before.actor == who.actor && before.lane == who.lane);
  }
  std::vector<Word> words_;
  std::unique_ptr<Last[]> reads_;  // [word][actor], of its readers: the last epoch in which it read, and the lane
};

inline bool AccessLog::read(uint32_t word, const Accessor& who) {
  Word& at = words_[word];
  const uint64_t mine = uint64_t{1} << who.actor;
  const uint32_t epoch = who.clock.over[who.actor];
  Last& last = reads_[word * kActors + who.actor];
  const uint8_t lane = static_cast<uint8_t>(who.lane);
  const bool others = (at.readers & mine) != 0 && last.epoch == epoch && last.lane != lane;
  last = {epoch, static_cast<uint8_t>(who.actor), others ? kManyLanes : lane};
  at.readers |= mine;
  return at.write.actor != kNobody && !is_ordered(at.write, who);
}

inline bool AccessLog::write(uint32_t word, const Accessor& who) {
  Word& at = words_[word];
  bool is_race = at.write.actor != kNobody && !is_ordered(at.write, who);
  for (uint64_t left = at.readers; left != 0; left &= left - 1)
    is_race = is_race || !is_ordered(reads_[word * kActors + __builtin_ctzll(left)], who);
  at.write = {who.clock.over[who.actor], static_cast<uint8_t>(who.actor), static_cast<uint8_t>(who.lane)};
  return is_race;
}

}  // namespace emulation
