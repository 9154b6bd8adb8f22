// What the CUDA candidates can serve, as plain tables, and the gates of spec R-9 that compare a problem with them.
// No CUDA header is needed: this part is in every build, so that the resolver can be tested with a made-up device.
#pragma once

#include <initializer_list>
#include <string>

#include "core/backend.h"

namespace kda::cuda {

class DtypeSet {
 public:
  constexpr DtypeSet(std::initializer_list<kda_dtype> dtypes) {
    for (kda_dtype d : dtypes) bits_ |= 1u << d;
  }
  constexpr bool has(kda_dtype d) const { return (bits_ >> d & 1u) != 0; }
  std::string text() const;  // "fp32, bf16"

 private:
  uint32_t bits_ = 0;
};

// Head dimensions: exactly one size, or any up to a limit.
struct DimRule {
  int64_t exact = 0;  // 0: any
  int64_t most = 0;
  constexpr bool has(int64_t dim) const { return exact != 0 ? dim == exact : dim >= 1 && dim <= most; }
  std::string text() const;  // "128" or "1 to 256"
};

struct AttentionCapability {
  DimRule key, value;
  DtypeSet io, gate, beta, state;
  bool softplus = true, bounded = true, plain = true;
  double smallest_bound = 0;  // 0: any; else lower bounds below it are refused
  bool grouped_heads = true, neg_eigval = true;
};

struct PrefillCapability {
  AttentionCapability attention;
  int64_t max_checkpoints = 0;  // -1: any number
  int64_t row_alignment = 1;    // bytes that every row of q, k, v, gate and out must start at
  int64_t row_bytes = 0;        // most from a row to the next; 0: any
};

// 32 rows, which the fused kernel addresses from one base, lie within 4 GiB.
constexpr int64_t kFusedPrefillRowBytes = (int64_t{1} << 32) / 32 - 1;

extern const PrefillCapability kFusedPrefill;     // tensor cores
extern const PrefillCapability kPortablePrefill;  // any shape
extern const AttentionCapability kFusedDecode;    // decode, commit and decode_step with K = V = 128
extern const AttentionCapability kPortableDecode;

constexpr int64_t kMaxHeadDim = 256;        // K and V of every CUDA operator
constexpr int64_t kMaxBlocks = 0x7fffffff;  // of one launch

// Machine code for a device of this compute capability is in the library.
bool has_device_image(const DeviceFacts& facts);
std::string device_images();  // "9.0"

// `no_device_image` and `driver`; nothing on a context of another kind, which `device_type` refuses already.
void check_device(const Context& context, Refusals& refusals);

void check_attention(const AttentionCapability& capability, const kda_attention_spec& spec, Refusals& refusals);
void check_prefill(const PrefillCapability& capability, const kda_prefill_desc& desc, const Context& context,
                   Refusals& refusals);
// The same without states and checkpoints.
void check_segment_summary(const PrefillCapability& capability, const kda_prefill_desc& desc, const Context& context,
                           Refusals& refusals);
void check_segment_merge(const kda_segment_merge_desc& desc, const Context& context, Refusals& refusals);
void check_decode(const AttentionCapability& capability, const kda_decode_desc& desc, const Context& context,
                  Refusals& refusals);
void check_commit(const AttentionCapability& capability, const kda_commit_desc& desc, const Context& context,
                  Refusals& refusals);
// `one_launch`: the fused kernel, which has W = 4 and holds the value heads of a query head in one cluster.
void check_decode_step(const AttentionCapability& capability, bool one_launch, const kda_decode_step_desc& desc,
                       const Context& context, Refusals& refusals);
void check_conv(const kda_conv_desc& desc, const Context& context, Refusals& refusals);
void check_gated_norm(const kda_gated_norm_desc& desc, const Context& context, Refusals& refusals);
void check_residual_norm(const kda_residual_norm_desc& desc, const Context& context, Refusals& refusals);

}  // namespace kda::cuda
