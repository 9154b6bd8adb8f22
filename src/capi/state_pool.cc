// State pools: the C face of core/state_pool.h.
#include "kda/state_pool.h"

#include "capi/guard.h"
#include "core/plan.h"
#include "core/state_pool.h"

struct kda_state_pool {
  std::unique_ptr<kda::StatePool> pool;
};

namespace {

using kda::StatePool;
using kda::Status;
using kda::capi::check_pointer;
using kda::capi::guard;

Status read_desc(const kda_state_pool_desc* raw, kda_state_pool_desc& desc) {
  KDA_RETURN_IF_ERROR(kda::read_struct(raw, desc, "desc"));
  return StatePool::normalize(desc);
}

// Guards a call on a pool.
template <class Pool, class F>
kda_status with(Pool* pool, const F& body) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("pool", pool));
    return body(*pool->pool);
  });
}

Status check_layer(const StatePool& pool, int32_t layer) {
  if (layer >= 0 && layer < pool.desc().num_layers) return {};
  return kda::not_found("layer: wanted one in [0, ", pool.desc().num_layers, "), got ", layer);
}

}  // namespace

extern "C" {

void kda_state_pool_desc_init(kda_state_pool_desc* desc) {
  if (desc == nullptr) return;
  *desc = kda_state_pool_desc{};
  desc->struct_size = sizeof(kda_state_pool_desc);
  desc->null_slot = -1;
}

kda_status kda_state_pool_size(const kda_state_pool_desc* raw, size_t* bytes, size_t* page_bytes) {
  return guard([&]() -> Status {
    kda_state_pool_desc desc{};
    KDA_RETURN_IF_ERROR(read_desc(raw, desc));
    auto layout = StatePool::layout_of(desc);
    if (!layout.ok()) return layout.status();
    if (bytes != nullptr) *bytes = static_cast<size_t>(layout.value().total_bytes);
    if (page_bytes != nullptr) *page_bytes = static_cast<size_t>(layout.value().page_bytes);
    return {};
  });
}

kda_status kda_state_pool_create(kda_context* context, const kda_state_pool_desc* raw, kda_state_pool** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    kda_state_pool_desc desc{};
    KDA_RETURN_IF_ERROR(read_desc(raw, desc));
    auto pool = StatePool::create(*context, desc);
    if (!pool.ok()) return pool.status();
    *out = new kda_state_pool{std::move(pool.value())};
    return {};
  });
}

void kda_state_pool_destroy(kda_state_pool* pool) { delete pool; }

kda_status kda_state_pool_state(const kda_state_pool* pool, int32_t layer, kda_tensor* out) {
  return with(pool, [&](const StatePool& p) -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    KDA_RETURN_IF_ERROR(check_layer(p, layer));
    *out = p.state_view(layer);
    return {};
  });
}

kda_status kda_state_pool_conv(const kda_state_pool* pool, int32_t layer, kda_tensor* out) {
  return with(pool, [&](const StatePool& p) -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    KDA_RETURN_IF_ERROR(check_layer(p, layer));
    if (p.desc().conv_channels == 0) return kda::not_found("conv: wanted a pool with windows, got one without");
    *out = p.conv_view(layer);
    return {};
  });
}

kda_status kda_state_pool_allocate(kda_state_pool* pool, int64_t count, int64_t* pages) {
  return with(pool, [&](StatePool& p) { return p.allocate(count, pages); });
}

kda_status kda_state_pool_free(kda_state_pool* pool, int64_t count, const int64_t* pages) {
  return with(pool, [&](StatePool& p) { return p.free(count, pages); });
}

int64_t kda_state_pool_available(const kda_state_pool* pool) { return pool ? pool->pool->available() : 0; }

kda_status kda_state_pool_set_position(kda_state_pool* pool, int64_t page, int64_t position) {
  return with(pool, [&](StatePool& p) { return p.set_position(page, position); });
}

kda_status kda_state_pool_position(const kda_state_pool* pool, int64_t page, int64_t* position) {
  return with(pool, [&](const StatePool& p) -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("position", position));
    auto found = p.position(page);
    if (!found.ok()) return found.status();
    *position = found.value();
    return {};
  });
}

kda_status kda_state_pool_fold(kda_state_pool* pool, const kda_state_columns* from, int64_t destination) {
  return with(pool, [&](StatePool& p) -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("from", from));
    return p.fold(*from, destination);
  });
}

size_t kda_state_pool_payload_size(const kda_state_pool* pool) {
  return pool ? static_cast<size_t>(pool->pool->payload_bytes()) : 0;
}

kda_status kda_state_pool_export(const kda_state_pool* pool, const kda_state_columns* from, void* payload,
                                 size_t bytes) {
  return with(pool, [&](const StatePool& p) -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("from", from));
    return p.export_payload(*from, payload, bytes);
  });
}

kda_status kda_state_pool_import(kda_state_pool* pool, int64_t page, const void* payload, size_t bytes,
                                 int64_t expected_position) {
  return with(pool, [&](StatePool& p) { return p.import_payload(page, payload, bytes, expected_position); });
}

}  // extern "C"
