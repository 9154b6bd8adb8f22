// What a device gives to the state copies: facts for routing, memory for the preparation, and the four variants
// of a layout (spec Y-17). A new device is one class; core decides everything else.
#pragma once

#include <cstddef>
#include <memory>

#include "base/status.h"
#include "core/context.h"
#include "core/snapshot.h"
#include "core/state_copy_layout.h"

namespace kda {

struct CopyTable;

// The run-time values of one call. `pool` is written by scatter only, `packed` by gather only.
struct CopyCall {
  char* pool = nullptr;            // row 0
  char* packed = nullptr;          // row 0
  int64_t packed_stride = 0;       // bytes from row to row
  const void* indices = nullptr;   // int32 or int64, by variant
  int64_t index_stride = 1;        // elements
  const uint8_t* flags = nullptr;  // dense, or null = all true; null in scatter
  int64_t n = 0;                   // > 0
};

// Launches one variant and checks the launch; an error means that nothing was started (spec Y-22, Y-24).
using CopyVariant = Status (*)(const CopyTable& table, const CopyCall& call, const Context& context, void* stream);

// A layout with its prepared functions. Shared by all layers of a set whose keys are equal; immutable.
struct CopyTable {
  CopyKey key;
  int64_t rows = 0;
  int64_t payload = 0;       // elements of a row
  int64_t pool_stride = 0;   // bytes from row to row
  int64_t pool_bytes = 0;    // bytes of a row's payload
  int64_t packed_bytes = 0;  // the same, packed
  int32_t lane = 1;          // 16, 8, 4, 2 or 1 (spec Y-1)

  // Filled in by CopyBackend::load.
  CopyVariant variants[2][2] = {};       // [int64 indices][scatter]
  int32_t packed_alignment = 1;          // that variants need of the packed address and row stride
  std::shared_ptr<const void> private_;  // whatever the backend's variants want to find

  CopyVariant variant(bool wide, bool scatter) const { return variants[wide ? 1 : 0][scatter ? 1 : 0]; }
};

class CopyBackend {
 public:
  virtual ~CopyBackend() = default;
  virtual kda_device_type device_type() const = 0;
  virtual CopyDevice facts(const Context& context) const = 0;
  // What the snapshot should hold beyond the context's device facts: embedded images and the like (spec Y-11).
  virtual void describe(const Context& context, Snapshot& snapshot) const = 0;

  // Chooses and loads the four variants for table.key (CUDA: Y-20). Called once per key.
  virtual Status load(CopyTable& table, const Context& context) const = 0;
  // At seal and at publish, for each layer: the device still holds what load() left there.
  virtual Status verify(const CopyTable& table, const Context& context) const = 0;

  // Scratch of the preparation, at least 16-byte aligned; null if there is no memory.
  virtual void* allocate(size_t bytes, const Context& context) const = 0;
  virtual void release(void* memory, const Context& context) const = 0;
  virtual Status fill(void* memory, int value, size_t bytes, const Context& context) const = 0;
  virtual Status synchronize(const Context& context) const = 0;
  // Checked mode (spec G-7): copies device values to the host; FAILED_PRECONDITION under stream capture.
  virtual Status read_back(void* host, const void* device, size_t bytes, const Context& context,
                           void* stream) const = 0;
};

}  // namespace kda
