// State-copy plans: preparation on scratch memory (spec Y-10, Y-17, Y-18) and the serving calls (Y-23, Y-24).
#pragma once

#include <atomic>
#include <memory>

#include "core/plan.h"
#include "core/state_copy_backend.h"
#include "kda/state_copy.h"

namespace kda {

enum class CopyDirection { gather, scatter };

struct StateCopyPlan : kda_plan {
  std::shared_ptr<const CopyTable> table;
  const CopyBackend* device = nullptr;
  int64_t max_selected = 0;
  // False while the set that owns the plan is not sealed, or has failed. A plan of its own is born ready.
  std::atomic<bool> ready{false};
};

// What a binding asks for, after the checks that need no device memory.
struct CopyRequest {
  CopyKey key;
  std::vector<Refused> refused;
};

// What observers are told (spec Y-25).
const char* copy_launch_name(CopyDirection direction);

// The context's device, or UNSUPPORTED if this build has no copies there.
Result<const CopyBackend*> find_copy_backend(const Context& context);

// Y-8.
Status check_max_selected(int64_t max_selected);

// C-3, C-16, Y-2..Y-4.
Result<CopyRequest> request_copy(const Context& context, const CopyBackend& device, const char* backend,
                                 const kda_tensor& pool, kda_dtype packed_dtype);

// Y-16 and Y-25: neither a sealed context nor a foreign observer.
Status check_may_prepare(const Context& context);

// Loads the variants of a key, runs each once on one-row scratch memory, synchronises, frees the scratch.
Result<std::shared_ptr<const CopyTable>> prepare_copy_table(const Context& context, const CopyBackend& device,
                                                            const CopyKey& key);

// A plan over a prepared table; not ready yet.
std::unique_ptr<StateCopyPlan> make_copy_plan(const Context& context, const CopyBackend& device, CopyRequest request,
                                              std::shared_ptr<const CopyTable> table, int64_t max_selected,
                                              bool checked);

// kda_state_copy_plan_create.
Result<std::unique_ptr<StateCopyPlan>> create_state_copy_plan(const Context& context,
                                                              const kda_state_copy_desc* desc);

// kda_state_gather and kda_state_scatter. Allocates nothing and takes no lock unless it fails.
Status run_state_copy(const kda_plan* plan, CopyDirection direction, const kda_state_copy_args* args, void* stream);

Status state_copy_info(const kda_plan* plan, kda_state_copy_info* info);

// kda_explain for KDA_OP_STATE_COPY: both kinds with their unmet conditions.
Status explain_state_copy(const Context& context, const kda_state_copy_desc* desc, kda_explain_fn fn, void* user);

// Fills an out-struct of the caller's size (convention 4 of kda/types.h).
Status write_struct(const void* ours, size_t our_size, void* out, const char* name);

}  // namespace kda
