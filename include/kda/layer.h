/* libkda, C ABI: the whole KDA layer (spec kda.md L): weights from safetensors, one operator from hidden states to
 * hidden states.
 *
 *   kda_checkpoint      safetensors files and config.json, memory-mapped and checked; which layers are KDA
 *   kda_layer_weights   one layer's weights, or one rank's share, packed for a context and an io dtype
 *   kda_layer_plan      a plan (kda_plan) for all layers of one description; runs with any such weights
 *
 * Numerics (spec L-7): every projection is fp32 accumulation and one rounding to the io dtype, so are conv + SiLU,
 * attention and the gated norm; docs/layer.md lists the points. On the reference backend projections are fp64.
 */
#ifndef KDA_LAYER_H_
#define KDA_LAYER_H_

#include <kda/conv.h>
#include <kda/decode.h>
#include <kda/prefill.h>
#include <kda/tensor_file.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Description ---------------------------------------------------------------------------------- */

/* Where z comes from (spec L-1): g_b_proj(g_a_proj(x)), or g_proj(x). */
typedef KDA_ENUM(kda_output_gate) { KDA_OUTPUT_GATE_LOW_RANK = 1, KDA_OUTPUT_GATE_FULL_RANK = 2 } kda_output_gate;

/* Shapes and numeric form of one layer, or of one rank's share of it (then head counts are the rank's). */
typedef struct kda_layer_spec {
  int64_t hidden;           /* D */
  int64_t num_heads;        /* H */
  int64_t num_value_heads;  /* HV; 0 = H */
  int64_t key_dim;          /* K */
  int64_t value_dim;        /* V */
  int64_t gate_rank;        /* r of f_a_proj, f_b_proj */
  int64_t output_gate_rank; /* r of g_a_proj, g_b_proj; 0 with the full-rank output gate */
  int32_t conv_width;       /* W. A layer without short convolution (spec L-11) is one of W = 2 with taps [0, 1] */
  kda_output_gate output_gate;
  kda_gate_family gate_family; /* softplus or bounded */
  double lower_bound;          /* bounded family only (spec E-3); there is no default */
  int32_t allow_neg_eigval;
  int32_t conv_bias; /* nonzero: the short convolution has a bias (FLA's conv_bias, spec L-11) */
  double norm_eps;   /* 0 = 1e-5 */
} kda_layer_spec;

/* Shapes of a published model (spec L-3): "kimi-linear", "kimi-k3", "glm-5.3-flash", and "tiny", which is nobody's.
 * `kda_layers` (may be NULL): its number of KDA layers, informative. NOT_FOUND lists the names. */
KDA_API kda_status kda_model_spec(const char* name, kda_layer_spec* spec, int32_t* kda_layers);

/* One rank's share (spec L-6). INVALID_ARGUMENT unless 0 <= rank < ranks and `ranks` divides H and HV. */
KDA_API kda_status kda_layer_spec_share(const kda_layer_spec* whole, int32_t ranks, int32_t rank, kda_layer_spec* share);

/* ---- Checkpoints ---------------------------------------------------------------------------------- */

typedef struct kda_checkpoint kda_checkpoint;

/* Opens a .safetensors file, an index (.json: "weight_map" of shards beside it), or a directory that holds one index or
 * else .safetensors files. config.json beside them is read if it is there (spec L-4, L-5).
 *
 * Layer n is KDA iff a tensor `...layers.<n>.self_attn.A_log` exists (FLA: `.attn.A_log`; a file of one bare layer: any
 * prefix without a number is layer 0). A layer list in the config must agree (spec L-5).
 *
 * Everything is checked here that needs no data: headers, shards, names, element types, counts (spec L-2). One error
 * names file and tensor: NOT_FOUND (a file or shard is missing), INVALID_ARGUMENT, UNSUPPORTED (an element type that a
 * KDA weight cannot have). An open checkpoint is immutable and may be used from any number of threads; files must not
 * shrink while it is open. */
KDA_API kda_status kda_checkpoint_open(const char* path, kda_checkpoint** out);
KDA_API void kda_checkpoint_close(kda_checkpoint* checkpoint);

/* KDA layer i in ascending order: its number n in the model and its description (each may be NULL). Without config the
 * gate family is softplus: a bound is never guessed (spec L-4). NOT_FOUND past the last. */
