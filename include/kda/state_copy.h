/* libkda, C ABI: copies between rows of a strided state pool and packed tensors, and the life cycle that makes
 * them safe to serve with (spec state-copy.md C-1..C-22, Y-1..Y-26).
 *
 *   gather    packed[i] = pool[indices[i]], zeros if the index is outside [0, rows) or the flag is false
 *   scatter   pool[indices[i]] = packed[i] for every index inside [0, rows); nothing else changes
 *
 * All decisions are made before serving. A plan fixes payload, row count, row stride, dtypes and lane width
 * (its layout key, spec Y-9) and holds four prepared variants, {int32, int64 indices} x {gather, scatter}; a
 * call brings pointers, n, index stride, flags and stream. Serving allocates nothing, takes no lock, reads no
 * environment and queries no device.
 *
 * Two ways to own plans: one by one (kda_state_copy_plan_create), or a copy set: the pools of all layers of one
 * worker, prepared, sealed and published together, all or none (kda_copy_set_*).
 */
#ifndef KDA_STATE_COPY_H_
#define KDA_STATE_COPY_H_

#include <kda/context.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- One plan ----------------------------------------------------------------------------------- */

/* Describes the copies of one pool layout. */
typedef struct kda_state_copy_desc {
  size_t struct_size;
  /* "auto" (NULL), "fused", "bytes"; aliases triton = fused, torch = bytes (spec Y-3). No environment variable
   * chooses a kind. fused: fp32, bf16, fp16 pools, vector lanes, casts. bytes: any dtype, no cast. */
  const char* backend;
  /* A view of the pool [rows, HV, V, K]: inner three dimensions dense, stride(0) >= HV*V*K, any storage offset
   * (spec C-3). Only its layout is kept: shape, strides, dtype, device, address mod 16. */
  kda_tensor pool;
  kda_dtype packed_dtype; /* 0 = the pool's; or fp32 with a bf16 or fp16 pool (spec C-16) */
  int64_t max_selected;   /* largest n of a call, >= 1: the scheduler's largest number of sequences (spec Y-8) */
  uint32_t flags;         /* KDA_PLAN_CHECKED */
} kda_state_copy_desc;

/* One call. n = length of `indices`, 0..max_selected; n = 0 is validated and launches nothing (spec C-18). */
typedef struct kda_state_copy_args {
  size_t struct_size;
  kda_tensor pool;    /* the prepared layout; any address of the same class mod 16 (spec Y-13) */
  kda_tensor indices; /* [n] int32 or int64, any stride >= 1, on the pool's device (spec C-19) */
  /* gather: optional dense bool [n]; false zeroes the row without reading the pool (spec C-6).
   * scatter ignores it: it describes initial states only (spec C-10). */
  kda_tensor has_initial_state;
  kda_tensor packed; /* [n, HV, V, K] of packed_dtype, inner dense, row stride >= HV*V*K, apart from the pool */
} kda_state_copy_args;

typedef struct kda_state_copy_info {
  size_t struct_size;
  int64_t rows, payload; /* of the pool: rows, elements of a row (HV*V*K) */
  int64_t max_selected;
  int32_t lane_bytes; /* 16, 8, 4, 2 or 1: the largest that divides pool address, row stride and payload (Y-1) */
  int32_t variants;   /* prepared functions: 4, always (spec Y-17) */
  uint64_t table;     /* identity of the prepared table: equal for layers of one set that share it (spec Y-9) */
} kda_state_copy_info;

/* Validates, chooses the kind (spec Y-2), prepares the four variants on scratch memory (spec Y-10: the pool is
 * neither read nor written) and synchronises the device. kda_plan_backend gives the kind, kda_plan_refusal why
 * a kind was passed over. The plan may be used at once, from any number of threads; it needs no workspace.
 * Errors: INVALID_ARGUMENT (spec C-3, C-16, Y-3, Y-8; pool on another device), UNSUPPORTED with every unmet
 * condition (a named kind that does not fit, a cast without fused, no_device_image), FAILED_PRECONDITION
 * (sealed context, launch observer, absent pool), OUT_OF_MEMORY, DEVICE_ERROR, INTERNAL. */
KDA_API kda_status kda_state_copy_plan_create(kda_context* context, const kda_state_copy_desc* desc, kda_plan** out);

/* packed[i] = pool[indices[i]]; every element of packed is written (spec C-1, C-5..C-8, C-11).
 * scatter: pool[indices[i]] = packed[i]; valid indices must be distinct, else the doubled rows are unspecified
 * (spec C-2, C-9, C-12). Casts: gather widens exactly, scatter rounds to nearest even.
 * Everything of spec Y-24 is refused before the launch with nothing written. Index and flag values are never an
 * error; checked mode (KDA_PLAN_CHECKED, KDA_CHECK=1) reports indices >= rows and, in scatter, both positions
 * of a doubled index. Any thread; ordered by `stream` (CPU: done on return). Keeps no pointer (spec G-11). */
KDA_API kda_status kda_state_gather(const kda_plan* plan, const kda_state_copy_args* args, void* stream);
KDA_API kda_status kda_state_scatter(const kda_plan* plan, const kda_state_copy_args* args, void* stream);

/* Fills `info` (whose struct_size the caller has set). INVALID_ARGUMENT for a plan of another operator. */
KDA_API kda_status kda_state_copy_plan_info(const kda_plan* plan, kda_state_copy_info* info);

