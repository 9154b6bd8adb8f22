// Seeded hashes that give the replay its random choices: which row a token reads, which draft is kept, who is
// preempted. Pure functions, so that a choice depends on what it is about and never on when it is made.
#pragma once

#include <cstdint>

namespace kda::serve {

// The splitmix64 finaliser.
constexpr uint64_t mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

template <class... Rest>
constexpr uint64_t mix(uint64_t first, Rest... rest) {
  uint64_t h = mix(first);
  ((h = mix(h ^ static_cast<uint64_t>(rest))), ...);
  return h;
}

// Uniform in [0, 1).
constexpr double unit(uint64_t hash) { return static_cast<double>(hash >> 11) * 0x1p-53; }

// What a hash is for; keeps the streams apart.
enum HashTag : uint64_t {
  kTagPrompt = 1,
  kTagOwnBlock,
  kTagGenerated,
  kTagRejected,
  kTagAccept,
  kTagPreempt,
  kTagVerify,
  kTagTable,
  kTagTaps,
  kTagGate,
  kTagBias,
  kTagNorm,
  kTagMatrix,
  kTagHidden,
};

}  // namespace kda::serve
