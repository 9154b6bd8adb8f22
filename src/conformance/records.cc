#include "conformance/records.h"

#include <algorithm>
#include <stdexcept>

#include "conformance/api.h"
#include "conformance/limits.h"
#include "conformance/random.h"
#include "conformance/tokens.h"

namespace kda::conformance {
namespace {

Records empty_records(const AttentionChoice& a, int64_t rows, int64_t width) {
  Records r;
  const kda_dtype gate = a.fp32_gate ? KDA_FP32 : a.io;
  r.u = Tensor(KDA_FP32, {rows, a.heads.HV, width, a.dims.V});
  r.kg = Tensor(gate, {rows, a.heads.HV, width, 2 * a.dims.K});
  r.count = Tensor::ints(std::vector<int64_t>(static_cast<size_t>(rows), 0));
  return r;
}

// Verifies `counts[n]` tokens of another draft by the reference, which leaves the records of a step before.
void fill_records(const AttentionChoice& a, int32_t width, const std::vector<int64_t>& counts, RecordsMade& made) {
  const TokenRows rows = place(Form::kOffsets32, counts, false, false);
  AttentionChoice other = a;
  other.layout = Layout::kDense;
  Problem p = attention_problem(other, rows.total, rows.begins, counts);
  for (Tensor* t : {&p.k, &p.v}) {  // not the tokens that are verified next
    std::vector<double> x = t->values();
    std::rotate(x.begin(), x.begin() + (x.empty() ? 0 : 1), x.end());
    t->assign(x);
  }
  kda_decode_desc d = decode_desc(p, "reference", width);
  d.max_sequences = rows.sequences();
  d.mode = KDA_DECODE_RECORDS;
  d.attention.state_dtype = made.pool.dtype();
  d.null_slot = made.tables.null_slot;
  Tensor out(a.io, {rows.total, a.heads.HV, a.dims.V});
  kda_decode_args args = decode_args(p);
  args.sequences = rows.view();
  args.state = made.pool;
  args.slots = made.tables.slots;
  args.records = made.records.view();
  args.out = out;
  Plan plan = make_plan(d);
  if (plan.run(args) != KDA_OK) throw std::runtime_error("records of an earlier step: " + plan.message());
}

}  // namespace

RecordsMade make_rows(const AttentionChoice& a, const RowChoice& choice, int64_t rows, int64_t columns,
                      kda_dtype pool, bool records, bool filled, bool record_rows) {
  RecordsMade made;
  std::vector<int64_t> counts;
  for (int64_t n = 0; n < rows; ++n) {
    counts.push_back(
        static_cast<int64_t>(splitmix64(static_cast<uint64_t>(n)) % static_cast<uint64_t>(choice.width + 1)));
  }
  const std::vector<int64_t> none(static_cast<size_t>(rows), 0);
  made.tables = row_tables(choice, rows, columns, records ? filled ? &counts : &none : nullptr);
  const int64_t payload = a.heads.HV * a.dims.V * a.dims.K;
  const bool gapped = choice.slots == Slots::kGapped;
  made.pool = canary_pool(pool, {made.tables.slots_in_pool, a.heads.HV, a.dims.V, a.dims.K},
                          gapped ? payload + 37 : 0, gapped ? 19 : 0);
  std::vector<double> x = uniform_vector(6, payload);
  for (double& v : x) v *= 0.5;
  for (int64_t slot : made.tables.start) {
    if (slot < 0) continue;
    std::rotate(x.begin(), x.begin() + 1, x.end());  // another state for each
    assign(select(made.pool, 0, slot), x);
  }
  if (!records) return made;
  const int64_t record_count = record_rows ? rows + 2 : made.tables.slots_in_pool;
  made.records = empty_records(a, record_count, choice.width);
  if (record_rows) {
    std::vector<int64_t> to;
    for (int64_t n = 0; n < rows; ++n) to.push_back(record_count - 1 - n);
    made.records.record_rows = Tensor::ints(to, choice.wide_index ? KDA_INT64 : KDA_INT32);
  }
  if (filled) fill_records(a, choice.width, counts, made);
  return made;
}

void check_records(Report& report, const Records& before, const Records& after, const Records& oracle, double limit) {
  report.expect_none("records.count", first_difference(after.count, oracle.count));
  report.expect_none("records.kg", first_difference(after.kg, oracle.kg));
  // Tokens of u that the oracle wrote; the others keep their bits.
  const Shape& s = after.u.shape();  // [rows, HV, width, V]
  const auto tokens = [&](const Tensor& t) { return reshape(t, {s[0] * s[1] * s[2], s[3]}); };
  const kda_tensor was = tokens(before.u), got = tokens(after.u), wanted = tokens(oracle.u);
  std::vector<double> x, r;
  for (int64_t i = 0; i < was.shape[0]; ++i) {
    if (same_bits(select(was, 0, i), select(wanted, 0, i))) {
      if (!same_bits(select(was, 0, i), select(got, 0, i))) {
        report.fault("records.u: row " + std::to_string(i / (s[1] * s[2])) + " was written");
        return;
      }
      continue;
    }
    const std::vector<double> gi = values(select(got, 0, i)), wi = values(select(wanted, 0, i));
    x.insert(x.end(), gi.begin(), gi.end());
    r.insert(r.end(), wi.begin(), wi.end());
  }
  report.measure("records.u", compare_flat(x, r, absolute_floor(KDA_FP32)), limit, KDA_FP32,
                 static_cast<int64_t>(x.size()), static_cast<int64_t>(x.size()));
}

}  // namespace kda::conformance
