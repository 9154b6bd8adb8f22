#include "cuda/host/gates.h"

#include "base/checked.h"
#include "base/tensor.h"

namespace kda::cuda {
namespace {

constexpr DtypeSet kFloats = {KDA_FP32, KDA_BF16, KDA_FP16};
constexpr DimRule kAnyDim = {0, kMaxHeadDim};
constexpr AttentionCapability kAnything = {kAnyDim, kAnyDim, kFloats, kFloats, kFloats, kFloats};
constexpr AttentionCapability kHead128 = {{128, 0}, {128, 0}, kFloats, kFloats, kFloats, kFloats};

// Compute capabilities with machine code in this build (cmake/cuda.cmake). sm_90a code runs on 9.0 alone.
struct Image {
  int32_t major, minor;
};
constexpr Image kImages[] = {{9, 0}};

void check_dtype(const char* gate, const DtypeSet& wanted, kda_dtype got, Refusals& r) {
  if (!wanted.has(got)) r.add(gate, wanted.text(), dtype_name(got));
}

// Blocks of a launch: one per (sequence, value head, slice of value rows).
void check_blocks(int64_t sequences, int64_t heads, int64_t slices, Refusals& r) {
  const auto blocks = checked_product({sequences, heads, slices});
  if (!blocks || *blocks > kMaxBlocks) {
    r.add("size", str_cat("max_sequences * num_value_heads <= ", kMaxBlocks / slices),
          str_cat(sequences, " * ", heads));
  }
}

// Kernels number the channels of a convolution in 32 bits, up to the end of the last block.
void check_channels(int64_t channels, Refusals& r) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (channels > kMost) r.add("size", str_cat("channels <= ", kMost), channels);
}

// An example's rows that a bulk or vector load cannot start at.
void check_rows(const char* name, const kda_tensor& t, const PrefillCapability& c, Refusals& r) {
  if (!present(t)) return;
  const int64_t alignment = c.row_alignment;
  const auto size = static_cast<int64_t>(dtype_size(t.dtype));
  if (t.rank > 0 && t.strides[t.rank - 1] != 1 && t.shape[t.rank - 1] > 1) {
    r.add("layout", str_cat(name, " with a dense last dimension"), describe(t));
    return;
  }
  for (int i = 0; i + 1 < t.rank; ++i) {
    if (t.shape[i] <= 1 || t.strides[i] * size % alignment == 0) continue;
    r.add("layout", str_cat(name, " with stride(", i, ") of a multiple of ", alignment, " bytes"),
          str_cat(t.strides[i] * size, " bytes"));
  }
  if (c.row_bytes == 0 || t.rank < 3 || t.strides[t.rank - 3] * size <= c.row_bytes) return;
  r.add("layout", str_cat(name, " with rows at most ", c.row_bytes, " bytes apart"),
        str_cat(t.strides[t.rank - 3] * size, " bytes"));
}

}  // namespace

const PrefillCapability kFusedPrefill = {
    {{128, 0}, {128, 0}, {KDA_BF16}, {KDA_BF16, KDA_FP32}, {KDA_BF16, KDA_FP32}, kFloats, true, true, true, -104},
    -1,
    16,
    kFusedPrefillRowBytes};
const PrefillCapability kPortablePrefill = {kAnything, -1, 1};
const AttentionCapability kFusedDecode = kHead128;
const AttentionCapability kPortableDecode = kAnything;

std::string DtypeSet::text() const {
  std::string s;
  for (kda_dtype d : {KDA_FP32, KDA_BF16, KDA_FP16, KDA_FP64}) {
    if (has(d)) s += (s.empty() ? "" : ", ") + std::string(dtype_name(d));
  }
  return s;
}

std::string DimRule::text() const { return exact != 0 ? str_cat(exact) : str_cat("1 to ", most); }

bool has_device_image(const DeviceFacts& f) {
  for (const Image& image : kImages) {
    if (image.major == f.major && image.minor == f.minor) return true;
  }
  return false;
}

