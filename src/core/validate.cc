#include "core/validate.h"

#include <algorithm>

#include "base/checked.h"

namespace kda {
namespace {

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string s = "[";
  for (int64_t d : shape) s += (s.size() > 1 ? ", " : "") + (d == kAny ? std::string("any") : std::to_string(d));
  return s + "]";
}

std::string dtypes_text(std::initializer_list<kda_dtype> dtypes) {
  std::string s;
  for (kda_dtype d : dtypes) s += (s.empty() ? "" : " or ") + std::string(dtype_name(d));
  return s;
}

Status check_dtype(const char* name, const kda_tensor& t, std::initializer_list<kda_dtype> dtypes) {
  for (kda_dtype d : dtypes) {
    if (t.dtype == d) return {};
  }
  return invalid_argument(name, ": wanted dtype ", dtypes_text(dtypes), ", got ", dtype_name(t.dtype));
}

Status check_dense(const char* name, const kda_tensor& t, int dense) {
  if (inner_dense(t, dense)) return {};
  return invalid_argument(name, ": wanted the last ", dense, " dimension(s) dense, got ", describe(t));
}

// Byte extent of a view over its dimensions from `dim` on; -1 if a stride is negative.
int64_t extent_from(const kda_tensor& t, int dim) {
  int64_t reach = 0;
  for (int i = dim; i < t.rank; ++i) {
    if (t.strides[i] < 0) return -1;
    reach += (t.shape[i] - 1) * t.strides[i];
  }
  return (reach + 1) * static_cast<int64_t>(dtype_size(t.dtype));
}

// True if no element is shared between a and b, whose first one lies `delta` bytes after a's, over their dimensions
// from `dim` on: apart as ranges, or side by side within equal strides (parts of a page, slices of a row).
bool interleave(const kda_tensor& a, const kda_tensor& b, int dim, int64_t delta) {
  const int64_t extent_a = extent_from(a, dim), extent_b = extent_from(b, dim);
  if (extent_a < 0 || extent_b < 0) return false;
  if (delta >= extent_a || -delta >= extent_b) return true;
  if (dim + 1 >= a.rank || dim + 1 >= b.rank) return false;
  const int64_t stride = a.strides[dim] * static_cast<int64_t>(dtype_size(a.dtype));
  if (stride <= 0 || stride != b.strides[dim] * static_cast<int64_t>(dtype_size(b.dtype))) return false;
  if (extent_from(a, dim + 1) > stride || extent_from(b, dim + 1) > stride) return false;
  // A row of a can meet only the rows of b that start within one stride of it.
  const int64_t rest = (delta % stride + stride) % stride;
  return interleave(a, b, dim + 1, rest) && interleave(a, b, dim + 1, rest - stride);
}

// True if no two elements of a view share memory: taken by growing strides, each dimension steps over all that lie
// within the ones before. (Stricter than need be: views that interleave with themselves otherwise are refused.)
bool elements_apart(const kda_tensor& t) {
  const auto stride = [&](int dim) { return t.strides[dim] < 0 ? -t.strides[dim] : t.strides[dim]; };
  bool taken[KDA_MAX_RANK] = {};
  int64_t extent = 1;
  for (int round = 0; round < t.rank; ++round) {
    int next = -1;
    for (int i = 0; i < t.rank; ++i) {
      if (!taken[i] && t.shape[i] > 1 && (next < 0 || stride(i) < stride(next))) next = i;
    }
    if (next < 0) return true;
    if (stride(next) < extent) return false;
    extent += (t.shape[next] - 1) * stride(next);
    taken[next] = true;
  }
  return true;
}

bool rows_interleave(const kda_tensor& a, const kda_tensor& b) {
  return interleave(a, b, 0, static_cast<char*>(b.data) - static_cast<char*>(a.data));
}

}  // namespace

bool is_io_dtype(kda_dtype t) { return t == KDA_FP32 || t == KDA_BF16 || t == KDA_FP16; }

