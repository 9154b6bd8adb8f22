#include "cuda/host/decode_lean.h"

#include <bit>
#include <limits>

namespace kda::cuda {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

int64_t size_of(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

// Gathers the conditions of a call while its arguments are put into 32 bits.
class Fit {
 public:
  bool ok() const { return ok_; }
  void want(bool condition) { ok_ = ok_ && condition; }
  int32_t number(int64_t x) {
    want(x >= 0 && x <= kMost);
    return ok_ ? static_cast<int32_t>(x) : 0;
  }
  uint32_t bytes(int64_t elements, int64_t size) {
    want(elements >= 0 && elements <= std::numeric_limits<uint32_t>::max() / size);
    return ok_ ? static_cast<uint32_t>(elements * size) : 0;
  }
  LeanTensor tensor(const void* data, int64_t row_stride, int64_t head_stride, int64_t size) {
    return {static_cast<char*>(const_cast<void*>(data)), bytes(row_stride, size), bytes(head_stride, size)};
  }
  // Samples of one row each are rows themselves.
  template <class Ref>
  LeanTensor rows(const Ref& t, bool samples) {
    return tensor(t.data, samples ? t.batch_stride : t.row_stride, t.head_stride, size_of(t.dtype));
  }
  LeanTensor vectors(const TokenRef& t, bool samples) {
    want(t.vectors != 0);
    return rows(t, samples);
  }

 private:
  bool ok_ = true;
};

void fill_slots(const SlotRef& t, LeanParams& c, Fit& fit) {
  fit.want(t.slots.present() && !t.slots.wide && !t.write_slots.present() && t.initial == Initial::kAll);
  c.slots = static_cast<const int32_t*>(t.slots.data);
  c.slots_row = fit.number(t.slots.row_stride);
  c.slots_column = fit.number(t.slots.column_stride);
  c.pool_slots = fit.number(t.count);
  c.null_slot = t.null_slot >= 0 && t.null_slot <= kMost ? static_cast<int32_t>(t.null_slot) : -1;
}

void fill_rows(const DecodeParams& p, LeanParams& c, Fit& fit) {
  const SequenceRef& s = p.sequences;
  fit.want(!s.begin.present());
  fit.want(s.cu.present() ? !s.batched && !s.cu.wide : s.tokens == 1);
  c.sequences = s.count;
  c.tokens = fit.number(s.cu.present() ? s.tokens : s.count);
  c.cu = static_cast<const int32_t*>(s.cu.data);
  c.cu_stride = fit.number(s.cu.row_stride);
  c.active = s.num_active;
  fill_slots(p.rule.slots, c, fit);
  fit.want(p.rule.records || (p.rule.per_token && p.rule.slots.slots.columns >= p.rule.width));
  c.columns = p.rule.width;
  c.accepted = p.rule.accepted;
  c.accepted_stride = fit.number(p.rule.accepted_stride);
}

void fill_gates(const GateRef& rule, LeanParams& c, Fit& fit) {
  fit.want(reinterpret_cast<uintptr_t>(rule.dt_bias) % 16 == 0);
  c.gate_rule = rule;
}

void fill_records(const RecordRef& records, int64_t gate_size, LeanRecordParams& r, Fit& fit) {
  fit.want(records.u_vectors != 0 && records.kg_vectors != 0 && !records.record_rows.wide);
  r.u = fit.tensor(records.u, records.u_row, records.u_head, 4);
  r.kg = fit.tensor(records.kg, records.kg_row, records.kg_head, gate_size);
  r.u_token_bytes = fit.bytes(records.u_token, 4);
  r.kg_token_bytes = fit.bytes(records.kg_token, gate_size);
  r.count = records.count;
  r.count_stride = fit.number(records.count_stride);
  r.record_rows = static_cast<const int32_t*>(records.record_rows.data);
  r.record_rows_stride = fit.number(records.record_rows.row_stride);
  r.rows = fit.number(records.rows);
}

LeanForm form_of(const DecodeParams& p) {
  const bool usual = p.form.io == Dtype::kBf16 && p.gate.dtype == Dtype::kBf16 && p.beta.dtype == Dtype::kBf16 &&
                     p.form.qk_norm && p.form.beta_logits;
  if (usual && p.gate_rule.family == GateFamily::kBounded) return LeanForm::kBounded;
  if (usual && p.gate_rule.family == GateFamily::kSoftplus) return LeanForm::kSoftplus;
  return LeanForm::kOther;
}

LeanParams fill_call(const DecodeParams& p, Fit& fit) {
  LeanParams c;
  fit.want(p.form.keys == 128 && p.form.values == 128 && p.vectors != 0);
  fit.want(p.form.io != Dtype::kFp32 && !p.out.rows.present());
  const auto ratio = static_cast<uint32_t>(p.form.value_heads / p.form.heads);
  fit.want(std::has_single_bit(ratio));
  c.query_shift = std::countr_zero(ratio);
  c.form = form_of(p);
  c.scale = p.form.scale;
  c.qk_norm = p.form.qk_norm;
  c.beta_logits = p.form.beta_logits;
  c.beta_doubled = p.form.beta_doubled;
  c.io = p.form.io;
  c.gate_dtype = p.gate.dtype;
  c.beta_dtype = p.beta.dtype;
  c.out_dtype = p.out.dtype;
  fill_rows(p, c, fit);
  const bool samples = p.sequences.batched != 0;
  c.q = fit.vectors(p.q, samples);
  c.k = fit.vectors(p.k, samples);
  c.v = fit.vectors(p.v, samples);
  c.gate = fit.vectors(p.gate, samples);
  c.beta = fit.rows(p.beta, samples);
  c.out = fit.rows(p.out, samples);
  fill_gates(p.gate_rule, c, fit);
  return c;
}

}  // namespace

std::optional<LeanParams> lean_call(const DecodeParams& p, int64_t element) {
  Fit fit;
  LeanParams c = fill_call(p, fit);
  c.pool = fit.tensor(p.pool.data, p.pool.slot_stride, 128 * 128, element);
  if (!fit.ok()) return std::nullopt;
  return c;
}

std::optional<LeanRecordParams> lean_record_call(const DecodeParams& p, int64_t element) {
  const auto call = lean_call(p, element);
  if (!call) return std::nullopt;
  Fit fit;
  LeanRecordParams r;
  r.call = *call;
  fill_records(p.records, size_of(p.gate.dtype), r, fit);
  r.fold = p.rule.fold;
  if (!fit.ok()) return std::nullopt;
  return r;
}

std::optional<LeanRecordParams> lean_commit_call(const CommitParams& p, int64_t element) {
  Fit fit;
  LeanRecordParams r;
  LeanParams& c = r.call;
  fit.want(p.form.keys == 128 && p.form.values == 128 && p.vectors != 0);
  c.qk_norm = p.form.qk_norm;
  c.gate_dtype = p.gate_dtype;
  fill_gates(p.gate_rule, c, fit);
  c.sequences = p.sequences;
  c.active = p.num_active;
  fill_slots(p.slots, c, fit);
  c.columns = p.width;
  c.accepted = p.accepted;
  c.accepted_stride = fit.number(p.accepted_stride);
  c.pool = fit.tensor(p.pool.data, p.pool.slot_stride, 128 * 128, element);
  fill_records(p.records, size_of(p.gate_dtype), r, fit);
  r.fold = 1;
  if (!fit.ok()) return std::nullopt;
  return r;
}

}  // namespace kda::cuda
