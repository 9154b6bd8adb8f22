// Contexts: device, threads, instruction set, life-cycle flags.
#include "kda/context.h"

#include <cstring>

#include "base/tensor.h"
#include "capi/backends.h"
#include "capi/guard.h"
#include "core/device_runtime.h"
#include "core/plan.h"
#include "cpu/isa.h"

using kda::Status;
using kda::capi::check_pointer;
using kda::capi::guard;

namespace {

Status fill_cpu(const kda_context_options& options, kda_context& context) {
  if (options.device.index != 0) {
    return kda::invalid_argument("device.index: wanted 0, the CPU is one device, got ", options.device.index);
  }
  auto isa = kda::cpu::choose_isa();
  if (!isa.ok()) return isa.status();
  context.isa = kda::cpu::isa_name(isa.value());
  context.runtime = &kda::host_runtime();
  if (options.parallel_for != nullptr) {
    const int32_t threads = options.num_threads > 0 ? options.num_threads : kda::cpu::default_num_threads();
    context.parallel = {options.parallel_for, options.parallel_user, threads};
    return {};
  }
  context.pool = std::make_unique<kda::cpu::ThreadPool>(options.num_threads);
  context.parallel = context.pool->parallel();
  return {};
}

Status fill_cuda(const kda_context_options& options, kda_context& context) {
  auto facts = kda::capi::cuda_open_device(options.device.index);
  if (!facts.ok()) return facts.status();
  context.facts = facts.value();
  context.runtime = &kda::capi::cuda_device_runtime(options.device.index);
  context.isa = kda::str_cat("sm_", context.facts.major, context.facts.minor);
  return {};
}

// Host facts of a device; the CPU has its cores for multiprocessors.
kda::Result<kda::DeviceFacts> facts_of(const kda_device& device) {
  if (device.type == KDA_CUDA) return kda::capi::cuda_device_facts(device.index);
  if (device.type != KDA_CPU || device.index != 0) {
    return kda::invalid_argument("device: wanted cpu:0 or a CUDA device, got type ", int{device.type}, ", index ",
                                 device.index);
  }
  kda::DeviceFacts facts;
  facts.name = "cpu";
  facts.multiprocessors = kda::cpu::default_num_threads();
  return facts;
}

}  // namespace

extern "C" {

kda_status kda_device_count(kda_device_type type, int32_t* count) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("count", count));
    if (type != KDA_CPU && type != KDA_CUDA) {
      return kda::invalid_argument("type: wanted KDA_CPU or KDA_CUDA, got ", int{type});
    }
    kda::Result<int32_t> found = 1;
    if (type == KDA_CUDA) found = kda::capi::cuda_device_count();
    if (!found.ok()) return found.status();
    *count = found.value();
    return {};
  });
}

kda_status kda_device_get_info(kda_device device, kda_device_info* info) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("info", info));
    const size_t size = info->struct_size;
    if (size < sizeof(size_t)) {
      return kda::invalid_argument("info.struct_size: wanted ", sizeof(*info), " (sizeof the struct), got ", size);
    }
    const auto facts = facts_of(device);
    if (!facts.ok()) return facts.status();
    const kda::DeviceFacts& f = facts.value();
    kda_device_info all{};
    all.struct_size = size;
    std::strncpy(all.name, f.name.c_str(), sizeof(all.name) - 1);
    all.compute_major = f.major;
    all.compute_minor = f.minor;
    all.multiprocessors = f.multiprocessors;
    all.driver_version = f.driver_version;
    all.runtime_version = f.runtime_version;
    all.memory_bytes = f.memory_bytes;
    all.l2_bytes = f.l2_bytes;
    std::memcpy(all.uuid, f.uuid.data(), sizeof(all.uuid));
    std::memcpy(info, &all, size < sizeof(all) ? size : sizeof(all));
    return {};
  });
}

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
    if (o.device.type != KDA_CPU && o.device.type != KDA_CUDA) {
      return kda::invalid_argument("device.type: wanted KDA_CPU or KDA_CUDA, got ", int{o.device.type});
    }
    KDA_RETURN_IF_ERROR(o.device.type == KDA_CPU ? fill_cpu(o, *context) : fill_cuda(o, *context));
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

kda_status kda_context_parallel_for(const kda_context* context, int32_t n, void (*body)(void*, int32_t), void* arg) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    if (body == nullptr) return kda::invalid_argument("body: wanted a function, got NULL");
    if (n < 0) return kda::invalid_argument("n: wanted >= 0, got ", n);
    context->parallel.for_each(n, [&](int64_t i, int32_t) { body(arg, static_cast<int32_t>(i)); });
    return {};
  });
}

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
