// Classes and order of a step's rows (spec M-4..M-8) and the row tables of M-10, for arrays that the host can
// read. The CPU backend builds its tables with this; devices use it for the counts of a host copy (M-12).
#pragma once

#include "base/status.h"
#include "base/tensor.h"
#include "core/chunk_tables.h"
#include "kda/metadata.h"

namespace kda {

enum class RowClass { empty, decode, prefill, spec };

struct StepCounts {
  int64_t values[KDA_METADATA_COUNTS] = {};
  int64_t operator[](kda_metadata_count which) const { return values[which]; }
};

// Goes over the rows of one step in order.
class StepReader {
 public:
  struct Row {
    int64_t begin = 0;
    int64_t length = 0;
    bool has_state = false;
    RowClass group = RowClass::empty;
  };

  StepReader(const kda_metadata_desc& desc, const kda_step& step, int64_t tokens);

  int64_t count() const { return count_; }
  // K3 rule of by_drafts: all non-spec rows are prefills (spec M-7).
  bool all_prefill() const { return all_prefill_; }

  // visit(n, row) for every row, empty ones included.
  template <class Visit>
  void for_each(const Visit& visit) const {
    LengthReader lengths(cu_, tokens_);
    for (int64_t n = 0; n < count_; ++n) {
      if (n >= active_) {  // not looked at (spec P-7)
        visit(n, Row{});
        continue;
      }
      const LengthReader::Span span = lengths.next(n);
      Row row{span.begin, span.length, has_state(n), RowClass::empty};
      row.group = classify(n, row);
      visit(n, row);
    }
  }

 private:
  bool has_state(int64_t n) const { return computed_ ? computed_[n] > 0 : flag(has_state_, n); }
  static bool flag(const kda_tensor& t, int64_t n) {
    return present(t) && static_cast<const uint8_t*>(t.data)[n * t.strides[0]] != 0;
  }
  RowClass classify(int64_t n, const Row& row) const;
  RowClass classify_by_drafts(int64_t n, const Row& row) const;

  IndexView cu_, computed_, drafts_;
  kda_tensor has_state_, prefilling_;
  int64_t count_, active_, tokens_, width_;
  bool by_drafts_;
  bool all_prefill_ = false;
};

StepCounts count_step(const kda_metadata_desc& desc, const StepReader& step);

// Every table of M-10 but the chunk tables, padding included. The views were checked (core/metadata.cc).
void fill_step_tables(const kda_metadata_desc& desc, const kda_metadata_args& args, const StepReader& step,
                      const StepCounts& counts);

}  // namespace kda
