/* libkda, C ABI: library information, errors, logging, contexts, and what all plans share. */
#ifndef KDA_CONTEXT_H_
#define KDA_CONTEXT_H_

#include <kda/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Library ------------------------------------------------------------------------------------ */

/* (major << 16) | (minor << 8) | patch of the loaded library. Any thread. */
KDA_API uint32_t kda_version(void);
/* "0.1.0"; static storage. */
KDA_API const char* kda_version_string(void);
/* Hash over the sources that the library was built from (hex), "unknown" outside a checkout. Static storage. */
KDA_API const char* kda_source_hash(void);
/* "INVALID_ARGUMENT" etc.; static storage; "UNKNOWN" for any other number. */
KDA_API const char* kda_status_name(kda_status status);
/* Message of the last failing call of this thread, "" if none. Valid until the next failing call here. */
KDA_API const char* kda_last_error(void);
/* "fp32" etc.; "none" for KDA_DTYPE_NONE. Static storage. */
KDA_API const char* kda_dtype_name(kda_dtype dtype);
/* Bytes of one element; 0 for KDA_DTYPE_NONE. */
KDA_API size_t kda_dtype_size(kda_dtype dtype);
/* Fills in row-major strides for the rank and shape of `tensor`; a size of 0 counts as 1 there. Any thread.
 * INVALID_ARGUMENT, nothing written: rank not in 0..KDA_MAX_RANK, a size < 0, or sizes whose product, each 0 taken as 1,
 * is above 2^63-1. */
KDA_API kda_status kda_tensor_make_dense(kda_tensor* tensor);
/* Largest verify width (spec V-13, F56). */
KDA_API int32_t kda_max_verify(void);

/* Instruction sets of the CPU backend that this machine can run, best first, separated by commas:
 * "avx512,avx2,portable". Static storage. KDA_FORCE_ISA chooses one; an absent one fails loudly. */
KDA_API const char* kda_cpu_isas(void);

/* ---- Logging ------------------------------------------------------------------------------------ */

typedef KDA_ENUM(kda_log_level){KDA_LOG_INFO = 1, KDA_LOG_WARNING = 2} kda_log_level;
typedef void (*kda_log_fn)(void* user, kda_log_level level, const char* message);

/* Installs the process's log callback; NULL restores the default, which writes warnings to standard error,
 * and infos too when KDA_VERBOSE=1. The callback may run on any thread. */
KDA_API kda_status kda_set_log_callback(kda_log_fn callback, void* user);

/* ---- Devices ------------------------------------------------------------------------------------ */

/* Host facts of one device (spec R-12). Grows at the end; set struct_size before the call. */
typedef struct kda_device_info {
  size_t struct_size;
  char name[128];                       /* "NVIDIA H200"; "cpu" */
  int32_t compute_major, compute_minor; /* CUDA compute capability; 0, 0 for the CPU */
  int32_t multiprocessors;              /* CPU: cores that this process may use */
  int32_t driver_version;               /* newest CUDA that the driver speaks, 1000 * major + 10 * minor */
  int32_t runtime_version;              /* CUDA that the library was built with */
  int64_t memory_bytes, l2_bytes;       /* 0 for the CPU */
  uint8_t uuid[16];
} kda_device_info;

/* Devices of a type. UNSUPPORTED, with the loader's or the driver's message, if this build or this machine has none.
 */
KDA_API kda_status kda_device_count(kda_device_type type, int32_t* count);
/* Facts of one device. INVALID_ARGUMENT if there is no such device, UNSUPPORTED as above. Any thread. */
KDA_API kda_status kda_device_get_info(kda_device device, kda_device_info* info);

/* ---- Context ------------------------------------------------------------------------------------ */

typedef struct kda_context kda_context;
typedef struct kda_plan kda_plan;

/* A caller's own parallel-for: call body(arg, i) once for every i in [0, n), on any threads, and return when
 * all are done. n never exceeds kda_context_options.num_threads. Must not throw. */
typedef void (*kda_parallel_for_fn)(void* user, int32_t n, void (*body)(void* arg, int32_t i), void* arg);

/* A test or profiling callback run before each launch (spec Y-25). */
typedef void (*kda_launch_observer_fn)(void* user, const char* kernel);

