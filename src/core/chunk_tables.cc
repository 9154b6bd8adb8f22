#include "core/chunk_tables.h"

#include <algorithm>

#include "base/checked.h"

namespace kda {
namespace {

template <class Index>
void fill(const kda_chunk_request& request, const IndexView& cu) {
  auto* pairs = static_cast<Index*>(request.chunk_indices.data);
  auto* offsets = static_cast<int64_t*>(request.chunk_offsets.data);
  const int64_t rows = request.chunk_indices.shape[0];
  LengthReader lengths(cu, request.num_tokens);
  int64_t row = 0;
  for (int64_t n = 0; n < request.num_sequences; ++n) {
    offsets[n] = row;
    const int64_t chunks = std::min(ceil_div(lengths.next(n).length, request.chunk), rows - row);
    for (int64_t c = 0; c < chunks; ++c, ++row) {
      pairs[2 * row] = static_cast<Index>(n);
      pairs[2 * row + 1] = static_cast<Index>(c);
    }
  }
  std::fill(offsets + request.num_sequences, offsets + request.chunk_offsets.shape[0], row);
  std::fill(pairs + 2 * row, pairs + 2 * rows, Index{-1});
}

Status check_offsets_view(const char* name, const kda_tensor& t, int64_t n) {
  if (t.rank == 1 && t.shape[0] == n + 1 && (t.dtype == KDA_INT32 || t.dtype == KDA_INT64) && t.data != nullptr &&
      (n == 0 || t.strides[0] >= 1)) {
    return {};
  }
  return invalid_argument(name, ": wanted int32 or int64 [", n + 1, "] with a stride >= 1, got ", describe(t));
}

}  // namespace

std::optional<int64_t> chunk_bound(int64_t tokens, int64_t sequences, int64_t chunk) {
  if (tokens < 0 || sequences < 0 || chunk < 1) return std::nullopt;
  const int64_t filled = std::min(sequences, tokens);
  return filled == 0 ? 0 : filled + (tokens - filled) / chunk;
}

int64_t count_chunks(const IndexView& cu, int64_t n, int64_t tokens, int64_t chunk) {
  LengthReader lengths(cu, tokens);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += ceil_div(lengths.next(i).length, chunk);
  return count;
}

Status check_host_offsets(const char* name, const kda_tensor& cu, int64_t tokens) {
  const IndexView view = index_view(cu);
  int64_t last = 0;
  for (int64_t i = 0; i < view.size; ++i) {
    const int64_t value = view[i];
    if (i == 0 ? value != 0 : value < last || value > tokens) {
      return invalid_argument(name, "[", i, "]: wanted ",
                              i == 0 ? std::string("0") : str_cat("a value in [", last, ", ", tokens, "]"), ", got ",
                              value);
    }
    last = value;
  }
  return {};
}

Status check_chunk_request(const kda_chunk_request& r) {
  if (r.num_tokens < 0) return invalid_argument("num_tokens: wanted >= 0, got ", r.num_tokens);
  if (r.num_sequences < 0) return invalid_argument("num_sequences: wanted >= 0, got ", r.num_sequences);
  if (r.chunk < 1) return invalid_argument("chunk: wanted >= 1, got ", r.chunk);
  KDA_RETURN_IF_ERROR(check_offsets_view("cu_seqlens", r.cu_seqlens, r.num_sequences));
  if (r.cu_seqlens.dtype == KDA_INT32 && r.num_tokens > INT32_MAX) {
    return invalid_argument("cu_seqlens: wanted int64 for ", r.num_tokens, " tokens, got int32");
  }
  int64_t wanted = *chunk_bound(r.num_tokens, r.num_sequences, r.chunk);
  if (present(r.cu_seqlens_host)) {
    KDA_RETURN_IF_ERROR(check_offsets_view("cu_seqlens_host", r.cu_seqlens_host, r.num_sequences));
    KDA_RETURN_IF_ERROR(check_host_offsets("cu_seqlens_host", r.cu_seqlens_host, r.num_tokens));
    wanted = count_chunks(index_view(r.cu_seqlens_host), r.num_sequences, r.num_tokens, r.chunk);
  }
  const kda_tensor &indices = r.chunk_indices, &offsets = r.chunk_offsets;
  if (indices.rank != 2 || indices.dtype != r.cu_seqlens.dtype || indices.shape[0] < wanted ||
      indices.shape[1] != 2 || !inner_dense(indices, 2) || (indices.shape[0] > 0 && indices.data == nullptr)) {
    return invalid_argument("chunk_indices: wanted dense ", dtype_name(r.cu_seqlens.dtype), " [>= ", wanted,
                            ", 2], got ", describe(indices));
  }
  if (offsets.rank != 1 || offsets.dtype != KDA_INT64 || offsets.shape[0] < r.num_sequences + 1 ||
      !inner_dense(offsets, 1) || offsets.data == nullptr) {
    return invalid_argument("chunk_offsets: wanted dense int64 [>= ", r.num_sequences + 1, "], got ",
                            describe(offsets));
  }
  return {};
}

void fill_chunk_tables(const kda_chunk_request& request, const kda_tensor& cu) {
  const IndexView view = index_view(cu);
  if (request.chunk_indices.dtype == KDA_INT64) fill<int64_t>(request, view);
  else fill<int32_t>(request, view);
}

}  // namespace kda
