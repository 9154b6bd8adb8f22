/* libkda, C ABI: short causal convolution + SiLU with windows in a pool (spec kda.md W), gated norm (L-7.4). */
#ifndef KDA_CONV_H_
#define KDA_CONV_H_

#include <kda/context.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef KDA_ENUM(kda_conv_mode) {
  KDA_CONV_PREFILL = 1, /* varlen, window = last W-1 inputs (spec W-2) */
  KDA_CONV_COLUMNS = 2, /* decode and verify with offset accepted-1 (spec W-3) */
  KDA_CONV_RECORDS = 3  /* recover mode: x_t goes to column W-1+t (spec W-4) */
} kda_conv_mode;

typedef struct kda_conv_desc {
  size_t struct_size;
  const char* backend;
  kda_conv_mode mode;
  int32_t width;       /* W, 2..8 */
  int32_t parts;       /* 1 (merged) or 3 (q, k, v apart): same bits (spec L-9) */
  int64_t channels[3]; /* per part */
  kda_dtype io_dtype;    /* of x and out */
  kda_dtype out_dtype;   /* 0 = io_dtype; fp64 on the reference backend */
  kda_dtype state_dtype; /* conv pool: io dtype or fp32; 0 = io_dtype */
  kda_conv_layout layout;
  int32_t verify_width;  /* 1 + S; 0 = 1 */
  int32_t fold;          /* records mode: commit the window by `accepted` first (spec V-10b) */
  int64_t max_tokens, max_sequences;
  kda_initial_state initial_state; /* 0 = all for columns and records, none for prefill */
  int64_t null_slot;               /* kda_conv_desc_init sets -1 */
  int64_t max_checkpoints;         /* prefill mode (spec K-1, K-2) */
  int32_t no_activation;           /* nonzero: no SiLU */
  uint32_t flags;
} kda_conv_desc;

typedef struct kda_conv_args {
  size_t struct_size;
  kda_tensor x[3];      /* [T, channels] raw inputs per part */
  kda_tensor weight[3]; /* [channels, W] or [channels, 1, W] fp32 */
  kda_tensor bias[3];   /* optional [channels] fp32 (spec L-11) */
  kda_sequences sequences;
  kda_tensor state[3];          /* pools per part, L columns: >= W-1 (prefill), W-1+S (columns), W+S (records) */
  kda_tensor slots;             /* [N] or [N, width] (column 0 is used) */
  kda_tensor write_slots;       /* optional [N] (spec P-8) */
  kda_tensor has_initial_state; /* [N] bool */
  kda_tensor accepted;          /* [N] int32: columns mode offset (W-3), fold: c */
  kda_tensor record_count;      /* records mode with fold: [rows] int32, read only (the verify that follows sets it) */
  kda_tensor record_rows;       /* optional [N] */
  kda_tensor checkpoint_offsets, checkpoint_slots; /* prefill mode, [N, Ck] (spec K-2) */
  kda_tensor out[3];            /* [T, channels] per part, io dtype */
  kda_tensor out_rows;          /* optional [T] */
} kda_conv_args;

KDA_API void kda_conv_desc_init(kda_conv_desc* desc);
KDA_API kda_status kda_conv_plan_create(kda_context* context, const kda_conv_desc* desc, kda_plan** out);
KDA_API kda_status kda_conv_run(const kda_plan* plan, const kda_conv_args* args, kda_workspace workspace,
                                void* stream);

/* Gated RMS norm per value head (spec L-7.4): y = io(o * rsqrt(mean_v(o^2) + eps) * weight_v * sigmoid(z)). */
typedef struct kda_gated_norm_desc {
  size_t struct_size;
  const char* backend;
  int64_t num_value_heads, value_dim;
  kda_dtype io_dtype;  /* of o and z */
  kda_dtype out_dtype; /* 0 = io_dtype; fp64 on the reference backend */
  double eps;          /* 0 = 1e-5 */
  int64_t max_tokens;
} kda_gated_norm_desc;

typedef struct kda_gated_norm_args {
  size_t struct_size;
  kda_tensor o, z;   /* [T, HV, V] */
  kda_tensor weight; /* [V] fp32 */
  kda_tensor out;    /* [T, HV, V] */
} kda_gated_norm_args;

KDA_API kda_status kda_gated_norm_plan_create(kda_context* context, const kda_gated_norm_desc* desc, kda_plan** out);
KDA_API kda_status kda_gated_norm_run(const kda_plan* plan, const kda_gated_norm_args* args,
                                      kda_workspace workspace, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_CONV_H_ */
