// Records of recover mode (spec P-3, V-10) and their replay, shared by verify_record with fold and by commit.
#pragma once

#include "reference/head_input.h"

namespace kda::reference {

inline char* record_u(const kda_records& r, int64_t row, int64_t head, int64_t t) {
  return advance(static_cast<char*>(r.u.data), r.u.dtype,
                 row * r.u.strides[0] + head * r.u.strides[1] + t * r.u.strides[2]);
}
inline char* record_kg(const kda_records& r, int64_t row, int64_t head, int64_t t) {
  return advance(static_cast<char*>(r.kg.data), r.kg.dtype,
                 row * r.kg.strides[0] + head * r.kg.strides[1] + t * r.kg.strides[2]);
}
inline int32_t& record_count(const kda_tensor& count, int64_t row) {
  return static_cast<int32_t*>(count.data)[row * count.strides[0]];
}

// Replays the first `tokens` records of (row, head) into the state: St := St o e^g, St := St + u n(k)^T.
void replay_records(const kda_attention_spec& spec, const HeadInput& input, const kda_records& records, int64_t row,
                    int64_t head, int64_t tokens, const HeadScratch& s);

// Records token t: u rounded to fp32, the key as it came in, the raw gate's bits.
void record_token(const kda_attention_spec& spec, const HeadInput& input, const kda_records& records, int64_t row,
                  int64_t head, int64_t t, const double* u);

}  // namespace kda::reference