Status check_view(const char* name, const kda_tensor& t, const kda_device& device) {
  if (!present(t)) return {};
  if (dtype_size(t.dtype) == 0) return invalid_argument(name, ": wanted a dtype of kda_dtype, got ", int{t.dtype});
  if (t.rank < 0 || t.rank > KDA_MAX_RANK) {
    return invalid_argument(name, ": wanted a rank of 0 to ", KDA_MAX_RANK, ", got ", t.rank);
  }
  if (t.device.type != device.type || (device.type != KDA_CPU && t.device.index != device.index)) {
    return invalid_argument(name, ": wanted a tensor on ", device_name(device.type), ":", device.index, ", got ",
                            device_name(t.device.type), ":", t.device.index);
  }
  // A size of 0 counts as 1, so that strides of an empty tensor can be multiplied up too.
  int64_t extent = 1, reach = 0;
  bool empty = false;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] < 0) return invalid_argument(name, ": wanted sizes >= 0, got ", shape_string(t));
    const auto product = checked_mul(extent, std::max<int64_t>(t.shape[i], 1));
    const auto step = checked_mul(t.shape[i] > 0 ? t.shape[i] - 1 : 0, t.strides[i]);
    const auto length = step ? checked_mul(*step, *step < 0 ? -1 : 1) : std::nullopt;
    const auto total = length ? checked_add(reach, *length) : std::nullopt;
    if (!product || !total || !checked_mul(*total, 8)) {
      return invalid_argument(name, ": wanted a size below 2^63 bytes, got ", describe(t));
    }
    extent = *product;
    reach = *total;
    empty = empty || t.shape[i] == 0;
  }
  if (!empty && t.data == nullptr) return invalid_argument(name, ": wanted data, got NULL for ", describe(t));
  if (reinterpret_cast<uintptr_t>(t.data) % dtype_size(t.dtype) != 0) {
    return invalid_argument(name, ": wanted an address aligned to its element of ", dtype_size(t.dtype),
                            " bytes, got ", t.data);
  }
  return {};
}

void AliasCheck::add(const char* name, const kda_tensor& t, bool written) {
  if (!present(t) || count_ == kMax) return;
  const ByteRange range = byte_range(t);
  if (range.first < range.last) entries_[count_++] = {name, &t, range, written};
}

Status AliasCheck::result(const kda_workspace& workspace) const {
  const auto base = reinterpret_cast<uintptr_t>(workspace.data);
  const ByteRange lent{base, base + std::min<uintptr_t>(workspace.bytes, UINTPTR_MAX - base)};
  for (int i = 0; i < count_; ++i) {
    if (!lent.overlaps(entries_[i].range)) continue;
    return invalid_argument("workspace: wanted memory apart from ", entries_[i].name, ", got overlapping bytes [",
                            lent.first, ", ", lent.last, ") and [", entries_[i].range.first, ", ",
                            entries_[i].range.last, ")");
  }
  for (int i = 0; i < count_; ++i) {
    if (!entries_[i].written) continue;
    if (!elements_apart(*entries_[i].tensor)) {
      return invalid_argument(entries_[i].name, ": wanted elements that share no memory, got ",
                              describe(*entries_[i].tensor));
    }
    for (int j = 0; j < count_; ++j) {
      if (j == i || (entries_[j].written && j < i) || !entries_[i].range.overlaps(entries_[j].range)) continue;
      if (rows_interleave(*entries_[i].tensor, *entries_[j].tensor)) continue;
      return invalid_argument(entries_[i].name, ": wanted memory apart from ", entries_[j].name,
                              ", got overlapping bytes [", entries_[i].range.first, ", ", entries_[i].range.last,
                              ") and [", entries_[j].range.first, ", ", entries_[j].range.last, ")");
    }
  }
  return {};
}

