#include "serve/step_tables.h"

#include <algorithm>
#include <cstring>

namespace kda::serve {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kVector = 0;  // no columns: a tensor of rank 1

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Status StepTables::create(const Device& device, const ExecutorOptions& options) {
  device_ = &device;
  options_ = options;
  if (device.is_host()) return {};
  const int64_t n = options.max_requests;
  const int64_t bytes = aligned(options.max_batch_tokens * 4) + 8 * aligned(n * 4) +
                        aligned(n * options.width() * 4) + 2 * aligned(n * options.max_checkpoints * 4);
  KDA_SERVE_TRY(device.allocate(bytes, staging_, KDA_MEMORY_HOST));
  return device.allocate(bytes, placed_);
}

template <class T>
kda_tensor StepTables::put(const std::vector<T>& values, kda_dtype dtype, int64_t rows, int64_t columns, T fill) {
  const void* data = values.data();
  const int64_t count = rows * std::max(columns, int64_t{1});
  if (!device_->is_host()) {
    auto* staged = reinterpret_cast<T*>(staging_.data() + used_);
    std::fill(std::copy(values.begin(), values.end(), staged), staged + count, fill);
    data = placed_.data() + used_;
    used_ += aligned(count * static_cast<int64_t>(sizeof(T)));
  }
  return columns == kVector ? device_->at(data, dtype, {rows}) : device_->at(data, dtype, {rows, columns});
}

Status StepTables::send() {
  return device_->is_host() ? Status() : device_->copy(placed_.data(), staging_.data(), used_);
}

Status StepTables::place(const Step& step, int64_t rows, int64_t tokens, StepViews& out) {
  used_ = 0;
  out = {};
  out.recurrent = rows;
  out.chunk = static_cast<int64_t>(step.chunk.size());
  out.recurrent_tokens = step.chunk.empty() ? tokens : step.recurrent_tokens;
  out.tokens = tokens;
  out.content = put(step.content, KDA_INT32, tokens, kVector, uint32_t{0});
  if (rows > 0) {
    const int64_t columns = options_.records ? kVector : options_.width();
    out.recurrent_begin = put(step.recurrent_begin, KDA_INT32, rows, kVector, 0);
    out.recurrent_length = put(step.recurrent_length, KDA_INT32, rows, kVector, 0);
    out.recurrent_slots = put(step.recurrent_slots, KDA_INT32, rows, columns, -1);
    out.recurrent_accepted = put(step.recurrent_accepted, KDA_INT32, rows, kVector, 1);
    out.recurrent_seat = put(step.recurrent_seat, KDA_INT32, rows, kVector, -1);
  }
  if (out.chunk > 0) {
    out.chunk_begin = put(step.chunk_begin, KDA_INT32, out.chunk, kVector, 0);
    out.chunk_length = put(step.chunk_length, KDA_INT32, out.chunk, kVector, 0);
    out.chunk_slots = put(step.chunk_slots, KDA_INT32, out.chunk, kVector, -1);
    out.chunk_has_state = put(step.chunk_has_state, KDA_BOOL, out.chunk, kVector, uint8_t{0});
    if (!step.snapshots.empty()) {
      out.checkpoint_offsets = put(step.checkpoint_offsets, KDA_INT32, out.chunk, options_.max_checkpoints, 0);
      out.checkpoint_slots = put(step.checkpoint_slots, KDA_INT32, out.chunk, options_.max_checkpoints, -1);
    }
  }
  return send();
}

Status StepTables::place(const std::vector<int32_t>& slots, const std::vector<int32_t>& accepted,
                         const std::vector<int32_t>& seats, CommitViews& out) {
  used_ = 0;
  const auto rows = static_cast<int64_t>(slots.size());
  out.slots = put(slots, KDA_INT32, rows, kVector, -1);
  out.accepted = put(accepted, KDA_INT32, rows, kVector, 0);
  out.seats = put(seats, KDA_INT32, rows, kVector, -1);
  return send();
}

}  // namespace kda::serve
