// From the C ABI's tensors to the kernels' plain views. Core has validated the tensors; nothing is read here.
#pragma once

#include "core/operators.h"
#include "cuda/kernels/common/rows.h"
#include "cuda/kernels/recurrence/params.h"

namespace kda::cuda {

Dtype to_dtype(kda_dtype dtype);
IndexRef to_index(const kda_tensor& t);
// [T, heads, dim] (row_dims 3) or [T, dim] (row_dims 2; beta too), or batched; `element_offset` skips channels.
TokenRef to_token(const kda_tensor& t, int row_dims, int64_t element_offset = 0);
OutRef to_out(const kda_tensor& t, const kda_tensor& out_rows, int row_dims);
// `token`: any token tensor of rank row_dims or, batched, one more.
SequenceRef to_sequences(const kda_sequences& s, const kda_tensor& token, int row_dims);
GateRef to_gate(const kda_attention_spec& spec, const kda_tensor& A_log, const kda_tensor& dt_bias);
PoolRef to_pool(const kda_tensor& state);
RecordRef to_records(const kda_records& r);
WindowRef to_window(const kda_tensor& pool, kda_conv_layout layout, int64_t channel_offset = 0);
SlotRef to_slots(const kda_tensor& slots, const kda_tensor& write_slots, const kda_tensor& flags, int64_t count,
                 int64_t null_slot, kda_initial_state initial);
AttentionForm to_form(const kda_attention_spec& spec);

// Groups of four elements from a multiple of four on are aligned to their size, in rows that lie `strides` apart.
bool groups_of_four(const void* data, kda_dtype dtype, std::initializer_list<int64_t> strides);

inline const int32_t* int32_data(const kda_tensor& t) { return static_cast<const int32_t*>(t.data); }
inline int64_t stride_of(const kda_tensor& t) { return t.rank > 0 ? t.strides[0] : 0; }

// Rows of `row_elements` in a tensor whose rows lie `strides` apart all start at multiples of 16 bytes and are whole
// 16-byte pieces.
bool rows_of_16_bytes(const void* data, kda_dtype dtype, int64_t row_elements,
                      std::initializer_list<int64_t> strides);
// The rows [K] of a state pool.
bool state_rows_of_16_bytes(const kda_tensor& state);

}  // namespace kda::cuda
