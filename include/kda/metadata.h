/* libkda, C ABI: step metadata (spec metadata.md M-1..M-29).
 *
 * Tables that a serving step needs, built once per step and cache group from per-request vectors and shared by
 * all layers. The host never waits for the device: launch sizes follow from T, N and the plan's bounds.
 *
 * Classes (spec M-4, M-7), for row n of qlen tokens:
 *   empty      qlen = 0, or n >= num_active                       in no group, null slot
 *   recurrent  has state, not prefilling, qlen <= width           spec group if width > 1, else decode group
 *   chunk      everything else, a fresh one-token row included    prefill group
 * mode BY_DRAFTS is vLLM's rule: spec iff drafts >= 0 (and qlen <= width); if any other row is prefilling, fresh
 * or has qlen != 1, all of them are prefills, else decodes. The caller then answers for spec V-7 itself.
 * Order (spec M-8): decodes, prefills, spec rows; inside a group the original order.
 *
 * Uniform decode graphs, one token (or width) per row, are valid only for steps without chunk rows; a fresh
 * one-token row in such a graph is right only through has_initial_state (spec M-29). Dummies for a capture:
 * drafts = qlen-1, accepted = qlen (spec M-28).
 */
#ifndef KDA_METADATA_H_
#define KDA_METADATA_H_

#include <kda/context.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef KDA_ENUM(kda_metadata_mode) { KDA_METADATA_BY_ROLE = 0, KDA_METADATA_BY_DRAFTS = 1 } kda_metadata_mode;

/* Elements of `counts`, int32 (spec M-10). */
typedef KDA_ENUM(kda_metadata_count) {
  KDA_COUNT_PREFILLS = 0,
  KDA_COUNT_PREFILL_TOKENS = 1,
  KDA_COUNT_DECODES = 2,
  KDA_COUNT_DECODE_TOKENS = 3,
  KDA_COUNT_SPEC_DECODES = 4,
  KDA_COUNT_SPEC_DECODE_TOKENS = 5,
  KDA_COUNT_ACTUAL_TOKENS = 6,
  KDA_COUNT_CHUNKS = 7,
  KDA_METADATA_COUNTS = 8
} kda_metadata_count;

/* ---- Chunk tables ------------------------------------------------------------------------------- */

/* One call of the overridable step: the chunk tables of `cu_seqlens` (spec M-14, M-22). With C = chunk and
 * len_i = cu[i+1] - cu[i] (offsets clamped to [0, num_tokens], a decreasing one gives 0, spec M-19):
 *   chunk_indices[r] = (sequence, chunk within it), sequences in order, chunks ascending; rows behind: (-1, -1)
 *   chunk_offsets[i] = sum over j < i of ceil(len_j / C); entries behind num_sequences repeat the last one
 * All views are valid during the call only. */
typedef struct kda_chunk_request {
  size_t struct_size;
  kda_tensor cu_seqlens;      /* [N+1] int32 or int64, on the device; starts at 0 */
  kda_tensor cu_seqlens_host; /* the same values in host memory, or absent */
  int64_t num_tokens;         /* T */
  int64_t num_sequences;      /* N */
  int64_t chunk;              /* C */
  kda_tensor chunk_indices;   /* out [rows, 2], dtype of cu_seqlens */
  kda_tensor chunk_offsets;   /* out [>= N+1] int64 */
  kda_device device;
  void* stream;
} kda_chunk_request;

/* Builds both tables; must write nothing else, must not throw, and on a device must not wait for it. */
typedef kda_status (*kda_chunk_hook_fn)(void* user, const kda_chunk_request* request);

/* Largest number of chunks of N sequences with T tokens in all: m + floor((T-m)/C), m = min(N, T) (spec M-16).
 * INVALID_ARGUMENT if T or N is negative or C < 1. */
KDA_API kda_status kda_chunk_bound(int64_t num_tokens, int64_t num_sequences, int64_t chunk, int64_t* rows);

/* ---- Helpers of the host ------------------------------------------------------------------------ */

/* Column of a block table that holds the state after `tokens` >= 1 tokens: (tokens-1) div block. At or past
 * `width`: INVALID_ARGUMENT naming both (spec M-9). */
