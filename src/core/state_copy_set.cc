#include "core/state_copy_set.h"

#include <algorithm>
#include <new>

namespace kda {
namespace {

const char* state_name(kda_copy_set_state state) {
  switch (state) {
    case KDA_COPY_SET_EMPTY: return "EMPTY";
    case KDA_COPY_SET_PREPARING: return "PREPARING";
    case KDA_COPY_SET_SEALED: return "SEALED";
    case KDA_COPY_SET_PUBLISHED: return "PUBLISHED";
    case KDA_COPY_SET_FAILED: return "FAILED";
  }
  return "unknown";
}

// Memory that runs out while the set moves is a failure like any other (spec Y-7, Y-26).
template <class Move>
Status guarded(const Move& move) {
  try {
    return move();
  } catch (const std::bad_alloc&) {
    return Status(KDA_OUT_OF_MEMORY, "copy set: no memory for its tables");
  }
}

Status for_layer(const Status& status, const std::string& layer) {
  return status.with_context("layer '" + layer + "'");
}

}  // namespace

// The right to move the set; held by one thread at a time, never waited for.
class CopySet::Turn {
 public:
  explicit Turn(const CopySet& set) : set_(set), taken_(!set.busy_.test_and_set(std::memory_order_acquire)) {}
  ~Turn() {
    if (taken_) set_.busy_.clear(std::memory_order_release);
  }
  Status status() const {
    if (taken_) return {};
    return failed_precondition("copy set: wanted one thread at a time, got a second one (spec Y-15)");
  }

