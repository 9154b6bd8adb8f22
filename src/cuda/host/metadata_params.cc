// From a step's tensors to the kernels' plain structs. Core has validated the tensors; nothing on the device is read.
#include "cuda/host/metadata_params.h"

#include <algorithm>

#include "base/checked.h"
#include "base/tensor.h"
#include "core/chunk_tables.h"
#include "cuda/host/views.h"

namespace kda::cuda {
namespace {

FlagRef to_flags(const kda_tensor& t) {
  if (!present(t)) return {};
  return {static_cast<const uint8_t*>(t.data), t.strides[0]};
}

template <class T>
T* data_of(const kda_tensor& t) {
  return present(t) ? static_cast<T*>(t.data) : nullptr;
}

GroupRef to_group(const kda_tensor& rows, const kda_tensor& begin, const kda_tensor& length,
                  const kda_tensor& offsets, const kda_tensor& slots, int32_t columns) {
  return {data_of<int32_t>(rows), data_of<void>(begin),    data_of<void>(length),
          data_of<void>(offsets), data_of<int32_t>(slots), columns};
}

// The capacity that plan and run agree on: entries behind it are the caller's.
ChunkTableRef to_chunk_tables(const kda_tensor& indices, const kda_tensor& offsets, int64_t rows, int64_t entries,
                              int64_t chunk) {
  return {data_of<void>(indices), data_of<int64_t>(offsets), rows, entries, chunk};
}

Int32Ref to_int32(const kda_tensor& t) {
  if (!present(t)) return {};
  return {static_cast<const int32_t*>(t.data), t.strides[0]};
}

bool in_fours(const void* data, int64_t stride, int64_t size) {
  return data == nullptr ||
         (stride == 1 && reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(4 * size) == 0);
}

void fill_step(const kda_metadata_desc& desc, const kda_metadata_args& args, MetadataParams& p) {
  const kda_step& step = args.step;
  p.cu = step.query_start_loc.data;
  p.cu_stride = step.query_start_loc.strides[0];
  p.computed = to_int32(step.computed);
  p.drafts = to_int32(step.drafts);
  p.accepted = to_int32(args.accepted);
  p.has_state = to_flags(step.has_state);
  p.prefilling = to_flags(step.prefilling);
  p.slots = to_index(args.slot_table);
  p.n = static_cast<int32_t>(step.query_start_loc.shape[0] - 1);
  p.active = p.n;
  if (present(step.num_active)) {
    if (step.num_active.device.type == KDA_CPU) {
      p.active = std::clamp(*static_cast<const int32_t*>(step.num_active.data), 0, p.n);
    } else {
      p.num_active = static_cast<const int32_t*>(step.num_active.data);
    }
  }
  p.tokens = static_cast<int32_t>(args.num_tokens);
  p.width = desc.width;
  p.by_drafts = desc.mode == KDA_METADATA_BY_DRAFTS;
  // Offsets of 64 bits are loaded in pairs.
  p.vectors = p.n % 4 == 0 && in_fours(p.cu, p.cu_stride, 4) && in_fours(p.computed.data, p.computed.stride, 4) &&
              in_fours(p.drafts.data, p.drafts.stride, 4) && in_fours(p.has_state.data, p.has_state.stride, 1) &&
              in_fours(p.prefilling.data, p.prefilling.stride, 1);
}

// The list of tails to fill in.
class Pads {
 public:
  Pads(MetadataParams& p, const kda_metadata_desc& desc) : p_(p), capacity_(desc.max_sequences) {}

  // Entries of `t` from size[start] * scale + skip to `entries`, with a constant.
  void constant(const kda_tensor& t, int64_t entries, StepSize start, int32_t value, int32_t scale = 1) {
    if (present(t)) add({t.data, entries * scale, bytes(t), start, scale, 0, -1, value});
  }
  // Offset lists repeat the last value.
  void last(const kda_tensor& t, StepSize start, StepSize value, int32_t skip = 1) {
    if (present(t)) add({t.data, capacity_ + 1, bytes(t), start, 1, skip, value, 0});
  }
  void group(const kda_tensor& rows, const kda_tensor& begin, const kda_tensor& length, const kda_tensor& offsets,
             const kda_tensor& slots, StepSize rows_of, int32_t columns, int32_t null_slot) {
    constant(rows, capacity_, rows_of, -1);
    constant(begin, capacity_, rows_of, 0);
    constant(length, capacity_, rows_of, 0);
    last(offsets, rows_of, static_cast<StepSize>(rows_of + 1));
    constant(slots, capacity_, rows_of, null_slot, columns);
  }

