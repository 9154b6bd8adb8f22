// Shared by the engine's tests: a context, pools, ledger content (a state that one can read by eye).
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "serve/engine.h"
#include "serve/layer_executor.h"

namespace kda::serve::testing_support {

inline kda_context* context() {
  static const ContextHandle shared = [] {
    kda_context_options o{};
    o.struct_size = sizeof o;
    o.num_threads = 2;
    kda_context* c = nullptr;
    EXPECT_EQ(kda_context_create(&o, &c), KDA_OK) << kda_last_error();
    return ContextHandle(c);
  }();
  return shared.get();
}

// Pages whose memory holds 0xff bytes (NaN in every dtype): what is read without having been written shows.
struct PoisonedPool {
  explicit PoisonedPool(kda_state_pool_desc d) {
    size_t bytes = 0;
    EXPECT_EQ(kda_state_pool_size(&d, &bytes, nullptr), KDA_OK) << kda_last_error();
    memory = std::move(Buffer::allocate(static_cast<int64_t>(bytes)).value());
    std::memset(memory.data(), 0xff, memory.bytes());
    d.memory = memory.data();
    d.memory_bytes = bytes;
    kda_state_pool* p = nullptr;
    EXPECT_EQ(kda_state_pool_create(context(), &d, &p), KDA_OK) << kda_last_error();
    pool.reset(p);
  }
  Buffer memory;
  PoolHandle pool;
};

}  // namespace kda::serve::testing_support
