// A replay from preparation to verification, for the tests of digests.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "serve/replay.h"

namespace kda::serve {

inline std::unique_ptr<Replay> run(const ReplayOptions& o) {
  auto replay = Replay::prepare(o);
  EXPECT_TRUE(replay.ok()) << replay.status().message();
  if (!replay.ok()) return nullptr;
  const std::atomic<bool> stop{false};
  Status status = replay.value()->run(stop, {});
  EXPECT_TRUE(status.ok()) << status.message();
  status = replay.value()->verify_results(stop);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(replay.value()->stats().finished, replay.value()->stats().total);
  return std::move(replay.value());
}

inline std::string digests(const ReplayOptions& o) {
  const auto replay = run(o);
  return replay ? replay->digests_text() : "";
}

}  // namespace kda::serve
