// The definition of the step tables (spec M-4..M-15), written for reading and independent of src/core.
#include "metadata_fixture.h"

namespace kda::conformance::test {
namespace {

struct Row {
  int64_t number, begin, length;
  bool state, prefilling;
  int64_t drafts;
};

void pad(Ints& x, int64_t size, int64_t value) { x.resize(static_cast<size_t>(size), value); }

Ints numbers(const std::vector<Row>& rows) {
  Ints x;
  for (const Row& r : rows) x.push_back(r.number);
  return x;
}
Ints lengths(const std::vector<Row>& rows) {
  Ints x;
  for (const Row& r : rows) x.push_back(r.length);
  return x;
}
Ints begins(const std::vector<Row>& rows) {
  Ints x;
  for (const Row& r : rows) x.push_back(r.begin);
  return x;
}
Ints offsets(const std::vector<Row>& rows) {
  Ints x{0};
  for (const Row& r : rows) x.push_back(x.back() + r.length);
  return x;
}
Ints tokens(const std::vector<Row>& rows) {
  Ints x;
  for (const Row& r : rows) {
    for (int64_t t = 0; t < r.length; ++t) x.push_back(r.begin + t);
  }
  return x;
}
int64_t sum(const Ints& x) {
  int64_t s = 0;
  for (int64_t v : x) s += v;
  return s;
}

}  // namespace

Expected model_step(const kda_metadata_desc& desc, const StepInput& s) {
  const int64_t capacity = desc.max_sequences, width = desc.width, chunk = desc.chunk == 0 ? 64 : desc.chunk;
  std::vector<Row> rows;
  const int64_t active = s.active < 0 ? s.n() : std::min(s.active, s.n());
  for (int64_t i = 0; i < active; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t length = s.cu[at + 1] - s.cu[at];
    if (length > 0) {
      rows.push_back(
          {i, s.cu[at], length, s.computed[at] > 0, s.prefilling[at] != 0, s.drafts.empty() ? -1 : s.drafts[at]});
    }
  }
  std::vector<Row> decode, prefill, spec;
  if (desc.mode == KDA_METADATA_BY_ROLE) {
    for (const Row& r : rows) {
      const bool recurrent = r.state && !r.prefilling && r.length <= width;
      (recurrent ? (width > 1 ? spec : decode) : prefill).push_back(r);
    }
  } else {
    std::vector<Row> rest;
    for (const Row& r : rows) (r.drafts >= 0 ? spec : rest).push_back(r);
    const bool any =
        std::any_of(rest.begin(), rest.end(), [](const Row& r) { return r.prefilling || !r.state || r.length != 1; });
    (any ? prefill : decode) = rest;
  }
  std::vector<Row> non_spec = decode;
  non_spec.insert(non_spec.end(), prefill.begin(), prefill.end());
  const Chunks chunks = model_chunks(lengths(prefill), chunk);

  Expected e;
  const auto add = [&](const std::string& name, Ints x, int64_t size, int64_t padding) {
    pad(x, size, padding);
    e.emplace_back(name, x);
  };
  const int64_t pt = sum(lengths(prefill)), dt = sum(lengths(decode)), st = sum(lengths(spec));
  e.emplace_back("counts", Ints{static_cast<int64_t>(prefill.size()), pt, static_cast<int64_t>(decode.size()), dt,
                                static_cast<int64_t>(spec.size()), st, pt + dt + st, chunks.offsets.back()});
  const struct {
    std::string name;
    const std::vector<Row>& rows;
  } groups[] = {{"prefill", prefill}, {"decode", decode}, {"spec", spec}};
  for (const auto& g : groups) {
    add(g.name + "_rows", numbers(g.rows), capacity, -1);
    add(g.name + "_begin", begins(g.rows), capacity, 0);
    add(g.name + "_length", lengths(g.rows), capacity, 0);
    Ints slots;
    const int64_t columns = g.name == "spec" ? width : 1;
    for (const Row& r : g.rows) {
      for (int64_t c = 0; c < columns; ++c) slots.push_back(s.slots[static_cast<size_t>(r.number * s.width + c)]);
    }
    add(g.name + "_slots", slots, capacity * columns, desc.null_slot);
  }
  add("non_spec_query_start_loc", offsets(non_spec), capacity + 1, dt + pt);
  add("spec_query_start_loc", offsets(spec), capacity + 1, st);
  add("prefill_query_start_loc", offsets(prefill), capacity + 1, pt);
  add("non_spec_token_indx", tokens(non_spec), desc.max_tokens, -1);
  add("spec_token_indx", tokens(spec), desc.max_tokens, -1);
  Ints initial, accepted, mask(static_cast<size_t>(capacity), 0);
  for (const Row& r : prefill) initial.push_back(r.state);
  for (const Row& r : spec) {
    accepted.push_back(s.accepted.empty() ? 1 : s.accepted[static_cast<size_t>(r.number)]);
    mask[static_cast<size_t>(r.number)] = 1;
  }
  add("has_initial_state", initial, capacity, 0);
  add("num_accepted", accepted, capacity, 1);
  e.emplace_back("spec_sequence_masks", mask);
  int64_t bound = 0;
  EXPECT_EQ(kda_chunk_bound(desc.max_tokens, capacity, chunk, &bound), KDA_OK);
  add("chunk_indices", chunks.indices, 2 * bound, -1);
  add("chunk_offsets", chunks.offsets, capacity + 1, chunks.offsets.back());
  return e;
}

}  // namespace kda::conformance::test