KDA_API kda_status kda_checkpoint_layer(const kda_checkpoint* checkpoint, size_t i, int64_t* number,
                                        kda_layer_spec* spec);

/* One parameter of KDA layer i as it lies in the mapped file: host memory that the checkpoint owns, [rows, cols] with a
 * row stride, element type as stored. Names are those of L-1 without prefix ("q_proj.weight", "A_log"), whatever the
 * file calls them: fused tensors and FLA's names are resolved (spec L-10, L-11). Conv weights [channels, W], A_log [HV],
 * dt_bias [HV, K], o_norm.weight [V], FLA's biases "g_b_proj.bias" [HV*V] and "q_conv1d.bias" ... [channels]. NOT_FOUND:
 * this layer has none. */
KDA_API kda_status kda_checkpoint_parameter(const kda_checkpoint* checkpoint, size_t i, const char* name,
                                            kda_tensor* out);

/* ---- Weights -------------------------------------------------------------------------------------- */

typedef struct kda_layer_weights kda_layer_weights;

typedef struct kda_layer_load_options {
  size_t struct_size;
  kda_dtype io_dtype;     /* that the plan will have; 0 = bf16 */
  const char* projection; /* as in kda_layer_desc; NULL = auto */
  int32_t ranks, rank;    /* tensor-parallel share (spec L-6); ranks 0 = 1 */
  /* For files without a config: the bounded family with this bound, where 0 means none. A config's bound that differs:
   * INVALID_ARGUMENT. */
  double lower_bound;
} kda_layer_load_options;

/* Loads layer i (as in kda_checkpoint_layer) and packs it; `options` NULL = defaults. The checkpoint may be closed
 * afterwards. INVALID_ARGUMENT, UNSUPPORTED and OUT_OF_MEMORY name file and tensor. */
KDA_API kda_status kda_layer_weights_load(kda_context* context, const kda_checkpoint* checkpoint, size_t i,
                                          const kda_layer_load_options* options, kda_layer_weights** out);

/* The same from memory: `tensors` are those of L-1 (fused and FLA names of L-10, L-11 too) of the layer that `spec`
 * describes, under their names without prefix ("q_proj.weight"), dense in host memory, fp32 or bf16; `options->ranks` then cuts this rank's share out of them. Nothing is kept of them. A tensor too many, too
 * few or of another count than `spec` says: INVALID_ARGUMENT. */
KDA_API kda_status kda_layer_weights_create(kda_context* context, const kda_layer_spec* spec,
                                            const kda_named_tensor* tensors, size_t count,
                                            const kda_layer_load_options* options, kda_layer_weights** out);
/* One parameter among tensors in memory, for runtimes that multiply themselves: `tensors` as above, the result as
 * kda_checkpoint_parameter gives it, a view of their memory. All of them are checked, whichever is asked for. */
KDA_API kda_status kda_layer_parameter(const kda_layer_spec* spec, const kda_named_tensor* tensors, size_t count,
                                       const char* name, kda_tensor* out);
KDA_API void kda_layer_weights_destroy(kda_layer_weights* weights);

/* What was loaded: the rank's own description. */
KDA_API kda_status kda_layer_weights_spec(const kda_layer_weights* weights, kda_layer_spec* spec);
/* Bytes that the packed weights take. */
KDA_API kda_status kda_layer_weights_size(const kda_layer_weights* weights, size_t* bytes);
/* Small parameters as the operators take them, fp32, on the context's device, owned by the weights: "A_log" [HV],
 * "dt_bias" [HV, K], "conv" [2*H*K + HV*V, W], "norm" [V], and "conv_bias" [2*H*K + HV*V] where the layer has one.
 * NOT_FOUND lists the names. */
KDA_API kda_status kda_layer_weights_parameter(const kda_layer_weights* weights, const char* name, kda_tensor* out);

/* ---- The operator --------------------------------------------------------------------------------- */

