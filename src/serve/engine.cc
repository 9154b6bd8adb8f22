#include "serve/engine.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace kda::serve {

Engine::Engine(const Device& device, const Model& model, const EngineOptions& options, kda_state_pool* pool,
               PrefixCache* cache, const Content& content, Executor& executor, Timeline* timeline)
    : device_(device),
      model_(model),
      options_(options),
      pool_(pool),
      cache_(cache),
      content_(content),
      executor_(executor),
      timeline_(timeline),
      clock_(timeline != nullptr ? timeline->clock() : Clock()),
      scheduler_(options.limits),
      builder_(content, cache,
               {options.seed, options.accept, pages_per_request(options), options.records,
                cache != nullptr ? max_checkpoints(options.limits.max_batch_tokens) : 0,
                options.limits.max_batch_tokens, options.limits.max_requests}) {
  for (int64_t seat = options.slots - 1; seat >= 0; --seat) free_seats_.push_back(static_cast<int32_t>(seat));
  stats_.slots = options.slots;
}

Status Engine::load(const Trace& trace, const std::vector<int64_t>& captured) {
  for (int32_t layer = 0; layer < model_.layers; ++layer) {
    kda_tensor state{}, conv{};
    KDA_SERVE_TRY(from_kda(kda_state_pool_state(pool_, layer, &state)));
    KDA_SERVE_TRY(from_kda(kda_state_pool_conv(pool_, layer, &conv)));
    state_views_.push_back(state);
    conv_views_.push_back(conv);
  }
  for (const TraceRequest& t : trace.requests) {
    auto r = std::make_unique<Request>();
    r->trace = t;
    r->owner = {t.index, trace.blocks_of(t)};
    if (options_.digests) r->digest = Digest(model_.layers);
    if (std::binary_search(captured.begin(), captured.end(), t.index)) {
      r->capture = std::make_unique<Capture>();
      for (auto* rows : {&r->capture->rows, &r->capture->inputs, &r->capture->outputs}) {
        rows->resize(static_cast<size_t>(model_.layers));
      }
    }
    stats_.prompt += t.input_length;
    requests_.push_back(std::move(r));
  }
  stats_.total = static_cast<int64_t>(requests_.size());
  stats_.ttft_ms.reserve(requests_.size());
  stats_.tpot_ms.reserve(requests_.size());
  builder_.reserve(step_);
  return {};
}

void Engine::take_arrivals() {
  const double now = clock_.seconds() * options_.speed;
  while (next_arrival_ < requests_.size()) {
    Request& r = *requests_[next_arrival_];
    if (options_.pace_trace && static_cast<double>(r.trace.arrival_ns) * 1e-9 > now) break;
    scheduler_.enqueue(&r);
    ++next_arrival_;
  }
}

// Sleeps in short pieces, so that an interrupt is seen. False if nothing is to come.
bool Engine::wait_for_arrival(const std::atomic<bool>& stop) {
  if (next_arrival_ == requests_.size()) return false;
  const double due = static_cast<double>(requests_[next_arrival_]->trace.arrival_ns) * 1e-9 / options_.speed;
  while (!stop.load(std::memory_order_relaxed)) {
    const double left = due - clock_.seconds();
    if (left <= 0) break;
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, 0.02)));
  }
  return true;
}

Status Engine::run(const std::atomic<bool>& stop, const std::function<void(const Engine&)>& on_step) {
  if (timeline_ != nullptr) timeline_->restart();
  clock_ = timeline_ != nullptr ? timeline_->clock() : Clock();
  while (fault_.ok() && !stop.load(std::memory_order_relaxed)) {
    take_arrivals();
    scheduler_.plan(step_, *this);
    if (!fault_.ok()) break;
    if (step_.empty()) {
      if (!scheduler_.idle()) {
        fault_ = error(KDA_INTERNAL, "scheduler: {} running and {} waiting requests, but an empty step",
                       scheduler_.running().size(), scheduler_.waiting());
        break;
      }
      if (!wait_for_arrival(stop)) break;
      continue;
    }
    run_step();
    update_stats();
    record();
    if (on_step) on_step(*this);
  }
  stats_.wall_s = clock_.seconds();
  stats_.interrupted = stats_.finished + stats_.failed < stats_.total;
  update_stats();
  return fault_;
}

void Engine::run_step() {
  step_.number = stats_.steps;
  step_used_slots_ = stats_.used_slots;
  builder_.build(step_);
  const double begin = clock_.seconds();
  const Status status = executor_.run(step_, *this);
  const double end = clock_.seconds();
  stats_.model_s += end - begin;
  if (timeline_ != nullptr) {
    timeline_->add({"step", begin, end, step_.number, -1, step_.tokens,
                    static_cast<int64_t>(step_.recurrent.size() + step_.chunk.size())});
  }
  ++stats_.steps;
  stats_.mixed_steps += !step_.recurrent.empty() && !step_.chunk.empty();
  stats_.chunk_rows += static_cast<int64_t>(step_.chunk.size());
  stats_.recurrent_rows += static_cast<int64_t>(step_.recurrent.size());
  stats_.step_tokens += step_.tokens;
  complete(status);
}

