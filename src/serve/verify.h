// Recomputation of finished requests by the fp64 oracle (spec E-11), through the public API: from the first
// token, alone, without cache, batching or speculation; conv and attention results rounded to io, the last result
// not. Output rows, final state and window are compared with what the engine produced.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "conformance/compare.h"
#include "serve/content.h"
#include "serve/request.h"
#include "serve/weights.h"

namespace kda::serve {

struct Tolerance {
  double out = 0, state = 0;
};
// Spec N-9 and E-11: chained runs with fp32 io are held to 1e-5, with 16-bit io to the first row of the table; a
// 16-bit pool adds its rounding per store.
Tolerance tolerance_of(const Model& model);

struct RequestError {
  int64_t index = 0;                   // of the request
  conformance::Comparison out, state;  // the worst layer's
  double rel_out = 0, rel_state = 0;   // their errors; infinite if a NaN or Inf stands where the oracle has none
  int32_t out_layer = 0, state_layer = 0;
  bool window_equal = true;
};

struct VerifyReport {
  int64_t requests = 0;
  Tolerance tolerance;
  double max_rel_l2_out = 0, max_rel_l2_state = 0;
  bool ok = true;
  double seconds = 0;
  std::vector<RequestError> errors;   // one per request
  std::vector<std::string> failures;  // what was beyond its limit
};

// How far verification is. Called now and then, from one thread at a time.
struct VerifyProgress {
  int64_t done = 0, requests = 0;  // whole requests, of so many
  double share = 0;                // of the work
  double seconds = 0;
};
using VerifyObserver = std::function<void(const VerifyProgress&)>;

// The `count` requests of a trace that a seed chooses, ascending by index.
std::vector<int64_t> choose_verified(const Trace& trace, int64_t count, uint64_t seed);

// Verifies the finished requests that were captured, on the threads of `host`. `stop` ends it early
// (FAILED_PRECONDITION).
Result<VerifyReport> verify(const Model& model, const std::vector<LayerWeights>& weights, const Content& content,
                            const std::vector<std::unique_ptr<Request>>& requests, const kda_context* host,
                            const std::atomic<bool>& stop, const VerifyObserver& observer = {});

}  // namespace kda::serve
