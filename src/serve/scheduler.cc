#include "serve/scheduler.h"

#include <algorithm>

namespace kda::serve {

void Scheduler::add_recurrent(Step& step, Request& request, int64_t& budget) const {
  const int64_t drafts = std::min({static_cast<int64_t>(limits_.spec), request.drafts_left(), budget - 1});
  StepRow row;
  row.request = &request;
  row.length = static_cast<int32_t>(1 + drafts);
  step.recurrent.push_back(row);
  budget -= row.length;
}

void Scheduler::plan_recurrent(Step& step, int64_t& budget) {
  const size_t n = running_.size();
  if (n == 0) return;
  const size_t start = cursor_ % n;
  cursor_ = 0;
  for (size_t i = 0; i < n; ++i) {
    const size_t at = (start + i) % n;
    if (running_[at]->phase != Phase::kDecoding) continue;
    if (budget < 1) {
      cursor_ = at;
      return;
    }
    add_recurrent(step, *running_[at], budget);
  }
}

bool Scheduler::add_chunk(Step& step, Request& request, int64_t& budget) const {
  int64_t tokens = std::min(request.prompt_left(), budget);
  if (tokens < request.prompt_left()) {
    const int64_t end = (request.prefilled + tokens) / KDA_PREFILL_GRID * KDA_PREFILL_GRID;
    tokens = end - request.prefilled;
  }
  if (tokens <= 0) return false;
  StepRow row;
  row.request = &request;
  row.length = static_cast<int32_t>(tokens);
  step.chunk.push_back(row);
  budget -= tokens;
  return true;
}

void Scheduler::admit_more(Step& step, int64_t& budget, Admission& admission) {
  while (static_cast<int64_t>(running_.size()) < limits_.max_requests && waiting() > 0) {
    std::deque<Request*>& queue = swapped_.empty() ? waiting_ : swapped_;
    Request& request = *queue.front();
    const bool decoding = request.phase == Phase::kDecoding;
    // Room for at least the smallest piece, so that nobody holds a slot without running.
    const int64_t least = decoding ? 1 : std::min<int64_t>(KDA_PREFILL_GRID, request.prompt_left());
    if (budget < least || !admission.admit(request)) return;
    queue.pop_front();
    running_.push_back(&request);
    if (decoding) {
      add_recurrent(step, request, budget);
    } else {
      add_chunk(step, request, budget);
    }
  }
}

void Scheduler::plan(Step& step, Admission& admission) {
  step.clear();
  int64_t budget = limits_.max_batch_tokens;
  plan_recurrent(step, budget);
  for (Request* request : running_) {
    if (request->phase == Phase::kPrefilling && budget > 0) add_chunk(step, *request, budget);
  }
  admit_more(step, budget, admission);
  for (StepRow& row : step.recurrent) {
    row.begin = step.tokens;
    step.tokens += row.length;
    step.drafts += row.length - 1;
  }
  step.recurrent_tokens = step.tokens;
  for (StepRow& row : step.chunk) {
    row.begin = step.tokens;
    step.tokens += row.length;
  }
}

void Scheduler::remove(Request* request) {
  const auto it = std::find(running_.begin(), running_.end(), request);
  if (it == running_.end()) return;
  const auto at = static_cast<size_t>(it - running_.begin());
  running_.erase(it);
  if (cursor_ > at) --cursor_;
}

}  // namespace kda::serve