Status check_tensor(const char* name, const kda_tensor& t, std::initializer_list<kda_dtype> dtypes,
                    std::initializer_list<int64_t> shape, int dense) {
  if (!present(t))
    return invalid_argument(name, ": wanted ", dtypes_text(dtypes), " ", shape_text(shape), ", got none");
  KDA_RETURN_IF_ERROR(check_dtype(name, t, dtypes));
  bool same = t.rank == static_cast<int>(shape.size());
  int i = 0;
  for (int64_t d : shape) {
    if (same && d != kAny && t.shape[i] != d) same = false;
    ++i;
  }
  if (!same) return invalid_argument(name, ": wanted shape ", shape_text(shape), ", got ", shape_string(t));
  return check_dense(name, t, dense);
}

Status check_token_tensor(const char* name, const kda_tensor& t, const TokenShape& shape,
                          std::initializer_list<kda_dtype> dtypes, std::initializer_list<int64_t> inner, int dense) {
  int64_t wanted[KDA_MAX_RANK];
  int rank = 0;
  if (shape.batched) wanted[rank++] = shape.batch;
  wanted[rank++] = shape.tokens;
  for (int64_t d : inner) wanted[rank++] = d;
  kda_tensor expected{};
  expected.rank = rank;
  bool same = present(t) && t.rank == rank;
  for (int i = 0; i < rank; ++i) {
    expected.shape[i] = wanted[i];
    same = same && t.shape[i] == wanted[i];
  }
  if (!present(t))
    return invalid_argument(name, ": wanted ", dtypes_text(dtypes), " ", shape_string(expected), ", got none");
  KDA_RETURN_IF_ERROR(check_dtype(name, t, dtypes));
  if (!same) return invalid_argument(name, ": wanted shape ", shape_string(expected), ", got ", shape_string(t));
  return check_dense(name, t, dense);
}

Status check_parameter(const char* name, const kda_tensor& t, int64_t count) {
  if (!present(t)) return invalid_argument(name, ": wanted ", count, " fp32 values, got none");
  KDA_RETURN_IF_ERROR(check_dtype(name, t, {KDA_FP32}));
  if (num_elements(t) != count) {
    return invalid_argument(name, ": wanted ", count, " values, got ", num_elements(t), " in shape ",
                            shape_string(t));
  }
  return check_dense(name, t, t.rank);
}

Status check_index(const char* name, const kda_tensor& t, int64_t n, int64_t min_columns) {
  if (!present(t)) return invalid_argument(name, ": wanted int32 or int64 [", n, "], got none");
  KDA_RETURN_IF_ERROR(check_dtype(name, t, {KDA_INT32, KDA_INT64}));
  const bool vector = t.rank == 1 && t.shape[0] == n && min_columns <= 1;
  const bool table = t.rank == 2 && t.shape[0] == n && t.shape[1] >= min_columns;
  if (!vector && !table) {
    return invalid_argument(name, ": wanted shape [", n, min_columns > 1 ? str_cat(", ", min_columns) : "", "], got ",
                            shape_string(t));
  }
  if (n > 1 && t.strides[0] < 1) return invalid_argument(name, ": wanted a stride >= 1, got ", describe(t));
  return {};
}

Status check_flags(const char* name, const kda_tensor& t, int64_t n) {
  return check_tensor(name, t, {KDA_BOOL}, {n});
}

Status check_absent(const char* name, const kda_tensor& t, const char* why) {
  if (!present(t)) return {};
  return invalid_argument(name, ": wanted none (", why, "), got ", describe(t));
}

