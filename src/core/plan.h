// Plans: describe -> create (validate, choose, prepare) -> workspace query -> run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/device_values.h"
#include "core/select.h"
#include "core/validate.h"

struct kda_plan {
  kda_operator op{};
  const kda::Context* context = nullptr;
  std::string backend;
  std::string isa;
  std::vector<kda::Refused> refused;
  kda::WorkspaceBook book;
  bool checked = false;
  virtual ~kda_plan() = default;
};

namespace kda {

template <class Op>
struct Plan : kda_plan {
  typename Op::Desc desc{};
  std::unique_ptr<Kernel<Op>> kernel;
};

// Copies a struct of the caller's size into ours (convention 4 of kda/types.h).
Status read_struct(const void* in, size_t in_size, void* out, size_t out_size, const char* name);
template <class T>
Status read_struct(const T* in, T& out, const char* name) {
  if (in == nullptr) return invalid_argument(name, ": wanted a struct, got NULL");
  return read_struct(in, in->struct_size, &out, sizeof(T), name);
}

// Plan flag or KDA_CHECK=1 (spec G-7).
bool checked_mode(uint32_t flags);

// A foreign observer voids the serving promise: neither plans nor runs with one, unless the context allows it
// (spec Y-25).
Status check_observer(const Context& context, const char* op);

// Size and alignment of the workspace against what the plan booked (spec ).
Status check_workspace(const kda_plan& plan, const kda_workspace& workspace);

template <class Desc>
uint32_t flags_of(const Desc& desc) {
  if constexpr (requires { desc.flags; }) return desc.flags;
  else if constexpr (requires { desc.decode.flags; }) return desc.decode.flags;
  else return 0;
}
template <class Desc>
const char* backend_of(const Desc& desc) {
  if constexpr (requires { desc.backend; }) return desc.backend;
  else return desc.decode.backend;
}

// A plan keeps no pointer of the caller's after creation.
template <class Desc>
Desc without_caller_pointers(Desc desc) {
  if constexpr (requires { desc.backend; }) desc.backend = nullptr;
  if constexpr (requires { desc.example; }) desc.example = nullptr;
  if constexpr (requires { desc.decode; }) desc.decode = without_caller_pointers(desc.decode);
  return desc;
}

template <class Op>
Result<std::unique_ptr<Plan<Op>>> create_plan(const Context& context, const typename Op::Desc* raw) {
  if (context.sealed.load() && !context.allow_late_plans) {
    return failed_precondition(Op::kName, ": plan creation after kda_context_seal (spec Y-16)");
  }
  KDA_RETURN_IF_ERROR(check_observer(context, Op::kName));
  auto plan = std::make_unique<Plan<Op>>();
  KDA_RETURN_IF_ERROR(read_struct(raw, plan->desc, "desc"));
  KDA_RETURN_IF_ERROR(Op::normalize(plan->desc));
  auto request = requested_backend(Op::kOp, backend_of(plan->desc), Op::kEnvironment);
  if (!request.ok()) return request.status();
  auto choice = select<Op>(context, plan->desc, request.value().name);
  if (!choice.ok()) return choice.status();
  auto kernel = choice.value().candidate->create(plan->desc, context, plan->book);
  if (!kernel.ok()) return kernel.status();
  if (plan->book.overflowed()) return unsupported(Op::kName, ": size: wanted a workspace below 2^63 bytes, got more");
  plan->desc = without_caller_pointers(plan->desc);
  plan->op = Op::kOp;
  plan->context = &context;
  plan->backend = choice.value().candidate->name();
  plan->isa = plan->backend == "reference" ? "fp64" : context.isa;
  plan->refused = std::move(choice.value().refused);
  plan->kernel = std::move(kernel.value());
  plan->checked = checked_mode(flags_of(plan->desc));
  log_choice(Op::kOp, plan->backend, request.value(), plan->refused, way_back_from(plan->backend, Op::kEnvironment));
  return plan;
}

template <class Op>
Status run_plan(const kda_plan* base, const typename Op::Args* raw, const kda_workspace& workspace, void* stream) {
  if (base == nullptr || base->op != Op::kOp) {
    return invalid_argument("plan: wanted a plan of operator ", Op::kName, ", got ",
                            base ? operator_name(base->op) : "NULL");
  }
  const auto& plan = *static_cast<const Plan<Op>*>(base);
  KDA_RETURN_IF_ERROR(check_observer(*plan.context, Op::kName));
  typename Op::Args args{};
  KDA_RETURN_IF_ERROR(read_struct(raw, args, "args"));
  Status first;
  AliasCheck aliases;
  Op::visit_tensors(args, [&](const char* name, const kda_tensor& tensor, bool written) {
    if (first.ok()) first = check_view(name, tensor, plan.context->device);
    if (first.ok()) aliases.add(name, tensor, written);
  });
  KDA_RETURN_IF_ERROR(first);
  KDA_RETURN_IF_ERROR(Op::validate(plan.desc, args));
  KDA_RETURN_IF_ERROR(check_workspace(plan, workspace));
  KDA_RETURN_IF_ERROR(aliases.result(plan.book.total_bytes() > 0 ? workspace : kda_workspace{}));
  if (plan.checked) KDA_RETURN_IF_ERROR(check_values<Op>(*plan.context, plan.desc, args, stream));
  plan.context->announce(Op::kName);
  return plan.kernel->run(args, WorkspaceGrant(plan.book, workspace.data), stream);
}

}  // namespace kda
