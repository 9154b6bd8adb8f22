#include "cuda/kernels/prefill_fused/choose.h"

#include <algorithm>

namespace kda::cuda::prefill_fused {
namespace {

constexpr int64_t kItem = 32;
constexpr int kMostSegments = 16, kLongestRun = 4;
constexpr int64_t kMostMatrices = 264;  // of the segment space, 17 MB: plans book them, whatever the calls' lengths

// Microseconds. What an item takes, by the form of its diagonal blocks:
struct ItemCosts {
  double fused;        // a cluster of two SMs
  double stage;        // its preparation, on one SM
  double beside;       // the same where memory does not limit it
  double cut;          // beside an opening and summaries, which take less of it
  int prepare_groups;  // that share an SM
};
constexpr ItemCosts kAnchored{1.645, 2.32, 2.04, 1.7, 4}, kDyadic{2.24, 3.07, 2.84, 3.1, 3};
constexpr double kFusedStart = 5, kFusedWork = 4.1, kFusedFirst = 1.75;  // of a work, less where it has few items
// Clearing of words, cutting of shares, handing over; what shares must save.
constexpr double kBalanceStart = 7.5, kBalanceGain = 1.015;
constexpr double kStageStart = 4, kStageOrder = 1e-3;  // and the order of sequences, by their number's square
constexpr double kLoneItem = 0.82;                     // a step of a chain on two SMs
constexpr double kChainWork = 2.6, kChainStart = 8;
constexpr double kMapStep = 5, kMapStart = 4;  // of the maps that lead to a segment's state
// A step of a chain on one SM, and what it reads and writes of memory: its stage, values and outputs.
struct StepCosts {
  double time, bytes;
};
constexpr StepCosts kWholeStep{1.4, 55.8e3};
constexpr double kSummaryStep = 1.28;                 // its memory traffic is not what limits it
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
  int64_t units, items;             // sequences x heads; items of each
  int64_t steps = 0, segments = 1;  // items of a segment, segments
};

Size size_of(const CallFacts& call, const Cut& cut) {
  const int64_t length = rounds(call.tokens, call.sequences);
  Size size{call.sequences * call.value_heads, rounds(length, kItem)};
  size.steps = size.items;
  if (cut.segments <= 1) return size;
  const int64_t tokens = segment_length(cut, length);
  size.segments = rounds(length, tokens);
  if (size.segments > 1) size.steps = tokens / kItem;
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
  const Size size = size_of(call, {});
  if (size.units <= clusters_of(call) || call.sequences > kMostTabledSequences) return false;
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

// On two SMs each, in turns.
double chain_time_on_pairs(int64_t works, int64_t items, int sm_count) {
  const int64_t room = std::max(1, sm_count / 2), turns = rounds(works, room);
  return static_cast<double>(turns) * chain_time(std::min(works, room), items, kWholeStep, sm_count);
}

double preparation_time(const Size& size, const CallFacts& call) {
  return kStageStart + kStageOrder * static_cast<double>(call.sequences * call.sequences) +
         costs_of(call).stage * static_cast<double>(size.units * size.items) / call.sm_count;
}

// The same beside chains: on form.prepare_ctas SMs, and not faster than memory.
double preparation_beside(const Size& size, const Form& form, const CallFacts& call) {
  const ItemCosts& costs = costs_of(call);
  const double item = form.cut.segments > 1 ? costs.cut : costs.beside;
  const int64_t groups = int64_t{form.prepare_ctas} * costs.prepare_groups;
  const int64_t used = groups > call.value_heads ? groups - groups % call.value_heads : groups;
  const auto all = static_cast<double>(size.units * size.items), works = static_cast<double>(size.units);
  return std::max(item * costs.prepare_groups * all / static_cast<double>(used),
                  (all * kItemBytes + works * kStateBytes) / kRate);
}

// The chains of all works at once, the preparation on the other SMs. `longest`: of the sequences, of their mean.
double beside_time(const Size& size, const Form& form, const CallFacts& call, double longest) {
  const bool is_lone = 2 * form.wave + form.prepare_ctas <= call.sm_count;
  return kBesideStart +
         std::max(
             preparation_beside(size, form, call),
             longest * static_cast<double>(size.items) * (is_lone ? kBesideLoneItem : kWholeStep.time) + kChainWork);
}

// Opening and summaries beside the preparation or behind it, then the segments.
double cut_time(const Size& size, const Form& form, const CallFacts& call) {
  const Cut& cut = form.cut;
  const int64_t mapped = size.segments - 1 - cut.opening, run = std::min<int64_t>(cut.run, mapped);
  const ChainSms sms = chain_sms(size.units, cut, call.sm_count, form.prepare_ctas);
  const auto steps = static_cast<double>(size.steps);
  const double opening = cut.opening * steps * (sms.opening == 2 ? kBesideLoneItem : kWholeStep.time);
  const double summaries =
      static_cast<double>(run) * (steps * (sms.summary == 2 ? kBesideLoneItem : kSummaryStep) + kChainWork);
  const bool is_beside = form.prepare_ctas < call.sm_count;
  const int64_t wanted = size.units * (sms.opening + sms.summary * 2 * cut.runs());
  const int64_t turns = rounds(wanted, is_beside ? call.sm_count - form.prepare_ctas : call.sm_count);
  const double chains = static_cast<double>(turns) * std::max(opening, summaries);
  const double first = is_beside ? kBesideStart + std::max(preparation_beside(size, form, call), chains)
                                 : preparation_time(size, call) + kChainStart + chains;
  return first + kMapStart + kMapStep * static_cast<double>(rounds(mapped, cut.run)) +
         chain_time_on_pairs(size.units * (size.segments - cut.opening), size.steps, call.sm_count);
}

// Several sequences, whole, the preparation first: then the longest alone keeps the others' SMs idle. Chains of one
// SM each beside the preparation hide it. They are taken where they gain as much by uneven sequences as they lose by
// even ones. Balanced, the longest takes longer than such a chain, and holds everything up as it does there.
bool is_better_beside(const CallFacts& call, const Form& best, const Form& lone) {
  const Size size = size_of(call, {});
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
  const Size size = size_of(call, form.cut);
  if (form.cut.segments > 1 && size.segments > form.cut.opening) return cut_time(size, form, call);
  if (form.wave > 0) return beside_time(size, form, call, 1);
  if (form.is_balanced) return balanced_time(size, call, 1);
  if (!form.is_staged) return fused_time(size.units, size.items, call);
  return preparation_time(size, call) + chain_time(size.units, size.items, kWholeStep, call.sm_count);
}

Form beside_form(const CallFacts& call, int sms) {
  const int64_t works = call.sequences * call.value_heads, left = (call.sm_count - sms * works) / 2 * 2;
  if (is_empty(call) || left < 2) return {};
  return {{}, true, static_cast<int>(works), static_cast<int>(left)};
}

ChainSms chain_sms(int64_t units, const Cut& cut, int sm_count, int prepare_ctas) {
  const int64_t room = prepare_ctas < sm_count ? sm_count - prepare_ctas : sm_count;
  const int64_t works = units * 2 * cut.runs();
  if (2 * (units + works) <= room) return {2, 2};
  return {2 * units + works <= room ? 2 : 1, 1};
}

int64_t most_segment_matrices(int64_t units) {
  return std::min(kMostMatrices, units * Cut{kMostSegments, 1, 1}.matrices());
}

Form cut_form(const CallFacts& call, const Cut& cut) {
  const int64_t units = call.sequences * call.value_heads, works = units * 2 * cut.runs();
  Form best{cut, true, static_cast<int>(std::min<int64_t>(units + works, call.sm_count)), call.sm_count};
  if (is_empty(call)) return best;
  double least = expected_microseconds(call, best);
  for (const int64_t chains : {2 * (units + works), 2 * units + works, units + works}) {
    Form form = best;
    form.prepare_ctas = static_cast<int>((call.sm_count - chains) / 2 * 2);
    if (chains > call.sm_count - 2) continue;
    const double time = expected_microseconds(call, form);
    if (time < least) best = form, least = time;
  }
  return best;
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
  if (call.may_stage) consider({{}, true});
  for (const int sms : {2, 1})
    if (const Form beside = beside_form(call, sms); call.may_stage && beside.wave > 0) consider(beside);
  // A (sequence, head) of which nothing can run beside its opening is not cut.
  const bool may_cut = call.may_cut && call.may_stage && 3 * call.sequences * call.value_heads <= call.sm_count;
  for (int run = 1; may_cut && run <= kLongestRun; ++run) {
    for (int opening = run; opening <= run + (run + 1) / 2; ++opening) {
      for (int runs = 1; opening + runs * run + 1 <= kMostSegments; ++runs) {
        const Cut cut{opening + runs * run + 1, opening, run};
        if (call.sequences * call.value_heads * cut.matrices() > kMostMatrices) break;
        if (size_of(call, cut).segments <= opening + (runs - 1) * run + 1) break;
        consider(cut_form(call, cut));
      }
    }
  }
  const bool is_whole = best.is_balanced || (best.is_staged && best.cut.segments == 1 && best.wave == 0);
  if (is_whole && call.may_stage && call.sequences > 1 && !call.is_even) {
    const Form lone = beside_form(call, 1);
    if (lone.wave > 0 && is_better_beside(call, best, lone)) return lone;
  }
  return best;
}

}  // namespace kda::cuda::prefill_fused
