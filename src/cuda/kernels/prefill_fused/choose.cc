#include "cuda/kernels/prefill_fused/choose.h"

#include <algorithm>

namespace kda::cuda::prefill_fused {
namespace {

constexpr int64_t kItem = 32, kShortestSegment = 256;
constexpr int kMostSegments = 16;

// Microseconds.
constexpr double kFusedItem = 2.0, kFusedStart = 5;     // a cluster of two SMs
constexpr double kFusedWork = 6.5, kFusedFirst = 2.25;  // and a work's start, less where it has few items
constexpr double kStageItem = 2.56, kStageStart = 4;    // an item's preparation, on one SM
constexpr double kLoneItem = 0.98, kPairItem = 1.2;     // a step of a chain on two SMs, on one
constexpr double kChainWork = 3, kChainStart = 8;
constexpr double kMergeStep = 9, kMergeStart = 3;
// What a chain reads and writes of memory: a step's stage, values and outputs; a work's states. Bytes, a microsecond.
constexpr double kStepBytes = 55.8e3, kStateBytes = 131e3, kRate = 3.9e6;
constexpr double kGain = 0.97;  // of the fused, uncut form's time: what another must save

int64_t rounds(int64_t works, int64_t room) { return (works + room - 1) / room; }

double fused_time(int64_t works, int64_t items, int sm_count) {
  const int64_t turns = rounds(works, std::max(1, sm_count / 2));
  const auto steps = static_cast<double>(items);
  return kFusedStart + static_cast<double>(turns) * (kFusedItem * steps + std::min(kFusedWork, kFusedFirst * steps));
}

double chain_time(int64_t works, int64_t items, int sm_count) {
  const bool is_lone = 2 * works <= sm_count;
  const auto turns = static_cast<double>(is_lone ? 1 : rounds(works, sm_count)), steps = static_cast<double>(items);
  const double latency = turns * steps * (is_lone ? kLoneItem : kPairItem);
  const double memory = static_cast<double>(works) * (steps * kStepBytes + kStateBytes) / kRate;
  return kChainStart + kChainWork * (turns - 1) + std::max(latency, memory);
}

}  // namespace

Form choose_form(const CallFacts& call) {
  Form best;
  if (call.sequences <= 0 || call.value_heads <= 0 || call.sm_count <= 0) return best;
  const int64_t units = call.sequences * call.value_heads;
  const int64_t length = rounds(call.tokens, call.sequences), items = rounds(length, kItem);
  const double prepare = kStageStart + kStageItem * static_cast<double>(units * items) / call.sm_count;
  int64_t whole = 1;
  while (whole < length) whole *= 2;
  best.microseconds = fused_time(units, items, call.sm_count);
  double limit = kGain * best.microseconds;
  const auto consider = [&](int segments, bool is_staged, double microseconds) {
    if (microseconds < limit) best = {segments, is_staged, microseconds}, limit = microseconds;
  };
  if (call.may_stage) consider(1, true, prepare + chain_time(units, items, call.sm_count));
  for (int segments = 2; call.may_cut && segments <= kMostSegments; ++segments) {
    const int64_t cut = std::max(kShortestSegment, rounds(rounds(whole, segments), 64) * 64);
    const int64_t count = rounds(length, cut), steps = cut / kItem;
    if (count < 2) break;
    const int64_t summaries = units * (2 * count - 3), pieces = units * count;
    const double merge = kMergeStart + kMergeStep * static_cast<double>(count - 2);
    consider(segments, false,
             merge + fused_time(summaries, steps, call.sm_count) + fused_time(pieces, steps, call.sm_count));
    if (!call.may_stage) continue;
    consider(
        segments, true,
        prepare + merge + chain_time(summaries, steps, call.sm_count) + chain_time(pieces, steps, call.sm_count));
  }
  return best;
}

}  // namespace kda::cuda::prefill_fused
