// Spreads the replay's own host work (filling tables, gathering token rows) over the threads of a context.
#pragma once

#include <kda/context.h>

#include <algorithm>
#include <cstdint>

namespace kda::serve {

// Calls body(first, last) for pieces of [0, n) of about `grain` items or more. Without a context: on this thread.
template <class Body>
void parallel_ranges(const kda_context* context, int64_t n, int64_t grain, const Body& body) {
  constexpr int64_t kPiecesPerThread = 4;  // evens out threads that start late
  const int64_t threads = context ? kda_context_num_threads(context) : 1;
  const int64_t pieces = std::min((n + grain - 1) / grain, threads > 1 ? threads * kPiecesPerThread : 1);
  if (n <= 0) return;
  if (pieces <= 1) return body(int64_t{0}, n);
  struct Task {
    const Body& body;
    int64_t n, pieces;
  } task{body, n, pieces};
  const auto piece = [](void* arg, int32_t i) {
    const Task& t = *static_cast<const Task*>(arg);
    t.body(t.n * i / t.pieces, t.n * (i + 1) / t.pieces);
  };
  static_cast<void>(kda_context_parallel_for(context, static_cast<int32_t>(pieces), piece, &task));
}

}  // namespace kda::serve
