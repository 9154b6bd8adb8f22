// A step's inputs, its output tables with guard words around each, and the definition of spec M-4..M-15 written
// as plainly as possible over vectors: what the builder must produce, padding included.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "conformance/tensor.h"
#include "kda/kda.h"
#include "support/device.h"

namespace kda::conformance::test {

using Ints = std::vector<int64_t>;

// One output table: guard words on both sides, poisoned before every build.
class Table {
 public:
  static constexpr int64_t kGuard = 8;
  Table() = default;
  Table(kda_dtype dtype, int64_t rows, int64_t columns = 0) : dtype_(dtype), rows_(rows), columns_(columns) {
    const auto count = static_cast<size_t>(rows * std::max<int64_t>(1, columns) + 2 * kGuard);
    bytes_.assign(count * dtype_size(dtype), 0xAB);
  }
  kda_tensor view() const {
    if (dtype_ == KDA_DTYPE_NONE) return {};
    void* data = const_cast<unsigned char*>(bytes_.data()) + kGuard * static_cast<int64_t>(dtype_size(dtype_));
    return columns_ > 0 ? make_tensor(data, dtype_, {rows_, columns_}) : make_tensor(data, dtype_, {rows_});
  }
  Ints values() const {
    const kda_tensor t = view();
    Ints out;
    const int64_t count = num_elements(t);
    for (int64_t i = 0; i < count; ++i) {
      switch (dtype_) {
        case KDA_INT64: out.push_back(static_cast<const int64_t*>(t.data)[i]); break;
        case KDA_BOOL: out.push_back(static_cast<const uint8_t*>(t.data)[i]); break;
        default: out.push_back(static_cast<const int32_t*>(t.data)[i]);
      }
    }
    return out;
  }
  bool guards_intact() const {
    const size_t guard = kGuard * dtype_size(dtype_);
    const auto kept = [](unsigned char c) { return c == 0xAB; };
    return std::all_of(bytes_.begin(), bytes_.begin() + static_cast<int64_t>(guard), kept) &&
           std::all_of(bytes_.end() - static_cast<int64_t>(guard), bytes_.end(), kept);
  }
  bool untouched() const {
    return std::all_of(bytes_.begin(), bytes_.end(), [](unsigned char c) { return c == 0xAB; });
  }
  void poison() { std::fill(bytes_.begin(), bytes_.end(), 0xAB); }

 private:
  kda_dtype dtype_ = KDA_DTYPE_NONE;
  int64_t rows_ = 0, columns_ = 0;
  std::vector<unsigned char> bytes_;
};

// Every table of a plan, in the order of kda_step_tables.
struct Tables {
  struct Entry {
    const char* name;
    kda_tensor kda_step_tables::*member;
    Table table;
  };
  Tables(const kda_metadata_desc& d, kda_dtype offset) {
    const int64_t n = d.max_sequences, width = d.width == 0 ? 1 : d.width;
    int64_t chunks = 0;
    EXPECT_EQ(kda_chunk_bound(d.max_tokens, n, d.chunk == 0 ? 64 : d.chunk, &chunks), KDA_OK);
    using T = kda_step_tables;
    entries = {{"counts", &T::counts, {KDA_INT32, 8}},
               {"prefill_rows", &T::prefill_rows, {KDA_INT32, n}},
               {"decode_rows", &T::decode_rows, {KDA_INT32, n}},
               {"spec_rows", &T::spec_rows, {KDA_INT32, n}},
               {"prefill_begin", &T::prefill_begin, {offset, n}},
               {"prefill_length", &T::prefill_length, {offset, n}},
               {"decode_begin", &T::decode_begin, {offset, n}},
               {"decode_length", &T::decode_length, {offset, n}},
               {"spec_begin", &T::spec_begin, {offset, n}},
               {"spec_length", &T::spec_length, {offset, n}},
               {"non_spec_query_start_loc", &T::non_spec_query_start_loc, {offset, n + 1}},
               {"spec_query_start_loc", &T::spec_query_start_loc, {offset, n + 1}},
               {"prefill_query_start_loc", &T::prefill_query_start_loc, {offset, n + 1}},
               {"non_spec_token_indx", &T::non_spec_token_indx, {KDA_INT32, d.max_tokens}},
               {"spec_token_indx", &T::spec_token_indx, {KDA_INT32, d.max_tokens}},
               {"prefill_slots", &T::prefill_slots, {KDA_INT32, n}},
               {"decode_slots", &T::decode_slots, {KDA_INT32, n}},
               {"spec_slots", &T::spec_slots, {KDA_INT32, n, width}},
               {"has_initial_state", &T::has_initial_state, {KDA_BOOL, n}},
               {"num_accepted", &T::num_accepted, {KDA_INT32, n}},
               {"spec_sequence_masks", &T::spec_sequence_masks, {KDA_BOOL, n}},
               {"chunk_indices", &T::chunk_indices, {offset, chunks, 2}},
               {"chunk_offsets", &T::chunk_offsets, {KDA_INT64, n + 1}}};
  }
  kda_step_tables views() const {
    kda_step_tables t{};
    for (const Entry& e : entries) t.*e.member = e.table.view();
    return t;
  }
  Ints operator[](const std::string& name) const {
    for (const Entry& e : entries) {
      if (name == e.name) return e.table.values();
    }
    ADD_FAILURE() << "no table " << name;
    return {};
  }
  // The first `count` values.
  Ints head(const std::string& name, size_t count) const {
    Ints all = (*this)[name];
    all.resize(std::min(count, all.size()));
    return all;
  }
  void poison() {
    for (Entry& e : entries) e.table.poison();
  }
  std::vector<Entry> entries;
};

// Inputs of a step, held as vectors; views are made on demand in the wanted dtypes.
struct StepInput {
  Ints cu;                    // [N+1]
  Ints computed, prefilling;  // [N]; computed > 0 = has state
  Ints drafts, accepted;      // [N] or empty = absent
  Ints slots;                 // [N, width]
  int64_t tokens = 0, width = 1;
  int64_t active = -1;  // -1 = absent
  kda_dtype offset = KDA_INT32, slot = KDA_INT32;
  int64_t slot_stride = 0;  // row stride of the table; 0 = width

