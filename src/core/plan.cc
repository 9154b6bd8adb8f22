#include "core/plan.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace kda {

Status read_struct(const void* in, size_t in_size, void* out, size_t out_size, const char* name) {
  if (in_size < sizeof(size_t)) {
    return invalid_argument(name, ".struct_size: wanted ", out_size, " (sizeof the struct), got ", in_size);
  }
  const auto* bytes = static_cast<const unsigned char*>(in);
  for (size_t i = out_size; i < in_size; ++i) {
    if (bytes[i] != 0) {
      return invalid_argument(name, ".struct_size: wanted at most ", out_size, " with a zero tail, got ", in_size,
                              " with fields that this library does not know");
    }
  }
  std::memset(out, 0, out_size);
  std::memcpy(out, in, in_size < out_size ? in_size : out_size);
  std::memcpy(out, &out_size, sizeof(size_t));
  return {};
}

bool checked_mode(uint32_t flags) {
  const char* v = std::getenv("KDA_CHECK");
  return (flags & KDA_PLAN_CHECKED) != 0 || (v != nullptr && std::strcmp(v, "1") == 0);
}

Status check_observer(const Context& context, const char* op) {
  if (context.observer == nullptr || context.allow_observers) return {};
  return failed_precondition(op, ": wanted no launch observer in the context, got one (spec Y-25)");
}

Status check_workspace(const kda_plan& plan, const kda_workspace& workspace) {
  const auto wanted = static_cast<size_t>(plan.book.total_bytes());
  if (workspace.bytes < wanted || (wanted > 0 && workspace.data == nullptr)) {
    return Status(KDA_WORKSPACE_TOO_SMALL,
                  str_cat(operator_name(plan.op), " workspace: wanted ", wanted, " bytes, got ",
                          workspace.data == nullptr ? 0 : workspace.bytes));
  }
  if (wanted > 0 && reinterpret_cast<uintptr_t>(workspace.data) % KDA_WORKSPACE_ALIGNMENT != 0) {
    return invalid_argument(operator_name(plan.op), " workspace: wanted an address aligned to ",
                            KDA_WORKSPACE_ALIGNMENT, " bytes, got one aligned to ",
                            reinterpret_cast<uintptr_t>(workspace.data) & -reinterpret_cast<uintptr_t>(workspace.data));
  }
  return {};
}

}  // namespace kda
