// Contexts: device, threads, instruction set, life-cycle flags.
#include "kda/context.h"

#include "base/tensor.h"
#include "capi/backends.h"
#include "capi/guard.h"
#include "core/plan.h"
#include "cpu/isa.h"

using kda::Status;
using kda::capi::check_pointer;
using kda::capi::guard;

namespace {

Status fill_cpu(const kda_context_options& options, kda_context& context) {
  auto isa = kda::cpu::choose_isa();
  if (!isa.ok()) return isa.status();
  context.isa = kda::cpu::isa_name(isa.value());
  if (options.parallel_for != nullptr) {
    const int32_t threads = options.num_threads > 0 ? options.num_threads : kda::cpu::default_num_threads();
    context.parallel = {options.parallel_for, options.parallel_user, threads};
    return {};
  }
  context.pool = std::make_unique<kda::cpu::ThreadPool>(options.num_threads);
  context.parallel = context.pool->parallel();
  return {};
}

}  // namespace

extern "C" {

kda_status kda_context_create(const kda_context_options* options, kda_context** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    kda_context_options o{};
    if (options != nullptr) KDA_RETURN_IF_ERROR(kda::read_struct(options, o, "options"));
    if (o.num_threads < 0) return kda::invalid_argument("num_threads: wanted >= 0, got ", o.num_threads);
    auto context = std::make_unique<kda_context>();
    context->device = o.device;
    context->backends = &kda::capi::backends();
    context->allow_late_plans = o.allow_late_plans != 0;
    context->allow_observers = o.allow_observers != 0;
    if (o.device.type != KDA_CPU) {
      return kda::unsupported("device: wanted a device whose backend is in this build (cpu), got ",
                              kda::device_name(o.device.type), ":", o.device.index);
    }
    KDA_RETURN_IF_ERROR(fill_cpu(o, *context));
    *out = context.release();
    return {};
  });
}

void kda_context_destroy(kda_context* context) { delete context; }

kda_status kda_context_seal(kda_context* context) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    context->sealed.store(true);
    return {};
  });
}

int32_t kda_context_num_threads(const kda_context* context) { return context ? context->parallel.num_threads : 0; }
const char* kda_context_isa(const kda_context* context) { return context ? context->isa.c_str() : ""; }

kda_status kda_context_set_launch_observer(kda_context* context, kda_launch_observer_fn fn, void* user) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    context->observer = fn;
    context->observer_user = user;
    return {};
  });
}

}  // extern "C"
