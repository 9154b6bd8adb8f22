#include "core/step_groups.h"

#include <algorithm>

#include "base/checked.h"

namespace kda {
namespace {

// A dense int32 or int64 table, or none.
class OffsetTable {
 public:
  OffsetTable() = default;
  explicit OffsetTable(const kda_tensor& t) : data_(t.data), wide_(t.dtype == KDA_INT64) {}
  void set(int64_t i, int64_t value) const {
    if (data_ == nullptr) return;
    if (wide_) static_cast<int64_t*>(data_)[i] = value;
    else static_cast<int32_t*>(data_)[i] = static_cast<int32_t>(value);
  }
  void fill(int64_t first, int64_t last, int64_t value) const {
    if (data_ == nullptr) return;
    for (int64_t i = first; i < last; ++i) set(i, value);
  }

 private:
  void* data_ = nullptr;
  bool wide_ = false;
};

int32_t* int32_table(const kda_tensor& t) { return static_cast<int32_t*>(t.data); }
uint8_t* bool_table(const kda_tensor& t) { return static_cast<uint8_t*>(t.data); }

template <class T>
void fill(T* table, int64_t first, int64_t last, T value) {
  if (table != nullptr && first < last) std::fill(table + first, table + last, value);
}

// The tables of one group, filled in row by row and padded at the end.
struct Group {
  int32_t* rows = nullptr;
  OffsetTable begin, length;
  OffsetTable own_offsets;                   // rebased to 0; of prefill and spec
  OffsetTable shared_offsets;                // of decode and prefill: non-spec offsets
  int64_t shared_row = 0, shared_token = 0;  // where this group starts in the shared lists
  int32_t* tokens = nullptr;
  int32_t* slots = nullptr;  // [Nmax, columns]
  int64_t columns = 1;
  int64_t count = 0, token_count = 0;

  void add(int64_t n, const StepReader::Row& row) {
    if (rows != nullptr) rows[count] = static_cast<int32_t>(n);
    begin.set(count, row.begin);
    length.set(count, row.length);
    if (tokens != nullptr) {
      int32_t* out = tokens + shared_token + token_count;
      for (int64_t t = 0; t < row.length; ++t) out[t] = static_cast<int32_t>(row.begin + t);
    }
    ++count;
    token_count += row.length;
    own_offsets.set(count, token_count);
    shared_offsets.set(shared_row + count, shared_token + token_count);
  }

  void start() const {
    own_offsets.set(0, 0);
    if (shared_row == 0) shared_offsets.set(0, 0);
  }

