// Who runs in the next step (continuous batching). Pure policy: knows lengths and phases, no tensors.
//
//  - Decoding requests first, 1 + drafts tokens each, in the order of admission; if the token budget ends before
//    the list does, the next step goes on where this one stopped.
//  - Then prompts under way, then swapped requests, then waiting ones, first come, first served.
//  - A prompt is cut at multiples of 64 of its own tokens only (spec H-10), so that cuts change no bit.
//  - A prompt token never takes the recurrent path, whatever its row's length (spec M-5, M-6).
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "serve/step.h"

namespace kda::serve {

struct SchedulerLimits {
  int64_t max_batch_tokens = 8192;  // >= 64
  int64_t max_requests = 256;
  int32_t spec = 0;  // S
};

// What the scheduler asks of whoever owns the slots.
class Admission {
 public:
  virtual ~Admission() = default;
  // Gives a request its slots and its state (a snapshot's, its own swapped one, or none). False if there is no
  // room; then nothing changed.
  virtual bool admit(Request& request) = 0;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerLimits& limits) : limits_(limits) {}

  void enqueue(Request* request) { waiting_.push_back(request); }
  // Fills in step.recurrent and step.chunk: request and length of each row, begins by P-12.
  void plan(Step& step, Admission& admission);
  // Takes a request out of the running ones: it finished, failed or was swapped out.
  void remove(Request* request);
  void requeue_swapped(Request* request) { swapped_.push_back(request); }

  const std::vector<Request*>& running() const { return running_; }
  int64_t waiting() const { return static_cast<int64_t>(waiting_.size() + swapped_.size()); }
  const std::deque<Request*>& queue() const { return waiting_; }  // that never ran, in order
  bool idle() const { return running_.empty() && waiting() == 0; }

 private:
  void plan_recurrent(Step& step, int64_t& budget);
  void add_recurrent(Step& step, Request& request, int64_t& budget) const;
  // False if no part of the prompt fits.
  bool add_chunk(Step& step, Request& request, int64_t& budget) const;
  void admit_more(Step& step, int64_t& budget, Admission& admission);

  SchedulerLimits limits_;
  std::vector<Request*> running_;
  std::deque<Request*> waiting_, swapped_;
  size_t cursor_ = 0;  // where the decoding rows of the next step begin
};

}  // namespace kda::serve
