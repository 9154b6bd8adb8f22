// decode_step (spec V-15): conv, recurrence and gated norm of one query head and its value heads, from the functions
// that conv, decode and gated_norm are made of, with the io roundings of L-7 in between: the same bits (L-8).
//
// A task is (row, query head): it alone reads and moves the windows of the head's q, k and v channels. Each value
// head convolves q and k again (W·K operations) rather than keeping them.
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode_step_kernel.cc"
#include <hwy/foreach_target.h>

#include "cpu/decode_step_call.h"
#include "cpu/simd/conv-inl.h"
#include "cpu/simd/decode-inl.h"
#include "cpu/simd/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace {

const kda_tensor kAbsent{};

// Channels [first, first + count) of one conv part: a head's q, k or v.
struct Channels {
  ConvPart part;
  int64_t first, count;
};

enum class Role { q, k, v };

Channels channels_of(const DecodeStepCall& c, Role role, int64_t head) {
  const kda_attention_spec& a = c.decode.desc->attention;
  const int64_t qk = a.num_heads * a.key_dim;
  const int64_t dim = role == Role::v ? a.value_dim : a.key_dim;
  const auto index = static_cast<int>(role);
  const bool merged = c.desc->conv_parts == 1;
  const int part = merged ? 0 : index;
  return {{c.args->x[part], c.args->conv_weight[part], kAbsent, c.args->conv_state[part]},
          (merged ? index * qk : 0) + head * dim,
          dim};
}

template <class F>
HWY_INLINE void for_tiles(const Channels& ch, const F& f) {
  for (int64_t at = 0, tile = 0; at < ch.count; at += kConvTile, ++tile) {
    f(ch.first + at, std::min(kConvTile, ch.count - at), tile, at);
  }
}

// Taps into scratch; a fold moves the window to its committed place.
void begin_conv(const DecodeStepCall& c, const ConvRow& row, const Channels& ch, float* const* scratch) {
  if (!row.active) return;
  const ConvPool pool(ch.part.state, c.conv.layout);
  for_tiles(ch, [&](int64_t c0, int64_t n, int64_t tile, int64_t) HWY_ATTR {
    load_taps(c.conv, ch.part, c0, n, ConvScratch(scratch[tile]).taps);
    fold_window(c.conv, pool, row, c0, n);
  });
}

// The window moves on, after the last output that needed the old one.
void end_conv(const DecodeStepCall& c, const ConvRow& row, const Channels& ch) {
  if (!row.active) return;
  const ConvPool pool(ch.part.state, c.conv.layout);
  store_window(c.conv, ch.part, pool, row, ch.first, ch.count);
}

// Post-conv values of tokens [t0, t0 + count), rounded to io, as floats: to[t * stride]. An inactive row gives zeros.
template <class Io>
void run_conv(const DecodeStepCall& c, const ConvRow& row, const Channels& ch, int64_t t0, int64_t count,
              float* const* scratch, const DecodeStepScratch& mine, float* to, int64_t stride) {
  if (!row.active) return void(std::memset(to, 0, static_cast<size_t>(count * stride) * sizeof(float)));
  const ConvPool pool(ch.part.state, c.conv.layout);
  const auto post = [&](int64_t t) { return reinterpret_cast<Io*>(mine.post + t * mine.post_stride); };
  for_tiles(ch, [&](int64_t c0, int64_t n, int64_t tile, int64_t at) HWY_ATTR {
    Io* out[kTokenGroup];
    for (int64_t t = 0; t < count; ++t) out[t] = post(t) + at;
    convolve_tokens<Io>(c.conv, ch.part, &pool, row, c0, n, t0, t0 + count, ConvScratch(scratch[tile]), out);
  });
  for (int64_t t = 0; t < count; ++t) load_row(post(t), ch.count, to + t * stride);
}

// Starts the channels of a head on their way to the cache: first input, context, taps are there already.
void prefetch_channels(const DecodeStepCall& c, const ConvRow& row, const Channels& ch) {
  if (!row.active || row.span.length == 0) return;
  prefetch(input_row(c.conv, ch.part, row, ch.first, 0),
           ch.count * static_cast<int64_t>(dtype_size(c.conv.io_dtype)));
  const ConvPool pool(ch.part.state, c.conv.layout);
  if (row.fresh || pool.channel_stride != 1) return;
  const int64_t offset = c.conv.mode == KDA_CONV_COLUMNS ? row.offset : 0;
  for (int64_t i = 0; i < c.conv.width - 1; ++i) {
    prefetch(pool.at(row.read_slot, offset + i, ch.first), ch.count * pool.size);
  }
}