/* ---- Copy set ----------------------------------------------------------------------------------- */

/* The layers of one worker. Life cycle (spec Y-6):
 *
 *   EMPTY --prepare--> PREPARING --seal--> SEALED --publish--> PUBLISHED --reset--> EMPTY
 *             any error in prepare, seal or publish --> FAILED --reset--> EMPTY
 *
 * A move that the state does not allow is FAILED_PRECONDITION and changes nothing. Before publish, and after a
 * failure, no layer is ready; publish makes all of them ready in one atomic step (spec Y-7). A failed
 * preparation must stop start-up: nothing is downgraded.
 *
 * Threads: prepare, seal, publish and reset by one thread at a time (a second one gets FAILED_PRECONDITION);
 * gather and scatter by any number of threads after publish. reset and destroy need that no call is in flight.
 * Sets are independent of one another; nothing is kept per process (spec Y-5). */
typedef struct kda_copy_set kda_copy_set;

typedef KDA_ENUM(kda_copy_set_state) {
  KDA_COPY_SET_EMPTY = 0,
  KDA_COPY_SET_PREPARING = 1,
  KDA_COPY_SET_SEALED = 2,
  KDA_COPY_SET_PUBLISHED = 3,
  KDA_COPY_SET_FAILED = 4
} kda_copy_set_state;

typedef struct kda_copy_set_options {
  size_t struct_size;
  const char* const* layers; /* optional names that must all be prepared before seal; copied */
  size_t num_layers;
  uint32_t flags;            /* KDA_PLAN_CHECKED */
  /* Version of the binding in use, "torch 2.10.0"; NULL = none. Part of the snapshot (spec Y-11). */
  const char* binding_version;
} kda_copy_set_options;

/* A layer's pool, as bound by the server. In an array, every element has the struct_size of the first. */
typedef struct kda_copy_binding {
  size_t struct_size;
  const char* layer;      /* unique within the set; copied */
  const char* backend;    /* as kda_state_copy_desc */
  kda_tensor pool;        /* absent = not bound: FAILED_PRECONDITION naming the layer (spec Y-26) */
  kda_dtype packed_dtype; /* as kda_state_copy_desc */
} kda_copy_binding;

typedef struct kda_copy_set_info {
  size_t struct_size;
  kda_copy_set_state state;
  int64_t layers;   /* prepared layers */
  int64_t ready;    /* layers that serve: 0, or all of them */
  int64_t tables;   /* distinct layout keys (spec Y-9) */
  int64_t variants; /* prepared functions: 4 a table */
} kda_copy_set_info;

/* `options` NULL = none. The set belongs to the caller and must go before its context. */
KDA_API kda_status kda_copy_set_create(kda_context* context, const kda_copy_set_options* options, kda_copy_set** out);
KDA_API void kda_copy_set_destroy(kda_copy_set* set);

/* EMPTY, PREPARING -> PREPARING. Prepares `count` >= 1 further layers, once per distinct layout key, for calls
 * of up to max_selected rows. Takes the configuration snapshot at the first call and compares it at every one
 * (spec Y-11). Errors as kda_state_copy_plan_create, with the layer's name; each leads to FAILED. A layer
 * that is already prepared: FAILED_PRECONDITION, state unchanged. */
KDA_API kda_status kda_copy_set_prepare(kda_copy_set* set, const kda_copy_binding* bindings, size_t count,
                                        int64_t max_selected);
/* PREPARING -> SEALED, once every layer of options.layers is prepared. Compares the snapshot: a difference is
 * FAILED_PRECONDITION naming the first differing entry. */
KDA_API kda_status kda_copy_set_seal(kda_copy_set* set);
/* SEALED -> PUBLISHED. */
KDA_API kda_status kda_copy_set_publish(kda_copy_set* set);
/* PUBLISHED, FAILED -> EMPTY: unreadies all layers first, then frees them. Plans got from the set die. */
KDA_API kda_status kda_copy_set_reset(kda_copy_set* set);

/* Any thread, also while another one moves the set. */
KDA_API kda_copy_set_state kda_copy_set_get_state(const kda_copy_set* set);
/* Fills `info` (struct_size set by the caller). Not while another thread moves the set: FAILED_PRECONDITION. */
KDA_API kda_status kda_copy_set_get_info(const kda_copy_set* set, kda_copy_set_info* info);
/* Number of layers that serve now: 0 or all of them, one atomic load. Any thread. */
KDA_API int64_t kda_copy_set_ready(const kda_copy_set* set);
/* First cause of the failure, with the layer's name; "" unless FAILED. Owned by the set, until reset. */
KDA_API const char* kda_copy_set_last_error(const kda_copy_set* set);

/* Copies of a published layer: as kda_state_gather and kda_state_scatter. Unpublished set: FAILED_PRECONDITION
 * before any access to the pool; unknown layer: NOT_FOUND with the known names. */
KDA_API kda_status kda_copy_set_gather(const kda_copy_set* set, const char* layer, const kda_state_copy_args* args,
                                       void* stream);
KDA_API kda_status kda_copy_set_scatter(const kda_copy_set* set, const char* layer, const kda_state_copy_args* args,
                                        void* stream);
/* The plan of one layer for direct use by its holder, from SEALED on (spec Y-6); owned by the set, dead after
 * reset. Do not destroy it. */
KDA_API kda_status kda_copy_set_plan(const kda_copy_set* set, const char* layer, const kda_plan** out);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_STATE_COPY_H_ */
