#include "reference/records.h"

#include <cstring>

namespace kda::reference {

void replay_records(const kda_attention_spec& spec, const HeadInput& input, const kda_records& records, int64_t row,
                    int64_t head, int64_t tokens, const HeadScratch& s) {
  const int64_t K = spec.key_dim, V = spec.value_dim;
  for (int64_t t = 0; t < tokens; ++t) {
    const char* kg = record_kg(records, row, head, t);
    load_row(kg, records.kg.dtype, K, s.k);
    if (!spec.no_qk_norm) normalize(s.k, K);
    input.decay(advance(kg, records.kg.dtype, K), records.kg.dtype, s.decay);
    load_row(record_u(records, row, head, t), records.u.dtype, V, s.u);
    replay(s.state, V, K, s.decay, s.k, s.u);
  }
}

void record_token(const kda_attention_spec& spec, const HeadInput& input, const kda_records& records, int64_t row,
                  int64_t head, int64_t t, const double* u) {
  const int64_t K = spec.key_dim;
  const kda_dtype kg = records.kg.dtype;
  char* const to = record_kg(records, row, head, t);
  const char* key = input.raw_key(t);
  // The gate's dtype is the io dtype or fp32: the key fits exactly.
  for (int64_t i = 0; i < K; ++i) store(advance(to, kg, i), kg, load(advance(key, spec.io_dtype, i), spec.io_dtype));
  std::memcpy(advance(to, kg, K), input.raw_gate(t), static_cast<size_t>(K) * dtype_size(kg));
  store_row(record_u(records, row, head, t), records.u.dtype, spec.value_dim, u);
}

}  // namespace kda::reference
