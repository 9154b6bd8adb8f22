// Step metadata (metadata.md) against its definition: every table, exactly, padding included.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "conformance/api.h"
#include "conformance/attention.h"
#include "conformance/cases.h"
#include "conformance/random.h"
#include "conformance/step_tables.h"

namespace kda::conformance {
namespace {

constexpr int64_t kSequences[] = {0, 1, 2, 3, 31, 33, 127, 1000};
constexpr int32_t kWidths[] = {1, 3, 8};
constexpr int32_t kChunks[] = {64, 16, 32};

enum Lengths { kZeros, kOnes, kEdges, kSmall, kOneLong, kMixed };

struct Choice {
  int64_t N;
  int lengths;
  int32_t width, chunk;
  bool wide, by_drafts, flags_only, prefilling, drafts, active, slots, wide_slots, accepted, host, null_zero, roomy;
};

std::vector<Axis> axes() {
  return {{"sequences", {"0", "1", "2", "3", "31", "33", "127", "1000"}},
          {"lengths", {"zeros", "ones", "edges", "small", "one-long", "mixed"}},
          {"width", {"1", "3", "8"}},
          {"chunk", {"64", "16", "32"}},
          {"cu", {"int32", "int64"}},
          {"mode", {"role", "drafts"}},
          {"state", {"computed", "flags"}},
          {"prefilling", {"none", "some"}},
          {"drafts", {"none", "some"}},
          {"active", {"all", "but-last"}},
          {"slots", {"none", "int32", "int64"}},
          {"accepted", {"none", "given"}},
          {"host", {"none", "given"}},
          {"null_slot", {"-1", "0"}},
          {"capacity", {"exact", "more"}}};
}

Choice choice_of(const std::vector<int>& c) {
  const auto on = [&](size_t axis) { return c[axis] == 1; };
  return {kSequences[c[0]], c[1],       kWidths[c[2]], kChunks[c[3]], on(4),  on(5), on(6), on(7), on(8), on(9),
          c[10] > 0,        c[10] == 2, on(11),        on(12),        on(13), on(14)};
}

std::vector<int64_t> lengths_of(const Choice& c) {
  constexpr int64_t kEdgeLengths[] = {1, 15, 16, 17, 63, 64, 65, 128, 0};
  std::vector<int64_t> lengths;
  for (int64_t n = 0; n < c.N; ++n) {
    const auto random = static_cast<int64_t>(splitmix64(static_cast<uint64_t>(n) + 5) >> 33);
    switch (c.lengths) {
      case kZeros: lengths.push_back(0); break;
      case kOnes: lengths.push_back(1); break;
      case kEdges: lengths.push_back(kEdgeLengths[n % 9]); break;
      case kSmall: lengths.push_back(random % (c.width + 2)); break;
      case kOneLong: lengths.push_back(n == c.N / 2 ? 5000 : random % 2); break;
      default: lengths.push_back(random % 3 == 0 ? random % 200 : 1 + random % c.width); break;
    }
  }
  return lengths;
}

Step make_step(const Choice& c, std::vector<int64_t>& computed) {
  Step s;
  s.query_start_loc = {0};
  for (int64_t length : lengths_of(c)) s.query_start_loc.push_back(s.query_start_loc.back() + length);
  s.active = c.active ? std::max<int64_t>(c.N - 1, 0) : c.N;
  for (int64_t n = 0; n < c.N; ++n) {
    const uint64_t r = splitmix64(static_cast<uint64_t>(n) + 99);
    const int64_t length = s.query_start_loc[static_cast<size_t>(n) + 1] - s.query_start_loc[static_cast<size_t>(n)];
    computed.push_back(r % 4 == 0 ? 0 : static_cast<int64_t>(r % 1000));
    s.has_state.push_back(computed.back() > 0);
    if (c.prefilling) s.prefilling.push_back(r % 5 == 0);
    if (c.drafts) s.drafts.push_back(length >= 1 && length <= c.width && r % 3 != 0 ? length - 1 : -1);
    if (c.accepted) s.accepted.push_back(1 + static_cast<int64_t>(r % static_cast<uint64_t>(c.width)));
    if (!c.slots) continue;
    s.slots.emplace_back();
    for (int64_t j = 0; j < c.width; ++j) s.slots.back().push_back(n % 7 == 6 ? -1 : 3 * n * c.width + j);
  }
  return s;
}

kda_step view_of(const Choice& c, const Tensor& start, const Tensor& computed, const Tensor& state,
                 const Tensor& prefilling, const Tensor& drafts, const Tensor& active) {
  kda_step v{};
  v.query_start_loc = start;
  if (c.flags_only) v.has_state = state;
  else v.computed = computed;
  v.prefilling = prefilling;
  v.drafts = drafts;
  v.num_active = active;
  return v;
}

// One output table and what it must hold.
struct Table {
  const char* name;
  kda_tensor kda_step_tables::*member;
  std::vector<int64_t> StepTables::*wanted;
  kda_dtype dtype;      // NONE: as query_start_loc
  int64_t columns = 1;  // > 1: rows of so many
};

std::vector<Table> tables_of(int64_t width) {
  using T = kda_step_tables;
  using W = StepTables;
  const kda_dtype offset = KDA_DTYPE_NONE;
  return {{"counts", &T::counts, &W::counts, KDA_INT32},
          {"prefill_rows", &T::prefill_rows, &W::prefill_rows, KDA_INT32},
          {"decode_rows", &T::decode_rows, &W::decode_rows, KDA_INT32},
          {"spec_rows", &T::spec_rows, &W::spec_rows, KDA_INT32},
          {"prefill_begin", &T::prefill_begin, &W::prefill_begin, offset},
          {"prefill_length", &T::prefill_length, &W::prefill_length, offset},
          {"decode_begin", &T::decode_begin, &W::decode_begin, offset},
          {"decode_length", &T::decode_length, &W::decode_length, offset},
          {"spec_begin", &T::spec_begin, &W::spec_begin, offset},
          {"spec_length", &T::spec_length, &W::spec_length, offset},
          {"non_spec_query_start_loc", &T::non_spec_query_start_loc, &W::non_spec_query_start_loc, offset},
          {"spec_query_start_loc", &T::spec_query_start_loc, &W::spec_query_start_loc, offset},
          {"prefill_query_start_loc", &T::prefill_query_start_loc, &W::prefill_query_start_loc, offset},
          {"non_spec_token_indx", &T::non_spec_token_indx, &W::non_spec_token_indx, KDA_INT32},
          {"spec_token_indx", &T::spec_token_indx, &W::spec_token_indx, KDA_INT32},
          {"prefill_slots", &T::prefill_slots, &W::prefill_slots, KDA_INT32},
          {"decode_slots", &T::decode_slots, &W::decode_slots, KDA_INT32},
          {"spec_slots", &T::spec_slots, &W::spec_slots, KDA_INT32, -width},
          {"has_initial_state", &T::has_initial_state, &W::has_initial_state, KDA_BOOL},
          {"num_accepted", &T::num_accepted, &W::num_accepted, KDA_INT32},
          {"spec_sequence_masks", &T::spec_sequence_masks, &W::spec_sequence_masks, KDA_BOOL},
          {"chunk_indices", &T::chunk_indices, &W::chunk_indices, offset, -2},
          {"chunk_offsets", &T::chunk_offsets, &W::chunk_offsets, KDA_INT64}};
}

void run(const Choice& c, const Setting& setting, Report& report) {
  std::vector<int64_t> computed;
  const Step step = make_step(c, computed);
  const int64_t T = step.query_start_loc.back() + 2;  // rows behind the last offset belong to nobody
  const kda_dtype offset = c.wide ? KDA_INT64 : KDA_INT32;
  StepBounds bounds;
  bounds.max_tokens = T + (c.roomy ? 77 : 0);
  bounds.max_sequences = c.N + (c.roomy ? 5 : 0);
  bounds.width = c.width;
  bounds.chunk = c.chunk;
  bounds.null_slot = c.null_zero ? 0 : -1;
  bounds.by_drafts = c.by_drafts;

  kda_metadata_desc d;
  kda_metadata_desc_init(&d);
  d.mode = c.by_drafts ? KDA_METADATA_BY_DRAFTS : KDA_METADATA_BY_ROLE;
  d.max_tokens = bounds.max_tokens;
  d.max_sequences = bounds.max_sequences;
  d.width = c.width;
  d.chunk = c.chunk;
  d.null_slot = bounds.null_slot;
  if (c.host && c.roomy) d.hook = "host";
  kda_plan* raw = nullptr;
  const kda_status status = kda_metadata_plan_create(setting.context, &d, &raw);
  const std::unique_ptr<kda_plan, void (*)(kda_plan*)> plan(raw, kda_plan_destroy);
  if (!report.accept(status, status == KDA_OK ? "" : kda_last_error(), raw)) return;

  const auto optional = [](const std::vector<int64_t>& x, kda_dtype dtype) {
    return x.empty() ? Tensor() : Tensor::ints(x, dtype);
  };
  const Tensor start = Tensor::ints(step.query_start_loc, offset), state = Tensor::flags(step.has_state),
               tokens = Tensor::ints(computed), prefilling = optional(step.prefilling, KDA_BOOL),
               drafts = optional(step.drafts, KDA_INT32), accepted = optional(step.accepted, KDA_INT32),
               active = c.active ? Tensor::ints({step.active}) : Tensor();
  Tensor slots;
  if (c.slots) {
    slots = Tensor(c.wide_slots ? KDA_INT64 : KDA_INT32, {c.N, c.width}, {c.width + 2, 1}, 1);
    for (int64_t n = 0; n < c.N; ++n) {
      for (int64_t j = 0; j < c.width; ++j) {
        slots.set({n, j}, static_cast<double>(step.slots[static_cast<size_t>(n)][static_cast<size_t>(j)]));
      }
    }
  }
  kda_metadata_args args = sized<kda_metadata_args>();
  args.num_tokens = T;
  args.step = view_of(c, start, tokens, state, prefilling, drafts, active);
  if (c.host) args.host = args.step;
  args.accepted = accepted;
  args.slot_table = slots;
  int32_t host_counts[8] = {};
  if (c.host) args.host_counts = host_counts;

  const StepTables wanted = step_tables(step, bounds);
  const std::vector<Table> list = tables_of(c.width);
  std::vector<Tensor> out;
  for (const Table& t : list) {
    const auto count = static_cast<int64_t>((wanted.*t.wanted).size());
    const kda_dtype dtype = t.dtype == KDA_DTYPE_NONE ? offset : t.dtype;
    out.push_back(t.columns < 0 ? Tensor(dtype, {count / -t.columns, -t.columns}) : Tensor(dtype, {count}));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    const bool of_slots = std::string(list[i].name).find("_slots") != std::string::npos;
    if (of_slots && !c.slots) out[i] = Tensor();  // nobody asks for slots without a table to take them from
    else args.tables.*list[i].member = out[i];
  }

  size_t bytes = 0;
  (void)kda_plan_workspace_size(raw, &bytes);
  std::string message;
  const auto call = [&](const kda_metadata_args& there, kda_workspace workspace) {
    return kda_metadata_run(raw, &there, workspace, nullptr);
  };
  const kda_status ran = run_in(setting.context, args, bytes, call, message);
  if (!report.succeeded("run", ran, message)) return;
  if (setting.spoil) setting.spoil("counts", out[0]);
  for (size_t i = 0; i < list.size(); ++i) {
    if (!out[i].present()) continue;
    const std::vector<int64_t>& values = wanted.*list[i].wanted;
    const Tensor expected = Tensor::ints(values, out[i].dtype());
    const Shape flat = {static_cast<int64_t>(values.size())};
    report.expect_none(list[i].name, first_difference(reshape(out[i], flat), expected));
    report.expect_none(std::string(list[i].name) + ": guards", out[i].guard_report());
  }
  for (size_t i = 0; c.host && i < 8; ++i) {
    if (host_counts[i] != wanted.counts[i]) report.fault("host_counts[" + std::to_string(i) + "]");
  }
}

}  // namespace

std::vector<Case> metadata_cases() { return covering_cases(KDA_OP_METADATA, axes(), nullptr, choice_of, run, 4); }

}  // namespace kda::conformance