  void pad(int64_t capacity, int32_t null_slot) const {
    fill(rows, count, capacity, int32_t{-1});
    begin.fill(count, capacity, 0);
    length.fill(count, capacity, 0);
    own_offsets.fill(count + 1, capacity + 1, token_count);
    fill(slots, count * columns, capacity * columns, null_slot);
  }
};

// Slot tables are int32: an int64 index that does not fit is dead in every pool, and so is -1 (spec P-5).
int32_t narrow_slot(int64_t slot) { return slot < INT32_MIN || slot > INT32_MAX ? -1 : static_cast<int32_t>(slot); }

void copy_slots(const kda_tensor& table, int64_t n, int64_t columns, int32_t* out) {
  if (out == nullptr) return;
  const IndexView row = index_row(table, n);
  for (int64_t c = 0; c < columns; ++c) out[c] = narrow_slot(row[c]);
}

}  // namespace

StepReader::StepReader(const kda_metadata_desc& desc, const kda_step& step, int64_t tokens)
    : cu_(index_view(step.query_start_loc)),
      computed_(index_view(step.computed)),
      drafts_(index_view(step.drafts)),
      has_state_(step.has_state),
      prefilling_(step.prefilling),
      count_(step.query_start_loc.shape[0] - 1),
      active_(count_),
      tokens_(tokens),
      width_(desc.width),
      by_drafts_(desc.mode == KDA_METADATA_BY_DRAFTS) {
  if (present(step.num_active)) active_ = std::clamp<int64_t>(index_view(step.num_active)[0], 0, count_);
  if (!by_drafts_) return;
  bool found = false;
  for_each([&](int64_t n, const Row& row) {
    if (row.group != RowClass::decode) return;
    found = found || row.length != 1 || !row.has_state || flag(prefilling_, n);
  });
  all_prefill_ = found;
}

RowClass StepReader::classify(int64_t n, const Row& row) const {
  if (row.length == 0) return RowClass::empty;
  if (by_drafts_) return classify_by_drafts(n, row);
  const bool recurrent = row.has_state && !flag(prefilling_, n) && row.length <= width_;
  if (!recurrent) return RowClass::prefill;
  return width_ > 1 ? RowClass::spec : RowClass::decode;
}

RowClass StepReader::classify_by_drafts(int64_t n, const Row& row) const {
  const bool drafted = drafts_ && drafts_[n] >= 0;
  if (drafted && row.length <= width_) return RowClass::spec;
  return all_prefill_ ? RowClass::prefill : RowClass::decode;
}

StepCounts count_step(const kda_metadata_desc& desc, const StepReader& step) {
  StepCounts c;
  step.for_each([&](int64_t, const StepReader::Row& row) {
    int64_t* group = nullptr;
    switch (row.group) {
      case RowClass::empty: return;
      case RowClass::prefill: group = c.values + KDA_COUNT_PREFILLS; break;
      case RowClass::decode: group = c.values + KDA_COUNT_DECODES; break;
      case RowClass::spec: group = c.values + KDA_COUNT_SPEC_DECODES; break;
    }
    group[0] += 1;
    group[1] += row.length;
    c.values[KDA_COUNT_ACTUAL_TOKENS] += row.length;
    if (row.group == RowClass::prefill) c.values[KDA_COUNT_CHUNKS] += ceil_div(row.length, desc.chunk);
  });
  return c;
}

void fill_step_tables(const kda_metadata_desc& desc, const kda_metadata_args& args, const StepReader& step,
                      const StepCounts& counts) {
  const kda_step_tables& t = args.tables;
  const int64_t capacity = desc.max_sequences, width = desc.width;
  const auto null_slot = static_cast<int32_t>(desc.null_slot);
  const OffsetTable non_spec(t.non_spec_query_start_loc);

  Group decode{int32_table(t.decode_rows), OffsetTable(t.decode_begin), OffsetTable(t.decode_length)};
  decode.shared_offsets = non_spec;
  decode.tokens = int32_table(t.non_spec_token_indx);
  decode.slots = int32_table(t.decode_slots);

  Group prefill{int32_table(t.prefill_rows), OffsetTable(t.prefill_begin), OffsetTable(t.prefill_length),
                OffsetTable(t.prefill_query_start_loc)};
  prefill.shared_offsets = non_spec;
  prefill.shared_row = counts[KDA_COUNT_DECODES];
  prefill.shared_token = counts[KDA_COUNT_DECODE_TOKENS];
  prefill.tokens = int32_table(t.non_spec_token_indx);
  prefill.slots = int32_table(t.prefill_slots);

  Group spec{int32_table(t.spec_rows), OffsetTable(t.spec_begin), OffsetTable(t.spec_length),
             OffsetTable(t.spec_query_start_loc)};
  spec.tokens = int32_table(t.spec_token_indx);
  spec.slots = int32_table(t.spec_slots);
  spec.columns = width;

  const IndexView accepted = index_view(args.accepted);
  int32_t* accepted_out = int32_table(t.num_accepted);
  uint8_t* initial_out = bool_table(t.has_initial_state);
  uint8_t* mask_out = bool_table(t.spec_sequence_masks);
  for (Group* group : {&decode, &prefill, &spec}) group->start();

  step.for_each([&](int64_t n, const StepReader::Row& row) {
    if (mask_out != nullptr) mask_out[n] = row.group == RowClass::spec;
    if (row.group == RowClass::empty) return;
    Group& group = row.group == RowClass::decode ? decode : row.group == RowClass::prefill ? prefill : spec;
    const int64_t at = group.count;
    group.add(n, row);
    if (group.slots != nullptr) copy_slots(args.slot_table, n, group.columns, group.slots + at * group.columns);
    if (row.group == RowClass::prefill && initial_out != nullptr) initial_out[at] = row.has_state;
    if (row.group == RowClass::spec && accepted_out != nullptr) {
      accepted_out[at] = accepted ? static_cast<int32_t>(accepted[n]) : 1;
    }
  });

  for (const Group* group : {&decode, &prefill, &spec}) group->pad(capacity, null_slot);
  const int64_t non_spec_rows = decode.count + prefill.count,
                non_spec_tokens = decode.token_count + prefill.token_count;
  non_spec.fill(non_spec_rows + 1, capacity + 1, non_spec_tokens);
  fill(int32_table(t.non_spec_token_indx), non_spec_tokens, desc.max_tokens, int32_t{-1});
  fill(int32_table(t.spec_token_indx), spec.token_count, std::min(desc.max_tokens, t.spec_token_indx.shape[0]),
       int32_t{-1});
  fill(initial_out, prefill.count, capacity, uint8_t{0});
  fill(accepted_out, spec.count, capacity, int32_t{1});
  fill(mask_out, step.count(), capacity, uint8_t{0});
  if (int32_t* out = int32_table(t.counts); out != nullptr) {
    for (int i = 0; i < KDA_METADATA_COUNTS; ++i) out[i] = static_cast<int32_t>(counts.values[i]);
  }
}

}  // namespace kda
