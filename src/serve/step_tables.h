// The tables of a step as the operators read them. On the CPU they are the step's own vectors; on another device they
// travel there in one copy, to places that depend on their sizes alone, so that a graph finds them again.
#pragma once

#include <vector>

#include "serve/device.h"
#include "serve/layer_plans.h"
#include "serve/step.h"

namespace kda::serve {

struct StepViews {
  int64_t recurrent = 0, chunk = 0;          // rows
  int64_t recurrent_tokens = 0, tokens = 0;  // token rows
  kda_tensor content;                        // [tokens] table rows
  kda_tensor recurrent_begin, recurrent_length, recurrent_slots, recurrent_accepted, recurrent_seat;
  kda_tensor chunk_begin, chunk_length, chunk_slots, chunk_has_state;
  kda_tensor checkpoint_offsets, checkpoint_slots;  // absent if nothing is checkpointed
};

struct CommitViews {
  kda_tensor slots, accepted, seats;
};

class StepTables {
 public:
  // Room for the largest step of `options`.
  Status create(const Device& device, const ExecutorOptions& options);

  // `rows` >= the step's recurrent rows: the tables are padded with rows that hold nothing to it, and the tokens to
  // `tokens`; the step's own counts: no padding. Valid until the next call.
  Status place(const Step& step, int64_t rows, int64_t tokens, StepViews& out);
  Status place(const Step& step, StepViews& out) {
    return place(step, static_cast<int64_t>(step.recurrent.size()), step.tokens, out);
  }
  Status place(const std::vector<int32_t>& slots, const std::vector<int32_t>& accepted,
               const std::vector<int32_t>& seats, CommitViews& out);

 private:
  // A table, missing values replaced by `fill`.
  template <class T>
  kda_tensor put(const std::vector<T>& values, kda_dtype dtype, int64_t rows, int64_t columns, T fill);
  Status send();

  const Device* device_ = nullptr;
  ExecutorOptions options_;
  DeviceBuffer staging_, placed_;
  int64_t used_ = 0;
};

}  // namespace kda::serve
