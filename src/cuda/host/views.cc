#include "cuda/host/views.h"

#include <algorithm>
#include <limits>

#include "base/tensor.h"

namespace kda::cuda {

bool groups_of_four(const void* data, kda_dtype dtype, std::initializer_list<int64_t> strides) {
  const auto group = 4 * static_cast<uintptr_t>(dtype_size(dtype));
  bool whole = group != 0 && reinterpret_cast<uintptr_t>(data) % group == 0;
  for (int64_t stride : strides) whole = whole && stride % 4 == 0;
  return whole;
}

Dtype to_dtype(kda_dtype dtype) {
  if (dtype == KDA_BF16) return Dtype::kBf16;
  if (dtype == KDA_FP16) return Dtype::kFp16;
  return Dtype::kFp32;
}

IndexRef to_index(const kda_tensor& t) {
  IndexRef r;
  if (!present(t)) return r;
  r.data = t.data;
  r.row_stride = stride_of(t);
  r.column_stride = t.rank > 1 ? t.strides[1] : 0;
  r.columns = t.rank > 1 ? static_cast<int32_t>(t.shape[1]) : 1;
  r.wide = t.dtype == KDA_INT64;
  return r;
}

TokenRef to_token(const kda_tensor& t, int row_dims, int64_t element_offset) {
  TokenRef r;
  if (!present(t)) return r;
  const int batched = t.rank > row_dims ? 1 : 0;
  r.data = static_cast<const char*>(t.data) + element_offset * static_cast<int64_t>(dtype_size(t.dtype));
  r.batch_stride = batched ? t.strides[0] : 0;
  r.row_stride = t.strides[batched];
  r.head_stride = t.strides[batched + 1];
  r.dtype = to_dtype(t.dtype);
  if (row_dims < 3) return r;
  const int64_t dim = t.shape[t.rank - 1];
  r.vectors = groups_of_four(r.data, t.dtype, {r.batch_stride, r.row_stride, r.head_stride}) && dim % 8 == 0;
  return r;
}

OutRef to_out(const kda_tensor& t, const kda_tensor& out_rows, int row_dims) {
  OutRef r;
  const TokenRef view = to_token(t, row_dims);
  r.data = t.data;
  r.batch_stride = view.batch_stride;
  r.row_stride = view.row_stride;
  r.head_stride = view.head_stride;
  r.dtype = view.dtype;
  r.rows = to_index(out_rows);
  r.count = t.shape[t.rank > row_dims ? 1 : 0];
  return r;
}

SequenceRef to_sequences(const kda_sequences& s, const kda_tensor& token, int row_dims) {
  SequenceRef r;
  r.cu = to_index(s.cu_seqlens);
  r.begin = to_index(s.begin);
  r.length = to_index(s.length);
  r.num_active = present(s.num_active) ? int32_data(s.num_active) : nullptr;
  r.batched = token.rank > row_dims;
  r.tokens = token.shape[r.batched ? 1 : 0];
  int64_t count = r.batched ? token.shape[0] : 1;
  if (present(s.cu_seqlens)) count = s.cu_seqlens.shape[0] - 1;
  else if (present(s.begin)) count = s.begin.shape[0];
  r.count = static_cast<int32_t>(count);
  return r;
}

GateRef to_gate(const kda_attention_spec& spec, const kda_tensor& A_log, const kda_tensor& dt_bias) {
  GateRef r;
  r.A_log = static_cast<const float*>(A_log.data);
  r.dt_bias = static_cast<const float*>(dt_bias.data);
  // Kept finite, as exp(A_log) is (gate_scale): no bound times a gate of zero may be 0 * inf.
  r.lower_bound = static_cast<float>(std::max(spec.lower_bound, double{-std::numeric_limits<float>::max()}));
  r.family = static_cast<GateFamily>(spec.gate_family);
  return r;
}

PoolRef to_pool(const kda_tensor& state) { return {state.data, stride_of(state), state.shape[0]}; }

RecordRef to_records(const kda_records& r) {
  RecordRef out;
  if (!present(r.u)) return out;
  out.u = static_cast<float*>(r.u.data);
  out.kg = r.kg.data;
  out.u_row = r.u.strides[0], out.u_head = r.u.strides[1], out.u_token = r.u.strides[2];
  out.kg_row = r.kg.strides[0], out.kg_head = r.kg.strides[1], out.kg_token = r.kg.strides[2];
  out.count = static_cast<int32_t*>(r.count.data);
  out.count_stride = stride_of(r.count);
  out.rows = r.count.shape[0];
  out.record_rows = to_index(r.record_rows);
  const int64_t keys = r.kg.shape[3] / 2, values = r.u.shape[3];
  out.u_vectors = groups_of_four(r.u.data, r.u.dtype, {out.u_row, out.u_head, out.u_token}) && values % 8 == 0;
  out.kg_vectors = groups_of_four(r.kg.data, r.kg.dtype, {out.kg_row, out.kg_head, out.kg_token}) && keys % 8 == 0;
  return out;
}

WindowRef to_window(const kda_tensor& pool, kda_conv_layout layout, int64_t channel_offset) {
  WindowRef r;
  if (!present(pool)) return r;
  const bool sd = layout == KDA_CONV_SD;
  r.slot_stride = pool.strides[0];
  r.channel_stride = pool.strides[sd ? 2 : 1];
  r.column_stride = pool.strides[sd ? 1 : 2];
  r.data = static_cast<char*>(pool.data) +
           channel_offset * r.channel_stride * static_cast<int64_t>(dtype_size(pool.dtype));
  r.dtype = to_dtype(pool.dtype);
  r.vectors = r.channel_stride == 1 && groups_of_four(r.data, pool.dtype, {r.slot_stride, r.column_stride});
  return r;
}

SlotRef to_slots(const kda_tensor& slots, const kda_tensor& write_slots, const kda_tensor& flags, int64_t count,
                 int64_t null_slot, kda_initial_state initial) {
  SlotRef r;
  r.slots = to_index(slots);
  r.write_slots = to_index(write_slots);
  r.flags = static_cast<const uint8_t*>(flags.data);
  r.flags_stride = stride_of(flags);
  r.count = count;
  r.null_slot = null_slot;
  r.initial = static_cast<Initial>(initial);
  return r;
}

AttentionForm to_form(const kda_attention_spec& spec) {
  AttentionForm f;
  f.heads = static_cast<int32_t>(spec.num_heads);
  f.value_heads = static_cast<int32_t>(spec.num_value_heads);
  f.keys = static_cast<int32_t>(spec.key_dim);
  f.values = static_cast<int32_t>(spec.value_dim);
  f.scale = static_cast<float>(spec.scale);
  f.qk_norm = spec.no_qk_norm == 0;
  f.beta_logits = spec.beta_form == KDA_BETA_LOGITS;
  f.beta_doubled = spec.allow_neg_eigval != 0;
  f.io = to_dtype(spec.io_dtype);
  return f;
}

bool rows_of_16_bytes(const void* data, kda_dtype dtype, int64_t row_elements,
                      std::initializer_list<int64_t> strides) {
  const auto size = static_cast<int64_t>(dtype_size(dtype));
  bool whole = reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_elements * size % 16 == 0;
  for (int64_t stride : strides) whole = whole && stride * size % 16 == 0;
  return whole;
}

bool state_rows_of_16_bytes(const kda_tensor& state) {
  return rows_of_16_bytes(state.data, state.dtype, state.shape[3], {state.shape[0] > 1 ? state.strides[0] : 0});
}

}  // namespace kda::cuda
