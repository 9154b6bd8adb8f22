// Copy sets: the life cycle of spec Y-5..Y-15 over the pools of one worker.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/state_copy.h"

namespace kda {

// One layer's pool, normalised.
struct CopyBinding {
  std::string layer;
  const char* backend = nullptr;
  kda_tensor pool{};
  kda_dtype packed_dtype = KDA_DTYPE_NONE;
};

class CopySet {
 public:
  struct Options {
    std::vector<std::string> expected_layers;  // must be prepared before seal
    bool checked = false;
    std::string binding_version;
    EnvironmentScan scan = scan_environment;
  };

  CopySet(const Context& context, Options options) : context_(context), options_(std::move(options)) {}
  CopySet(const CopySet&) = delete;
  CopySet& operator=(const CopySet&) = delete;

  // The moves (Y-6). Each takes the set's turn; a second thread is refused (Y-15).
  Status prepare(std::span<const CopyBinding> bindings, int64_t max_selected);
  Status seal();
  Status publish();
  Status reset();

  kda_copy_set_state state() const { return state_.load(std::memory_order_acquire); }
  // Layers that serve: none or all, by one load.
  int64_t ready() const;
  const char* last_error() const { return state() == KDA_COPY_SET_FAILED ? first_cause_.c_str() : ""; }
  Status info(kda_copy_set_info* out) const;

  // The plan that serves a published layer. No lock, no allocation.
  Result<const StateCopyPlan*> serving(std::string_view layer) const;
  // The same from SEALED on, for a holder.
  Result<const StateCopyPlan*> plan(std::string_view layer) const;

 private:
  struct Layer {
    std::string name;
    std::unique_ptr<StateCopyPlan> plan;
  };
  class Turn;
  using Index = std::vector<const Layer*>;  // sorted by name

  Status refuse_move(const char* move, const char* allowed) const;
  Status fail(const Status& cause);
  Status take_or_compare_snapshot();
  Snapshot snapshot() const;
  Status check_names(std::span<const CopyBinding> bindings) const;
  Status prepare_layers(std::span<const CopyBinding> bindings, int64_t max_selected);
  Result<std::shared_ptr<const CopyTable>> table_for(const CopyBackend& device, const CopyKey& key);
  Status verify_layers() const;
  static const Layer* find(const Index& index, std::string_view name);
  Result<const StateCopyPlan*> lookup(const Index& index, std::string_view layer) const;

  const Context& context_;
  const Options options_;
  std::atomic<kda_copy_set_state> state_{KDA_COPY_SET_EMPTY};
  mutable std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  std::vector<std::unique_ptr<Layer>> layers_;  // in the order of preparation
  std::vector<std::shared_ptr<const CopyTable>> tables_;
  Snapshot snapshot_;
  Index index_;                                   // made by seal
  std::atomic<const Index*> published_{nullptr};  // the one step of publish: null or &index_
  std::string first_cause_;
};

}  // namespace kda
