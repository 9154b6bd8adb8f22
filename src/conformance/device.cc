#include "conformance/device.h"

#include <algorithm>
#include <cstring>

#include "conformance/rounding.h"

namespace kda::conformance {
namespace {

constexpr unsigned char kPattern = 0xff;  // as the guards of conformance/tensor.h
constexpr size_t kAlign = 256, kGuard = 4096;

struct Device {
  kda_context* context = nullptr;
  DeviceMemory* memory = nullptr;
} device;

void add(std::vector<kda_tensor*>& list, kda_sequences& s) {
  for (kda_tensor* t : {&s.cu_seqlens, &s.begin, &s.length, &s.num_active}) list.push_back(t);
}

std::vector<kda_tensor*> with_sequences(kda_sequences& s, std::vector<kda_tensor*> list) {
  add(list, s);
  return list;
}

}  // namespace

void* ContextMemory::allocate(size_t bytes) {
  void* memory = nullptr;
  return kda_memory_allocate(context_, KDA_MEMORY_DEVICE, bytes, &memory) == KDA_OK ? memory : nullptr;
}
void ContextMemory::release(void* p) { (void)kda_memory_free(context_, KDA_MEMORY_DEVICE, p); }
bool ContextMemory::to_device(void* to, const void* from, size_t bytes) {
  return kda_memory_copy(context_, to, from, bytes, nullptr) == KDA_OK && synchronize().empty();
}
bool ContextMemory::to_host(void* to, const void* from, size_t bytes) { return to_device(to, from, bytes); }
std::string ContextMemory::synchronize() {
  return kda_stream_synchronize(context_, nullptr) == KDA_OK ? "" : kda_last_error();
}

void set_device(kda_context* context, DeviceMemory* memory) { device = {context, memory}; }
kda_context* device_context() { return device.context; }
DeviceMemory* memory_of(const kda_context* context) {
  return context != nullptr && context == device.context ? device.memory : nullptr;
}

std::vector<kda_tensor*> tensors_of(kda_prefill_args& a) {
  return with_sequences(a.sequences,
                        {&a.q, &a.k, &a.v, &a.gate, &a.beta, &a.A_log, &a.dt_bias, &a.state, &a.slots, &a.write_slots,
                         &a.has_initial_state, &a.final_state, &a.checkpoint_offsets, &a.checkpoint_slots,
                         &a.checkpoint_states, &a.chunk_indices, &a.chunk_offsets, &a.out, &a.out_rows});
}
std::vector<kda_tensor*> tensors_of(kda_decode_args& a) {
  return with_sequences(a.sequences, {&a.q, &a.k, &a.v, &a.gate, &a.beta, &a.A_log, &a.dt_bias, &a.state, &a.slots,
                                      &a.write_slots, &a.accepted, &a.has_initial_state, &a.records.u, &a.records.kg,
                                      &a.records.count, &a.records.record_rows, &a.out, &a.out_rows});
}
std::vector<kda_tensor*> tensors_of(kda_commit_args& a) {
  return {&a.A_log,         &a.dt_bias,       &a.state,        &a.slots,         &a.accepted,
          &a.num_active,    &a.records.u,     &a.records.kg,   &a.records.count, &a.records.record_rows,
          &a.conv_state[0], &a.conv_state[1], &a.conv_state[2]};
}
std::vector<kda_tensor*> tensors_of(kda_decode_step_args& a) {
  auto list = tensors_of(a.decode);
  for (int i = 0; i < 3; ++i) {
    for (kda_tensor* t : {&a.x[i], &a.conv_weight[i], &a.conv_state[i]}) list.push_back(t);
  }
  list.push_back(&a.z);
  list.push_back(&a.norm_weight);
  return list;
}
std::vector<kda_tensor*> tensors_of(kda_conv_args& a) {
  auto list =
      with_sequences(a.sequences, {&a.slots, &a.write_slots, &a.has_initial_state, &a.accepted, &a.record_count,
                                   &a.record_rows, &a.checkpoint_offsets, &a.checkpoint_slots, &a.out_rows});
  for (int i = 0; i < 3; ++i) {
    for (kda_tensor* t : {&a.x[i], &a.weight[i], &a.bias[i], &a.state[i], &a.out[i]}) list.push_back(t);
  }
  return list;
}
std::vector<kda_tensor*> tensors_of(kda_gated_norm_args& a) { return {&a.o, &a.z, &a.weight, &a.out}; }
std::vector<kda_tensor*> tensors_of(kda_residual_norm_args& a) { return {&a.residual, &a.add, &a.weight, &a.out}; }
std::vector<kda_tensor*> tensors_of(kda_segment_summary_args& a) {
  return with_sequences(a.sequences, {&a.q, &a.k, &a.v, &a.gate, &a.beta, &a.A_log, &a.dt_bias, &a.summary});
}
std::vector<kda_tensor*> tensors_of(kda_segment_merge_args& a) {
  return {&a.initial_state, &a.summaries, &a.present, &a.start_states, &a.final_state};
}

std::vector<kda_tensor*> tensors_of(kda_state_copy_args& a) {
  return {&a.pool, &a.indices, &a.has_initial_state, &a.packed};
}
std::vector<kda_tensor*> tensors_of(kda_metadata_args& a) {
  kda_step& s = a.step;
  kda_step_tables& t = a.tables;
  return {&s.query_start_loc,
          &s.computed,
          &s.has_state,
          &s.prefilling,
          &s.drafts,
          &s.num_active,
          &a.accepted,
          &a.slot_table,
          &t.counts,
          &t.prefill_rows,
          &t.decode_rows,
          &t.spec_rows,
          &t.prefill_begin,
          &t.prefill_length,
          &t.decode_begin,
          &t.decode_length,
          &t.spec_begin,
          &t.spec_length,
          &t.non_spec_query_start_loc,
          &t.spec_query_start_loc,
          &t.prefill_query_start_loc,
          &t.non_spec_token_indx,
          &t.spec_token_indx,
          &t.prefill_slots,
          &t.decode_slots,
          &t.spec_slots,
          &t.has_initial_state,
          &t.num_accepted,
          &t.spec_sequence_masks,
          &t.chunk_indices,
          &t.chunk_offsets};
}

std::vector<kda_tensor*> tensors_of(kda_layer_args& a) {
  std::vector<kda_tensor*> list = {&a.hidden,     &a.state,         &a.conv_state,          &a.records.u,
                                   &a.records.kg, &a.records.count, &a.records.record_rows, &a.normed,
                                   &a.out};
  for (kda_layer_group* g : {&a.chunk, &a.recurrent}) {
    kda_sequences& s = g->sequences;
    for (kda_tensor* t : {&s.cu_seqlens, &s.begin, &s.length, &s.num_active, &g->slots, &g->write_slots,
                          &g->has_initial_state, &g->accepted, &g->checkpoint_offsets, &g->checkpoint_slots}) {
      list.push_back(t);
    }
  }
  return list;
}

Mirror::Mirror(DeviceMemory& memory, const std::vector<kda_tensor*>& tensors, size_t workspace_bytes)
    : memory_(memory), workspace_bytes_(workspace_bytes) {
  for (const kda_tensor* t : tensors) {
    if (t->dtype == KDA_DTYPE_NONE || t->data == nullptr) continue;
    int64_t low = 0, high = 0;
    bool empty = false;
    for (int i = 0; i < t->rank; ++i) {
      empty = empty || t->shape[i] == 0;
      const int64_t reach = (t->shape[i] - 1) * t->strides[i];
      (reach < 0 ? low : high) += reach;
    }
    const auto base = reinterpret_cast<uintptr_t>(t->data);
    const auto size = static_cast<int64_t>(kda_dtype_size(t->dtype));
    if (empty) ranges_.push_back({base, base + 1});
    else
      ranges_.push_back(
          {base + static_cast<uintptr_t>(low * size), base + static_cast<uintptr_t>((high + 1) * size)});
  }
  std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
  std::vector<Range> merged;
  for (const Range& r : ranges_) {
    if (!merged.empty() && r.first <= merged.back().last) merged.back().last = std::max(merged.back().last, r.last);
    else merged.push_back(r);
  }
  ranges_ = std::move(merged);
  size_t at = kGuard;
  for (Range& r : ranges_) {
    at = (at + kAlign - 1) / kAlign * kAlign;
    r.at = at + r.first % kAlign;
    at = r.at + (r.last - r.first) + kGuard;
  }
  workspace_at_ = (at + kAlign - 1) / kAlign * kAlign;
  image_.assign(workspace_at_ + workspace_bytes + kGuard, kPattern);
  for (const Range& r : ranges_) std::memcpy(&image_[r.at], reinterpret_cast<const void*>(r.first), r.last - r.first);
  device_ = static_cast<unsigned char*>(memory_.allocate(image_.size()));
  if (device_ == nullptr) return;
  if (!memory_.to_device(device_, image_.data(), image_.size())) return;
  for (kda_tensor* t : tensors) {
    if (t->dtype == KDA_DTYPE_NONE) continue;
    t->device = {KDA_CUDA, 0};
    if (t->data == nullptr) continue;
    const auto p = reinterpret_cast<uintptr_t>(t->data);
    for (const Range& r : ranges_) {
      if (p >= r.first && p <= r.last) t->data = device_ + r.at + (p - r.first);
    }
  }
}

Mirror::~Mirror() {
  if (device_ != nullptr) memory_.release(device_);
}

bool Mirror::refresh() {
  for (const Range& r : ranges_) std::memcpy(&image_[r.at], reinterpret_cast<const void*>(r.first), r.last - r.first);
  return memory_.to_device(device_, image_.data(), image_.size());
}

kda_workspace Mirror::workspace() const { return {device_ + workspace_at_, workspace_bytes_}; }

std::string Mirror::back() {
  std::string fault = memory_.synchronize();
  std::vector<unsigned char> now(image_.size());
  if (fault.empty() && !memory_.to_host(now.data(), device_, now.size())) fault = "copying back failed";
  if (!fault.empty()) return fault;
  std::vector<std::pair<size_t, size_t>> mine;  // bytes that may change
  for (const Range& r : ranges_) {
    std::memcpy(reinterpret_cast<void*>(r.first), &now[r.at], r.last - r.first);
    mine.emplace_back(r.at, r.at + (r.last - r.first));
  }
  mine.emplace_back(workspace_at_, workspace_at_ + workspace_bytes_);
  mine.emplace_back(now.size(), now.size());
  size_t at = 0;
  for (const auto& [first, last] : mine) {
    for (; at < first; ++at) {
      if (now[at] != kPattern) return "byte " + std::to_string(at) + " between the tensors was written";
    }
    at = std::max(at, last);
  }
  return "";
}

}  // namespace kda::conformance
