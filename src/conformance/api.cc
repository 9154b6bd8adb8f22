#include "conformance/api.h"

#include <cstdint>
#include <cstring>
#include <map>

namespace kda::conformance {
namespace {

constexpr size_t kAlign = KDA_WORKSPACE_ALIGNMENT, kGuard = 4096;
constexpr unsigned char kPattern = 0xff;  // NaN in every float format

bool names_device(const char* backend) { return backend != nullptr && std::strncmp(backend, "cuda_", 5) == 0; }

// The context that a description's backend name means, and the name without the device.
kda_context* or_default(kda_context* context, const char*& backend) {
  if (context != nullptr) return context;
  if (!names_device(backend)) return cpu_context();
  backend += 5;
  return device_context();
}

template <class Desc>
const char*& backend_of(Desc& desc) {
  if constexpr (requires { desc.backend; }) return desc.backend;
  else return desc.decode.backend;
}

template <class Desc>
Plan make(kda_status (*create)(kda_context*, const Desc*, kda_plan**), kda_context* context, Desc desc) {
  const char*& backend = backend_of(desc);
  context = or_default(context, backend);
  // The oracle has no device.
  if (memory_of(context) != nullptr && backend != nullptr && std::strcmp(backend, "reference") == 0)
    context = cpu_context();
  return Plan(create, context, desc);
}

}  // namespace

kda_context* cpu_context(int threads) {
  static std::map<int, std::shared_ptr<kda_context>> contexts;
  auto& context = contexts[threads];
  if (!context) {
    auto options = sized<kda_context_options>();
    options.num_threads = threads;
    kda_context* made = nullptr;
    if (kda_context_create(&options, &made) != KDA_OK) return nullptr;
    context.reset(made, kda_context_destroy);
  }
  return context.get();
}

Lent::Lent(size_t bytes) : bytes_(bytes), memory_(bytes + 2 * kGuard + kAlign, kPattern) {
  const auto base = reinterpret_cast<uintptr_t>(memory_.data()) + kGuard;
  first_ = kGuard + (kAlign - base % kAlign) % kAlign;
}

kda_workspace Lent::workspace() { return {memory_.data() + first_, bytes_}; }

bool Lent::intact() const {
  for (size_t i = 0; i < first_; ++i) {
    if (memory_[i] != kPattern) return false;
  }
  for (size_t i = first_ + bytes_; i < memory_.size(); ++i) {
    if (memory_[i] != kPattern) return false;
  }
  return true;
}

size_t Plan::workspace_bytes() const {
  size_t bytes = 0;
  if (ok()) (void)kda_plan_workspace_size(plan_.get(), &bytes);
  return bytes;
}

Plan make_plan(const kda_prefill_desc& desc, kda_context* c) { return make(kda_prefill_plan_create, c, desc); }
Plan make_plan(const kda_decode_desc& desc, kda_context* c) { return make(kda_decode_plan_create, c, desc); }
Plan make_plan(const kda_commit_desc& desc, kda_context* c) { return make(kda_commit_plan_create, c, desc); }
Plan make_plan(const kda_decode_step_desc& desc, kda_context* c) {
  return make(kda_decode_step_plan_create, c, desc);
}
Plan make_plan(const kda_conv_desc& desc, kda_context* c) { return make(kda_conv_plan_create, c, desc); }
Plan make_plan(const kda_residual_norm_desc& desc, kda_context* c) {
  return make(kda_residual_norm_plan_create, c, desc);
}
Plan make_plan(const kda_gated_norm_desc& desc, kda_context* c) { return make(kda_gated_norm_plan_create, c, desc); }
Plan make_plan(const kda_segment_merge_desc& desc, kda_context* c) {
  return make(kda_segment_merge_plan_create, c, desc);
}
Plan make_summary_plan(const kda_prefill_desc& desc, kda_context* c) {
  return make(kda_segment_summary_plan_create, c, desc);
}

kda_prefill_desc prefill_desc(const Problem& p, const char* backend) {
  kda_prefill_desc d;
  kda_prefill_desc_init(&d);
  d.attention = p.spec;
  d.backend = backend;
  d.max_tokens = p.tokens();
  d.max_sequences = p.sequences();
  d.initial_state = p.state.present() ? KDA_INITIAL_ALL : KDA_INITIAL_NONE;
  return d;
}

kda_decode_desc decode_desc(const Problem& p, const char* backend, int32_t width) {
  kda_decode_desc d;
  kda_decode_desc_init(&d);
  d.attention = p.spec;
  d.backend = backend;
  d.max_tokens = p.tokens();
  d.max_sequences = p.sequences();
  d.width = width;
  return d;
}

template <class Args>
static Args token_args(const Problem& p) {
  auto a = sized<Args>();
  a.q = p.q;
  a.k = p.k;
  a.v = p.v;
  a.gate = p.gate;
  a.beta = p.beta;
  a.A_log = p.A_log;
  a.dt_bias = p.dt_bias;
  return a;
}

kda_prefill_args prefill_args(const Problem& p) { return token_args<kda_prefill_args>(p); }
kda_decode_args decode_args(const Problem& p) { return token_args<kda_decode_args>(p); }

Outcome prefill(const Problem& p, const PrefillOptions& options) {
  kda_prefill_desc d = prefill_desc(p, options.backend);
  d.flags = options.flags;
  d.attention.out_dtype = options.out_dtype;
  if (options.state_dtype != KDA_DTYPE_NONE) d.attention.state_dtype = options.state_dtype;
  const kda_attention_spec& a = d.attention;
  const int64_t HV = a.num_value_heads ? a.num_value_heads : a.num_heads;
  const kda_dtype state_dtype = a.state_dtype ? a.state_dtype : KDA_FP32;

  Outcome r;
  r.out = Tensor(a.out_dtype ? a.out_dtype : p.q.dtype(), {p.tokens(), HV, a.value_dim});
  r.state = Tensor(state_dtype, {p.sequences(), HV, a.value_dim, a.key_dim});
  const Tensor offsets = Tensor::ints(p.offsets());
  const Tensor initial = p.state.present() ? p.state.copy(state_dtype) : Tensor();
  kda_prefill_args args = prefill_args(p);
  args.sequences.cu_seqlens = offsets;
  args.state = initial;
  args.final_state = r.state;
  args.out = r.out;
  Plan plan = make_plan(d, options.context);
  r.status = plan.run(args);
  if (r.status != KDA_OK) r.message = plan.message();
  return r;
}

Outcome oracle(const Problem& p) {
  PrefillOptions options;
  options.out_dtype = options.state_dtype = KDA_FP64;
  return prefill(p, options);
}

}  // namespace kda::conformance