  static StepInput of(const Ints& lengths, int64_t width) {
    StepInput s;
    s.width = width;
    s.cu = {0};
    for (int64_t l : lengths) s.cu.push_back(s.cu.back() + l);
    s.tokens = s.cu.back();
    s.computed.assign(lengths.size(), 1);
    s.prefilling.assign(lengths.size(), 0);
    for (int64_t i = 0; i < static_cast<int64_t>(lengths.size()) * width; ++i) s.slots.push_back(100 + i);
    return s;
  }
  int64_t n() const { return static_cast<int64_t>(cu.size()) - 1; }
};

// The memory behind a run's views.
struct StepViews {
  std::vector<Tensor> held;
  kda_metadata_args args;

  explicit StepViews(const StepInput& s, bool host = false) : args(sized<kda_metadata_args>()) {
    const auto vector = [&](const Ints& x, kda_dtype dtype) {
      held.push_back(Tensor::ints(x, dtype));
      kda_tensor t = held.back().view();
      return t;
    };
    held.reserve(16);
    args.num_tokens = s.tokens;
    const auto fill = [&](kda_step& step) {
      step.query_start_loc = vector(s.cu, s.offset);
      step.computed = vector(s.computed, KDA_INT32);
      step.prefilling = vector(s.prefilling, KDA_BOOL);
      if (!s.drafts.empty()) step.drafts = vector(s.drafts, KDA_INT32);
      if (s.active >= 0) step.num_active = vector({s.active}, KDA_INT32);
    };
    fill(args.step);
    if (host) fill(args.host);
    if (!s.accepted.empty()) args.accepted = vector(s.accepted, KDA_INT32);
    const int64_t stride = s.slot_stride == 0 ? s.width : s.slot_stride;
    held.emplace_back(s.slot, Shape{s.n(), s.width}, Shape{stride, 1});
    for (int64_t i = 0; i < s.n() * s.width; ++i) {
      held.back().set({i / s.width, i % s.width}, static_cast<double>(s.slots[static_cast<size_t>(i)]));
    }
    args.slot_table = held.back().view();
  }
};

inline kda_metadata_desc metadata_desc(int64_t max_tokens, int64_t max_sequences, int32_t width = 1,
                                       kda_metadata_mode mode = KDA_METADATA_BY_ROLE) {
  kda_metadata_desc d;
  kda_metadata_desc_init(&d);
  d.max_tokens = max_tokens;
  d.max_sequences = max_sequences;
  d.width = width;
  d.mode = mode;
  return d;
}

inline Plan metadata_plan(const kda_metadata_desc& desc, kda_context* context = nullptr) {
  return Plan(kda_metadata_plan_create, context != nullptr ? context : test_context(), desc);
}

inline kda_status run(const Plan& plan, kda_metadata_args args) {
  const auto call = [&] { return kda_metadata_run(plan.get(), &args, kda_workspace{}, nullptr); };
  if (!on_device()) return call();
  std::vector<kda_tensor*> tensors{
      &args.step.query_start_loc, &args.step.computed,   &args.step.has_state, &args.step.prefilling,
      &args.step.drafts,          &args.step.num_active, &args.accepted,       &args.slot_table};
  auto* tables = reinterpret_cast<kda_tensor*>(&args.tables);
  for (size_t i = 0; i < sizeof(args.tables) / sizeof(kda_tensor); ++i) tensors.push_back(tables + i);
  return call_there(tensors, call);
}

// Chunk tables by definition (spec M-14).
struct Chunks {
  Ints indices, offsets;  // pairs flattened
};
inline Chunks model_chunks(const Ints& lengths, int64_t chunk) {
  Chunks c;
  c.offsets.push_back(0);
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t count = (lengths[i] + chunk - 1) / chunk;
    for (int64_t j = 0; j < count; ++j) {
      c.indices.push_back(static_cast<int64_t>(i));
      c.indices.push_back(j);
    }
    c.offsets.push_back(c.offsets.back() + count);
  }
  return c;
}

// Every table of M-10 by definition, padded to the plan's capacity: name -> values.
using Expected = std::vector<std::pair<std::string, Ints>>;
Expected model_step(const kda_metadata_desc& desc, const StepInput& s);

// A step of n rows, some empty, some of up to `longest` tokens, the others as long as a verify window at most.
inline StepInput random_step(std::mt19937_64& random, int64_t n, int32_t width, int64_t longest) {
  const auto below = [&](int64_t x) { return static_cast<int64_t>(random() % static_cast<uint64_t>(x)); };
  Ints lengths;
  for (int64_t i = 0; i < n; ++i) {
    lengths.push_back(below(8) == 0 ? 0 : below(5) == 0 ? 1 + below(longest) : 1 + below(width));
  }
  StepInput s = StepInput::of(lengths, width);
  for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
    s.computed[i] = below(6) == 0 ? 0 : 1 + below(5000);
    s.prefilling[i] = below(6) == 0;
    s.drafts.push_back(below(3) == 0 ? -1 : below(width));
    s.accepted.push_back(below(width + 2));
  }
  s.offset = below(2) == 0 ? KDA_INT32 : KDA_INT64;
  s.slot = below(2) == 0 ? KDA_INT32 : KDA_INT64;
  s.slot_stride = width + below(3);
  return s;
}

}  // namespace kda::conformance::test
