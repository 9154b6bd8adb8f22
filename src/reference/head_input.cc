#include "reference/head_input.h"

#include <cstring>

namespace kda::reference {
namespace {

// Row r of the output, all heads, or null if out_rows skips it.
char* output_row(const kda_tensor& out, const kda_tensor& out_rows, const TokenSpan& span, int64_t t) {
  const int64_t row = out_row(out, out_rows, span, 3, t);
  if (row < 0) return nullptr;
  const bool batched = out.rank > 3;
  return advance(static_cast<char*>(out.data), out.dtype,
                 (batched ? span.batch * out.strides[0] : 0) + row * out.strides[batched ? 1 : 0]);
}

}  // namespace

void HeadInput::decay(const char* raw, kda_dtype dtype, double* out) const {
  for (int64_t i = 0; i < spec_.key_dim; ++i) {
    const double bias = parameter(x_.dt_bias, head_ * spec_.key_dim + i, 0);
    out[i] = std::exp(log_decay(spec_, load(advance(raw, dtype, i), dtype), a_, bias));
  }
}

double HeadInput::read(int64_t t, const HeadScratch& s) const {
  const int64_t K = spec_.key_dim;
  decay(raw_gate(t), x_.gate.dtype, s.decay);
  load_row(raw_key(t), x_.k.dtype, K, s.k);
  if (present(x_.q)) load_row(head_row(x_.q, t, query_head_), x_.q.dtype, K, s.q);
  else std::memset(s.q, 0, static_cast<size_t>(K) * sizeof(double));
  if (!spec_.no_qk_norm) {
    normalize(s.k, K);
    normalize(s.q, K);
  }
  load_row(head_row(x_.v, t, head_), x_.v.dtype, spec_.value_dim, s.v);
  const char* beta =
      advance(token_row(x_.beta, span_, 2, t), x_.beta.dtype, head_ * x_.beta.strides[x_.beta.rank - 1]);
  return beta_value(spec_, load(beta, x_.beta.dtype));
}

void zero_output(const kda_tensor& out, const kda_tensor& out_rows, const TokenSpan& span, int64_t heads,
                 int64_t dim) {
  for (int64_t t = 0; t < span.length; ++t) {
    char* row = output_row(out, out_rows, span, t);
    for (int64_t h = 0; row != nullptr && h < heads; ++h) {
      zero_row(advance(row, out.dtype, h * out.strides[out.rank - 2]), out.dtype, dim);
    }
  }
}

void store_output(const kda_tensor& out, const kda_tensor& out_rows, const TokenSpan& span, int64_t t, int64_t head,
                  int64_t dim, const double* o) {
  char* row = output_row(out, out_rows, span, t);
  if (row != nullptr) store_row(advance(row, out.dtype, head * out.strides[out.rank - 2]), out.dtype, dim, o);
}

}  // namespace kda::reference