Status check_sequences(const kda_sequences& s, const char* name, const kda_tensor& token, int row_dims,
                       int64_t max_tokens, int64_t max_sequences, TokenShape& shape) {
  const bool cu = present(s.cu_seqlens), ranges = present(s.begin) || present(s.length);
  if (cu && ranges) return invalid_argument("sequences: wanted cu_seqlens or begin and length, got both");
  if (!present(token) || token.rank < row_dims || token.rank > row_dims + 1 ||
      (token.rank > row_dims && (cu || ranges))) {
    return invalid_argument(name, ": wanted a tensor of rank ", row_dims,
                            cu || ranges ? " (with offsets or ranges)" : str_cat(" or ", row_dims + 1, " (batched)"),
                            ", got ", describe(token));
  }
  shape.batched = token.rank > row_dims;
  shape.batch = shape.batched ? token.shape[0] : 1;
  shape.tokens = token.shape[shape.batched ? 1 : 0];
  if (cu) {
    if (s.cu_seqlens.rank != 1 || s.cu_seqlens.shape[0] < 1) {
      return invalid_argument("cu_seqlens: wanted shape [N+1], got ", shape_string(s.cu_seqlens));
    }
    KDA_RETURN_IF_ERROR(check_index("cu_seqlens", s.cu_seqlens, s.cu_seqlens.shape[0]));
    if (s.cu_seqlens.dtype == KDA_INT32 && shape.tokens > INT32_MAX) {
      return invalid_argument("cu_seqlens: wanted int64 for ", shape.tokens, " tokens, got int32");
    }
    shape.sequences = s.cu_seqlens.shape[0] - 1;
  } else if (ranges) {
    if (!present(s.begin) || !present(s.length))
      return invalid_argument("sequences: wanted begin and length, got one");
    if (s.begin.rank != 1) return invalid_argument("begin: wanted shape [N], got ", shape_string(s.begin));
    KDA_RETURN_IF_ERROR(check_index("begin", s.begin, s.begin.shape[0]));
    if (s.length.rank != 1) return invalid_argument("length: wanted shape [N], got ", shape_string(s.length));
    KDA_RETURN_IF_ERROR(check_index("length", s.length, s.begin.shape[0]));
    shape.sequences = s.begin.shape[0];
  } else {
    shape.sequences = shape.batch;
  }
  if (present(s.num_active)) KDA_RETURN_IF_ERROR(check_tensor("num_active", s.num_active, {KDA_INT32}, {1}));
  if (shape.batch * shape.tokens > max_tokens) {
    return invalid_argument("tokens: wanted at most max_tokens = ", max_tokens, ", got ", shape.batch * shape.tokens);
  }
  if (shape.sequences > max_sequences) {
    return invalid_argument("sequences: wanted at most max_sequences = ", max_sequences, ", got ", shape.sequences);
  }
  return {};
}

Status check_state(const char* name, const kda_tensor& t, int64_t rows, const kda_attention_spec& a,
                   std::initializer_list<kda_dtype> dtypes) {
  KDA_RETURN_IF_ERROR(check_tensor(name, t, dtypes, {rows, a.num_value_heads, a.value_dim, a.key_dim}, 3));
  const int64_t payload = a.num_value_heads * a.value_dim * a.key_dim;
  if (t.shape[0] > 1 && t.strides[0] < payload) {
    return invalid_argument(name, ": wanted stride(0) >= ", payload, " (rows may not overlap), got ", t.strides[0]);
  }
  return {};
}

Status check_conv_state(const char* name, const kda_tensor& t, kda_conv_layout layout, int64_t channels,
                        int64_t columns, kda_dtype dtype, int64_t slots) {
  const bool sd = layout == KDA_CONV_SD;
  KDA_RETURN_IF_ERROR(check_tensor(name, t, {dtype}, {kAny, sd ? kAny : channels, sd ? channels : kAny}));
  if (slots != kAny && t.shape[0] != slots) {
    return invalid_argument(name, ": wanted ", slots, " slots as the other pools, got ", t.shape[0]);
  }
  if (t.shape[sd ? 1 : 2] < columns) {
    return invalid_argument(name, ": wanted at least ", columns, " columns, got ", t.shape[sd ? 1 : 2], " in ",
                            sd ? "[slots, L, channels] " : "[slots, channels, L] ", shape_string(t));
  }
  if (t.strides[2] != 1 && t.shape[2] != 1) {
    return invalid_argument(name, ": wanted the last dimension dense, got ", describe(t));
  }
  const int64_t reach = (t.shape[1] - 1) * t.strides[1] + t.shape[2];
  if (t.strides[1] < t.shape[2] || (t.shape[0] > 1 && t.strides[0] < reach)) {
    return invalid_argument(name, ": wanted rows that do not overlap, got ", describe(t));
  }
  return {};
}

