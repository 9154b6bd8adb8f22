// The boundary: a Status becomes a code and a thread-local message; no exception crosses (convention 6).
#pragma once

#include <exception>
#include <memory>
#include <new>

#include "base/status.h"
#include "core/context.h"
#include "cpu/parallel.h"

struct kda_context : kda::Context {
  std::unique_ptr<kda::cpu::ThreadPool> pool;  // null if the caller brought a parallel-for
};

namespace kda::capi {

void set_last_error(const std::string& message) noexcept;

template <class F>
kda_status guard(const F& body) noexcept {
  try {
    const Status status = body();
    if (!status.ok()) set_last_error(status.message());
    return status.code();
  } catch (const std::bad_alloc&) {
    set_last_error("host memory: wanted an allocation, got none");
    return KDA_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    set_last_error(e.what());
    return KDA_INTERNAL;
  } catch (...) {
    set_last_error("unknown exception");
    return KDA_INTERNAL;
  }
}

inline Status check_pointer(const char* name, const void* pointer) {
  if (pointer != nullptr) return {};
  return invalid_argument(name, ": wanted a pointer, got NULL");
}

}  // namespace kda::capi
