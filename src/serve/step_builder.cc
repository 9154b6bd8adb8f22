#include "serve/step_builder.h"

#include <algorithm>
#include <span>

namespace kda::serve {

int32_t max_checkpoints(int64_t tokens) { return static_cast<int32_t>(tokens / kBlockTokens + 1); }

int32_t kept_drafts(uint64_t seed, double accept, int64_t request, int64_t base, int32_t drafts) {
  int32_t kept = 0;
  while (kept < drafts && unit(mix(uint64_t{kTagAccept}, seed, request, base + 1 + kept)) < accept) ++kept;
  return kept;
}

void StepBuilder::reserve(Step& step) const {
  const auto tokens = static_cast<size_t>(options_.max_batch_tokens);
  const auto n = static_cast<size_t>(options_.max_requests);
  const auto checkpoints = n * static_cast<size_t>(options_.max_checkpoints);
  step.content.reserve(tokens);
  step.recurrent.reserve(n);
  step.chunk.reserve(n);
  step.snapshots.reserve(checkpoints);
  for (auto* table : {&step.recurrent_begin, &step.recurrent_length, &step.recurrent_accepted, &step.recurrent_seat,
                      &step.chunk_begin, &step.chunk_length, &step.chunk_slots}) {
    table->reserve(n);
  }
  step.recurrent_slots.reserve(n * static_cast<size_t>(options_.width));
  step.chunk_has_state.reserve(n);
  step.checkpoint_offsets.reserve(checkpoints);
  step.checkpoint_slots.reserve(checkpoints);
}

void StepBuilder::add_recurrent(Step& step, StepRow& row) {
  const Request& r = *row.request;
  row.accepted = 1 + kept_drafts(options_.seed, options_.accept, r.trace.index, r.decoded, row.length - 1);
  row.first_output = 0;
  row.outputs = row.accepted;
  const std::span<uint32_t> rows(step.content.data() + row.begin, static_cast<size_t>(row.length));
  content_.generated_rows(r.owner, r.decoded, rows.first(static_cast<size_t>(row.accepted)));
  for (int32_t t = row.accepted; t < row.length; ++t) {
    rows[static_cast<size_t>(t)] = content_.rejected_row(r.owner, r.decoded + t);
  }
  step.recurrent_begin.push_back(static_cast<int32_t>(row.begin));
  step.recurrent_length.push_back(row.length);
  step.recurrent_seat.push_back(r.seat);
  // Records mode: how many recorded tokens to commit first. A request that just took its seat has none: 0 also drops
  // what the seat's last owner left there (V-10b, V-11).
  step.recurrent_accepted.push_back(options_.records && !r.has_records ? 0 : r.accepted);
  for (int32_t column = 0; column < r.num_pages; ++column) {  // the width, or one page in records mode
    step.recurrent_slots.push_back(static_cast<int32_t>(r.pages[static_cast<size_t>(column)]));
  }
}

void StepBuilder::prompt_rows(const Request& r, std::span<uint32_t> rows) const {
  const int64_t at = r.prefilled - r.ahead_first, ready = static_cast<int64_t>(r.ahead.size()) - at;
  const int64_t copied = at >= 0 ? std::clamp<int64_t>(ready, 0, static_cast<int64_t>(rows.size())) : 0;
  std::copy_n(r.ahead.data() + (copied > 0 ? at : 0), copied, rows.data());
  if (copied == static_cast<int64_t>(rows.size())) return;
  content_.prompt_rows(r.owner, r.prefilled + copied, rows.subspan(static_cast<size_t>(copied)));
}

void StepBuilder::look_ahead(Request& r, int64_t first) const {
  const int64_t count = std::min(r.trace.input_length - first, options_.max_batch_tokens + kBlockTokens);
  if (count <= 0 || (first == r.ahead_first && static_cast<int64_t>(r.ahead.size()) >= count)) return;
  r.ahead.resize(static_cast<size_t>(count));
  r.ahead_first = first;
  content_.prompt_rows(r.owner, first, r.ahead);
}

void StepBuilder::add_chunk(Step& step, StepRow& row, size_t n) {
  const Request& r = *row.request;
  prompt_rows(*row.request, {step.content.data() + row.begin, static_cast<size_t>(row.length)});
  const bool completes = r.prefilled + row.length == r.trace.input_length;
  row.outputs = completes && r.trace.output_length > 0 ? 1 : 0;
  row.first_output = row.length - row.outputs;
  step.chunk_begin.push_back(static_cast<int32_t>(row.begin));
  step.chunk_length.push_back(row.length);
  step.chunk_slots.push_back(static_cast<int32_t>(r.pages[0]));
  step.chunk_has_state.push_back(r.fresh ? 0 : 1);

  row.first_snapshot = static_cast<int32_t>(step.snapshots.size());
  row.snapshots = 0;
  if (cache_ == nullptr) return;
  size_t at = n * static_cast<size_t>(options_.max_checkpoints);
  for (int64_t b = r.prefilled / kBlockTokens + 1; b * kBlockTokens <= r.prefilled + row.length; ++b) {
    if (b > static_cast<int64_t>(r.keys.size())) break;
    const SnapshotHandle handle = cache_->begin_write(r.keys[static_cast<size_t>(b - 1)]);
    if (handle.entry < 0) continue;
    step.checkpoint_offsets[at] = static_cast<int32_t>(b * kBlockTokens - r.prefilled);
    step.checkpoint_slots[at] = static_cast<int32_t>(cache_->page(handle));
    ++at;
    step.snapshots.push_back({handle, b * kBlockTokens});
    ++row.snapshots;
  }
}

void StepBuilder::build(Step& step) {
  step.content.resize(static_cast<size_t>(step.tokens));
  for (auto* table : {&step.recurrent_begin, &step.recurrent_length, &step.recurrent_accepted, &step.recurrent_seat,
                      &step.recurrent_slots, &step.chunk_begin, &step.chunk_length, &step.chunk_slots}) {
    table->clear();
  }
  step.chunk_has_state.clear();
  const size_t checkpoints = step.chunk.size() * static_cast<size_t>(options_.max_checkpoints);
  step.checkpoint_offsets.assign(checkpoints, 0);  // offset 0 and slot -1: nothing is written (spec K-3)
  step.checkpoint_slots.assign(checkpoints, -1);
  for (StepRow& row : step.recurrent) add_recurrent(step, row);
  for (size_t n = 0; n < step.chunk.size(); ++n) add_chunk(step, step.chunk[n], n);
}

}  // namespace kda::serve