Status check_conv_weight(const char* name, const kda_tensor& t, int64_t channels, int64_t width) {
  if (present(t) && t.rank == 3) return check_tensor(name, t, {KDA_FP32}, {channels, 1, width}, 3);
  return check_tensor(name, t, {KDA_FP32}, {channels, width}, 2);
}

Status check_out(const char* name, const kda_tensor& out, const kda_tensor& out_rows, const TokenShape& shape,
                 kda_dtype dtype, std::initializer_list<int64_t> inner) {
  TokenShape rows = shape;
  if (present(out_rows)) {
    if (shape.batched) return invalid_argument("out_rows: wanted none with batched tokens, got ", describe(out_rows));
    if (out_rows.rank != 1)
      return invalid_argument("out_rows: wanted shape [", shape.tokens, "], got ", shape_string(out_rows));
    KDA_RETURN_IF_ERROR(check_index("out_rows", out_rows, shape.tokens));
    if (present(out) && out.rank > 0) rows.tokens = out.shape[0];
  }
  KDA_RETURN_IF_ERROR(check_token_tensor(name, out, rows, {dtype}, inner, 1));
  return {};
}

Status check_gate_parameters(const kda_attention_spec& a, const kda_tensor& A_log, const kda_tensor& dt_bias) {
  if (a.gate_family == KDA_GATE_PLAIN) {
    KDA_RETURN_IF_ERROR(check_absent("A_log", A_log, "the plain gate form has none"));
    return check_absent("dt_bias", dt_bias, "the plain gate form has none");
  }
  if (a.gate_family == KDA_GATE_SOFTPLUS || present(A_log)) {
    KDA_RETURN_IF_ERROR(check_parameter("A_log", A_log, a.num_value_heads));
  }
  if (present(dt_bias)) KDA_RETURN_IF_ERROR(check_parameter("dt_bias", dt_bias, a.num_value_heads * a.key_dim));
  return {};
}

Status check_attention_tokens(const kda_attention_spec& a, const TokenShape& shape, const kda_tensor* q,
                              const kda_tensor* k, const kda_tensor* v, const kda_tensor& gate,
                              const kda_tensor& beta) {
  if (q) KDA_RETURN_IF_ERROR(check_token_tensor("q", *q, shape, {a.io_dtype}, {a.num_heads, a.key_dim}, 1));
  if (k) KDA_RETURN_IF_ERROR(check_token_tensor("k", *k, shape, {a.io_dtype}, {a.num_heads, a.key_dim}, 1));
  if (v) KDA_RETURN_IF_ERROR(check_token_tensor("v", *v, shape, {a.io_dtype}, {a.num_value_heads, a.value_dim}, 1));
  KDA_RETURN_IF_ERROR(check_token_tensor("gate", gate, shape, {a.gate_dtype}, {a.num_value_heads, a.key_dim}, 1));
  if (present(beta) && beta.rank == (shape.batched ? 4 : 3)) {
    return unsupported("beta: wanted one value per head, shape [T, ", a.num_value_heads, "], got ",
                       shape_string(beta), " (per-channel beta is not supported, spec E-5)");
  }
  return check_token_tensor("beta", beta, shape, {a.beta_dtype}, {a.num_value_heads}, 0);
}

void visit_sequences(const kda_sequences& s, const TensorVisitor& visit) {
  visit("cu_seqlens", s.cu_seqlens, false);
  visit("begin", s.begin, false);
  visit("length", s.length, false);
  visit("num_active", s.num_active, false);
}

}  // namespace kda
