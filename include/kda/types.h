/* libkda, C ABI: vocabulary types.
 *
 * Conventions that hold for every function of <kda/kda.h>:
 *  1. Every call returns a kda_status; KDA_OK is 0. On any other status nothing was written: no output
 *     tensor, no pool, no out-parameter (spec G-6). kda_last_error() then says what was wrong: it names the
 *     argument, what was expected and what came. The message is thread-local and lives until the next
 *     failing call on the same thread.
 *  2. Tensors are views (kda_tensor): nothing is copied, converted or made contiguous behind the caller's
 *     back. A layout that cannot be read is refused by name (spec G-8).
 *  3. Values in *device* memory (slots, offsets, flags, counts) are never an error: the specification says
 *     what each bad value does (spec G-7). Checked mode reports them instead. For the CPU backend "device
 *     memory" is ordinary memory and the same rules hold.
 *  4. Structs that cross the boundary begin with struct_size = sizeof(the struct) as the caller was
 *     compiled. Later versions only append fields; a missing tail reads as zero, and zero always means
 *     "absent" or "default".
 *  5. Plans are immutable and may be run from any number of threads at once, with distinct workspaces.
 *     Objects that say so (copy sets, state pools) need outside locking for their changing calls.
 *  6. destroy(NULL) is a no-op. No exception crosses the boundary, nothing aborts or prints.
 *  7. Dimension letters: N sequences, T tokens, D hidden, H query/key heads, HV value heads, K key dim,
 *     V value dim, C chunk, S draft tokens, W conv width, L conv window columns.
 */
#ifndef KDA_TYPES_H_
#define KDA_TYPES_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define KDA_API
#elif defined(__GNUC__)
#define KDA_API __attribute__((visibility("default")))
#else
#define KDA_API
#endif

/* Enumerations have a fixed width in C++ too, so that any number a caller puts in can be looked at and refused. */
#ifdef __cplusplus
#define KDA_ENUM(name) enum name : int32_t
#else
#define KDA_ENUM(name) enum name
#endif

#define KDA_VERSION_MAJOR 0
#define KDA_VERSION_MINOR 1
#define KDA_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* Tokens per chunk of the prefill grid: cuts of a prompt at multiples of it keep every bit (spec H-10). */
#define KDA_PREFILL_GRID 64
/* Most tokens (base + drafts) of one verify row (spec V-13). */
#define KDA_MAX_VERIFY 16
/* Most dimensions of a tensor view. */
#define KDA_MAX_RANK 6

/* Status codes, frozen (spec G-4). */
typedef KDA_ENUM(kda_status) {
  KDA_OK = 0,
  KDA_INVALID_ARGUMENT = 1,    /* an argument is wrong; the message names it */
  KDA_UNSUPPORTED = 2,         /* valid, but no (named) candidate can serve it; the message lists why */
  KDA_OUT_OF_MEMORY = 3,       /* host or device allocation failed */
  KDA_WORKSPACE_TOO_SMALL = 4, /* the granted workspace is smaller than booked */
  KDA_DEVICE_ERROR = 5,        /* the device or its runtime reported an error */
  KDA_NOT_FOUND = 6,           /* a name is not known; the message lists the known ones */
  KDA_INTERNAL = 7,            /* a fault of libkda itself */
  KDA_FAILED_PRECONDITION = 8  /* a life-cycle rule: unsealed, unpublished, drifted, unprepared layout */
} kda_status;

/* Element types. */
typedef KDA_ENUM(kda_dtype) {
  KDA_DTYPE_NONE = 0,
  KDA_FP32 = 1,
  KDA_BF16 = 2,
  KDA_FP16 = 3,
  KDA_FP64 = 4, /* outputs and states of the reference backend; never an io dtype of a serving backend */
  KDA_INT8 = 5,
  KDA_INT16 = 6,
  KDA_INT32 = 7,
  KDA_INT64 = 8,
  KDA_BOOL = 9, /* one byte; any nonzero is true */
  KDA_UINT8 = 10
} kda_dtype;

typedef KDA_ENUM(kda_device_type) { KDA_CPU = 0, KDA_CUDA = 1 } kda_device_type;

typedef struct kda_device {
  kda_device_type type;
  int32_t index; /* ordinal among devices of this type; 0 for the CPU */
} kda_device;