typedef struct kda_layer_desc {
  size_t struct_size;
  kda_layer_spec layer;        /* as kda_layer_weights_spec says */
  const char* backend;         /* of conv, attention and norm: NULL = "auto", "reference", ... (spec R-18) */
  const char* prefill_backend; /* of prefill alone; NULL = `backend` */
  const char* projection; /* "auto", "onednn", "portable", "reference"; on CUDA "cublaslt"; NULL: "reference" if
                             `backend` is, else auto */
  kda_dtype io_dtype;          /* of hidden, out and all that is rounded between them; 0 = bf16 */
  kda_dtype state_dtype;       /* of the recurrent pool; 0 = fp32 */
  kda_dtype conv_dtype;        /* of the conv pool; 0 = io_dtype */
  kda_dtype out_dtype;         /* 0 = io_dtype; fp64 on the reference backend: gated norm and out are not rounded */
  int64_t max_tokens;          /* T bound of a step, both groups together */
  int64_t max_sequences;       /* N bound of each group */
  int32_t width;               /* 1 + S of the recurrent group; 0 = 1 */
  kda_decode_mode mode;        /* of the recurrent group: columns or records */
  int32_t fold;                /* records mode: commit first (spec V-10b) */
  kda_initial_state initial_state; /* of the chunk group: 0 = none */
  kda_conv_layout conv_layout;     /* 0 = SD; one pool over q|k|v channels */
  int64_t null_slot;               /* kda_layer_desc_init sets -1 */
  int64_t max_checkpoints;         /* of the chunk group */
  kda_segments segments;
  uint32_t flags;
} kda_layer_desc;

/* The sequences of one group of a step, over the step's token rows; absent (all zero) = the group is empty. The two
 * groups' rows are disjoint and lie anywhere in the step. */
typedef struct kda_layer_group {
  kda_sequences sequences;       /* cu_seqlens, or begin and length */
  kda_tensor slots, write_slots; /* as the group's operator takes them */
  kda_tensor has_initial_state;  /* chunk group, when the plan says flags */
  kda_tensor accepted;           /* recurrent group, optional */
  kda_tensor checkpoint_offsets, checkpoint_slots; /* chunk group (spec K-1, K-2) */
} kda_layer_group;

typedef struct kda_layer_args {
  size_t struct_size;
  const kda_layer_weights* weights;
  kda_tensor hidden;         /* [T, D] io dtype */
  kda_layer_group chunk;     /* prompt rows: conv, chunked prefill, norm */
  kda_layer_group recurrent; /* decode and verify rows: decode_step; with a conv bias conv, decode, norm */
  kda_tensor state;          /* pool [slots, HV, V, K] */
  kda_tensor conv_state;     /* pool of the merged q|k|v channels (spec P-2) */
  kda_records records;       /* records mode */
  kda_tensor normed;         /* optional out [T, HV, V]: what the gated norm gives (L-7.4), before o_proj */
  kda_tensor out;            /* [T, D]: a rank's partial sum (spec L-6). Rows of no sequence, or of an inactive one, are
                                zero if their hidden row is finite */
} kda_layer_args;

KDA_API void kda_layer_desc_init(kda_layer_desc* desc);
/* One kda_plan of operator KDA_OP_LAYER; kda_plan_backend is the projections'. On CUDA these are cuBLASLt's, which is
 * loaded here and not linked: UNSUPPORTED names what was looked for where it cannot be had (environment variable
 * KDA_CUBLASLT_DIR: the folder to look in). Takes device memory for the time of the call, to run each algorithm once. */
KDA_API kda_status kda_layer_plan_create(kda_context* context, const kda_layer_desc* desc, kda_plan** out);
/* The plans inside a layer's plan, for what they chose: i = 0, 1, ... until NOT_FOUND. Owned by the plan. */
KDA_API kda_status kda_layer_plan_part(const kda_plan* plan, size_t i, const kda_plan** part);
/* A step. With both groups absent: a dry run (spec L-12), `out` and `normed` become zero, no pool is touched. */
KDA_API kda_status kda_layer_run(const kda_plan* plan, const kda_layer_args* args, kda_workspace workspace,
                                 void* stream);

/* A batch [B, T] with a mask as sequences of its B*T rows (spec L-13): begin[b] and length[b] of the nonzero run of row
 * b. `mask` is a bool tensor in host memory, rank 2. INVALID_ARGUMENT names row and position of a hole: only padding
 * on the left or on the right is accepted. Writes nothing on failure. */
KDA_API kda_status kda_mask_sequences(const kda_tensor* mask, int64_t* begin, int64_t* length);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_LAYER_H_ */