// The step that has just run, with whatever was waited for before it.
void Engine::record() {
  Interval sums;
  sums.end_s = clock_.seconds();
  sums.operators_s = stats_.model_s;
  sums.steps = stats_.steps;
  sums.prefilled = stats_.prefilled, sums.decoded = stats_.decoded, sums.cached = stats_.cached;
  sums.recurrent_rows = stats_.recurrent_rows, sums.chunk_rows = stats_.chunk_rows;
  Interval step = sums;
  step.begin_s = recorded_.end_s;
  step.operators_s -= recorded_.operators_s;
  step.steps -= recorded_.steps;
  step.prefilled -= recorded_.prefilled, step.decoded -= recorded_.decoded, step.cached -= recorded_.cached;
  step.recurrent_rows -= recorded_.recurrent_rows, step.chunk_rows -= recorded_.chunk_rows;
  step.recurrent_tokens = step_.recurrent_tokens, step.chunk_tokens = step_.tokens - step_.recurrent_tokens;
  step.used_slots = step_used_slots_, step.cache_blocks = stats_.cache_blocks, step.waiting = scheduler_.waiting();
  stats_.history.add(step);
  recorded_ = sums;
}

// ---- Admission -----------------------------------------------------------------------------------

bool Engine::admit(Request& request) {
  if (stats_.used_slots >= options_.slots || !fault_.ok()) return false;
  request.num_pages = pages_per_request(options_);
  fault_ = from_kda(kda_state_pool_allocate(pool_, request.num_pages, request.pages.data()));
  if (!fault_.ok()) return false;
  request.seat = free_seats_.back();
  free_seats_.pop_back();
  request.accepted = 1;
  request.has_records = false;
  stats_.peak_used = std::max(stats_.peak_used, ++stats_.used_slots);
  if (request.admitted_s < 0) request.admitted_s = clock_.seconds();
  fault_ = request.swapped ? resume(request) : start(request);
  if (request.phase == Phase::kWaiting) request.phase = Phase::kPrefilling;
  return fault_.ok();
}

Status Engine::start(Request& request) {
  if (cache_ == nullptr || request.owner.blocks.empty()) return {};
  const auto full = static_cast<size_t>(request.trace.input_length / kBlockTokens);
  request.keys.reserve(full);
  PrefixKey key;
  for (size_t b = 0; b < full; ++b) {
    key = extend_key(key, request.owner.blocks[b]);
    request.keys.push_back(key);
  }
  // The oracle takes a layer's own inputs, from the first token on: nothing of a verified prompt may be skipped.
  if (options_.hidden && request.capture) return {};
  // At least one token is computed (spec K-8).
  const auto usable = static_cast<size_t>((request.trace.input_length - 1) / kBlockTokens);
  const PrefixCache::Hit hit = cache_->find({request.keys.data(), std::min(full, usable)});
  if (hit.blocks == 0) return {};
  const int64_t tokens = hit.blocks * kBlockTokens;
  KDA_SERVE_TRY(cache_->acquire(hit.handle));
  KDA_SERVE_TRY(cache_->restore(hit.handle, request.pages[0], tokens));
  KDA_SERVE_TRY(cache_->release(hit.handle));
  request.prefilled = request.cached = tokens;
  request.fresh = false;
  stats_.cached += tokens;
  return {};
}

Status Engine::resume(Request& request) {
  KDA_SERVE_TRY(from_kda(kda_state_pool_import(pool_, request.pages[0], request.payload.data(),
                                               request.payload.size(), request.position())));
  request.payload = {};
  request.swapped = false;
  return {};
}

// ---- Completion ----------------------------------------------------------------------------------

// The rows of the prompts that the next step will most likely take: the longest part of its preparation.
void Engine::device_works() {
  int64_t tokens = 0;
  const auto look = [&](Request& r, int64_t first) {
    builder_.look_ahead(r, first);
    tokens += r.trace.input_length - first;
    return tokens < options_.limits.max_batch_tokens;
  };
  for (const StepRow& row : step_.chunk) {
    const int64_t next = row.request->prefilled + row.length;
    if (next < row.request->trace.input_length && !look(*row.request, next)) return;
  }
  for (Request* r : scheduler_.queue()) {
    if (!look(*r, 0)) return;
  }
}

