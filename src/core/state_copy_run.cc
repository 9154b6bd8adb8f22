// The serving calls: everything of spec Y-24 is checked on the host, then one variant is launched.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "core/state_copy.h"

namespace kda {
namespace {

bool same_device(const kda_tensor& t, const CopyKey& key) {
  return t.device.type == key.device_type && (key.device_type == KDA_CPU || t.device.index == key.device_index);
}

Status check_device(const char* name, const kda_tensor& t, const CopyKey& key) {
  if (same_device(t, key)) return {};
  return invalid_argument(name, ": wanted a tensor on ", device_name(key.device_type), ":", key.device_index,
                          ", got one on ", device_name(t.device.type), ":", t.device.index);
}

Status check_indices(const kda_tensor& t, const CopyKey& key, int64_t max_selected) {
  if (!present(t) || t.rank != 1 || (t.dtype != KDA_INT32 && t.dtype != KDA_INT64) || t.shape[0] < 0) {
    return invalid_argument("indices: wanted int32 or int64 [n], got ", describe(t));
  }
  KDA_RETURN_IF_ERROR(check_device("indices", t, key));
  const int64_t n = t.shape[0];
  if (n > max_selected) {
    return invalid_argument("indices: wanted n <= max_selected = ", max_selected, ", got ", n);
  }
  const auto size = static_cast<int64_t>(dtype_size(t.dtype));
  if (n > 1 && (t.strides[0] < 1 || !checked_product({n, t.strides[0], size}))) {
    return invalid_argument("indices: wanted a stride >= 1, got ", describe(t));
  }
  if (n > 0 && (t.data == nullptr || reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size) != 0)) {
    return invalid_argument("indices: wanted an address aligned to ", size, " bytes, got ", t.data);
  }
  return {};
}

Status check_flag_vector(const kda_tensor& t, const CopyKey& key, int64_t n) {
  if (!present(t)) return {};
  if (t.dtype != KDA_BOOL || t.rank != 1 || t.shape[0] != n) {
    return invalid_argument("has_initial_state: wanted bool [", n, "], got ", describe(t));
  }
  KDA_RETURN_IF_ERROR(check_device("has_initial_state", t, key));
  if (n > 1 && t.strides[0] != 1) {
    return invalid_argument("has_initial_state: wanted a contiguous vector, got ", describe(t));
  }
  if (n > 0 && t.data == nullptr) return invalid_argument("has_initial_state: wanted memory, got NULL");
  return {};
}

Status check_packed(const kda_tensor& t, const CopyTable& table, int64_t n) {
  const CopyKey& key = table.key;
  if (!present(t) || t.rank != 4 || t.shape[0] != n || t.shape[1] != key.shape[1] || t.shape[2] != key.shape[2] ||
      t.shape[3] != key.shape[3]) {
    return invalid_argument("packed: wanted [", n, ", ", key.shape[1], ", ", key.shape[2], ", ", key.shape[3],
                            "], got ", describe(t));
  }
  if (t.dtype != key.packed_dtype) {
    return invalid_argument("packed: wanted ", dtype_name(key.packed_dtype), ", got ", dtype_name(t.dtype));
  }
  KDA_RETURN_IF_ERROR(check_device("packed", t, key));
  if (!inner_dense(t, 3))
    return invalid_argument("packed: wanted the inner three dimensions dense, got ", describe(t));
  const auto size = static_cast<int64_t>(dtype_size(t.dtype));
  if (n > 1 && (t.strides[0] < table.payload || !checked_product({n, t.strides[0], size}))) {
    return invalid_argument("packed: wanted a row stride >= ", table.payload, ", got ", describe(t));
  }
  if (n > 0 && t.data == nullptr) return invalid_argument("packed: wanted memory, got NULL");
  if (n > 0 && (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(table.packed_alignment) != 0 ||
                (n > 1 && t.strides[0] * size % table.packed_alignment != 0))) {
    return invalid_argument("packed: wanted rows aligned to ", table.packed_alignment, " bytes, got ", t.data,
                            " with stride ", t.strides[0] * size, " bytes");
  }
  return {};
}

Status check_apart(const char* a, const ByteRange& x, const char* b, const kda_tensor& t) {
  const ByteRange y = byte_range(t);
  if (!x.overlaps(y)) return {};
  return invalid_argument(a, ": wanted memory apart from ", b, ", got overlapping bytes [", x.first, ", ", x.last,
                          ") and [", y.first, ", ", y.last, ")");
}

// G-9 and C-21: what is written overlaps nothing that is read.
Status check_overlap(CopyDirection direction, const kda_state_copy_args& args) {
  const ByteRange pool = byte_range(args.pool), packed = byte_range(args.packed);
  KDA_RETURN_IF_ERROR(check_apart("pool", pool, "packed", args.packed));
  if (direction == CopyDirection::scatter) return check_apart("pool", pool, "indices", args.indices);
  KDA_RETURN_IF_ERROR(check_apart("packed", packed, "indices", args.indices));
  return check_apart("packed", packed, "has_initial_state", args.has_initial_state);
}

// Checked mode: indices past the pool, and valid scatter indices that occur twice (spec G-7, C-12).
Status check_index_values(const StateCopyPlan& plan, CopyDirection direction, const kda_tensor& indices,
                          void* stream) {
  const int64_t n = indices.shape[0], stride = n > 1 ? indices.strides[0] : 1;
  if (n == 0) return {};
  const size_t bytes = static_cast<size_t>((n - 1) * stride + 1) * dtype_size(indices.dtype);
  std::vector<int64_t> host(bytes / 8 + 1);
  KDA_RETURN_IF_ERROR(plan.device->read_back(host.data(), indices.data, bytes, *plan.context, stream));
  kda_tensor copy = indices;
  copy.data = host.data();
  const IndexView view = index_view(copy);
  std::vector<std::pair<int64_t, int64_t>> valid;  // (index, position)
  for (int64_t i = 0; i < n; ++i) {
    if (view[i] >= plan.table->rows) {
      return invalid_argument("indices[", i, "]: wanted below rows = ", plan.table->rows, ", got ", view[i]);
    }
    if (view[i] >= 0) valid.emplace_back(view[i], i);
  }
  if (direction == CopyDirection::gather) return {};
  std::sort(valid.begin(), valid.end());
  const auto same = [](const auto& a, const auto& b) { return a.first == b.first; };
  const auto at = std::adjacent_find(valid.begin(), valid.end(), same);
  if (at == valid.end()) return {};
  return invalid_argument("indices: wanted distinct rows to scatter to, got ", at->first, " at positions ",
                          at->second, " and ", (at + 1)->second);
}

}  // namespace