 private:
  const CopySet& set_;
  const bool taken_;
};

Status CopySet::refuse_move(const char* move, const char* allowed) const {
  std::string why;
  if (state() == KDA_COPY_SET_FAILED) why = str_cat(" (first cause: ", first_cause_, ")");
  return failed_precondition("copy set: ", move, ": wanted state ", allowed, ", got ", state_name(state()), why);
}

Status CopySet::fail(const Status& cause) {
  published_.store(nullptr, std::memory_order_release);
  for (const auto& layer : layers_) layer->plan->ready.store(false, std::memory_order_release);
  first_cause_ = cause.message();
  state_.store(KDA_COPY_SET_FAILED, std::memory_order_release);
  return cause;
}

Snapshot CopySet::snapshot() const {
  Snapshot now;
  describe_library(context_, now);
  if (const auto device = find_copy_backend(context_); device.ok()) device.value()->describe(context_, now);
  if (!options_.binding_version.empty()) now["binding version"] = options_.binding_version;
  options_.scan(now);
  return now;
}

Status CopySet::take_or_compare_snapshot() {
  Snapshot now = snapshot();
  if (!snapshot_.empty()) return compare_snapshots(snapshot_, now);
  snapshot_ = std::move(now);
  return {};
}

Status CopySet::check_names(std::span<const CopyBinding> bindings) const {
  if (bindings.empty()) return invalid_argument("bindings: wanted at least one layer, got none");
  std::vector<std::string_view> names;
  for (const CopyBinding& binding : bindings) {
    if (binding.layer.empty()) return invalid_argument("bindings: wanted a layer name, got none");
    names.push_back(binding.layer);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) return invalid_argument("layer '", *twice, "': wanted one binding, got two");
  return {};
}

Result<std::shared_ptr<const CopyTable>> CopySet::table_for(const CopyBackend& device, const CopyKey& key) {
  for (const auto& table : tables_) {
    if (table->key == key) return table;
  }
  auto table = prepare_copy_table(context_, device, key);
  if (table.ok()) tables_.push_back(table.value());
  return table;
}

Status CopySet::prepare_layers(std::span<const CopyBinding> bindings, int64_t max_selected) {
  KDA_RETURN_IF_ERROR(check_max_selected(max_selected));
  KDA_RETURN_IF_ERROR(check_names(bindings));
  KDA_RETURN_IF_ERROR(check_may_prepare(context_));
  KDA_RETURN_IF_ERROR(take_or_compare_snapshot());
  const auto device = find_copy_backend(context_);
  if (!device.ok()) return device.status();
  for (const CopyBinding& binding : bindings) {
    auto request = request_copy(context_, *device.value(), binding.backend, binding.pool, binding.packed_dtype);
    if (!request.ok()) return for_layer(request.status(), binding.layer);
    auto table = table_for(*device.value(), request.value().key);
    if (!table.ok()) return for_layer(table.status(), binding.layer);
    log_choice(KDA_OP_STATE_COPY, copy_kind_name(request.value().key.kind), BackendRequest::of_plan(binding.backend),
               request.value().refused);
    auto layer = std::make_unique<Layer>();
    layer->name = binding.layer;
    layer->plan = make_copy_plan(context_, *device.value(), std::move(request.value()), std::move(table.value()),
                                 max_selected, options_.checked);
    layers_.push_back(std::move(layer));
  }
  return {};
}

Status CopySet::prepare(std::span<const CopyBinding> bindings, int64_t max_selected) {
  const Turn turn(*this);
  KDA_RETURN_IF_ERROR(turn.status());
  if (state() != KDA_COPY_SET_EMPTY && state() != KDA_COPY_SET_PREPARING) {
    return refuse_move("prepare", "EMPTY or PREPARING");
  }
  for (const CopyBinding& binding : bindings) {
    for (const auto& layer : layers_) {
      if (layer->name == binding.layer) {
        return failed_precondition("layer '", binding.layer,
                                   "': wanted a layer that is not prepared yet, got one that is");
      }
    }
  }
  state_.store(KDA_COPY_SET_PREPARING, std::memory_order_release);
  const Status status = guarded([&] { return prepare_layers(bindings, max_selected); });
  return status.ok() ? status : fail(status);
}

Status CopySet::verify_layers() const {
  for (const auto& layer : layers_) {
    const Status status = layer->plan->device->verify(*layer->plan->table, context_);
    if (!status.ok()) return for_layer(status, layer->name);
  }
  return {};
}

Status CopySet::seal() {
  const Turn turn(*this);
  KDA_RETURN_IF_ERROR(turn.status());
  if (state() != KDA_COPY_SET_PREPARING) return refuse_move("seal", "PREPARING");
  for (const std::string& expected : options_.expected_layers) {
    const bool prepared =
        std::any_of(layers_.begin(), layers_.end(), [&](const auto& l) { return l->name == expected; });
    if (!prepared) return failed_precondition("copy set: seal: wanted layer '", expected, "' prepared, got none");
  }
  const Status status = guarded([&]() -> Status {
    KDA_RETURN_IF_ERROR(take_or_compare_snapshot());
    KDA_RETURN_IF_ERROR(verify_layers());
    for (const auto& layer : layers_) index_.push_back(layer.get());
    return {};
  });
  if (!status.ok()) return fail(status);
  std::sort(index_.begin(), index_.end(), [](const Layer* a, const Layer* b) { return a->name < b->name; });
  state_.store(KDA_COPY_SET_SEALED, std::memory_order_release);
  for (const auto& layer : layers_) layer->plan->ready.store(true, std::memory_order_release);
  return {};
}

Status CopySet::publish() {
  const Turn turn(*this);
  KDA_RETURN_IF_ERROR(turn.status());
  if (state() != KDA_COPY_SET_SEALED) return refuse_move("publish", "SEALED");
  const Status status = verify_layers();
  if (!status.ok()) return fail(status);
  published_.store(&index_, std::memory_order_release);
  state_.store(KDA_COPY_SET_PUBLISHED, std::memory_order_release);
  return {};
}

Status CopySet::reset() {
  const Turn turn(*this);
  KDA_RETURN_IF_ERROR(turn.status());
  if (state() != KDA_COPY_SET_PUBLISHED && state() != KDA_COPY_SET_FAILED) {
    return refuse_move("reset", "PUBLISHED or FAILED");
  }
  published_.store(nullptr, std::memory_order_release);
  for (const auto& layer : layers_) layer->plan->ready.store(false, std::memory_order_release);
  index_.clear();
  layers_.clear();
  tables_.clear();
  snapshot_.clear();
  first_cause_.clear();
  state_.store(KDA_COPY_SET_EMPTY, std::memory_order_release);
  return {};
}

int64_t CopySet::ready() const {
  const Index* index = published_.load(std::memory_order_acquire);
  return index == nullptr ? 0 : static_cast<int64_t>(index->size());
}

Status CopySet::info(kda_copy_set_info* out) const {
  const Turn turn(*this);
  KDA_RETURN_IF_ERROR(turn.status());
  kda_copy_set_info ours{};
  ours.state = state();
  ours.layers = static_cast<int64_t>(layers_.size());
  ours.ready = ready();
  ours.tables = static_cast<int64_t>(tables_.size());
  for (const auto& table : tables_) {
    for (const auto& by_index : table->variants) {
      for (CopyVariant variant : by_index) ours.variants += variant != nullptr;
    }
  }
  return write_struct(&ours, sizeof ours, out, "info");
}

const CopySet::Layer* CopySet::find(const Index& index, std::string_view name) {
  const auto at = std::lower_bound(index.begin(), index.end(), name,
                                   [](const Layer* layer, std::string_view n) { return layer->name < n; });
  return at != index.end() && (*at)->name == name ? *at : nullptr;
}

Result<const StateCopyPlan*> CopySet::lookup(const Index& index, std::string_view name) const {
  const Layer* layer = find(index, name);
  if (layer != nullptr) return static_cast<const StateCopyPlan*>(layer->plan.get());
  std::string known;
  for (const Layer* l : index) known += (known.empty() ? "" : ", ") + l->name;
  return not_found("layer: wanted one of ", known, "; got \"", name, "\"");
}

Result<const StateCopyPlan*> CopySet::serving(std::string_view layer) const {
  const Index* index = published_.load(std::memory_order_acquire);
  if (index == nullptr) {
    return failed_precondition("layer '", layer, "': wanted a published copy set, got state ", state_name(state()));
  }
  return lookup(*index, layer);
}

Result<const StateCopyPlan*> CopySet::plan(std::string_view layer) const {
  if (state() != KDA_COPY_SET_SEALED && state() != KDA_COPY_SET_PUBLISHED) {
    return failed_precondition("layer '", layer, "': wanted a sealed copy set, got state ", state_name(state()));
  }
  return lookup(index_, layer);
}

}  // namespace kda
