/* libkda, C ABI: the paged pool of recurrent states and conv windows (spec kda.md P-1, P-2, V-11, K-10, K-11).
 *
 * One page holds, for every layer, one recurrent state [HV, V, K] and one conv window of L columns, packed
 * behind one another as serving engines do:
 *
 *   page p:  | layer 0 state | layer 0 window | layer 1 state | layer 1 window | ...      (each padded to 64 bytes)
 *
 * A page number is thus a slot of every layer's state pool and of every layer's conv pool; the views that
 * kda_state_pool_state and kda_state_pool_conv give are what the operators take as `state` and `conv_state`.
 * The pool knows who owns a page and how many tokens the state in it has seen; operators know neither.
 *
 * Nothing clears a page: a request that starts from nothing says so to the operator (spec P-1, P-9).
 * Calls that change the pool (create, destroy, allocate, free, set_position, fold, import) need outside
 * locking; views and queries do not. No call may touch a page that a run in flight writes.
 */
#ifndef KDA_STATE_POOL_H_
#define KDA_STATE_POOL_H_

#include <kda/context.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kda_state_pool kda_state_pool;

typedef struct kda_state_pool_desc {
  size_t struct_size;
  int32_t num_layers;       /* >= 1 */
  int64_t num_value_heads;  /* HV of this rank */
  int64_t first_value_head; /* this rank holds value heads [first, first + HV) of the model (spec L-6) */
  int64_t key_dim, value_dim;
  kda_dtype state_dtype;       /* fp32, bf16, fp16; 0 = fp32 */
  int64_t conv_channels;       /* 0 = the pages hold no window */
  int32_t conv_width;          /* W, 2..8 */
  int32_t conv_columns;        /* L >= W-1; 0 = W-1. W-1+S in columns mode, W+S in records mode (spec P-2) */
  kda_dtype conv_dtype;        /* fp32, bf16, fp16; 0 = fp32 */
  kda_conv_layout conv_layout; /* 0 = SD */
  int64_t pages;               /* >= 1 */
  int64_t null_slot;           /* page that is never handed out; kda_state_pool_desc_init sets -1 (none) */
  void* memory;                /* kda_state_pool_size bytes aligned to 256 that outlive the pool; NULL = its own */
  size_t memory_bytes;
} kda_state_pool_desc;

/* Fills in struct_size and null_slot = -1. */
KDA_API void kda_state_pool_desc_init(kda_state_pool_desc* desc);
/* Bytes of all pages, and of one (the stride between pages). Either pointer may be NULL. */
KDA_API kda_status kda_state_pool_size(const kda_state_pool_desc* desc, size_t* bytes, size_t* page_bytes);
/* Makes a pool on the context's device. All pages are free. OUT_OF_MEMORY if there is none. */
KDA_API kda_status kda_state_pool_create(kda_context* context, const kda_state_pool_desc* desc, kda_state_pool** out);
KDA_API void kda_state_pool_destroy(kda_state_pool* pool);

/* Views of one layer: state [pages, HV, V, K]; conv [pages, L, channels] (SD) or [pages, channels, L] (DS).
 * The inner dimensions are dense, stride(0) is the page. NOT_FOUND past the last layer or, for conv, if the
 * pages hold no window. Valid as long as the pool. */
KDA_API kda_status kda_state_pool_state(const kda_state_pool* pool, int32_t layer, kda_tensor* out);
KDA_API kda_status kda_state_pool_conv(const kda_state_pool* pool, int32_t layer, kda_tensor* out);

/* ---- Ownership ---------------------------------------------------------------------------------- */

/* Takes `count` free pages, or none and OUT_OF_MEMORY. Their position becomes 0, their contents are whatever
 * they were. Which pages come depends only on the calls made before. The null slot is never among them. */
KDA_API kda_status kda_state_pool_allocate(kda_state_pool* pool, int64_t count, int64_t* pages);
/* Gives pages back. INVALID_ARGUMENT, and nothing is freed, if one is outside the pool, not allocated, named
 * twice, or the null slot. */
KDA_API kda_status kda_state_pool_free(kda_state_pool* pool, int64_t count, const int64_t* pages);
/* Pages that allocate could still give. */
KDA_API int64_t kda_state_pool_available(const kda_state_pool* pool);

/* Tokens that the request whose column 0 is `page` has absorbed, drafts that were rejected not counted
 * (spec K-10). INVALID_ARGUMENT for a page that is not allocated or a negative position. */
KDA_API kda_status kda_state_pool_set_position(kda_state_pool* pool, int64_t page, int64_t position);
KDA_API kda_status kda_state_pool_position(const kda_state_pool* pool, int64_t page, int64_t* position);

/* ---- Copies of a request ------------------------------------------------------------------------- */

/* On a device the copies run on a stream of the pool's own and are done when the call returns; payloads lie in
 * host memory. Not while a run that writes the same pages is in flight, and not while serving is timed. */

/* Where a request's accepted state lies: pages[0..width) are its state columns, `accepted` (1..width) the
 * count of its last step (spec V-2). The state is in pages[accepted-1], the window in pages[0] from column
 * accepted-1 on (spec W-3). In records mode commit first; then width = accepted = 1. */
typedef struct kda_state_columns {
  const int64_t* pages;
  int32_t width;
  int32_t accepted;
} kda_state_columns;

/* Copies what was accepted (spec V-11) to `destination`, which then holds the state, the window in columns
 * 0..W-2 and the position of pages[0]; its user starts with accepted = 1. `destination` may be one of the
 * request's own pages. Columns beyond W-2 are unspecified. INVALID_ARGUMENT for pages that are not allocated
 * or `accepted` outside 1..width. */
KDA_API kda_status kda_state_pool_fold(kda_state_pool* pool, const kda_state_columns* from, int64_t destination);

/* Bytes of the payload that export writes; the same for every page of the pool. */
KDA_API size_t kda_state_pool_payload_size(const kda_state_pool* pool);
/* Writes what was accepted as a self-describing payload (spec K-11): magic, version, layout, dtype, value
 * heads, V, K, W, conv layout, position, then window and state of each layer. `bytes` must be at least
 * kda_state_pool_payload_size. */
KDA_API kda_status kda_state_pool_export(const kda_state_pool* pool, const kda_state_columns* from, void* payload,
                                         size_t bytes);
/* Reads a payload into an allocated page; its user starts with accepted = 1. `expected_position` >= 0 is
 * compared with the payload's (spec K-10); -1 takes any. Every mismatch with the pool is INVALID_ARGUMENT
 * naming field, expectation and what came, and leaves the page as it was. */
KDA_API kda_status kda_state_pool_import(kda_state_pool* pool, int64_t page, const void* payload, size_t bytes,
                                         int64_t expected_position);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_STATE_POOL_H_ */
