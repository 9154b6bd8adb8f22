// Plans of the operators: one per description, made at its first call and kept for the life of the process.
//
// The key is the description itself (every field, the backend's name, device, CPU threads) and, for prefill, the
// class of the tensors' layout. No address, length or value of a call is in it. Bounds that the caller leaves out are
// rounded up to powers of two, so that a server with growing batches makes a few plans and not one per size.
#pragma once

#include <cstring>
#include <string>
#include <string_view>

#include "arguments.h"

namespace kda::torch_ops {

// A description of all zeros, padding too (it is part of the key), with struct_size set.
template <class Desc>
Desc zeroed() {
  Desc d;
  std::memset(static_cast<void*>(&d), 0, sizeof d);
  d.struct_size = sizeof d;
  return d;
}

// The caller's bound, or the next power of two (at least 16).
int64_t bound(int64_t given, int64_t needed);
// Key part of a tensor's layout: what gates on rows ask for (alignment and pitch), not its sizes.
uint64_t layout_class(const kda_tensor& t);

// The plan of a description on a device; throws what its creation says.
struct PlanRequest {
  kda_operator op;
  kda_device device;
  std::string_view backend;
  const uint64_t* layouts = nullptr;
  size_t num_layouts = 0;
};
const kda_plan* find_plan(const PlanRequest& request, const void* desc, size_t size,
                          kda_plan* (*create)(kda_context*, const void* desc, const char* backend, const void* more),
                          const void* more);

// Description `desc` with `backend` and whatever `finish(desc)` adds that is not part of the key.
template <class Desc, class Finish>
const kda_plan* plan_of(const PlanRequest& request, const Desc& desc,
                        kda_status (*create)(kda_context*, const Desc*, kda_plan**), const Finish& finish) {
  struct More {
    decltype(create) function;
    const Finish* finish;
  } const more{create, &finish};
  return find_plan(
      request, &desc, sizeof desc,
      [](kda_context* context, const void* raw, const char* backend, const void* opaque) {
        const More& m = *static_cast<const More*>(opaque);
        Desc d = *static_cast<const Desc*>(raw);
        if constexpr (requires { d.decode; }) d.decode.backend = backend;
        else d.backend = backend;
        (*m.finish)(d);
        kda_plan* plan = nullptr;
        check(m.function(context, &d, &plan));
        return plan;
      },
      &more);
}
template <class Desc>
const kda_plan* plan_of(const PlanRequest& request, const Desc& desc,
                        kda_status (*create)(kda_context*, const Desc*, kda_plan**)) {
  return plan_of(request, desc, create, [](Desc&) {});
}

size_t plan_count();  // that are kept

// PyTorch's current stream of a CUDA device; null on the CPU.
void* current_stream(kda_device device);

// Whether the calling thread only asks how much scratch its operators need (libkda_torch_measure); notes the plan's
// need.
bool only_measured(const kda_plan* plan);

// Scratch memory of one run: what the calling thread was lent (libkda_torch_lend), else from PyTorch's allocator, so
// that its lifetime follows the stream and graphs own it.
class Scratch {
 public:
  Scratch(const kda_plan* plan, kda_device device);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  kda_workspace get() const { return grant_; }

 private:
  AtenTensorHandle memory_ = nullptr;
  void* bare_ = nullptr;
  kda_workspace grant_{};
};

template <class Args>
void run(const kda_plan* plan, kda_status (*function)(const kda_plan*, const Args*, kda_workspace, void*),
         const Args& args, kda_device device) {
  if (only_measured(plan)) return;
  const Scratch scratch(plan, device);
  check(function(plan, &args, scratch.get(), current_stream(device)));
}

}  // namespace kda::torch_ops