 private:
  static int32_t bytes(const kda_tensor& t) { return static_cast<int32_t>(dtype_size(t.dtype)); }
  void add(const PadRef& pad) { p_.pad[p_.pads++] = pad; }
  MetadataParams& p_;
  int64_t capacity_;
};

void fill_tables(const kda_metadata_desc& desc, const kda_metadata_args& args, bool chunks, MetadataParams& p) {
  const kda_step_tables& t = args.tables;
  const int64_t capacity = desc.max_sequences;
  const auto null_slot = static_cast<int32_t>(desc.null_slot);
  p.groups[kDecodeGroup] = to_group(t.decode_rows, t.decode_begin, t.decode_length, {}, t.decode_slots, 1);
  p.groups[kPrefillGroup] =
      to_group(t.prefill_rows, t.prefill_begin, t.prefill_length, t.prefill_query_start_loc, t.prefill_slots, 1);
  p.groups[kSpecGroup] =
      to_group(t.spec_rows, t.spec_begin, t.spec_length, t.spec_query_start_loc, t.spec_slots, desc.width);
  p.non_spec_offsets = data_of<void>(t.non_spec_query_start_loc);
  p.non_spec_tokens = data_of<int32_t>(t.non_spec_token_indx);
  p.spec_tokens = data_of<int32_t>(t.spec_token_indx);
  p.has_initial = data_of<uint8_t>(t.has_initial_state);
  p.accepted_out = data_of<int32_t>(t.num_accepted);
  p.spec_mask = data_of<uint8_t>(t.spec_sequence_masks);
  p.counts = data_of<int32_t>(t.counts);
  p.chunks.chunk = desc.chunk;
  p.divisor = chunk_divisor(desc.chunk);
  Pads pads(p, desc);
  // The longest first: a table a warp.
  pads.constant(t.non_spec_token_indx, desc.max_tokens, kNonSpecTokens, -1);
  if (present(t.spec_token_indx)) {
    pads.constant(t.spec_token_indx, std::min(desc.max_tokens, t.spec_token_indx.shape[0]), kSpecTokens, -1);
  }
  if (chunks) {
    const int64_t rows = *chunk_bound(desc.max_tokens, capacity, desc.chunk);
    p.chunks = to_chunk_tables(t.chunk_indices, t.chunk_offsets, rows, capacity + 1, desc.chunk);
    pads.constant(t.chunk_indices, rows, kChunks, -1, 2);
    pads.last(t.chunk_offsets, kPrefillRows, kChunks, 0);
  }
  pads.group(t.spec_rows, t.spec_begin, t.spec_length, t.spec_query_start_loc, t.spec_slots, kSpecRows, desc.width,
             null_slot);
  pads.group(t.prefill_rows, t.prefill_begin, t.prefill_length, t.prefill_query_start_loc, t.prefill_slots,
             kPrefillRows, 1, null_slot);
  pads.group(t.decode_rows, t.decode_begin, t.decode_length, {}, t.decode_slots, kDecodeRows, 1, null_slot);
  pads.last(t.non_spec_query_start_loc, kNonSpecRows, kNonSpecTokens);
  pads.constant(t.has_initial_state, capacity, kPrefillRows, 0);
  pads.constant(t.num_accepted, capacity, kSpecRows, 1);
  pads.constant(t.spec_sequence_masks, capacity, kStepRows, 0);
}

}  // namespace

ChunkDivisor chunk_divisor(int64_t chunk) {
  ChunkDivisor d;
  const auto c = static_cast<uint64_t>(std::min<int64_t>(chunk, INT32_MAX));  // as good as any larger one
  while ((uint64_t{1} << d.shift) < c) ++d.shift;
  d.factor = static_cast<uint32_t>(((uint64_t{1} << (31 + d.shift)) + c - 1) / c);
  return d;
}

MetadataParams metadata_params(const kda_metadata_desc& desc, const kda_metadata_args& args, bool chunks) {
  MetadataParams p;
  fill_step(desc, args, p);
  fill_tables(desc, args, chunks, p);
  return p;
}

ChunkTableRef chunk_tables_of(const kda_chunk_request& r) {
  return to_chunk_tables(r.chunk_indices, r.chunk_offsets, r.chunk_indices.shape[0], r.chunk_offsets.shape[0],
                         r.chunk);
}

ChunkParams chunk_params(const kda_chunk_request& r) {
  ChunkParams p;
  p.cu = to_index(r.cu_seqlens);
  p.n = r.num_sequences;
  p.tokens = r.num_tokens;
  p.wide = r.cu_seqlens.dtype == KDA_INT64;
  p.chunks = chunk_tables_of(r);
  return p;
}

int64_t metadata_blocks(int64_t rows, int64_t entries) {
  return std::clamp<int64_t>(std::max(ceil_div(rows, 32), ceil_div(entries, 512)), 1, 128);
}

void share_rows(MetadataParams& p, int64_t blocks) {
  p.share = static_cast<int32_t>(std::min<int64_t>(4 * ceil_div(ceil_div(p.n, blocks), 4), INT32_MAX - 3));
}

}  // namespace kda::cuda
