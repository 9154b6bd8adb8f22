// Host checks of views (spec G-6, G-8, G-9): each returns the first thing wrong, naming argument, wanted, got.
#pragma once

#include <initializer_list>

#include "base/status.h"
#include "base/tensor.h"
#include "core/operators.h"

namespace kda {

constexpr int64_t kAny = -1;  // a dimension of any size

// Rank, sizes, overflow, data pointer, device: what every view must satisfy, whatever it is used for.
Status check_view(const char* name, const kda_tensor& t, const kda_device& device);

// Every pair (written, other) of an operator's tensors is disjoint, no written tensor overlaps itself, and the
// workspace overlaps none (spec G-9, R-35). Views whose rows interleave in one buffer (pools that share pages, slices
// of one projection) are told apart row by row.
class AliasCheck {
 public:
  void add(const char* name, const kda_tensor& t, bool written);
  Status result(const kda_workspace& workspace) const;

 private:
  struct Entry {
    const char* name;
    const kda_tensor* tensor;
    ByteRange range;
    bool written;
  };
  static constexpr int kMax = 48;
  Entry entries_[kMax];
  int count_ = 0;
};

// dtype is one of `dtypes`, shape equals `shape` (kAny matches), the last `dense` dimensions are dense.
Status check_tensor(const char* name, const kda_tensor& t, std::initializer_list<kda_dtype> dtypes,
                    std::initializer_list<int64_t> shape, int dense = 0);
// The same for per-token tensors [T, inner...] or [B, T, inner...]; `lead` is {T} or {B, T}.
struct TokenShape {
  bool batched = false;
  int64_t batch = 1;      // B
  int64_t tokens = 0;     // T (per sample if batched)
  int64_t sequences = 0;  // N
};
Status check_token_tensor(const char* name, const kda_tensor& t, const TokenShape& shape,
                          std::initializer_list<kda_dtype> dtypes, std::initializer_list<int64_t> inner, int dense);
// An fp32 parameter with `count` elements in any dense shape (spec L-1: A_log, dt_bias).
Status check_parameter(const char* name, const kda_tensor& t, int64_t count);
// [n] or [n, columns >= min_columns] of int32/int64.
Status check_index(const char* name, const kda_tensor& t, int64_t n, int64_t min_columns = 1);
Status check_flags(const char* name, const kda_tensor& t, int64_t n);
Status check_absent(const char* name, const kda_tensor& t, const char* why);

// Forms of P-12 and the bounds of R-31. `name`: of the token tensor; `row_dims`: its rank without batch.
Status check_sequences(const kda_sequences& s, const char* name, const kda_tensor& token, int row_dims,
                       int64_t max_tokens, int64_t max_sequences, TokenShape& shape);
// A state pool or packed tensor [rows, HV, V, K] (spec P-1, P-4).
Status check_state(const char* name, const kda_tensor& t, int64_t rows, const kda_attention_spec& a,
                   std::initializer_list<kda_dtype> dtypes);
// One conv pool [slots, L, channels] or [slots, channels, L] with L >= columns (spec P-2).
Status check_conv_state(const char* name, const kda_tensor& t, kda_conv_layout layout, int64_t channels,
                        int64_t columns, kda_dtype dtype, int64_t slots);
Status check_conv_weight(const char* name, const kda_tensor& t, int64_t channels, int64_t width);
// out [T, inner...], or any number of rows with out_rows [T] (spec R-41).
Status check_out(const char* name, const kda_tensor& out, const kda_tensor& out_rows, const TokenShape& shape,
                 kda_dtype dtype, std::initializer_list<int64_t> inner);
Status check_gate_parameters(const kda_attention_spec& a, const kda_tensor& A_log, const kda_tensor& dt_bias);
Status check_attention_tokens(const kda_attention_spec& a, const TokenShape& shape, const kda_tensor* q,
                              const kda_tensor* k, const kda_tensor* v, const kda_tensor& gate,
                              const kda_tensor& beta);

// Defaults and limits of the common description parts.
Status normalize_attention(kda_attention_spec& a);
Status check_bound(const char* name, int64_t value);
Status check_plan_flags(uint32_t flags);
bool is_io_dtype(kda_dtype t);

// Checked mode (spec G-7): values that normal mode would treat as "inactive" or clamp.
// More in core/check_slots.h.
Status check_offset_values(const kda_sequences& s, const TokenShape& shape);
Status check_active_value(const kda_tensor& num_active, int64_t n);
Status check_gate_values(const kda_attention_spec& a, const kda_sequences& s, const kda_tensor& gate);
Status check_row_values(const kda_tensor& out_rows, int64_t rows);
// Supplied chunk tables belong to the sequences and to chunks of KDA_PREFILL_GRID tokens (spec M-14, M-20).
Status check_chunk_values(const kda_sequences& s, const kda_tensor& token, const kda_tensor& indices,
                          const kda_tensor& offsets);

// Tensors that operators share, for their visit_tensors.
void visit_sequences(const kda_sequences& s, const TensorVisitor& visit);
template <class Args>
void visit_inputs(const Args& args, const TensorVisitor& visit) {
  visit("k", args.k, false);
  visit("v", args.v, false);
  visit("gate", args.gate, false);
  visit("beta", args.beta, false);
  visit("A_log", args.A_log, false);
  visit("dt_bias", args.dt_bias, false);
  visit_sequences(args.sequences, visit);
}

}  // namespace kda