void Engine::layer_done(const Step& step, int32_t layer, const char* rows) {
  const int64_t row_bytes = model_.out_size() * static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  for (const auto* group : {&step.recurrent, &step.chunk}) {
    for (const StepRow& row : *group) {
      if (row.outputs == 0 || !wants(row)) continue;
      Request& r = *row.request;
      const char* first = rows + (row.begin + row.first_output) * row_bytes;
      if (options_.digests) r.digest.add_rows(layer, first, row.outputs, row_bytes);
      if (r.capture && !options_.hidden) {
        std::vector<char>& kept = r.capture->rows[static_cast<size_t>(layer)];
        kept.insert(kept.end(), first, first + row.outputs * row_bytes);
      }
    }
  }
}

void Engine::hidden_done(const Step& step, int32_t layer, const char* in, const char* out) {
  const int64_t row_bytes = model_.hidden * static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  const auto keep = [&](Capture& c, int64_t first, int64_t rows) {
    const auto number = static_cast<size_t>(layer);
    c.inputs[number].insert(c.inputs[number].end(), in + first * row_bytes, in + (first + rows) * row_bytes);
    c.outputs[number].insert(c.outputs[number].end(), out + first * row_bytes, out + (first + rows) * row_bytes);
  };
  for (const StepRow& row : step.recurrent) {
    if (row.request->capture) keep(*row.request->capture, row.begin, row.accepted);
  }
  for (const StepRow& row : step.chunk) {
    const int64_t rows = std::min<int64_t>(row.length, kVerifiedPrompt - row.request->prefilled);
    if (row.request->capture && rows > 0) keep(*row.request->capture, row.begin, rows);
  }
}

void Engine::complete(const Status& status) {
  if (!status.ok()) {
    fail_step(status);
    return;
  }
  for (const StepSnapshot& s : step_.snapshots) {
    const Status published = cache_->publish(s.handle, s.position);
    if (fault_.ok() && !published.ok()) fault_ = published;
  }
  finishing_.clear();
  preempted_.clear();
  const double now = clock_.seconds();
  for (const StepRow& row : step_.recurrent) advance_recurrent(row, now);
  for (const StepRow& row : step_.chunk) advance_chunk(row, now);
  const Status settled = settle();
  if (fault_.ok() && !settled.ok()) fault_ = settled;
}

void Engine::fail_step(const Status& status) {
  if (stats_.first_failure.empty()) stats_.first_failure = fmt::format("step {}: {}", step_.number, status.message());
  for (const StepSnapshot& s : step_.snapshots) (void)cache_->abandon(s.handle);
  for (const auto* group : {&step_.recurrent, &step_.chunk}) {
    for (const StepRow& row : *group) {
      row.request->phase = Phase::kFailed;
      ++stats_.failed;
      scheduler_.remove(row.request);
      let_go(*row.request);
    }
  }
}

bool Engine::preempted(const Request& r) const {
  return options_.preempt > 0 &&
         unit(mix(uint64_t{kTagPreempt}, options_.seed, r.trace.index, step_.number)) < options_.preempt;
}

void Engine::advance_recurrent(const StepRow& row, double now) {
  Request& r = *row.request;
  r.decoded += row.accepted;
  r.accepted = row.accepted;
  r.has_records = options_.records;
  r.last_s = now;
  stats_.decoded += row.accepted;
  stats_.drafted += row.length - 1;
  stats_.accepted += row.accepted - 1;
  if (r.decoded == r.decode_length()) {
    finishing_.push_back(&r);
  } else if (preempted(r)) {
    preempted_.push_back(&r);
  }
}

void Engine::advance_chunk(const StepRow& row, double now) {
  Request& r = *row.request;
  r.prefilled += row.length;
  r.fresh = false;
  stats_.prefilled += row.length;
  if (r.prefilled == r.trace.input_length) {
    r.ahead = {};
    if (options_.hidden && r.capture) {
      const Status read = read_prompt_end(r);
      if (fault_.ok() && !read.ok()) fault_ = read;
    }
    if (r.trace.output_length > 0) r.first_s = r.last_s = now;
    r.phase = Phase::kDecoding;
    if (r.decode_length() == 0) {
      finishing_.push_back(&r);
      return;
    }
  }
  if (preempted(r)) preempted_.push_back(&r);
}

kda_state_columns Engine::columns(const Request& r) const {
  // After a commit, and always in records mode, column 0 holds what was accepted.
  return {r.pages.data(), r.num_pages, options_.records ? 1 : r.accepted};
}

