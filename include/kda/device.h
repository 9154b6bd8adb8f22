/* libkda, C ABI: memory, streams, events and graphs of a context's device.
 *
 * For programs that have no other runtime of the device. A server that has one (PyTorch, the CUDA runtime) passes its own
 * pointers and streams to every run and needs nothing of this header; the two mix freely: a stream here is a
 * cudaStream_t, memory is plain device or page-locked host memory.
 *
 * On the CPU memory is host memory, copies are done when the call returns, streams are NULL, events are points in
 * time; graphs are UNSUPPORTED. Any thread may call; one stream is used by one thread at a time.
 */
#ifndef KDA_DEVICE_H_
#define KDA_DEVICE_H_

#include <kda/context.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Memory ------------------------------------------------------------------------------------- */

typedef KDA_ENUM(kda_memory_kind) {
  KDA_MEMORY_DEVICE = 1,
  KDA_MEMORY_HOST = 2 /* host memory that the device copies from and to at full speed (page-locked) */
} kda_memory_kind;

/* Memory aligned to 256 bytes, contents unspecified; 0 bytes give NULL. OUT_OF_MEMORY if there is none. Waits for the
 * device on some drivers: not while serving. */
KDA_API kda_status kda_memory_allocate(const kda_context* context, kda_memory_kind kind, size_t bytes, void** out);
/* Gives it back; NULL is fine. Nothing may use it any more. */
KDA_API kda_status kda_memory_free(const kda_context* context, kda_memory_kind kind, void* memory);
/* Copies `bytes` between host and device memory, in any direction, in the order of `stream`. Source and destination do not
 * overlap. Host memory that is not page-locked may make the call wait. */
KDA_API kda_status kda_memory_copy(const kda_context* context, void* to, const void* from, size_t bytes, void* stream);

/* ---- Streams ------------------------------------------------------------------------------------ */

/* A stream that does not wait for the device's default stream. */
KDA_API kda_status kda_stream_create(const kda_context* context, void** out);
KDA_API kda_status kda_stream_destroy(const kda_context* context, void* stream);
/* Waits until all that was put into the stream is done; DEVICE_ERROR if some of it failed. */
KDA_API kda_status kda_stream_synchronize(const kda_context* context, void* stream);

/* ---- Events ------------------------------------------------------------------------------------- */

typedef struct kda_event kda_event;
KDA_API kda_status kda_event_create(const kda_context* context, kda_event** out);
KDA_API void kda_event_destroy(kda_event* event);
/* Notes the time at which the stream comes here. */
KDA_API kda_status kda_event_record(kda_event* event, void* stream);
/* Seconds between two recorded events of one device that have both been reached. */
KDA_API kda_status kda_event_elapsed(const kda_event* from, const kda_event* to, double* seconds);

/* ---- Graphs ------------------------------------------------------------------------------------- */

typedef struct kda_graph kda_graph;
/* Between the two calls, runs and copies on `stream` by this thread are recorded instead of done (every run of a plan can
 * be, spec Y-29, M-29, V-8). The graph holds the addresses that they were given. */
KDA_API kda_status kda_graph_begin(const kda_context* context, void* stream);
/* Ends the recording and prepares the graph. After a failed recording: the error, and no graph. */
KDA_API kda_status kda_graph_end(const kda_context* context, void* stream, kda_graph** out);
KDA_API kda_status kda_graph_launch(kda_graph* graph, void* stream);
KDA_API void kda_graph_destroy(kda_graph* graph);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_DEVICE_H_ */
