// A copy backend whose device is ordinary memory and whose every step can be made to fail: routing and life cycle
// are tested against it without a GPU (spec T-9, T-11).
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "core/state_copy_backend.h"

namespace kda::conformance::test {

class StubCopyBackend : public CopyBackend {
 public:
  explicit StubCopyBackend(kda_device_type type) : type_(type) {}

  // Facts and faults, set by tests.
  bool has_image = true;
  Status load_fault, launch_fault, late_fault;
  std::map<int, Status> verify_faults;  // by number of the verify call
  size_t scratch_shift = 0;             // bytes by which scratch misses its 16-byte alignment
  bool no_memory = false;
  mutable std::atomic<int> loads{0}, launches{0}, verifies{0}, allocations{0}, live_allocations{0}, syncs{0};
  std::map<std::string, std::string> device_entries{{"device", "stub"}};

  kda_device_type device_type() const override { return type_; }
  CopyDevice facts(const Context&) const override { return {type_, has_image, "stub device (sm_00)"}; }
  void describe(const Context&, kda::Snapshot& snapshot) const override {
    for (const auto& [entry, value] : device_entries) snapshot[entry] = value;
  }
  Status load(CopyTable& table, const Context&) const override {
    ++loads;
    if (!load_fault.ok()) return load_fault;
    for (auto& by_index : table.variants) {
      for (auto& variant : by_index) variant = &launch;
    }
    table.private_ = std::shared_ptr<const void>(this, [](const void*) {});
    return {};
  }
  Status verify(const CopyTable&, const Context&) const override {
    const auto at = verify_faults.find(verifies++);
    return at == verify_faults.end() ? Status() : at->second;
  }
  void* allocate(size_t bytes, const Context&) const override {
    ++allocations;
    if (no_memory) return nullptr;
    ++live_allocations;
    return static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64)) + scratch_shift;
  }
  void release(void* memory, const Context&) const override {
    --live_allocations;
    std::free(static_cast<char*>(memory) - scratch_shift);
  }
  Status fill(void* memory, int value, size_t bytes, const Context&) const override {
    std::memset(memory, value, bytes);
    return {};
  }
  Status synchronize(const Context&) const override {
    ++syncs;
    return late_fault;
  }
  Status read_back(void* host, const void* device, size_t bytes, const Context&, void*) const override {
    std::memcpy(host, device, bytes);
    return {};
  }

 private:
  static Status launch(const CopyTable& table, const CopyCall&, const Context&, void*) {
    const auto& self = *static_cast<const StubCopyBackend*>(table.private_.get());
    ++self.launches;
    return self.launch_fault;
  }
  kda_device_type type_;
};

// A context over one stub.
struct StubWorld {
  explicit StubWorld(kda_device_type type = KDA_CUDA) : device(type) {
    backends.copies.push_back(&device);
    context.device = {type, 0};
    context.isa = "stub";
    context.backends = &backends;
  }
  StubCopyBackend device;
  Backends backends;
  Context context;
};

}  // namespace kda::conformance::test
