/* libkda, C ABI: decode, speculative verify, commit, decode_step (spec kda.md V, W). */
#ifndef KDA_DECODE_H_
#define KDA_DECODE_H_

#include <kda/conv.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How the states of a row's tokens are kept. */
typedef KDA_ENUM(kda_decode_mode) {
  KDA_DECODE_COLUMNS = 0, /* a state per token: slots [N, width] (spec V-1..V-9) */
  KDA_DECODE_RECORDS = 1  /* one state and a record per token: verify_record + commit (spec V-10) */
} kda_decode_mode;

typedef KDA_ENUM(kda_store) {
  KDA_STORE_PER_TOKEN = 0, /* state after token t goes to slots[n, t] (spec V-3) */
  KDA_STORE_FINAL = 1      /* only the last one, to slots[n, 0] */
} kda_store;

/* Records of recover mode (spec P-3). Row of a sequence: its slot, or record_rows[n] when given. */
typedef struct kda_records {
  kda_tensor u;     /* [rows, HV, width, V] fp32 */
  kda_tensor kg;    /* [rows, HV, width, 2K] gate dtype: post-conv k, then the raw gate */
  kda_tensor count; /* [rows] int32 */
  kda_tensor record_rows; /* optional [N] int32/int64 */
} kda_records;

typedef struct kda_decode_args kda_decode_args;

typedef struct kda_decode_desc {
  size_t struct_size;
  kda_attention_spec attention;
  const char* backend;   /* spec R-18 */
  int64_t max_tokens;    /* T bound */
  int64_t max_sequences; /* N bound */
  int32_t width;         /* 1 + S, 1..KDA_MAX_VERIFY; 0 = 1 */
  kda_decode_mode mode;
  int32_t fold;    /* records mode: commit the previous records first (spec V-10b) */
  kda_store store; /* columns mode */
  kda_initial_state initial_state; /* 0 = all (spec P-9); none or flags for fresh rows */
  int64_t null_slot;               /* kda_decode_desc_init sets -1 */
  uint32_t flags;
  const kda_decode_args* example; /* optional, as in kda_prefill_desc */
} kda_decode_desc;

struct kda_decode_args {
  size_t struct_size;
  kda_tensor q, k, v, gate, beta, A_log, dt_bias; /* as prefill */
  kda_sequences sequences;      /* rows of qlen >= 0 tokens; form (c): [B, T, ...] */
  kda_tensor state;             /* pool [slots, HV, V, K], or packed [N, HV, V, K] without slots */
  kda_tensor slots;             /* [N] or [N, width] int32/int64; row stride free */
  kda_tensor write_slots;       /* optional [N] or [N, width] (spec P-8) */
  kda_tensor accepted;          /* optional [N] int32 (spec V-2); absent = 1. Records mode with fold: c (V-10) */
  kda_tensor has_initial_state; /* [N] bool, when the plan says flags */
  kda_records records;          /* records mode */
  kda_tensor out;               /* [T, HV, V] */
  kda_tensor out_rows;          /* optional [T] (spec R-41) */
};

KDA_API void kda_decode_desc_init(kda_decode_desc* desc);
KDA_API kda_status kda_decode_plan_create(kda_context* context, const kda_decode_desc* desc, kda_plan** out);
/* One token or a verify window per row, by the plan's mode: writes out, and states (columns) or records. */
KDA_API kda_status kda_decode_run(const kda_plan* plan, const kda_decode_args* args, kda_workspace workspace,
                                  void* stream);

/* commit (spec V-10): replays the first c recorded tokens into the state, moves the window (W-4), count := 0. */
typedef struct kda_commit_desc {
  size_t struct_size;
  kda_attention_spec attention;
  const char* backend;
  int64_t max_sequences;
  int32_t width;
  int64_t null_slot;
  int32_t conv_width;          /* W; 0 = no conv pools are given */
  int32_t conv_parts;          /* 1 (merged q|k|v) or 3 */
  kda_conv_layout conv_layout; /* of the conv pools */
  kda_dtype conv_dtype;        /* 0 = io_dtype */
  uint32_t flags;
} kda_commit_desc;

typedef struct kda_commit_args {
  size_t struct_size;
  kda_tensor A_log, dt_bias;
  kda_tensor state;
  kda_tensor slots;         /* [N] */
  kda_tensor accepted;      /* [N] int32: c in [0, count]; outside: row inactive, records kept */
  kda_tensor num_active;    /* optional int32 [1] */
  kda_records records;
  kda_tensor conv_state[3]; /* pools, L >= W + S (spec P-2) */
} kda_commit_args;

KDA_API void kda_commit_desc_init(kda_commit_desc* desc);
KDA_API kda_status kda_commit_plan_create(kda_context* context, const kda_commit_desc* desc, kda_plan** out);
KDA_API kda_status kda_commit_run(const kda_plan* plan, const kda_commit_args* args, kda_workspace workspace,
                                  void* stream);

/* decode_step (spec V-15): conv + SiLU + attention + gated norm in one pass, equal bit for bit to the chain
 * conv -> decode -> gated_norm on the same backend (spec L-8). */
typedef struct kda_decode_step_desc {
  size_t struct_size;
  kda_decode_desc decode;
  int32_t conv_width;          /* W */
  int32_t conv_parts;          /* 1: qkv [T, 2*H*K + HV*V]; 3: q, k, v apart */
  kda_conv_layout conv_layout;
  kda_dtype conv_dtype;        /* pool dtype; 0 = io_dtype */
  double norm_eps;             /* 0 = 1e-5 */
  int32_t no_norm;             /* nonzero: z absent, out is the raw o (spec V-15) */
} kda_decode_step_desc;

typedef struct kda_decode_step_args {
  size_t struct_size;
  kda_decode_args decode;    /* q, k, v are absent here */
  kda_tensor x[3];           /* raw projections: [T, channels] per part */
  kda_tensor conv_weight[3]; /* [channels, W] or [channels, 1, W] fp32 per part */
  kda_tensor conv_state[3];  /* pools per part */
  kda_tensor z;              /* [T, HV, V] io dtype */
  kda_tensor norm_weight;    /* [V] fp32 */
} kda_decode_step_args;

KDA_API void kda_decode_step_desc_init(kda_decode_step_desc* desc);
KDA_API kda_status kda_decode_step_plan_create(kda_context* context, const kda_decode_step_desc* desc,
                                               kda_plan** out);
KDA_API kda_status kda_decode_step_run(const kda_plan* plan, const kda_decode_step_args* args,
                                       kda_workspace workspace, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_DECODE_H_ */
