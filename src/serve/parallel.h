// Spreads the replay's own host work (filling tables, gathering token rows) over the threads of the run.
#pragma once

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <cstdint>

namespace kda::serve {

// Calls body(first, last) for pieces of [0, n) of at least `grain` items, on at most `threads` threads.
template <class Body>
void parallel_ranges(int threads, int64_t n, int64_t grain, const Body& body) {
  if (n <= 0) return;
  if (threads <= 1 || n <= grain) {
    body(int64_t{0}, n);
    return;
  }
  tbb::task_arena arena(threads);
  arena.execute([&] {
    tbb::parallel_for(tbb::blocked_range<int64_t>(0, n, static_cast<size_t>(grain)),
                      [&](const tbb::blocked_range<int64_t>& r) { body(r.begin(), r.end()); });
  });
}

}  // namespace kda::serve
