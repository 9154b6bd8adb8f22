// One request's life in the engine.
//
//   waiting --admit--> prefilling --last prompt token--> decoding --last output--> finished
//                          |  ^                             |  ^
//                          v  | resume                      v  | resume
//                        swapped (state and window in host memory)
//
// Any phase ends in `failed` when a step that holds the request fails.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "serve/content.h"
#include "serve/digest.h"
#include "serve/prefix_cache.h"
#include "serve/trace.h"

namespace kda::serve {

enum class Phase : uint8_t { kWaiting, kPrefilling, kDecoding, kFinished, kFailed };

// What a verified request leaves behind: its output rows and final state, layer by layer, in the run's dtypes.
struct Capture {
  std::vector<std::vector<char>> rows;     // [layers][m * HV * V]
  std::vector<std::vector<char>> states;   // [layers][HV * V * K]
  std::vector<std::vector<char>> windows;  // [layers][(W-1) * channels]

  // Layer mode: the layers' inputs and outputs [layers][tokens * D] of the first kVerifiedPrompt prompt tokens and of
  // all decoded ones; states and windows where the prompt ended.
  std::vector<std::vector<char>> inputs, outputs;
  std::vector<std::vector<char>> prompt_states, prompt_windows;
};
inline constexpr int64_t kVerifiedPrompt = 1024;

struct Request {
  TraceRequest trace;
  TokenOwner owner;

  Phase phase = Phase::kWaiting;
  bool swapped = false;      // its state lies in `payload`
  bool fresh = true;         // no state yet: the first step starts from zero
  int64_t prefilled = 0;     // prompt tokens in the state, restored ones counted
  int64_t cached = 0;        // of these, restored from a snapshot
  int64_t decoded = 0;       // generated tokens fed back
  int32_t accepted = 1;      // tokens kept of the last step (spec V-2)
  bool has_records = false;  // records mode: the last step's records are not committed yet
  int32_t seat = -1;         // row of the records
  std::array<int64_t, KDA_MAX_VERIFY> pages{};
  int32_t num_pages = 0;

  // Table rows of prompt tokens [ahead_first, ...) that were looked up while a device worked.
  std::vector<uint32_t> ahead;
  int64_t ahead_first = 0;
  std::vector<PrefixKey> keys;  // of its full prompt blocks, while it runs
  std::vector<char> payload;
  Digest digest;
  std::unique_ptr<Capture> capture;
  Hash128 result;

  double admitted_s = -1, first_s = -1, last_s = -1;  // on the run's clock

  // Generated tokens that are fed back: the last one is not.
  int64_t decode_length() const { return trace.output_length > 0 ? trace.output_length - 1 : 0; }
  int64_t prompt_left() const { return trace.input_length - prefilled; }
  int64_t position() const { return prefilled + decoded; }
  // Drafts that the next step may try: never more than tokens left (design.md 4).
  int64_t drafts_left() const { return decode_length() - decoded - 1; }
};

}  // namespace kda::serve
