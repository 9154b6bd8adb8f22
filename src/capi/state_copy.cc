// State-copy plans and copy sets.
#include "kda/state_copy.h"

#include <vector>

#include "capi/guard.h"
#include "core/state_copy_set.h"

using kda::CopyDirection;
using kda::Status;
using kda::capi::check_pointer;
using kda::capi::guard;

struct kda_copy_set : kda::CopySet {
  using CopySet::CopySet;
};

namespace {

Status check_set(const kda_copy_set* set) { return check_pointer("set", set); }

kda_status run(const kda_plan* plan, CopyDirection direction, const kda_state_copy_args* args, void* stream) {
  return guard([&] { return kda::run_state_copy(plan, direction, args, stream); });
}

kda_status run_layer(const kda_copy_set* set, const char* layer, CopyDirection direction,
                     const kda_state_copy_args* args, void* stream) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_set(set));
    KDA_RETURN_IF_ERROR(check_pointer("layer", layer));
    const auto plan = set->serving(layer);
    if (!plan.ok()) return plan.status();
    return kda::run_state_copy(plan.value(), direction, args, stream);
  });
}

Status read_options(const kda_copy_set_options* raw, kda::CopySet::Options& options) {
  if (raw == nullptr) return {};
  kda_copy_set_options o{};
  KDA_RETURN_IF_ERROR(kda::read_struct(raw, o, "options"));
  if ((o.flags & ~KDA_PLAN_CHECKED) != 0) {
    return kda::invalid_argument("flags: wanted KDA_PLAN_CHECKED or none, got ", o.flags);
  }
  if (o.num_layers > 0) KDA_RETURN_IF_ERROR(check_pointer("layers", o.layers));
  for (size_t i = 0; i < o.num_layers; ++i) {
    KDA_RETURN_IF_ERROR(check_pointer("layers", o.layers[i]));
    options.expected_layers.emplace_back(o.layers[i]);
  }
  options.checked = (o.flags & KDA_PLAN_CHECKED) != 0;
  if (o.binding_version != nullptr) options.binding_version = o.binding_version;
  return {};
}

// Bindings lie struct_size bytes apart, by the first one's.
Status read_bindings(const kda_copy_binding* raw, size_t count, std::vector<kda::CopyBinding>& out) {
  if (count > 0) KDA_RETURN_IF_ERROR(check_pointer("bindings", raw));
  const auto* bytes = reinterpret_cast<const char*>(raw);
  for (size_t i = 0; i < count; ++i) {
    kda_copy_binding b{};
    KDA_RETURN_IF_ERROR(
        kda::read_struct(reinterpret_cast<const kda_copy_binding*>(bytes + i * raw->struct_size), b, "binding"));
    out.push_back({b.layer != nullptr ? b.layer : "", b.backend, b.pool, b.packed_dtype});
  }
  return {};
}

}  // namespace

extern "C" {

kda_status kda_state_copy_plan_create(kda_context* context, const kda_state_copy_desc* desc, kda_plan** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto plan = kda::create_state_copy_plan(*context, desc);
    if (!plan.ok()) return plan.status();
    *out = plan.value().release();
    return {};
  });
}

kda_status kda_state_gather(const kda_plan* plan, const kda_state_copy_args* args, void* stream) {
  return run(plan, CopyDirection::gather, args, stream);
}

kda_status kda_state_scatter(const kda_plan* plan, const kda_state_copy_args* args, void* stream) {
  return run(plan, CopyDirection::scatter, args, stream);
}

kda_status kda_state_copy_plan_info(const kda_plan* plan, kda_state_copy_info* info) {
  return guard([&] { return kda::state_copy_info(plan, info); });
}

kda_status kda_copy_set_create(kda_context* context, const kda_copy_set_options* options, kda_copy_set** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    kda::CopySet::Options o;
    KDA_RETURN_IF_ERROR(read_options(options, o));
    o.checked = kda::checked_mode(o.checked ? KDA_PLAN_CHECKED : 0);
    *out = new kda_copy_set(*context, std::move(o));
    return {};
  });
}

void kda_copy_set_destroy(kda_copy_set* set) { delete set; }

kda_status kda_copy_set_prepare(kda_copy_set* set, const kda_copy_binding* bindings, size_t count,
                                int64_t max_selected) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_set(set));
    std::vector<kda::CopyBinding> list;
    KDA_RETURN_IF_ERROR(read_bindings(bindings, count, list));
    return set->prepare(list, max_selected);
  });
}

kda_status kda_copy_set_seal(kda_copy_set* set) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_set(set));
    return set->seal();
  });
}

kda_status kda_copy_set_publish(kda_copy_set* set) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_set(set));
    return set->publish();
  });
}

kda_status kda_copy_set_reset(kda_copy_set* set) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_set(set));
    return set->reset();
  });
}

kda_copy_set_state kda_copy_set_get_state(const kda_copy_set* set) {
  return set != nullptr ? set->state() : KDA_COPY_SET_EMPTY;
}

kda_status kda_copy_set_get_info(const kda_copy_set* set, kda_copy_set_info* info) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_set(set));
    return set->info(info);
  });
}

int64_t kda_copy_set_ready(const kda_copy_set* set) { return set != nullptr ? set->ready() : 0; }

const char* kda_copy_set_last_error(const kda_copy_set* set) { return set != nullptr ? set->last_error() : ""; }

kda_status kda_copy_set_gather(const kda_copy_set* set, const char* layer, const kda_state_copy_args* args,
                               void* stream) {
  return run_layer(set, layer, CopyDirection::gather, args, stream);
}

kda_status kda_copy_set_scatter(const kda_copy_set* set, const char* layer, const kda_state_copy_args* args,
                                void* stream) {
  return run_layer(set, layer, CopyDirection::scatter, args, stream);
}

kda_status kda_copy_set_plan(const kda_copy_set* set, const char* layer, const kda_plan** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_set(set));
    KDA_RETURN_IF_ERROR(check_pointer("layer", layer));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    const auto plan = set->plan(layer);
    if (!plan.ok()) return plan.status();
    *out = plan.value();
    return {};
  });
}

}  // extern "C"