Status run_state_copy(const kda_plan* base, CopyDirection direction, const kda_state_copy_args* raw, void* stream) {
  if (base == nullptr || base->op != KDA_OP_STATE_COPY) {
    return invalid_argument("plan: wanted a plan of operator state_copy, got ",
                            base != nullptr ? operator_name(base->op) : "NULL");
  }
  const auto& plan = *static_cast<const StateCopyPlan*>(base);
  const Context& context = *plan.context;
  if (!plan.ready.load(std::memory_order_acquire)) {
    return failed_precondition("plan: wanted a sealed copy set, got one that is not sealed or has failed");
  }
  KDA_RETURN_IF_ERROR(check_observer(context, "state_copy"));
  kda_state_copy_args args{};
  KDA_RETURN_IF_ERROR(read_struct(raw, args, "args"));
  const CopyTable& table = *plan.table;
  KDA_RETURN_IF_ERROR(check_prepared_layout(table.key, args.pool));
  KDA_RETURN_IF_ERROR(check_indices(args.indices, table.key, plan.max_selected));
  const int64_t n = args.indices.shape[0];
  const bool scatter = direction == CopyDirection::scatter;
  if (scatter) args.has_initial_state = {};
  KDA_RETURN_IF_ERROR(check_flag_vector(args.has_initial_state, table.key, n));
  KDA_RETURN_IF_ERROR(check_packed(args.packed, table, n));
  KDA_RETURN_IF_ERROR(check_overlap(direction, args));
  if (plan.checked) KDA_RETURN_IF_ERROR(check_index_values(plan, direction, args.indices, stream));
  if (n == 0) return {};

  CopyCall call;
  call.pool = static_cast<char*>(args.pool.data);
  call.packed = static_cast<char*>(args.packed.data);
  call.packed_stride = args.packed.strides[0] * static_cast<int64_t>(dtype_size(args.packed.dtype));
  call.indices = args.indices.data;
  call.index_stride = args.indices.strides[0];
  call.flags = static_cast<const uint8_t*>(args.has_initial_state.data);
  call.n = n;
  context.announce(copy_launch_name(direction));
  return table.variant(args.indices.dtype == KDA_INT64, scatter)(table, call, context, stream);
}

}  // namespace kda