std::string device_images() {
  std::string text;
  for (const Image& image : kImages) text += str_cat(text.empty() ? "" : ", ", image.major, ".", image.minor);
  return text;
}

void check_device(const Context& context, Refusals& r) {
  if (context.device.type != KDA_CUDA) return;
  const DeviceFacts& f = context.facts;
  if (!has_device_image(f)) {
    r.add("no_device_image", "compute capability " + device_images(), str_cat(f.major, ".", f.minor));
  }
  // Drivers serve every runtime of their own major version and older ones.
  if (f.driver_version / 1000 < f.runtime_version / 1000) {
    r.add("driver", str_cat("a driver for CUDA ", f.runtime_version / 1000, ".0 or newer"),
          str_cat("one for CUDA ", f.driver_version / 1000, ".", f.driver_version % 1000 / 10));
  }
}

void check_attention(const AttentionCapability& c, const kda_attention_spec& a, Refusals& r) {
  if (!c.key.has(a.key_dim) || !c.value.has(a.value_dim)) {
    r.add("head_dim", str_cat("K ", c.key.text(), ", V ", c.value.text()),
          str_cat("K ", a.key_dim, ", V ", a.value_dim));
  }
  check_dtype("io_dtype", c.io, a.io_dtype, r);
  if (a.out_dtype != a.io_dtype) check_dtype("io_dtype", c.io, a.out_dtype, r);
  check_dtype("gate_dtype", c.gate, a.gate_dtype, r);
  check_dtype("gate_dtype", c.beta, a.beta_dtype, r);
  check_dtype("pool_dtype", c.state, a.state_dtype, r);
  if (a.gate_family == KDA_GATE_SOFTPLUS && !c.softplus) r.add("gate_family", "bounded", "softplus");
  if (a.gate_family == KDA_GATE_PLAIN && !c.plain)
    r.add("gate_family", c.softplus ? "softplus or bounded" : "bounded", "plain");
  if (a.gate_family == KDA_GATE_BOUNDED && !c.bounded) r.add("gate_family", "softplus", "bounded");
  if (a.gate_family == KDA_GATE_BOUNDED && c.smallest_bound != 0 && a.lower_bound < c.smallest_bound) {
    r.add("lower_bound", str_cat("at least ", c.smallest_bound), a.lower_bound);
  }
  if (a.num_value_heads != a.num_heads && !c.grouped_heads) {
    r.add("grouped_heads", "HV/H = 1", str_cat("HV/H = ", a.num_value_heads / a.num_heads));
  }
  if (a.allow_neg_eigval != 0 && !c.neg_eigval) r.add("neg_eigval", "beta up to 1", "beta up to 2");
}

void check_prefill(const PrefillCapability& c, const kda_prefill_desc& d, const Context& context, Refusals& r) {
  check_device(context, r);
  check_attention(c.attention, d.attention, r);
  if (c.max_checkpoints >= 0 && d.max_checkpoints > c.max_checkpoints) {
    r.add("checkpoints", str_cat("at most ", c.max_checkpoints, " a sequence"), d.max_checkpoints);
  }
  check_blocks(d.max_sequences, d.attention.num_value_heads, 16, r);
  if (d.example == nullptr) return;
  check_rows("q", d.example->q, c, r);
  check_rows("k", d.example->k, c, r);
  check_rows("v", d.example->v, c, r);
  check_rows("gate", d.example->gate, c, r);
  check_rows("out", d.example->out, c, r);
}

void check_segment_summary(const PrefillCapability& c, const kda_prefill_desc& d, const Context& context,
                           Refusals& r) {
  kda_prefill_desc ours = d;
  ours.max_checkpoints = 0;
  ours.attention.out_dtype = d.attention.io_dtype;
  ours.attention.state_dtype = KDA_FP32;
  kda_prefill_args inputs{};
  if (d.example != nullptr) inputs.k = d.example->k, inputs.v = d.example->v, inputs.gate = d.example->gate;
  ours.example = &inputs;
  check_prefill(c, ours, context, r);
}

