// Descriptions: defaults, enumerations, and everything about a problem that no backend can change.
#include <cmath>

#include "base/checked.h"
#include "core/validate.h"

namespace kda {
namespace {

Status check_enum(const char* name, int value, int low, int high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(name, ": wanted an enumerator from ", low, " to ", high, ", got ", value);
}

Status default_dtype(const char* name, kda_dtype& dtype, kda_dtype fallback,
                     std::initializer_list<kda_dtype> allowed) {
  if (dtype == KDA_DTYPE_NONE) dtype = fallback;
  std::string names;
  for (kda_dtype d : allowed) {
    if (d == dtype) return {};
    names += (names.empty() ? "" : ", ") + std::string(dtype_name(d));
  }
  return invalid_argument(name, ": wanted one of ", names, "; got ", dtype_name(dtype));
}

Status check_lower_bound(const kda_attention_spec& a) {
  if (a.gate_family != KDA_GATE_BOUNDED) {
    if (a.lower_bound == 0) return {};
    return invalid_argument("lower_bound: wanted 0 (only the bounded gate family has one), got ", a.lower_bound);
  }
  if (std::isfinite(a.lower_bound) && a.lower_bound < 0) return {};
  return invalid_argument("lower_bound: wanted a finite number < 0, got ", a.lower_bound);
}

Status normalize_conv_pool(int32_t width, int32_t parts, kda_conv_layout& layout) {
  if (width < 2 || width > 8) return invalid_argument("conv width: wanted 2 to 8, got ", width);
  if (parts != 1 && parts != 3) return invalid_argument("conv parts: wanted 1 or 3, got ", parts);
  return check_enum("conv layout", layout, KDA_CONV_SD, KDA_CONV_DS);
}

Status normalize_width(int32_t& width) {
  if (width == 0) width = 1;
  if (width < 0) return invalid_argument("width: wanted 1 to ", KDA_MAX_VERIFY, ", got ", width);
  if (width > KDA_MAX_VERIFY) {
    return unsupported("width: wanted at most ", KDA_MAX_VERIFY, " (KDA_MAX_VERIFY), got ", width);
  }
  return {};
}

}  // namespace

Status check_bound(const char* name, int64_t value) {
  if (value >= 0) return {};
  return invalid_argument(name, ": wanted a bound >= 0, got ", value);
}

Status check_plan_flags(uint32_t flags) {
  const uint32_t known = KDA_PLAN_BATCH_INVARIANT | KDA_PLAN_CHECKED;
  if ((flags & ~known) == 0) return {};
  return invalid_argument("flags: wanted bits of ", known, ", got ", flags);
}

Status normalize_attention(kda_attention_spec& a) {
  if (a.num_heads < 1) return invalid_argument("num_heads: wanted H >= 1, got ", a.num_heads);
  if (a.num_value_heads == 0) a.num_value_heads = a.num_heads;
  if (a.num_value_heads < 1 || a.num_value_heads % a.num_heads != 0) {
    return invalid_argument("num_value_heads: wanted a multiple of num_heads = ", a.num_heads, ", got ",
                            a.num_value_heads);
  }
  if (a.key_dim < 1) return invalid_argument("key_dim: wanted K >= 1, got ", a.key_dim);
  if (a.value_dim < 1) return invalid_argument("value_dim: wanted V >= 1, got ", a.value_dim);
  const auto rows = checked_add(a.key_dim, a.value_dim);
  if (!rows || !checked_product({a.num_value_heads, *rows, a.key_dim, 8})) {
    return invalid_argument("attention: wanted a state below 2^63 bytes, got HV ", a.num_value_heads, ", V ",
                            a.value_dim, ", K ", a.key_dim);
  }
  KDA_RETURN_IF_ERROR(check_enum("gate_family", a.gate_family, KDA_GATE_SOFTPLUS, KDA_GATE_PLAIN));
  if (a.beta_form == 0) a.beta_form = KDA_BETA_LOGITS;
  KDA_RETURN_IF_ERROR(check_enum("beta_form", a.beta_form, KDA_BETA_LOGITS, KDA_BETA_PLAIN));
  KDA_RETURN_IF_ERROR(default_dtype("io_dtype", a.io_dtype, KDA_BF16, {KDA_FP32, KDA_BF16, KDA_FP16}));
  KDA_RETURN_IF_ERROR(default_dtype("gate_dtype", a.gate_dtype, a.io_dtype, {a.io_dtype, KDA_FP32}));
  const bool plain_beta = a.beta_form == KDA_BETA_PLAIN;
  KDA_RETURN_IF_ERROR(default_dtype("beta_dtype", a.beta_dtype, plain_beta ? KDA_FP32 : a.io_dtype,
                                    {plain_beta ? KDA_FP32 : a.io_dtype, KDA_FP32}));
  KDA_RETURN_IF_ERROR(
      default_dtype("state_dtype", a.state_dtype, KDA_FP32, {KDA_FP32, KDA_BF16, KDA_FP16, KDA_FP64}));
  KDA_RETURN_IF_ERROR(default_dtype("out_dtype", a.out_dtype, a.io_dtype, {a.io_dtype, KDA_FP64}));
  KDA_RETURN_IF_ERROR(check_lower_bound(a));
  if (!std::isfinite(a.scale)) return invalid_argument("scale: wanted a finite number, got ", a.scale);
  if (a.scale == 0) a.scale = 1.0 / std::sqrt(static_cast<double>(a.key_dim));
  return {};
}

Status Prefill::normalize(kda_prefill_desc& d) {
  KDA_RETURN_IF_ERROR(normalize_attention(d.attention));
  KDA_RETURN_IF_ERROR(check_bound("max_tokens", d.max_tokens));
  KDA_RETURN_IF_ERROR(check_bound("max_sequences", d.max_sequences));
  KDA_RETURN_IF_ERROR(check_bound("max_checkpoints", d.max_checkpoints));
  if (d.initial_state == 0) d.initial_state = KDA_INITIAL_NONE;
  KDA_RETURN_IF_ERROR(check_enum("initial_state", d.initial_state, KDA_INITIAL_NONE, KDA_INITIAL_FLAGS));
  KDA_RETURN_IF_ERROR(check_enum("segments", d.segments, KDA_SEGMENTS_AUTO, KDA_SEGMENTS_OFF));
  KDA_RETURN_IF_ERROR(check_plan_flags(d.flags));
  if (d.flags & KDA_PLAN_BATCH_INVARIANT) d.segments = KDA_SEGMENTS_OFF;  // spec S-8
  return {};
}

Status SegmentSummary::normalize(kda_prefill_desc& d) { return Prefill::normalize(d); }

Status SegmentMerge::normalize(kda_segment_merge_desc& d) {
  if (d.num_value_heads < 1) return invalid_argument("num_value_heads: wanted HV >= 1, got ", d.num_value_heads);
  if (d.key_dim < 1) return invalid_argument("key_dim: wanted K >= 1, got ", d.key_dim);
  if (d.value_dim < 1) return invalid_argument("value_dim: wanted V >= 1, got ", d.value_dim);
  const auto rows = checked_add(d.key_dim, d.value_dim);
  if (!rows || !checked_product({d.num_value_heads, *rows, d.key_dim, 4})) {
    return invalid_argument("segment_merge: wanted a summary below 2^63 bytes, got HV ", d.num_value_heads, ", V ",
                            d.value_dim, ", K ", d.key_dim);
  }
  return check_bound("max_segments", d.max_segments);
}

Status Decode::normalize(kda_decode_desc& d) {
  KDA_RETURN_IF_ERROR(normalize_attention(d.attention));
  KDA_RETURN_IF_ERROR(check_bound("max_tokens", d.max_tokens));
  KDA_RETURN_IF_ERROR(check_bound("max_sequences", d.max_sequences));
  KDA_RETURN_IF_ERROR(normalize_width(d.width));
  KDA_RETURN_IF_ERROR(check_enum("mode", d.mode, KDA_DECODE_COLUMNS, KDA_DECODE_RECORDS));
  KDA_RETURN_IF_ERROR(check_enum("store", d.store, KDA_STORE_PER_TOKEN, KDA_STORE_FINAL));
  if (d.mode == KDA_DECODE_RECORDS && d.store != KDA_STORE_PER_TOKEN) {
    return invalid_argument("store: wanted 0 in records mode (states are committed, not stored), got ", int{d.store});
  }
  if (d.mode == KDA_DECODE_COLUMNS && d.fold) return invalid_argument("fold: wanted 0 in columns mode, got ", d.fold);
  if (d.initial_state == 0) d.initial_state = KDA_INITIAL_ALL;
  KDA_RETURN_IF_ERROR(check_enum("initial_state", d.initial_state, KDA_INITIAL_NONE, KDA_INITIAL_FLAGS));
  if (d.mode == KDA_DECODE_RECORDS && d.initial_state != KDA_INITIAL_ALL) {
    return invalid_argument("initial_state: wanted all in records mode (a row verifies from its state), got ",
                            int{d.initial_state});
  }
  return check_plan_flags(d.flags);
}

Status Commit::normalize(kda_commit_desc& d) {
  KDA_RETURN_IF_ERROR(normalize_attention(d.attention));
  KDA_RETURN_IF_ERROR(check_bound("max_sequences", d.max_sequences));
  KDA_RETURN_IF_ERROR(normalize_width(d.width));
  KDA_RETURN_IF_ERROR(check_plan_flags(d.flags));
  if (d.conv_width == 0) return {};
  if (d.conv_parts == 0) d.conv_parts = 1;
  const kda_dtype io = d.attention.io_dtype;
  KDA_RETURN_IF_ERROR(default_dtype("conv_dtype", d.conv_dtype, io, {io, KDA_FP32}));
  return normalize_conv_pool(d.conv_width, d.conv_parts, d.conv_layout);
}

Status DecodeStep::normalize(kda_decode_step_desc& d) {
  KDA_RETURN_IF_ERROR(Decode::normalize(d.decode));
  if (d.conv_parts == 0) d.conv_parts = 1;
  KDA_RETURN_IF_ERROR(normalize_conv_pool(d.conv_width, d.conv_parts, d.conv_layout));
  const kda_dtype io = d.decode.attention.io_dtype;
  KDA_RETURN_IF_ERROR(default_dtype("conv_dtype", d.conv_dtype, io, {io, KDA_FP32}));
  if (!std::isfinite(d.norm_eps) || d.norm_eps < 0) {
    return invalid_argument("norm_eps: wanted a finite number >= 0, got ", d.norm_eps);
  }
  if (d.norm_eps == 0) d.norm_eps = 1e-5;
  return {};
}

Status Conv::normalize(kda_conv_desc& d) {
  KDA_RETURN_IF_ERROR(check_enum("mode", d.mode, KDA_CONV_PREFILL, KDA_CONV_RECORDS));
  if (d.parts == 0) d.parts = 1;
  KDA_RETURN_IF_ERROR(normalize_conv_pool(d.width, d.parts, d.layout));
  for (int i = 0; i < d.parts; ++i) {
    if (d.channels[i] < 1) return invalid_argument("channels[", i, "]: wanted >= 1, got ", d.channels[i]);
  }
  KDA_RETURN_IF_ERROR(default_dtype("io_dtype", d.io_dtype, KDA_BF16, {KDA_FP32, KDA_BF16, KDA_FP16}));
  KDA_RETURN_IF_ERROR(default_dtype("out_dtype", d.out_dtype, d.io_dtype, {d.io_dtype, KDA_FP64}));
  KDA_RETURN_IF_ERROR(default_dtype("state_dtype", d.state_dtype, d.io_dtype, {d.io_dtype, KDA_FP32}));
  KDA_RETURN_IF_ERROR(normalize_width(d.verify_width));
  if (d.mode != KDA_CONV_RECORDS && d.fold)
    return invalid_argument("fold: wanted 0 outside records mode, got ", d.fold);
  KDA_RETURN_IF_ERROR(check_bound("max_tokens", d.max_tokens));
  KDA_RETURN_IF_ERROR(check_bound("max_sequences", d.max_sequences));
  KDA_RETURN_IF_ERROR(check_bound("max_checkpoints", d.max_checkpoints));
  if (d.max_checkpoints > 0 && d.mode != KDA_CONV_PREFILL) {
    return invalid_argument("max_checkpoints: wanted 0 outside prefill mode, got ", d.max_checkpoints);
  }
  if (d.initial_state == 0) d.initial_state = d.mode == KDA_CONV_PREFILL ? KDA_INITIAL_NONE : KDA_INITIAL_ALL;
  KDA_RETURN_IF_ERROR(check_enum("initial_state", d.initial_state, KDA_INITIAL_NONE, KDA_INITIAL_FLAGS));
  if (d.mode == KDA_CONV_RECORDS && d.initial_state != KDA_INITIAL_ALL) {
    return invalid_argument("initial_state: wanted all in records mode, got ", int{d.initial_state});
  }
  return check_plan_flags(d.flags);
}

Status GatedNorm::normalize(kda_gated_norm_desc& d) {
  if (d.num_value_heads < 1) return invalid_argument("num_value_heads: wanted HV >= 1, got ", d.num_value_heads);
  if (d.value_dim < 1) return invalid_argument("value_dim: wanted V >= 1, got ", d.value_dim);
  if (!checked_product({d.num_value_heads, d.value_dim, 128})) {
    return invalid_argument("gated_norm: wanted a row below 2^56 elements, got HV ", d.num_value_heads, ", V ",
                            d.value_dim);
  }
  KDA_RETURN_IF_ERROR(default_dtype("io_dtype", d.io_dtype, KDA_BF16, {KDA_FP32, KDA_BF16, KDA_FP16}));
  KDA_RETURN_IF_ERROR(default_dtype("out_dtype", d.out_dtype, d.io_dtype, {d.io_dtype, KDA_FP64}));
  if (!std::isfinite(d.eps) || d.eps < 0) return invalid_argument("eps: wanted a finite number >= 0, got ", d.eps);
  if (d.eps == 0) d.eps = 1e-5;
  return check_bound("max_tokens", d.max_tokens);
}

Status ResidualNorm::normalize(kda_residual_norm_desc& d) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (d.hidden < 1 || d.hidden > kMost) return invalid_argument("hidden: wanted 1 <= D < 2^31, got ", d.hidden);
  KDA_RETURN_IF_ERROR(default_dtype("io_dtype", d.io_dtype, KDA_BF16, {KDA_FP32, KDA_BF16, KDA_FP16}));
  KDA_RETURN_IF_ERROR(default_dtype("out_dtype", d.out_dtype, d.io_dtype, {d.io_dtype, KDA_FP64}));
  if (!std::isfinite(d.eps) || d.eps < 0) return invalid_argument("eps: wanted a finite number >= 0, got ", d.eps);
  if (d.eps == 0) d.eps = 1e-5;
  return check_bound("max_tokens", d.max_tokens);
}

}  // namespace kda