typedef struct kda_context_options {
  size_t struct_size;
  kda_device device;                /* every plan of the context runs there */
  int32_t num_threads;              /* CPU: 0 = all cores that this process may use */
  kda_parallel_for_fn parallel_for; /* CPU: NULL = the built-in pool, which binds helpers to other cores */
  void* parallel_user;
  int32_t allow_late_plans; /* nonzero: plans may be made after kda_context_seal (spec Y-16) */
  int32_t allow_observers;  /* nonzero: launch observers do not void the serving promise (spec Y-25) */
} kda_context_options;

/* Makes a context. `options` NULL = CPU, all cores. UNSUPPORTED if the device's backend is not in this build
 * or KDA_FORCE_ISA names an ISA that this machine lacks. A context outlives its plans, sets and pools. */
KDA_API kda_status kda_context_create(const kda_context_options* options, kda_context** out);
KDA_API void kda_context_destroy(kda_context* context);
/* After this, creating a plan is FAILED_PRECONDITION unless allow_late_plans was set (spec Y-16). */
KDA_API kda_status kda_context_seal(kda_context* context);
/* Threads that a run may use. */
KDA_API int32_t kda_context_num_threads(const kda_context* context);
/* Runs body(arg, i) for every i in [0, n) on the context's threads and returns when all are done: host work of the
 * caller's own (filling inputs, sampling) beside the runs, without a second pool. Negative n or a NULL body is
 * INVALID_ARGUMENT. Not from inside a body. */
KDA_API kda_status kda_context_parallel_for(const kda_context* context, int32_t n, void (*body)(void* arg, int32_t i),
                                            void* arg);
/* ISA in use on a CPU context ("avx512"); architecture name on others. Owned by the context. */
KDA_API const char* kda_context_isa(const kda_context* context);
/* Installs or, with NULL, removes the context's launch observer (spec Y-25). Not while a run is in flight. */
KDA_API kda_status kda_context_set_launch_observer(kda_context* context, kda_launch_observer_fn fn, void* user);

/* ---- Plans -------------------------------------------------------------------------------------- */

typedef KDA_ENUM(kda_operator){KDA_OP_PREFILL = 1,         KDA_OP_DECODE = 2, /* decode, verify and verify_record */
                               KDA_OP_COMMIT = 3,          KDA_OP_DECODE_STEP = 4,    KDA_OP_CONV = 5,
                               KDA_OP_GATED_NORM = 6,      KDA_OP_STATE_COPY = 7,     KDA_OP_METADATA = 8,
                               KDA_OP_SEGMENT_SUMMARY = 9, KDA_OP_SEGMENT_MERGE = 10, KDA_OP_LAYER = 11,
                               KDA_OP_RESIDUAL_NORM = 12} kda_operator;
/* "prefill" etc.; static storage; "unknown" for any other number. */
KDA_API const char* kda_operator_name(kda_operator op);

/* Frees a plan; no run of it may be in flight. */
KDA_API void kda_plan_destroy(kda_plan* plan);
/* Bytes that each run needs (spec R-30); depends on the plan alone. */
KDA_API kda_status kda_plan_workspace_size(const kda_plan* plan, size_t* bytes);
/* One booked section (spec R-33): name, offset and bytes. NOT_FOUND past the last. Owned by the plan. */
KDA_API kda_status kda_plan_workspace_section(const kda_plan* plan, size_t i, const char** name, size_t* offset,
                                              size_t* bytes);
KDA_API kda_operator kda_plan_operator(const kda_plan* plan);
/* Candidate that was chosen: "portable", "fused", "reference". Owned by the plan. */
KDA_API const char* kda_plan_backend(const kda_plan* plan);
/* Instruction set or architecture it runs with. Owned by the plan. */
KDA_API const char* kda_plan_isa(const kda_plan* plan);
/* Candidates passed over before the chosen one: i = 0, 1, ... until NOT_FOUND. `reasons` holds one
 * "gate: wanted ..., got ..." per line (spec R-9). Owned by the plan. */
KDA_API kda_status kda_plan_refusal(const kda_plan* plan, size_t i, const char** candidate, const char** reasons);

/* Calls `fn` for every candidate of an operator, in order: its name, "" or its refusals (one a line), and
 * whether `auto` would choose it. `desc` is the operator's description struct. Creates nothing. */
typedef void (*kda_explain_fn)(void* user, const char* candidate, const char* reasons, int32_t chosen);
KDA_API kda_status kda_explain(const kda_context* context, kda_operator op, const void* desc, kda_explain_fn fn,
                               void* user);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_CONTEXT_H_ */