void check_segment_merge(const kda_segment_merge_desc& d, const Context& context, Refusals& r) {
  check_device(context, r);
  if (!kAnyDim.has(d.key_dim) || !kAnyDim.has(d.value_dim)) {
    r.add("head_dim", str_cat("K ", kAnyDim.text(), ", V ", kAnyDim.text()),
          str_cat("K ", d.key_dim, ", V ", d.value_dim));
  }
  check_blocks(1, d.num_value_heads, kMaxHeadDim / 8, r);
}

void check_decode(const AttentionCapability& c, const kda_decode_desc& d, const Context& context, Refusals& r) {
  check_device(context, r);
  check_attention(c, d.attention, r);
  check_blocks(d.max_sequences, d.attention.num_value_heads, 16, r);
  if (d.max_tokens > kMaxBlocks) r.add("size", str_cat("max_tokens <= ", kMaxBlocks), d.max_tokens);
}

void check_commit(const AttentionCapability& c, const kda_commit_desc& d, const Context& context, Refusals& r) {
  check_device(context, r);
  check_attention(c, d.attention, r);
  check_blocks(d.max_sequences, d.attention.num_value_heads, 16, r);
}

void check_decode_step(const AttentionCapability& c, bool one_launch, const kda_decode_step_desc& d,
                       const Context& context, Refusals& r) {
  check_decode(c, d.decode, context, r);
  const kda_attention_spec& a = d.decode.attention;
  const int64_t qk = checked_product({2, a.num_heads, a.key_dim}).value_or(INT64_MAX);
  check_channels(checked_add(qk, a.num_value_heads * a.value_dim).value_or(INT64_MAX), r);
  if (!one_launch) return;
  constexpr int64_t kCluster = 8;  // blocks
  if (d.conv_width != 4) r.add("layout", "conv width 4", str_cat("conv width ", d.conv_width));
  if (a.num_value_heads / a.num_heads > kCluster) {
    r.add("grouped_heads", str_cat("HV/H <= ", kCluster), str_cat("HV/H = ", a.num_value_heads / a.num_heads));
  }
}

void check_conv(const kda_conv_desc& d, const Context& context, Refusals& r) {
  check_device(context, r);
  check_dtype("io_dtype", kFloats, d.out_dtype, r);
  int64_t channels = 0;
  for (int i = 0; i < d.parts; ++i) channels = checked_add(channels, d.channels[i]).value_or(INT64_MAX);
  const auto blocks =
      checked_product({checked_add(d.max_sequences, d.max_tokens).value_or(INT64_MAX), channels / 64 + 3});
  if (!blocks || *blocks > kMaxBlocks) {
    r.add("size", str_cat("(max_sequences + max_tokens) * channels / 64 <= ", kMaxBlocks),
          str_cat("(", d.max_sequences, " + ", d.max_tokens, ") * ", channels, " / 64"));
  }
  check_channels(channels, r);
}

void check_residual_norm(const kda_residual_norm_desc& d, const Context& context, Refusals& r) {
  check_device(context, r);
  check_dtype("io_dtype", kFloats, d.out_dtype, r);
  if (d.max_tokens > kMaxBlocks) r.add("size", str_cat("max_tokens <= ", kMaxBlocks), d.max_tokens);
}

void check_gated_norm(const kda_gated_norm_desc& d, const Context& context, Refusals& r) {
  check_device(context, r);
  check_dtype("io_dtype", kFloats, d.out_dtype, r);
  constexpr int64_t kMost = 1024;
  if (d.value_dim > kMost) r.add("head_dim", str_cat("V 1 to ", kMost), str_cat("V ", d.value_dim));
  constexpr int64_t kMostRows = kMaxBlocks - 32;  // numbered in 32 bits up to the end of the last block
  const auto rows = checked_mul(d.max_tokens, d.num_value_heads);
  if (!rows || *rows > kMostRows) {
    r.add("size", str_cat("max_tokens * num_value_heads <= ", kMostRows),
          str_cat(d.max_tokens, " * ", d.num_value_heads));
  }
}

}  // namespace kda::cuda