Status Engine::settle() {
  for (const auto* group : {&step_.recurrent, &step_.chunk}) {
    for (const StepRow& row : *group) {
      KDA_SERVE_TRY(from_kda(kda_state_pool_set_position(pool_, row.request->pages[0], row.request->position())));
    }
  }
  uncommitted_.clear();
  for (const auto* group : {&finishing_, &preempted_}) {
    for (Request* r : *group) {
      if (r->has_records) uncommitted_.push_back(r);
    }
  }
  if (!uncommitted_.empty()) KDA_SERVE_TRY(executor_.commit(uncommitted_));
  for (Request* r : uncommitted_) r->has_records = false;
  for (Request* r : finishing_) KDA_SERVE_TRY(finish(*r));
  for (Request* r : preempted_) KDA_SERVE_TRY(swap_out(*r));
  return {};
}

Status Engine::finish(Request& r) {
  const kda_state_columns from = columns(r);
  if (options_.digests || r.capture) {
    KDA_SERVE_TRY(from_kda(kda_state_pool_fold(pool_, &from, r.pages[0])));
    KDA_SERVE_TRY(read_final(r));
  }
  r.phase = Phase::kFinished;
  ++stats_.finished;
  if (r.trace.output_length > 0) {
    const double from_s =
        options_.pace_trace ? static_cast<double>(r.trace.arrival_ns) * 1e-9 / options_.speed : r.admitted_s;
    stats_.ttft_ms.push_back((r.first_s - from_s) * 1e3);
  }
  if (r.trace.output_length > 1) {
    stats_.tpot_ms.push_back((r.last_s - r.first_s) * 1e3 / static_cast<double>(r.decode_length()));
  }
  scheduler_.remove(&r);
  let_go(r);
  return {};
}

// State and window of column 0 of one layer, into final_state_ and final_window_.
Status Engine::read_column(const Request& r, int32_t layer) {
  final_state_.resize(static_cast<size_t>(model_.state_size()) * kda_dtype_size(model_.state_dtype));
  final_window_.resize(static_cast<size_t>(model_.channels() * (model_.conv_width - 1)) *
                       kda_dtype_size(model_.io_dtype));
  const auto read = [&](const kda_tensor& t, std::vector<char>& to) {
    const int64_t at = r.pages[0] * t.strides[0] * static_cast<int64_t>(kda_dtype_size(t.dtype));
    return device_.copy(to.data(), static_cast<const char*>(t.data) + at, static_cast<int64_t>(to.size()));
  };
  KDA_SERVE_TRY(read(state_views_[static_cast<size_t>(layer)], final_state_));
  KDA_SERVE_TRY(read(conv_views_[static_cast<size_t>(layer)], final_window_));  // [L, channels]: the first W-1
  return device_.synchronize();
}

Status Engine::read_prompt_end(Request& r) {
  for (int32_t layer = 0; layer < model_.layers; ++layer) {
    KDA_SERVE_TRY(read_column(r, layer));
    r.capture->prompt_states.push_back(final_state_);
    r.capture->prompt_windows.push_back(final_window_);
  }
  return {};
}

// The folded state and window of column 0: into the digest, and kept if the request is verified.
Status Engine::read_final(Request& r) {
  for (int32_t layer = 0; layer < model_.layers; ++layer) {
    KDA_SERVE_TRY(read_column(r, layer));
    if (options_.digests) {
      r.digest.add(layer, final_state_.data(), final_state_.size());
      r.digest.add(layer, final_window_.data(), final_window_.size());
    }
    if (r.capture) {
      r.capture->states.push_back(final_state_);
      r.capture->windows.push_back(final_window_);
    }
  }
  if (options_.digests) r.result = r.digest.result();
  return {};
}

Status Engine::swap_out(Request& r) {
  r.payload.resize(kda_state_pool_payload_size(pool_));
  const kda_state_columns from = columns(r);
  KDA_SERVE_TRY(from_kda(kda_state_pool_export(pool_, &from, r.payload.data(), r.payload.size())));
  r.swapped = true;
  ++stats_.preemptions;
  scheduler_.remove(&r);
  let_go(r);
  scheduler_.requeue_swapped(&r);
  return {};
}

void Engine::let_go(Request& r) {
  const Status freed = from_kda(kda_state_pool_free(pool_, r.num_pages, r.pages.data()));
  if (fault_.ok() && !freed.ok()) fault_ = freed;
  free_seats_.push_back(r.seat);
  r.seat = -1;
  r.num_pages = 0;
  --stats_.used_slots;
  if (!r.swapped) r.keys = {}, r.ahead = {};
}

void Engine::update_stats() {
  if (cache_ == nullptr) return;
  const PrefixCache::Stats& c = cache_->stats();
  stats_.cache_capacity = cache_->capacity();
  stats_.cache_blocks = c.blocks;
  stats_.cache_peak_blocks = c.peak_blocks;
  stats_.cache_lookups = c.lookups;
  stats_.cache_hits = c.hits;
  stats_.cache_published = c.published;
  stats_.cache_evictions = c.evictions;
}

}  // namespace kda::serve