/* A strided view. A zero-initialised kda_tensor is the absent tensor: dtype KDA_DTYPE_NONE. */
typedef struct kda_tensor {
  void* data; /* first element (storage offset already added); may be NULL if a dimension is 0 */
  kda_dtype dtype;
  kda_device device;
  int32_t rank; /* 0..KDA_MAX_RANK */
  int64_t shape[KDA_MAX_RANK];
  int64_t strides[KDA_MAX_RANK]; /* in elements */
} kda_tensor;

/* Gate families (spec E-1), x = raw + dt_bias, a = exp(A_log):
 * softplus g = -a*softplus(x); bounded g = lower_bound*sigmoid(a*x); plain: g <= 0 given. */
typedef KDA_ENUM(kda_gate_family) { KDA_GATE_SOFTPLUS = 1, KDA_GATE_BOUNDED = 2, KDA_GATE_PLAIN = 3 } kda_gate_family;

/* Beta (spec E-5): logits through a sigmoid, or the values themselves (then fp32). */
typedef KDA_ENUM(kda_beta_form) { KDA_BETA_LOGITS = 1, KDA_BETA_PLAIN = 2 } kda_beta_form;

/* Where a call's states come from (spec P-9): nowhere (all fresh), every active slot, or by flag vector. */
typedef KDA_ENUM(kda_initial_state) { KDA_INITIAL_NONE = 1, KDA_INITIAL_ALL = 2, KDA_INITIAL_FLAGS = 3 } kda_initial_state;

/* Conv pool layouts (spec P-2), told apart by this field, never by shape. */
typedef KDA_ENUM(kda_conv_layout) {
  KDA_CONV_SD = 1, /* [slots, L, channels], channel fastest */
  KDA_CONV_DS = 2  /* [slots, channels, L], column fastest */
} kda_conv_layout;

/* Plan flags, or-ed together. */
#define KDA_PLAN_BATCH_INVARIANT 0x1u /* spec N-13: a sequence's bits depend on nothing but itself */
#define KDA_PLAN_CHECKED 0x2u         /* spec G-7: read index values first and report bad ones */

/* What every attention operator has in common: shapes, dtypes and the numeric form.
 * Zero means the stated default, so that a zeroed struct needs only heads, dims and gate_family. */
typedef struct kda_attention_spec {
  int64_t num_heads;       /* H  >= 1: query/key heads */
  int64_t num_value_heads; /* HV, a multiple of H (spec E-8); 0 = H */
  int64_t key_dim;         /* K  */
  int64_t value_dim;       /* V  */
  kda_dtype io_dtype;      /* of q, k, v, out: fp32, bf16 or fp16; 0 = bf16 */
  kda_dtype gate_dtype;    /* io_dtype or fp32; 0 = io_dtype */
  kda_dtype beta_dtype;    /* io_dtype or fp32 (plain beta: fp32); 0 = io_dtype, or fp32 if plain */
  kda_dtype state_dtype;   /* of the pool or packed states: fp32, bf16, fp16; 0 = fp32 */
  kda_dtype out_dtype;     /* 0 = io_dtype; fp64 on the reference backend */
  kda_gate_family gate_family;
  double lower_bound;         /* bounded family only: finite and < 0 (spec E-3); there is no default */
  kda_beta_form beta_form;    /* 0 = logits */
  int32_t allow_neg_eigval;   /* nonzero: beta = 2*sigmoid(logit) */
  int32_t no_qk_norm;         /* nonzero: q and k are used as they are (plain form) */
  double scale;               /* 0 = K^-1/2; must be finite (spec E-6) */
} kda_attention_spec;

/* Sequences of a call over its T token rows (spec P-12); exactly one form:
 *  (a) cu_seqlens [N+1], cu[0] = 0;   (b) begin [N] and length [N], disjoint ranges;
 *  (c) nothing: the token tensors are batched [B, T, ...], B sequences of T rows (spec G-8).
 * Integer vectors are int32 or int64, each on its own, any stride >= 1. Bad values: spec P-13. */
typedef struct kda_sequences {
  kda_tensor cu_seqlens;
  kda_tensor begin;
  kda_tensor length;
  kda_tensor num_active; /* optional int32 [1]: sequences >= num_active are inactive (spec P-7) */
} kda_sequences;

/* Scratch memory of one run, lent by the caller; `bytes` >= kda_plan_workspace_size, aligned to 256. */
typedef struct kda_workspace {
  void* data;
  size_t bytes;
} kda_workspace;

#define KDA_WORKSPACE_ALIGNMENT 256

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_TYPES_H_ */