KDA_API kda_status kda_block_column(int64_t tokens, int64_t block, int64_t width, int64_t* column);
/* Boundaries every `interval` tokens in (computed, computed+n]: floor((computed+n)/E) - floor(computed/E)
 * (spec K-6). INVALID_ARGUMENT if an argument is negative, interval < 1 or the sum overflows. */
KDA_API kda_status kda_checkpoint_count(int64_t computed, int64_t n, int64_t interval, int64_t* count);

/* ---- The builder -------------------------------------------------------------------------------- */

typedef struct kda_metadata_desc {
  size_t struct_size;
  const char* backend; /* a registered name (spec M-24), case-sensitive; NULL = the first one of the device */
  kda_metadata_mode mode;
  int64_t max_tokens;    /* Tmax, >= 0 */
  int64_t max_sequences; /* Nmax, 0..2^31-1 */
  int32_t width;         /* 1 + S, 1..KDA_MAX_VERIFY; 0 = 1 */
  int32_t chunk;         /* C of the chunk tables; 0 = KDA_PREFILL_GRID */
  int64_t null_slot;     /* of padding and empty rows; kda_metadata_desc_init sets -1 */
  uint32_t flags;        /* KDA_PLAN_BATCH_INVARIANT (changes nothing here, spec M-5), KDA_PLAN_CHECKED */
  /* Who builds the chunk tables: NULL = the backend's own hook; "host" = from the host copy of the offsets, which
   * every run must then give (spec M-23). `chunk_hook` overrides either. */
  const char* hook;
  kda_chunk_hook_fn chunk_hook;
  void* chunk_user;
} kda_metadata_desc;

/* Per-request vectors of a step (spec M-1), in batch order. */
typedef struct kda_step {
  kda_tensor query_start_loc; /* [N+1] int32 or int64; bad values: spec M-19 */
  kda_tensor computed;        /* [N] int32, tokens in the state before this step; or */
  kda_tensor has_state;       /* [N] bool. Exactly one of the two */
  kda_tensor prefilling;      /* optional [N] bool; absent = none */
  kda_tensor drafts;          /* optional [N] int32, -1 = no verification; absent = -1. qlen = 1 + drafts */
  kda_tensor num_active;      /* optional int32 [1], device or host: rows >= num_active are empty (spec P-7) */
} kda_step;

/* The caller's persistent tables (spec M-10, M-27), of at least the plan's capacity; each may be absent. Rows up
 * to capacity are always written: row lists padded with -1, offset lists by repeating the last value, lengths and
 * begins with 0, slots with null_slot, accepted with 1, flags with false. All dense. `offset` = dtype of
 * query_start_loc. Chunk tables: both or neither, and with them prefill_query_start_loc. */
typedef struct kda_step_tables {
  kda_tensor counts;                                       /* [8] int32, kda_metadata_count */
  kda_tensor prefill_rows, decode_rows, spec_rows;         /* [Nmax] int32: request numbers */
  kda_tensor prefill_begin, prefill_length;                /* [Nmax] offset: ranges in the token buffer */
  kda_tensor decode_begin, decode_length;                  /* [Nmax] offset */
  kda_tensor spec_begin, spec_length;                      /* [Nmax] offset */
  kda_tensor non_spec_query_start_loc;                     /* [Nmax+1] offset: decodes then prefills, from 0 */
  kda_tensor spec_query_start_loc;                         /* [Nmax+1] offset */
  kda_tensor prefill_query_start_loc;                      /* [Nmax+1] offset */
  kda_tensor non_spec_token_indx;                          /* [Tmax] int32: token rows in packed order */
  kda_tensor spec_token_indx;                              /* [min(Tmax, Nmax*width)] int32 */
  kda_tensor prefill_slots, decode_slots;                  /* [Nmax] int32: column 0 */
  kda_tensor spec_slots;                                   /* [Nmax, width] int32 */
  kda_tensor has_initial_state;                            /* [Nmax] bool, of the prefill rows */
  kda_tensor num_accepted;                                 /* [Nmax] int32, of the spec rows, as given */
  kda_tensor spec_sequence_masks;                          /* [Nmax] bool, by request */
  kda_tensor chunk_indices;                                /* [kda_chunk_bound(Tmax, Nmax, C), 2] offset */
  kda_tensor chunk_offsets;                                /* [Nmax+1] int64 */
} kda_step_tables;

