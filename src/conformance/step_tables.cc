#include "conformance/step_tables.h"

#include <algorithm>

namespace kda::conformance {
namespace {

using Values = std::vector<int64_t>;

enum class Group { kEmpty, kDecode, kPrefill, kSpec };

struct Row {
  int64_t number, begin, length;
};

bool flag(const Values& v, size_t n) { return n < v.size() && v[n] != 0; }

// M-4..M-7.
std::vector<Group> classify(const Step& s, const StepBounds& b) {
  const size_t N = s.query_start_loc.size() - 1;
  std::vector<Group> groups(N, Group::kEmpty);
  bool all_decodes = true;  // by_drafts: of the rows without drafts
  for (size_t n = 0; n < N; ++n) {
    const int64_t length = s.query_start_loc[n + 1] - s.query_start_loc[n];
    if (static_cast<int64_t>(n) >= s.active || length <= 0) continue;
    const bool recurrent = flag(s.has_state, n) && !flag(s.prefilling, n) && length <= b.width;
    if (b.by_drafts) {
      const bool spec = n < s.drafts.size() && s.drafts[n] >= 0 && length <= b.width;
      groups[n] = spec ? Group::kSpec : Group::kPrefill;
      if (!spec && (flag(s.prefilling, n) || !flag(s.has_state, n) || length != 1)) all_decodes = false;
    } else {
      groups[n] = !recurrent ? Group::kPrefill : b.width > 1 ? Group::kSpec : Group::kDecode;
    }
  }
  if (b.by_drafts && all_decodes) std::replace(groups.begin(), groups.end(), Group::kPrefill, Group::kDecode);
  return groups;
}

// Lists of one group, padded with -1 and 0.
void list_rows(const std::vector<Row>& rows, int64_t bound, Values& numbers, Values& begins, Values& lengths) {
  numbers.assign(static_cast<size_t>(bound), -1);
  begins.assign(static_cast<size_t>(bound), 0);
  lengths = begins;
  for (size_t i = 0; i < rows.size(); ++i) {
    numbers[i] = rows[i].number;
    begins[i] = rows[i].begin;
    lengths[i] = rows[i].length;
  }
}

// Offsets from 0, padded by repeating the last.
Values offsets_of(const std::vector<Row>& rows, int64_t bound) {
  Values offsets = {0};
  for (const Row& r : rows) offsets.push_back(offsets.back() + r.length);
  offsets.resize(static_cast<size_t>(bound + 1), offsets.back());
  return offsets;
}

Values token_list(const std::vector<Row>& rows, int64_t bound) {
  Values list;
  for (const Row& r : rows) {
    for (int64_t t = 0; t < r.length; ++t) list.push_back(r.begin + t);
  }
  list.resize(static_cast<size_t>(bound), -1);
  return list;
}

// The first `columns` slots of each row.
Values slot_list(const Step& s, const std::vector<Row>& rows, int64_t bound, int64_t columns, int64_t null_slot) {
  Values list(static_cast<size_t>(bound * columns), null_slot);
  for (size_t i = 0; i < rows.size() && !s.slots.empty(); ++i) {
    for (size_t j = 0; j < static_cast<size_t>(columns); ++j) {
      list[i * static_cast<size_t>(columns) + j] = s.slots[static_cast<size_t>(rows[i].number)][j];
    }
  }
  return list;
}

// M-14, M-16, M-17.
void chunk_tables(const std::vector<Row>& prefills, const StepBounds& b, StepTables& t) {
  const int64_t m = std::min(b.max_sequences, b.max_tokens);
  t.chunk_indices.clear();
  t.chunk_offsets = {0};
  for (size_t i = 0; i < prefills.size(); ++i) {
    const int64_t chunks = (prefills[i].length + b.chunk - 1) / b.chunk;
    for (int64_t c = 0; c < chunks; ++c) {
      t.chunk_indices.push_back(static_cast<int64_t>(i));
      t.chunk_indices.push_back(c);
    }
    t.chunk_offsets.push_back(t.chunk_offsets.back() + chunks);
  }
  t.counts[7] = t.chunk_offsets.back();
  t.chunk_offsets.resize(static_cast<size_t>(b.max_sequences + 1), t.chunk_offsets.back());
  t.chunk_indices.resize(static_cast<size_t>(2 * (m + (b.max_tokens - m) / b.chunk)), -1);
}

}  // namespace

StepTables step_tables(const Step& s, const StepBounds& b) {
  const std::vector<Group> groups = classify(s, b);
  std::vector<Row> prefills, decodes, specs, non_specs;
  StepTables t;
  t.spec_sequence_masks.assign(static_cast<size_t>(b.max_sequences), 0);
  for (size_t n = 0; n < groups.size(); ++n) {
    const Row row{static_cast<int64_t>(n), s.query_start_loc[n], s.query_start_loc[n + 1] - s.query_start_loc[n]};
    if (groups[n] == Group::kPrefill) prefills.push_back(row);
    if (groups[n] == Group::kDecode) decodes.push_back(row);
    if (groups[n] == Group::kSpec) specs.push_back(row);
    t.spec_sequence_masks[n] = groups[n] == Group::kSpec;
  }
  non_specs = decodes;  // M-8
  non_specs.insert(non_specs.end(), prefills.begin(), prefills.end());

  t.counts.assign(8, 0);
  const std::vector<Row>* const by_count[] = {&prefills, &decodes, &specs};
  for (size_t g = 0; g < 3; ++g) {
    t.counts[2 * g] = static_cast<int64_t>(by_count[g]->size());
    for (const Row& r : *by_count[g]) t.counts[2 * g + 1] += r.length, t.counts[6] += r.length;
  }
  const int64_t Nmax = b.max_sequences;
  list_rows(prefills, Nmax, t.prefill_rows, t.prefill_begin, t.prefill_length);
  list_rows(decodes, Nmax, t.decode_rows, t.decode_begin, t.decode_length);
  list_rows(specs, Nmax, t.spec_rows, t.spec_begin, t.spec_length);
  t.non_spec_query_start_loc = offsets_of(non_specs, Nmax);
  t.spec_query_start_loc = offsets_of(specs, Nmax);
  t.prefill_query_start_loc = offsets_of(prefills, Nmax);
  t.non_spec_token_indx = token_list(non_specs, b.max_tokens);
  t.spec_token_indx = token_list(specs, std::min(b.max_tokens, Nmax * b.width));
  t.prefill_slots = slot_list(s, prefills, Nmax, 1, b.null_slot);
  t.decode_slots = slot_list(s, decodes, Nmax, 1, b.null_slot);
  t.spec_slots = slot_list(s, specs, Nmax, b.width, b.null_slot);
  t.has_initial_state.assign(static_cast<size_t>(Nmax), 0);
  t.num_accepted.assign(static_cast<size_t>(Nmax), 1);
  for (size_t i = 0; i < prefills.size(); ++i) {
    t.has_initial_state[i] = flag(s.has_state, static_cast<size_t>(prefills[i].number));
  }
  for (size_t i = 0; i < specs.size() && !s.accepted.empty(); ++i) {
    t.num_accepted[i] = s.accepted[static_cast<size_t>(specs[i].number)];
  }
  chunk_tables(prefills, b, t);
  return t;
}

}  // namespace kda::conformance
