// The paged pool of recurrent states and conv windows behind kda_state_pool: page layout, ownership, copies.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "core/context.h"
#include "core/device_runtime.h"
#include "kda/state_pool.h"

namespace kda {

// Byte offsets inside a pool; every sum and product is checked once, when the layout is made.
struct StatePoolLayout {
  int64_t state_bytes = 0;   // one state [HV, V, K], dense
  int64_t conv_bytes = 0;    // one window of L columns
  int64_t conv_offset = 0;   // of the window inside a layer
  int64_t layer_bytes = 0;   // state + window, padded
  int64_t page_bytes = 0;    // all layers
  int64_t total_bytes = 0;   // all pages
  int64_t window_bytes = 0;  // the W-1 columns that a payload carries
};

class StatePool {
 public:
  // Fills in defaults; INVALID_ARGUMENT names the field.
  static Status normalize(kda_state_pool_desc& desc);
  static Result<StatePoolLayout> layout_of(const kda_state_pool_desc& desc);
  static Result<std::unique_ptr<StatePool>> create(const Context& context, const kda_state_pool_desc& desc);
  ~StatePool();
  StatePool(const StatePool&) = delete;
  StatePool& operator=(const StatePool&) = delete;

  kda_tensor state_view(int32_t layer) const;  // [pages, HV, V, K]
  kda_tensor conv_view(int32_t layer) const;   // SD [pages, L, channels] or DS [pages, channels, L]
  const kda_state_pool_desc& desc() const { return desc_; }

  Status allocate(int64_t count, int64_t* pages);
  Status free(int64_t count, const int64_t* pages);
  int64_t available() const { return static_cast<int64_t>(free_.size()); }

  Status set_position(int64_t page, int64_t position);
  Result<int64_t> position(int64_t page) const;

  Status fold(const kda_state_columns& from, int64_t destination);
  int64_t payload_bytes() const;
  Status export_payload(const kda_state_columns& from, void* payload, size_t bytes) const;
  Status import_payload(int64_t page, const void* payload, size_t bytes, int64_t expected_position);

 private:
  StatePool(const kda_state_pool_desc& desc, const StatePoolLayout& layout, const Context& context)
      : desc_(desc), layout_(layout), device_(context.device), runtime_(*context.runtime) {}

  // The caller's memory, or its own.
  Status take_memory();

  char* layer_of(int64_t page, int32_t layer) const {
    return memory_ + page * layout_.page_bytes + layer * layout_.layer_bytes;
  }
  Status check_owned(const char* what, int64_t page) const;
  Status check_columns(const kda_state_columns& from) const;
  // Copies window columns [offset, offset + W-1) to a dense [W-1, channels] or [channels, W-1] block or back.
  Status read_window(const char* window, int32_t offset, char* dense) const;
  Status write_window(const char* dense, char* window) const;
  Status copy(void* to, const void* from, int64_t bytes) const {
    return runtime_.copy(to, from, static_cast<size_t>(bytes), stream_);
  }

  kda_state_pool_desc desc_;
  StatePoolLayout layout_;
  kda_device device_;
  const DeviceRuntime& runtime_;
  void* owned_ = nullptr;
  char* memory_ = nullptr;
  char* window_ = nullptr;          // one window, on its way between overlapping places
  void* stream_ = nullptr;          // of the copies
  std::vector<int64_t> free_;       // a stack: the page freed last is taken first, its memory is warm
  std::vector<int64_t> positions_;  // per page; kFree if nobody owns it
};

}  // namespace kda
