// Memory, streams, events and graphs of a context's device.
#include "kda/device.h"

#include "capi/guard.h"
#include "core/device_runtime.h"

using kda::DeviceRuntime;
using kda::Status;
using kda::capi::check_pointer;
using kda::capi::guard;

struct kda_event {
  std::unique_ptr<kda::DeviceEvent> event;
};

struct kda_graph {
  std::unique_ptr<kda::DeviceGraph> graph;
};

namespace {

// Calls body(runtime) of the context's device.
template <class F>
kda_status with(const kda_context* context, const F& body) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    return body(*context->runtime);
  });
}

// Hands a result out.
template <class T, class Out>
Status give(kda::Result<T> result, Out* out) {
  KDA_RETURN_IF_ERROR(check_pointer("out", out));
  if (!result.ok()) return result.status();
  *out = std::move(result.value());
  return {};
}

Status check_kind(kda_memory_kind kind) {
  if (kind == KDA_MEMORY_DEVICE || kind == KDA_MEMORY_HOST) return {};
  return kda::invalid_argument("kind: wanted KDA_MEMORY_DEVICE (1) or KDA_MEMORY_HOST (2), got ", int{kind});
}

}  // namespace

extern "C" {

kda_status kda_memory_allocate(const kda_context* context, kda_memory_kind kind, size_t bytes, void** out) {
  return with(context, [&](const DeviceRuntime& runtime) -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    KDA_RETURN_IF_ERROR(check_kind(kind));
    return give(runtime.allocate(kind, bytes), out);
  });
}

kda_status kda_memory_free(const kda_context* context, kda_memory_kind kind, void* memory) {
  return with(context, [&](const DeviceRuntime& runtime) -> Status {
    KDA_RETURN_IF_ERROR(check_kind(kind));
    return memory == nullptr ? Status() : runtime.release(kind, memory);
  });
}

kda_status kda_memory_copy(const kda_context* context, void* to, const void* from, size_t bytes, void* stream) {
  return with(context, [&](const DeviceRuntime& runtime) -> Status {
    if (bytes == 0) return {};
    KDA_RETURN_IF_ERROR(check_pointer("to", to));
    KDA_RETURN_IF_ERROR(check_pointer("from", from));
    return runtime.copy(to, from, bytes, stream);
  });
}

kda_status kda_stream_create(const kda_context* context, void** out) {
  return with(context, [&](const DeviceRuntime& runtime) -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    return give(runtime.create_stream(), out);
  });
}

kda_status kda_stream_destroy(const kda_context* context, void* stream) {
  return with(context, [&](const DeviceRuntime& runtime) { return runtime.destroy_stream(stream); });
}

kda_status kda_stream_synchronize(const kda_context* context, void* stream) {
  return with(context, [&](const DeviceRuntime& runtime) { return runtime.synchronize(stream); });
}

kda_status kda_event_create(const kda_context* context, kda_event** out) {
  return with(context, [&](const DeviceRuntime& runtime) -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto event = std::make_unique<kda_event>();
    KDA_RETURN_IF_ERROR(give(runtime.create_event(), &event->event));
    *out = event.release();
    return {};
  });
}

void kda_event_destroy(kda_event* event) { delete event; }

kda_status kda_event_record(kda_event* event, void* stream) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("event", event));
    return event->event->record(stream);
  });
}

kda_status kda_event_elapsed(const kda_event* from, const kda_event* to, double* seconds) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("from", from));
    KDA_RETURN_IF_ERROR(check_pointer("to", to));
    return give(from->event->seconds_until(*to->event), seconds);
  });
}

kda_status kda_graph_begin(const kda_context* context, void* stream) {
  return with(context, [&](const DeviceRuntime& runtime) { return runtime.begin_graph(stream); });
}

kda_status kda_graph_end(const kda_context* context, void* stream, kda_graph** out) {
  return with(context, [&](const DeviceRuntime& runtime) -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto graph = std::make_unique<kda_graph>();
    KDA_RETURN_IF_ERROR(give(runtime.end_graph(stream), &graph->graph));
    *out = graph.release();
    return {};
  });
}

kda_status kda_graph_launch(kda_graph* graph, void* stream) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("graph", graph));
    return graph->graph->launch(stream);
  });
}

void kda_graph_destroy(kda_graph* graph) { delete graph; }

}  // extern "C"