typedef struct kda_metadata_args {
  size_t struct_size;
  int64_t num_tokens;    /* T: rows of the token buffer, at most 2^31-1 (counts and token lists are int32) */
  kda_step step;         /* on the plan's device */
  kda_tensor accepted;   /* optional [N] int32, previous step; absent = 1. Copied as it is (spec V-6) */
  kda_tensor slot_table; /* optional [N, >= width] or, if width = 1, [N]; int32 or int64, free strides */
  /* Optional copy of `step` in host memory (all that `step` has). Its offsets must start at 0, not decrease and
   * end at T or less, else INVALID_ARGUMENT. With it the counts are known to the host without any wait. */
  kda_step host;
  kda_step_tables tables; /* out */
  int32_t* host_counts;   /* optional out [8]: as `counts` (spec M-12). Needs `host` on a device; not on the CPU */
} kda_metadata_args;

/* Fills in struct_size and the defaults that are not zero (null_slot = -1). */
KDA_API void kda_metadata_desc_init(kda_metadata_desc* desc);
/* NOT_FOUND for an unknown backend, with the known names; UNSUPPORTED if it declines; INVALID_ARGUMENT names the
 * field. kda_plan_backend gives the registered name. */
KDA_API kda_status kda_metadata_plan_create(kda_context* context, const kda_metadata_desc* desc, kda_plan** out);
/* Builds the tables of one step. N = length of query_start_loc - 1. T > Tmax or N > Nmax: INVALID_ARGUMENT with
 * both numbers. On INVALID_ARGUMENT of libkda's own checks nothing was written; an error of a caller's hook is
 * returned as it is, with everything but the chunk tables written. The hook runs exactly once if the step has
 * prefill rows (on a device without host lengths: if it may have any) and chunk tables are asked for.
 * Allocates nothing, keeps no pointer and caches nothing by address (spec M-21). Any thread, distinct tables. */
KDA_API kda_status kda_metadata_run(const kda_plan* plan, const kda_metadata_args* args, kda_workspace workspace,
                                    void* stream);
/* Chunk tables alone, by the plan's hook, for any offsets within the plan's bounds (spec M-17). chunk_indices
 * needs kda_chunk_bound(T, N, C) rows, or, with cu_seqlens_host, at least the number of chunks; chunk_offsets
 * needs N+1 entries. request->chunk, device and stream are taken from the plan and the argument. int32 offsets
 * with T > 2^31-1: INVALID_ARGUMENT. */
KDA_API kda_status kda_metadata_chunk_tables(const kda_plan* plan, const kda_chunk_request* request, void* stream);

/* ---- Registry (spec M-24) ----------------------------------------------------------------------- */

/* A backend of a vendor: the shared builder of its device with another chunk hook. */
typedef struct kda_metadata_backend {
  size_t struct_size;
  const char* name; /* copied */
  kda_device_type device;
  /* Optional predicate: nonzero if it can serve `desc`; else it may write why into reason[0..size). */
  int32_t (*capable)(void* user, const kda_metadata_desc* desc, char* reason, size_t size);
  kda_chunk_hook_fn chunk_hook; /* NULL = the device's own */
  uint32_t operators;           /* bit (1 << kda_operator) for each operator it has; informative */
  void* user;                   /* must live as long as the process */
} kda_metadata_backend;

/* Adds a backend to the process's list. An existing name: INVALID_ARGUMENT. Any thread. */
KDA_API kda_status kda_metadata_register(const kda_metadata_backend* backend);
/* Name of backend i, in the order of registration; NOT_FOUND past the last. LIBKDA_CPU is first; LIBKDA_CUDA is
 * there when built. The text lives as long as the process. */
KDA_API kda_status kda_metadata_backend_name(size_t i, const char** name);
/* Device type and operators of a backend; NOT_FOUND lists the known names. */
KDA_API kda_status kda_metadata_find(const char* name, kda_device_type* device, uint32_t* operators);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_METADATA_H_ */
