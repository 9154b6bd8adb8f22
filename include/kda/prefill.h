/* libkda, C ABI: chunked prefill (spec prefill.md R-1..R-5, kda.md E, H, K, P), segment maps (spec S). */
#ifndef KDA_PREFILL_H_
#define KDA_PREFILL_H_

#include <kda/context.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef KDA_ENUM(kda_segments) { KDA_SEGMENTS_AUTO = 0, KDA_SEGMENTS_OFF = 1 } kda_segments;

typedef struct kda_prefill_args kda_prefill_args;

/* Describes a prefill plan. The bounds are checked on every run (spec R-31). */
typedef struct kda_prefill_desc {
  size_t struct_size;
  kda_attention_spec attention;
  const char* backend; /* NULL = "auto"; "portable", "fused", "reference", aliases (spec R-6) */
  int64_t max_tokens;    /* T bound, >= 0 */
  int64_t max_sequences; /* N bound, >= 0 */
  kda_initial_state initial_state; /* 0 = none */
  int64_t null_slot;               /* spec P-6: -1 = none. NOTE: zero is slot 0; kda_prefill_desc_init sets -1 */
  int64_t max_checkpoints;         /* Ck bound, 0 = none (spec K-1) */
  uint32_t flags;                  /* KDA_PLAN_* */
  kda_segments segments;           /* spec S-8; off under BATCH_INVARIANT */
  /* Optional example of a run's tensors (data pointers ignored): lets candidates judge layouts and index
   * dtypes at plan time (gates `layout`, `index_dtype`). NULL: only general layouts are promised. */
  const kda_prefill_args* example;
} kda_prefill_desc;

/* One run's tensors. Absent tensors are zero-initialised. */
struct kda_prefill_args {
  size_t struct_size;
  kda_tensor q, k;    /* [T, H, K] or [B, T, H, K], io dtype, post-conv, not normalised */
  kda_tensor v;       /* [T, HV, V] */
  kda_tensor gate;    /* [T, HV, K]: raw logits; plain form: log decay <= 0 */
  kda_tensor beta;    /* [T, HV]: logits or values */
  kda_tensor A_log;   /* [HV] fp32; absent = 1 for the bounded family, required for softplus, not for plain */
  kda_tensor dt_bias; /* [HV*K] or [HV, K] fp32; absent = 0 */
  kda_sequences sequences;
  /* States: a pool [slots, HV, V, K] addressed by slots (spec P-1), or packed [N, HV, V, K] with no slots
   * (spec P-4). The final state goes to write_slots (absent: slots) of the same pool unless no_final_state. */
  kda_tensor state;
  kda_tensor slots;             /* [N] int32/int64, any stride */
  kda_tensor write_slots;       /* optional [N] (spec P-8) */
  kda_tensor has_initial_state; /* [N] bool, when the plan says flags (spec P-9) */
  kda_tensor final_state;       /* optional packed [N, HV, V, K]: final states go here instead of `state` */
  int32_t no_final_state;       /* nonzero: final states are not stored (spec R-3) */
  kda_tensor checkpoint_offsets; /* [N, Ck] int32/int64, tokens from the sequence's first token here (spec K-1) */
  kda_tensor checkpoint_slots;   /* [N, Ck] into `state`; or */
  kda_tensor checkpoint_states;  /* packed [N, Ck, HV, V, K], fp32 or the pool dtype */
  kda_tensor chunk_indices, chunk_offsets; /* optional, both or neither (spec M-20) */
  kda_tensor out;      /* [T, HV, V] or batched */
  kda_tensor out_rows; /* optional [T] int32/int64: row r goes to out row out_rows[r] (spec R-41) */
  kda_tensor stages;   /* optional: what kda_segment_summary_run left of the same tokens and sequences, see there */
};

/* Fills in struct_size and the defaults that are not zero (null_slot = -1). */
KDA_API void kda_prefill_desc_init(kda_prefill_desc* desc);
/* Validates, chooses a candidate (spec R-6..R-18) and prepares it. INVALID_ARGUMENT names the field;
 * UNSUPPORTED lists every candidate with every unmet gate. */
KDA_API kda_status kda_prefill_plan_create(kda_context* context, const kda_prefill_desc* desc, kda_plan** out);
/* Runs it. `stream` is the CUDA stream (ignored on the CPU). Allocates nothing and never synchronises. */
KDA_API kda_status kda_prefill_run(const kda_plan* plan, const kda_prefill_args* args, kda_workspace workspace,
                                   void* stream);

/* ---- Segment maps for context parallelism (spec S-9) -------------------------------------------- */

/* segment_summary: each sequence's map St_out = St_in*M + B as fp32 [N, HV, V+K, K]: rows 0..V-1 = B,
 * V..V+K-1 = M (row = input channel). Uses attention, bounds, flags of the description and k, v and gate of its
 * example; states and checkpoint fields are ignored. An empty sequence gives (I, 0). */
typedef struct kda_segment_summary_args {
  size_t struct_size;
  kda_tensor q, k, v, gate, beta, A_log, dt_bias; /* as prefill; q is not read and may be absent */
  kda_sequences sequences;
  kda_tensor summary; /* out [N, HV, V+K, K] fp32, inner three dimensions dense */
  /* Optional out, with q: uint8 [>= kda_segment_stages_size], aligned to 256 bytes: the tokens' preparation, for a
   * kda_prefill_run on the same q, k, gate, beta, parameters and sequences that is given it and need not make it again.
   * Same bits. */
  kda_tensor stages;
} kda_segment_summary_args;

KDA_API kda_status kda_segment_summary_plan_create(kda_context* context, const kda_prefill_desc* desc,
                                                   kda_plan** out);
/* Bytes of `stages` for N sequences of T tokens together; 0: this plan keeps none (then leave it absent). A prefill plan
 * that reads them has the same attention fields; one that cannot read them makes its own. */
KDA_API kda_status kda_segment_stages_size(const kda_plan* plan, int64_t sequences, int64_t tokens, size_t* bytes);
KDA_API kda_status kda_segment_summary_run(const kda_plan* plan, const kda_segment_summary_args* args,
                                           kda_workspace workspace, void* stream);

/* segment_merge: start states of P shards and the final state from the initial state and the summaries in
 * token order. All ranks that run it get the same bits. */
typedef struct kda_segment_merge_desc {
  size_t struct_size;
  const char* backend;
  int64_t num_value_heads, key_dim, value_dim;
  int64_t max_segments; /* P bound */
} kda_segment_merge_desc;

typedef struct kda_segment_merge_args {
  size_t struct_size;
  kda_tensor initial_state; /* [HV, V, K] fp32; absent = zero */
  kda_tensor summaries;     /* [P, HV, V+K, K] fp32, inner dimensions dense */
  kda_tensor present;       /* optional [P] bool: false = identity, the summary is not read */
  kda_tensor start_states;  /* out [P, HV, V, K] fp32; optional */
  kda_tensor final_state;   /* out [HV, V, K] fp32; optional */
} kda_segment_merge_args;

KDA_API kda_status kda_segment_merge_plan_create(kda_context* context, const kda_segment_merge_desc* desc,
                                                 kda_plan** out);
KDA_API kda_status kda_segment_merge_run(const kda_plan* plan, const kda_segment_merge_args* args,
                                         kda_workspace workspace, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_PREFILL_H_ */
