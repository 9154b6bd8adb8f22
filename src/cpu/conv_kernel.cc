// Convolution over tiles of channels (spec W); the arithmetic and the windows are in cpu/simd/conv-inl.h.
//
// A task is (part, tile of kConvTile channels, sequence, chunk of kConvChunk tokens). Chunks read the inputs before
// their own where they lie; the first chunk of a tile alone reads and writes windows and checkpoints.
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/conv_kernel.cc"
#include <hwy/foreach_target.h>

#include "cpu/simd/conv-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace {

ConvPart part_of(const ConvCall& c, int part) {
  return {c.args->x[part], c.args->weight[part], c.args->bias[part], c.args->state[part]};
}

void run_load_taps(const ConvCall& c, int part, int64_t c0, int64_t n, float* scratch) {
  load_taps(c.form, part_of(c, part), c0, n, ConvScratch(scratch).taps);
}

// Where token t of the row goes, channel c0 on; null if the call skips it.
char* output_row(const ConvCall& c, int part, const ConvRow& row, int64_t c0, int64_t t) {
  const kda_tensor& out = c.args->out[part];
  const int64_t r = out_row(out, c.args->out_rows, row.span, 2, t);
  if (r < 0) return nullptr;
  const char* first = token_row(out, row.span, 2, r - row.span.begin);
  return const_cast<char*>(first) + c0 * static_cast<int64_t>(dtype_size(out.dtype));
}

// Windows of prefix-cache checkpoints (K-2), out of the context and the inputs.
void store_checkpoints(const ConvCall& c, const ConvPart& part, const ConvPool& pool, const ConvRow& row, int64_t seq,
                       int64_t c0, int64_t n) {
  if (!present(c.args->checkpoint_offsets)) return;
  const IndexView offsets = index_row(c.args->checkpoint_offsets, seq);
  const IndexView slots = index_row(c.args->checkpoint_slots, seq);
  for (int64_t i = 0; i < offsets.size; ++i) {
    if (offsets[i] <= 0 || offsets[i] > row.span.length) continue;
    if (!slot_is_live(slots[i], part.state.shape[0], c.desc->null_slot)) continue;
    store_stream(c.form, part, pool, row, offsets[i], slots[i], 0, c.form.width - 1, c0, n);
  }
}

template <class Io>
void run_as(const ConvCall& c, int part_index, int64_t c0, int64_t n, int64_t seq, int64_t t0, float* scratch) {
  const ConvRow& row = c.rows[seq];
  const ConvPart part = part_of(c, part_index);
  const ConvScratch s(scratch);
  const int64_t t1 = std::min(t0 + kConvChunk, row.span.length);
  Io* out[kConvChunk];
  for (int64_t t = t0; t < t1; ++t) out[t - t0] = reinterpret_cast<Io*>(output_row(c, part_index, row, c0, t));
  if (!row.active) {
    for (int64_t t = t0; t < t1; ++t) {
      if (out[t - t0] != nullptr) std::memset(out[t - t0], 0, static_cast<size_t>(n) * sizeof(Io));
    }
    return;
  }
  const bool pooled = t0 == 0 && present(part.state);
  const ConvPool pool = pooled ? ConvPool(part.state, c.form.layout) : ConvPool();
  if (pooled) fold_window(c.form, pool, row, c0, n);
  convolve_tokens<Io>(c.form, part, pooled ? &pool : nullptr, row, c0, n, t0, t1, s, out);
  if (!pooled) return;
  store_checkpoints(c, part, pool, row, seq, c0, n);
  store_window(c.form, part, pool, row, c0, n);
}

void run(const ConvCall& c, int part, int64_t c0, int64_t n, int64_t seq, int64_t t0, float* scratch) {
  switch (c.form.io_dtype) {
    case KDA_FP32: return run_as<float>(c, part, c0, n, seq, t0, scratch);
    case KDA_BF16: return run_as<bf16>(c, part, c0, n, seq, t0, scratch);
    default: return run_as<fp16>(c, part, c0, n, seq, t0, scratch);
  }
}

}  // namespace

const ConvFunctions* conv_table() {
  static constexpr ConvFunctions table = {run_load_taps, run};
  return &table;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {
HWY_EXPORT(conv_table);
const ConvFunctions& conv_functions(Isa isa) { return *KDA_CPU_TABLE(conv_table, isa)(); }
}  // namespace kda::cpu
#endif