// The attention output of token t: rounded to io (L-7.3), normed, written.
void emit_row(const DecodeStepCall& c, const DecodeRow& row, int64_t hv, int64_t t, float* o,
              const DecodeStepScratch& mine) {
  const kda_attention_spec& a = c.decode.desc->attention;
  void* to = out_head(c.decode, row, t, hv);
  if (to == nullptr) return;
  if (c.desc->no_norm) return store_any(a.out_dtype, o, a.value_dim, to);
  if (a.io_dtype == KDA_FP32) {
    std::fill(o + a.value_dim, o + padded(a.value_dim), 0.0f);
  } else {
    store_any(a.io_dtype, o, a.value_dim, mine.post);
    load_any(a.io_dtype, mine.post, a.value_dim, o);
  }
  norm_any(a.io_dtype, o, head_row(c.args->z, row.span, 3, t, hv), mine.norm_weight, a.value_dim,
           static_cast<float>(c.desc->norm_eps), to);
}

template <class Io>
void run_query_head(const DecodeStepCall& c, int64_t n, int64_t h, float* scratch) {
  const kda_attention_spec& a = c.decode.desc->attention;
  const kda_decode_args& args = *c.decode.args;
  const DecodeRow& row = c.decode.rows[n];
  const ConvRow& conv_row = c.conv_rows[n];
  const DecodeStepScratch mine(*c.desc, scratch);
  const int64_t ratio = a.num_value_heads / a.num_heads;
  const Channels q = channels_of(c, Role::q, h), k = channels_of(c, Role::k, h);
  begin_conv(c, conv_row, q, mine.conv);
  begin_conv(c, conv_row, k, mine.conv + 1);
  if (!c.desc->no_norm) load_row(static_cast<const float*>(c.args->norm_weight.data), a.value_dim, mine.norm_weight);
  for (int64_t hv = h * ratio; hv < (h + 1) * ratio; ++hv) {
    const Channels v = channels_of(c, Role::v, hv);
    begin_conv(c, conv_row, v, mine.conv + 2);
    if (row.active) {
      HeadScratch s(*c.decode.desc, mine.head);
      load_bias(a, args.dt_bias, hv, s.bias);
      const auto load_group = [&](int64_t t0, int64_t count) HWY_ATTR {
        run_conv<Io>(c, conv_row, q, t0, count, mine.conv, mine, s.q, s.kp);
        run_conv<Io>(c, conv_row, k, t0, count, mine.conv + 1, mine, s.k, s.kp);
        run_conv<Io>(c, conv_row, v, t0, count, mine.conv + 2, mine, s.v, s.vp);
      };
      const auto emit = [&](int64_t t, float* o) HWY_ATTR { emit_row(c, row, hv, t, o, mine); };
      run_head(c.decode, row, n, hv, 0, a.value_dim, gate_head(a, args.A_log, hv), s, load_group, emit);
    } else {
      zero_out(c.decode, row, hv, 0, a.value_dim);
    }
    end_conv(c, conv_row, v);
  }
  end_conv(c, conv_row, q);
  end_conv(c, conv_row, k);
}

void prefetch_query_head(const DecodeStepCall& c, int64_t n, int64_t h) {
  const kda_attention_spec& a = c.decode.desc->attention;
  const DecodeRow& row = c.decode.rows[n];
  const int64_t ratio = a.num_value_heads / a.num_heads;
  prefetch_channels(c, c.conv_rows[n], channels_of(c, Role::q, h));
  prefetch_channels(c, c.conv_rows[n], channels_of(c, Role::k, h));
  prefetch_channels(c, c.conv_rows[n], channels_of(c, Role::v, h * ratio));
  if (row.span.length == 0) return;
  const auto size = [](const kda_tensor& x) { return static_cast<int64_t>(dtype_size(x.dtype)); };
  const kda_tensor& gate = c.decode.args->gate;
  prefetch(head_row(gate, row.span, 3, 0, h * ratio), a.key_dim * size(gate));
  if (!c.desc->no_norm) prefetch(head_row(c.args->z, row.span, 3, 0, h * ratio), a.value_dim * size(c.args->z));
}

void run(const DecodeStepCall& c, int64_t n, int64_t h0, int64_t h1, float* scratch) {
  for (int64_t h = h0; h < h1; ++h) {
    if (h + 1 < h1) prefetch_query_head(c, n, h + 1);
    switch (c.decode.desc->attention.io_dtype) {
      case KDA_FP32: run_query_head<float>(c, n, h, scratch); break;
      case KDA_BF16: run_query_head<bf16>(c, n, h, scratch); break;
      default: run_query_head<fp16>(c, n, h, scratch); break;
    }
  }
}

}  // namespace

const DecodeStepFunctions* decode_step_table() {
  static constexpr DecodeStepFunctions table = {run};
  return &table;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {
HWY_EXPORT(decode_step_table);
const DecodeStepFunctions& decode_step_functions(Isa isa) { return *KDA_CPU_TABLE(decode_step_table, isa)(); }
}  // namespace kda::cpu
#endif
