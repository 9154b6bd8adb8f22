#include "cuda/kernels/prefill_fused/choose.h"

#include <algorithm>

namespace kda::cuda::prefill_fused {
namespace {

constexpr int64_t kItem = 32, kShortestSegment = 256;
constexpr int kMostSegments = 16;

// Microseconds. What an item takes, by the form of its diagonal blocks:
struct ItemCosts {
  double fused;        // a cluster of two SMs
  double stage;        // its preparation, on one SM
  double beside;       // the same where memory does not limit it
  int prepare_groups;  // that share an SM
};
constexpr ItemCosts kAnchored{1.645, 2.32, 2.04, 4}, kDyadic{2.24, 3.07, 2.84, 3};
constexpr double kFusedStart = 5, kFusedWork = 4.1, kFusedFirst = 1.75;  // of a work, less where it has few items
// Clearing of words, cutting of shares, handing over; what shares must save.
constexpr double kBalanceStart = 7.5, kBalanceGain = 1.015;
constexpr double kStageStart = 4, kStageOrder = 1e-3;  // and the order of sequences, by their number's square
constexpr double kLoneItem = 0.82;                     // a step of a chain on two SMs
constexpr double kChainWork = 2.6, kChainStart = 8;
constexpr double kMergeStep = 3, kMergeStart = 4;
// A step of a chain on one SM, and what it reads and writes of memory: its stage, values and outputs.
struct StepCosts {
  double time, bytes;
};
constexpr StepCosts kWholeStep{1.4, 55.8e3}, kSummaryStep{1.2, 33.3e3};
constexpr double kStateBytes = 131e3, kRate = 3.9e6;  // of a work; bytes a microsecond
// Beside one another: from the start until the first chain is under way; what is read and written of memory for an
// item.
constexpr double kBesideStart = 16, kItemBytes = 80.5e3;
constexpr double kBesideLoneItem = 0.885;  // a step of a chain on two SMs, there
constexpr double kUneven = 2;              // the longest of several sequences, of their mean, where nobody knows
constexpr double kGain = 0.97;             // of the fused, uncut form's time: what another must save

const ItemCosts& costs_of(const CallFacts& call) { return call.diagonal == Diagonal::kDyadic ? kDyadic : kAnchored; }

int64_t rounds(int64_t works, int64_t room) { return (works + room - 1) / room; }

struct Size {
  int64_t units, items;           // sequences x heads; items of each
  int64_t steps = 0, pieces = 1;  // of a segment, segments
};

Size size_of(const CallFacts& call, int segments) {
  const int64_t length = rounds(call.tokens, call.sequences);
  Size size{call.sequences * call.value_heads, rounds(length, kItem)};
  size.steps = size.items;
  if (segments <= 1) return size;
  int64_t whole = 1;
  while (whole < length) whole *= 2;
  const int64_t cut = std::max(kShortestSegment, rounds(rounds(whole, segments), 64) * 64);
  size.pieces = rounds(length, cut);
  if (size.pieces > 1) size.steps = cut / kItem;
  return size;
}

int64_t clusters_of(const CallFacts& call) { return fused_clusters(call.sm_count); }

double fused_work_time(double items, const CallFacts& call) {
  return costs_of(call).fused * items + std::min(kFusedWork, kFusedFirst * items);
}

double fused_time(int64_t works, int64_t items, const CallFacts& call) {
  const int64_t turns = rounds(works, clusters_of(call));
  return kFusedStart + static_cast<double>(turns) * fused_work_time(static_cast<double>(items), call);
}

// `longest`: of the sequences, of their mean.
double balanced_time(const Size& size, const CallFacts& call, double longest) {
  const auto items = static_cast<double>(size.items), clusters = static_cast<double>(clusters_of(call));
  const double share = static_cast<double>(size.units) / clusters * fused_work_time(items, call);
  return kFusedStart + kBalanceStart + std::max(share, fused_work_time(longest * items, call)) + kFusedWork;
}

// Where lengths are not known, works that are dealt out are expected to keep the others waiting for half a work, and
// even ones must not lose.
bool is_worth_balancing(const CallFacts& call) {
  const Size size = size_of(call, 1);
  if (size.units <= clusters_of(call) || call.sequences > kMostStagedSequences) return false;
  const double dealt = fused_time(size.units, size.items, call), balanced = balanced_time(size, call, 1);
  if (dealt >= kBalanceGain * balanced) return true;
  if (call.is_even || call.sequences == 1 || balanced > dealt) return false;
  const double turns = static_cast<double>(size.units) / static_cast<double>(clusters_of(call)) + 0.5;
  return kFusedStart + turns * fused_work_time(static_cast<double>(size.items), call) >= kBalanceGain * balanced;
}

double chain_time(int64_t works, int64_t items, const StepCosts& step, int sm_count, double longest = 1) {
  const bool is_lone = 2 * works <= sm_count;
  const auto turns = static_cast<double>(is_lone ? 1 : rounds(works, sm_count)), steps = static_cast<double>(items);
  const double latency = std::max(turns, longest) * steps * (is_lone ? kLoneItem : step.time);
  const double memory = static_cast<double>(works) * (steps * step.bytes + kStateBytes) / kRate;
  return kChainStart + kChainWork * (turns - 1) + std::max(latency, memory);
}

double preparation_time(const Size& size, const CallFacts& call) {
  return kStageStart + kStageOrder * static_cast<double>(call.sequences * call.sequences) +
         costs_of(call).stage * static_cast<double>(size.units * size.items) / call.sm_count;
}

// The chains of all works at once, the preparation on the other SMs. `longest`: of the sequences, of their mean.
double beside_time(const Size& size, const Form& form, const CallFacts& call, double longest) {
  const ItemCosts& costs = costs_of(call);
  const bool is_lone = 2 * form.wave + form.prepare_ctas <= call.sm_count;
  const int64_t groups = int64_t{form.prepare_ctas} * costs.prepare_groups;
  const int64_t used = groups > call.value_heads ? groups - groups % call.value_heads : groups;
  const auto all = static_cast<double>(size.units * size.items), works = static_cast<double>(size.units);
  return kBesideStart +
         std::max(
             {costs.beside * costs.prepare_groups * all / static_cast<double>(used),
              longest * static_cast<double>(size.items) * (is_lone ? kBesideLoneItem : kWholeStep.time) + kChainWork,
              (all * kItemBytes + works * kStateBytes) / kRate});
}

// Several sequences, whole, the preparation first: then the longest alone keeps the others' SMs idle. Chains of one
// SM each beside the preparation hide it. They are taken where they gain as much by uneven sequences as they lose by
// even ones. Balanced, the longest takes longer than such a chain, and holds everything up as it does there.
bool is_better_beside(const CallFacts& call, const Form& best, const Form& lone) {
  const Size size = size_of(call, 1);
  if (best.is_balanced) return beside_time(size, lone, call, kUneven) < balanced_time(size, call, kUneven);
  double gain = 0;
  for (const double longest : {1.0, kUneven})
    gain += preparation_time(size, call) + chain_time(size.units, size.steps, kWholeStep, call.sm_count, longest) -
            beside_time(size, lone, call, longest);
  return gain > 0;
}

bool is_empty(const CallFacts& call) { return call.sequences <= 0 || call.value_heads <= 0 || call.sm_count <= 0; }

}  // namespace

double expected_microseconds(const CallFacts& call, const Form& form) {
  if (is_empty(call)) return 0;
  const Size size = size_of(call, form.segments);
  if (form.wave > 0) return beside_time(size, form, call, 1);
  if (form.is_balanced) return balanced_time(size, call, 1);
  const int64_t summaries = size.units * (2 * size.pieces - 3), all = size.units * size.pieces;
  double time = form.is_staged ? preparation_time(size, call) : 0;
  const auto add = [&](int64_t works, const StepCosts& step) {
    time += form.is_staged ? chain_time(works, size.steps, step, call.sm_count) : fused_time(works, size.steps, call);
  };
  if (size.pieces > 1) {
    time += kMergeStart + kMergeStep * static_cast<double>(size.pieces - 2);
    add(summaries, kSummaryStep);
  }
  add(all, kWholeStep);
  return time;
}

Form beside_form(const CallFacts& call, int chain_sms) {
  const int64_t works = call.sequences * call.value_heads, left = (call.sm_count - chain_sms * works) / 2 * 2;
  if (is_empty(call) || left < 2) return {};
  return {1, true, static_cast<int>(works), static_cast<int>(left)};
}

Form choose_form(const CallFacts& call) {
  Form best;
  if (is_empty(call)) return best;
  best.is_balanced = is_worth_balancing(call);
  double limit = kGain * expected_microseconds(call, best);
  const auto consider = [&](const Form& form) {
    const double time = expected_microseconds(call, form);
    if (time < limit) best = form, limit = time;
  };
  if (call.may_stage) consider({1, true});
  for (const int chain_sms : {2, 1})
    if (const Form beside = beside_form(call, chain_sms); call.may_stage && beside.wave > 0) consider(beside);
  for (int segments = 2; call.may_cut && segments <= kMostSegments; ++segments) {
    if (size_of(call, segments).pieces < 2) break;
    consider({segments, false});
    if (call.may_stage) consider({segments, true});
  }
  const bool is_whole = best.is_balanced || (best.is_staged && best.segments == 1 && best.wave == 0);
  if (is_whole && call.may_stage && call.sequences > 1 && !call.is_even) {
    const Form lone = beside_form(call, 1);
    if (lone.wave > 0 && is_better_beside(call, best, lone)) return lone;
  }
  return best;
}

}  // namespace kda::cuda::prefill_fused
