// Where a head's tokens come from: q, k, v tensors (DirectSource) or the records of an earlier verify (RecordSource).
#pragma once

#include "cuda/kernels/recurrence/token.cuh"

namespace kda::cuda {

// Address of a recorded token's k and raw gate, in elements.
__device__ __forceinline__ int64_t record_kg_offset(const RecordRef& r, int64_t row, int32_t head, int64_t t) {
  return row * r.kg_row + head * r.kg_head + t * r.kg_token;
}
__device__ __forceinline__ int64_t record_u_offset(const RecordRef& r, int64_t row, int32_t head, int64_t t) {
  return row * r.u_row + head * r.u_head + t * r.u_token;
}

// P has the fields of DecodeParams.
template <class P, class Slot_>
struct DirectSource {
  using Slot = Slot_;
  using Input = PartInput<Slot>;
  const P& p;
  const HeadPlace& at;
  int32_t head, query_head;  // `at` may have others: a block goes through several
  bool stores = false;       // store slots are wanted

  __device__ __forceinline__ VectorRef row_of(const TokenRef& x, int t, int32_t of, int32_t first, int32_t n) const {
    return {x.data, x.offset(at.span.batch, at.span.begin + t, of) + first, n, x.dtype, x.vectors != 0};
  }

  __device__ __forceinline__ void gather(Input& in, Part part, int t) const {
    if (part == Part::kScalar) {
      in.beta = load_bits(p.beta.data, p.beta.offset(at.span.batch, at.span.begin + t, head), p.beta.dtype);
    } else {
      const bool value = part == Part::kValue;
      const TokenRef& x = part == Part::kQuery ? p.q : value ? p.v : p.k;
      const VectorRef row =
          row_of(x, t, value ? head : query_head, value ? at.first_row : 0, value ? at.rows : p.form.keys);
      in.bits.gather(row);
    }
    in.decay.gather(p.gate_rule, row_of(p.gate, t, head, 0, p.form.keys), part, head);
  }

  __device__ __forceinline__ void finish(const Input& in, Part part, int t, Slot& s) const {
    in.decay.finish(p.gate_rule, p.gate.dtype, p.form.keys, part, s.decay);
    if (part == Part::kScalar) {
      finish_scalars(p, at, in.beta, t, stores, s);
    } else {
      float x[Input::kLanes];
      const TokenRef& from = part == Part::kQuery ? p.q : part == Part::kKey ? p.k : p.v;
      in.bits.convert(x, p.form.io, from.vectors != 0);
      if (part == Part::kValue) finish_values(x, Slot::kValues, s.v);
      else finish_normalised(x, p.form.qk_norm != 0, part == Part::kQuery ? s.q : s.k);
    }
  }
};

// beta of token t and where its results go.
template <class P, class Slot>
__device__ __forceinline__ void finish_scalars(const P& p, const HeadPlace& at, unsigned beta, int t, bool stores,
                                               Slot& s) {
  if (lane_id() != 0) return;
  s.beta = beta_value(float_of_bits(beta, p.beta.dtype), p.form.beta_logits != 0, p.form.beta_doubled != 0);
  s.out_row = p.out.row(at.span.begin + t);
  if (stores) s.store_slot = store_slot(p.rule.slots, at.n, t);
}

// Recorded tokens: u in the place of v, no q and no beta.
template <class Slot_>
struct RecordSource {
  using Slot = Slot_;
  using Input = PartInput<Slot>;
  const RecordRef& records;
  const GateRef& gate_rule;
  const AttentionForm& form;
  Dtype gate_dtype;
  const HeadPlace& at;
  int64_t row;  // of the records

  __device__ __forceinline__ void gather(Input& in, Part part, int t) const {
    const int64_t kg = record_kg_offset(records, row, at.head, t);
    if (part == Part::kKey) {
      in.bits.gather({records.kg, kg, form.keys, gate_dtype, records.kg_vectors != 0});
    } else if (part == Part::kValue) {
      in.bits.gather({records.u, record_u_offset(records, row, at.head, t) + at.first_row, at.rows, Dtype::kFp32,
                      records.u_vectors != 0});
    }
    in.decay.gather(gate_rule, {records.kg, kg + form.keys, form.keys, gate_dtype}, part, at.head);
  }

  __device__ __forceinline__ void finish(const Input& in, Part part, int, Slot& s) const {
    in.decay.finish(gate_rule, gate_dtype, form.keys, part, s.decay);
    float x[Input::kLanes];
    if (part == Part::kKey) {
      in.bits.convert(x, gate_dtype, records.kg_vectors != 0);
      finish_normalised(x, form.qk_norm != 0, s.k);
    } else if (part == Part::kValue) {
      in.bits.convert(x, Dtype::kFp32, records.u_vectors != 0);
      finish_values(x, Slot::kValues, s.v);
    }
  }
};

}  // namespace kda::cuda
