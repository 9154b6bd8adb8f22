#include "core/state_copy.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"

namespace kda {
namespace {

// One piece of scratch memory of the preparation.
class Scratch {
 public:
  Scratch(const Context& context, const CopyBackend& device, size_t bytes)
      : context_(context), device_(device), bytes_(bytes), memory_(device.allocate(bytes, context)) {}
  ~Scratch() {
    if (memory_ != nullptr) device_.release(memory_, context_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const { return static_cast<char*>(memory_); }
  Status fill(int value) const {
    if (memory_ == nullptr) {
      return Status(KDA_OUT_OF_MEMORY, str_cat("state_copy: no memory for ", bytes_, " bytes of scratch"));
    }
    return device_.fill(memory_, value, bytes_, context_);
  }

 private:
  const Context& context_;
  const CopyBackend& device_;
  size_t bytes_;
  void* memory_;
};

int32_t lane_bytes(const CopyKey& key, int64_t stride_bytes, int64_t payload_bytes) {
  for (int32_t lane : {16, 8, 4, 2}) {
    if (key.alignment % lane == 0 && stride_bytes % lane == 0 && payload_bytes % lane == 0) return lane;
  }
  return 1;
}

CopyTable describe_table(const CopyKey& key) {
  CopyTable table;
  const auto pool_size = static_cast<int64_t>(dtype_size(key.pool_dtype));
  table.key = key;
  table.rows = key.shape[0];
  table.payload = key.shape[1] * key.shape[2] * key.shape[3];
  table.pool_stride = key.strides[0] * pool_size;
  table.pool_bytes = table.payload * pool_size;
  table.packed_bytes = table.payload * static_cast<int64_t>(dtype_size(key.packed_dtype));
  table.lane = lane_bytes(key, table.pool_stride, table.pool_bytes);
  return table;
}

// Every variant once, on one row, index zero, flag true.
Status run_on_scratch(const Context& context, const CopyTable& table, const Scratch& pool, const Scratch& packed,
                      const Scratch& index, const Scratch& flag) {
  CopyCall call;
  call.pool = pool.data() + table.key.alignment;
  call.packed = packed.data();
  call.packed_stride = table.packed_bytes;
  call.indices = index.data();
  call.n = 1;
  if (reinterpret_cast<uintptr_t>(call.pool) % kCopyAlignmentClass != static_cast<uintptr_t>(table.key.alignment)) {
    return internal_error("state_copy: scratch at ", static_cast<const void*>(call.pool),
                          " breaks the pool's alignment class ", table.key.alignment, " mod ", kCopyAlignmentClass);
  }
  for (CopyDirection direction : {CopyDirection::gather, CopyDirection::scatter}) {
    const bool scatter = direction == CopyDirection::scatter;
    call.flags = scatter ? nullptr : reinterpret_cast<const uint8_t*>(flag.data());
    for (bool wide : {false, true}) {
      const CopyVariant variant = table.variant(wide, scatter);
      if (variant == nullptr) return internal_error("state_copy: the backend left a variant out");
      context.announce(copy_launch_name(direction));
      KDA_RETURN_IF_ERROR(variant(table, call, context, nullptr));
    }
  }
  return {};
}

}  // namespace

const char* copy_launch_name(CopyDirection direction) {
  return direction == CopyDirection::gather ? "state_gather" : "state_scatter";
}

Result<const CopyBackend*> find_copy_backend(const Context& context) {
  if (context.backends != nullptr) {
    for (const CopyBackend* backend : context.backends->copies) {
      if (backend->device_type() == context.device.type) return backend;
    }
  }
  return unsupported("state_copy: device_type: wanted a backend of this build, got ",
                     device_name(context.device.type));
}

Status check_max_selected(int64_t max_selected) {
  if (max_selected >= 1) return {};
  return invalid_argument("max_selected: wanted an integer >= 1, got ", max_selected);
}

Status check_may_prepare(const Context& context) {
  if (context.sealed.load() && !context.allow_late_plans) {
    return failed_precondition("state_copy: plan creation after kda_context_seal (spec Y-16)");
  }
  return check_observer(context, "state_copy");
}

Result<CopyRequest> request_copy(const Context& context, const CopyBackend& device, const char* backend,
                                 const kda_tensor& pool, kda_dtype packed_dtype) {
  const auto request = parse_copy_backend(backend);
  if (!request.ok()) return request.status();
  KDA_RETURN_IF_ERROR(check_copy_pool(pool, context.device));
  const auto packed = copy_packed_dtype(pool.dtype, packed_dtype);
  if (!packed.ok()) return packed.status();
  CopyRequest result;
  const auto kind = route_copy(pool, packed.value(), device.facts(context), request.value(), result.refused);
  if (!kind.ok()) return kind.status();
  result.key = make_copy_key(kind.value(), pool, packed.value());
  return result;
}

Result<std::shared_ptr<const CopyTable>> prepare_copy_table(const Context& context, const CopyBackend& device,
                                                            const CopyKey& key) {
  auto table = std::make_shared<CopyTable>(describe_table(key));
  KDA_RETURN_IF_ERROR(device.load(*table, context));
  Status status;
  {
    const Scratch pool(context, device, static_cast<size_t>(table->pool_bytes) + kCopyAlignmentClass);
    const Scratch packed(context, device, static_cast<size_t>(table->packed_bytes));
    const Scratch index(context, device, sizeof(int64_t));
    const Scratch flag(context, device, kCopyAlignmentClass);
    for (const Scratch* scratch : {&pool, &packed, &index}) {
      if (status.ok()) status = scratch->fill(0);
    }
    if (status.ok()) status = flag.fill(1);
    if (status.ok()) status = run_on_scratch(context, *table, pool, packed, index, flag);
    // Whatever was started ends before its memory goes, and a late error belongs to this preparation.
    const Status late = device.synchronize(context);
    if (status.ok()) status = late;
  }
  if (!status.ok()) return status;
  return std::shared_ptr<const CopyTable>(std::move(table));
}

std::unique_ptr<StateCopyPlan> make_copy_plan(const Context& context, const CopyBackend& device, CopyRequest request,
                                              std::shared_ptr<const CopyTable> table, int64_t max_selected,
                                              bool checked) {
  auto plan = std::make_unique<StateCopyPlan>();
  plan->op = KDA_OP_STATE_COPY;
  plan->context = &context;
  plan->backend = copy_kind_name(request.key.kind);
  plan->isa = context.isa;
  plan->refused = std::move(request.refused);
  plan->checked = checked;
  plan->table = std::move(table);
  plan->device = &device;
  plan->max_selected = max_selected;
  return plan;
}

Result<std::unique_ptr<StateCopyPlan>> create_state_copy_plan(const Context& context,
                                                              const kda_state_copy_desc* raw) {
  kda_state_copy_desc desc{};
  KDA_RETURN_IF_ERROR(read_struct(raw, desc, "desc"));
  KDA_RETURN_IF_ERROR(check_may_prepare(context));
  KDA_RETURN_IF_ERROR(check_max_selected(desc.max_selected));
  if ((desc.flags & ~KDA_PLAN_CHECKED) != 0) {
    return invalid_argument("flags: wanted KDA_PLAN_CHECKED or none, got ", desc.flags);
  }
  const auto device = find_copy_backend(context);
  if (!device.ok()) return device.status();
  auto request = request_copy(context, *device.value(), desc.backend, desc.pool, desc.packed_dtype);
  if (!request.ok()) return request.status();
  auto table = prepare_copy_table(context, *device.value(), request.value().key);
  if (!table.ok()) return table.status();
  auto plan = make_copy_plan(context, *device.value(), std::move(request.value()), std::move(table.value()),
                             desc.max_selected, checked_mode(desc.flags));
  plan->ready.store(true, std::memory_order_release);
  log_choice(KDA_OP_STATE_COPY, plan->backend, BackendRequest::of_plan(desc.backend), plan->refused);
  return plan;
}

Status write_struct(const void* ours, size_t our_size, void* out, const char* name) {
  if (out == nullptr) return invalid_argument(name, ": wanted a struct, got NULL");
  size_t size;
  std::memcpy(&size, out, sizeof size);
  if (size < sizeof size) {
    return invalid_argument(name, ".struct_size: wanted ", our_size, " (sizeof the struct), got ", size);
  }
  const size_t common = std::min(size, our_size);
  std::memcpy(static_cast<char*>(out) + sizeof size, static_cast<const char*>(ours) + sizeof size,
              common - sizeof size);
  return {};
}

Status state_copy_info(const kda_plan* base, kda_state_copy_info* info) {
  if (base == nullptr || base->op != KDA_OP_STATE_COPY) {
    return invalid_argument("plan: wanted a plan of operator state_copy, got ",
                            base != nullptr ? operator_name(base->op) : "NULL");
  }
  const auto& plan = *static_cast<const StateCopyPlan*>(base);
  kda_state_copy_info ours{};
  ours.rows = plan.table->rows;
  ours.payload = plan.table->payload;
  ours.max_selected = plan.max_selected;
  ours.lane_bytes = plan.table->lane;
  for (const auto& by_index : plan.table->variants) {
    for (CopyVariant variant : by_index) ours.variants += variant != nullptr;
  }
  ours.table = reinterpret_cast<uintptr_t>(plan.table.get());
  return write_struct(&ours, sizeof ours, info, "info");
}

Status explain_state_copy(const Context& context, const kda_state_copy_desc* raw, kda_explain_fn fn, void* user) {
  kda_state_copy_desc desc{};
  KDA_RETURN_IF_ERROR(read_struct(raw, desc, "desc"));
  KDA_RETURN_IF_ERROR(check_max_selected(desc.max_selected));
  KDA_RETURN_IF_ERROR(check_copy_pool(desc.pool, context.device));
  const auto packed = copy_packed_dtype(desc.pool.dtype, desc.packed_dtype);
  if (!packed.ok()) return packed.status();
  const auto device = find_copy_backend(context);
  if (!device.ok()) return device.status();
  bool chosen = false;
  for (CopyKind kind : {CopyKind::fused, CopyKind::bytes}) {
    const Refusals r = copy_refusals(kind, desc.pool, packed.value(), device.value()->facts(context));
    const bool first = r.empty() && !chosen;
    chosen = chosen || first;
    fn(user, copy_kind_name(kind), r.text().c_str(), first);
  }
  return {};
}

}  // namespace kda
