// Prefill plans on CUDA: the tensor-core kernel of K = V = 128.
#include "cuda/host/prefill_fused.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "base/log.h"
#include "base/tensor.h"
#include "core/operators.h"
#include "core/select.h"
#include "cuda/host/candidate.h"
#include "cuda/host/candidates.h"
#include "cuda/host/error.h"
#include "cuda/host/gates.h"
#include "cuda/kernels/prefill_fused/choose.h"

namespace kda::cuda {
namespace {

namespace fused = prefill_fused;

fused::Real to_real(kda_dtype dtype) {
  if (dtype == KDA_BF16) return fused::Real::kBf16;
  if (dtype == KDA_FP16) return fused::Real::kF16;
  return fused::Real::kF32;
}

fused::Gate to_gate(kda_gate_family family) {
  if (family == KDA_GATE_BOUNDED) return fused::Gate::kBounded;
  return family == KDA_GATE_SOFTPLUS ? fused::Gate::kSoftplus : fused::Gate::kPlain;
}

fused::Initial to_initial(kda_initial_state initial) {
  if (initial == KDA_INITIAL_ALL) return fused::Initial::kAll;
  return initial == KDA_INITIAL_FLAGS ? fused::Initial::kFlags : fused::Initial::kNone;
}

fused::Indices to_indices(const kda_tensor& t) {
  if (!present(t)) return {};
  return {t.data, t.strides[0], t.dtype == KDA_INT64};
}

fused::Table to_table(const kda_tensor& t) {
  if (!present(t)) return {};
  return {t.data, t.strides[0], t.strides[1], t.dtype == KDA_INT64};
}

// `row_dims`: rank without the samples.
fused::Rows to_rows(const kda_tensor& t, int row_dims) {
  const int batched = t.rank > row_dims ? 1 : 0;
  return {batched ? t.strides[0] : 0, t.strides[batched], t.strides[batched + 1]};
}

}  // namespace

Status check_fused_rows(const char* name, const kda_tensor& t) {
  const auto size = static_cast<int64_t>(dtype_size(t.dtype));
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) {
    return unsupported("layout: wanted ", name, " at a multiple of 16 bytes, got an address that is none");
  }
  for (int i = 0; i + 1 < t.rank; ++i) {
    if (t.shape[i] <= 1 || t.strides[i] * size % 16 == 0) continue;
    return unsupported("layout: wanted ", name, " with stride(", i, ") of a multiple of 16 bytes, got ",
                       t.strides[i] * size, " bytes");
  }
  const int64_t row = t.strides[t.rank - 3] * size;
  if (row <= kFusedPrefillRowBytes) return {};
  return unsupported("layout: wanted ", name, " with rows at most ", kFusedPrefillRowBytes, " bytes apart, got ",
                     row);
}

void fill_fused_tokens(const kda_attention_spec& a, const FusedTokens& x, fused::Params& p) {
  p.q = x.q.data, p.q_rows = to_rows(x.q, 3);
  p.k = x.k.data, p.k_rows = to_rows(x.k, 3);
  p.v = x.v.data, p.v_rows = to_rows(x.v, 3);
  p.gate = x.gate.data, p.gate_rows = to_rows(x.gate, 3);
  p.beta = x.beta.data, p.beta_rows = to_rows(x.beta, 2);
  p.beta_type = to_real(a.beta_dtype);
  p.beta_is_logit = a.beta_form == KDA_BETA_LOGITS;
  p.beta_factor = a.allow_neg_eigval != 0 ? 2.0f : 1.0f;
  p.a_log = static_cast<const float*>(x.A_log.data);
  p.dt_bias = static_cast<const float*>(x.dt_bias.data);
  p.lower_bound = static_cast<float>(a.lower_bound);
  p.scale = static_cast<float>(a.scale);
  p.normalize = a.no_qk_norm == 0;
  p.heads = static_cast<int32_t>(a.num_heads);
  p.value_heads = static_cast<int32_t>(a.num_value_heads);
}

void fill_fused_sequences(const kda_sequences& s, const kda_tensor& token, fused::Params& p) {
  const bool batched = token.rank > 3;
  p.cu_seqlens = to_indices(s.cu_seqlens);
  p.begin = to_indices(s.begin);
  p.length = to_indices(s.length);
  p.num_active = static_cast<const int32_t*>(s.num_active.data);
  p.tokens = token.shape[batched ? 1 : 0];
  p.sequences = batched ? token.shape[0] : 1;
  if (present(s.cu_seqlens)) p.sequences = s.cu_seqlens.shape[0] - 1;
  else if (present(s.begin)) p.sequences = s.begin.shape[0];
}

Status give_stages(const kda_tensor& stages, fused::Params& p) {
  if (!fused::may_be_staged(p)) {
    return unsupported("stages: wanted at most ", fused::kMostTabledSequences, " sequences, got ", p.sequences);
  }
  const int64_t bytes = fused::staged_workspace(fused::staged_positions(p), p.value_heads);
  if (stages.shape[0] < bytes) {
    return invalid_argument("stages: wanted ", bytes, " bytes, got ", stages.shape[0]);
  }
  p.stages = stages.data;
  return {};
}

fused::Diagonal diagonal_of(const kda_attention_spec& a) {
  return fused::diagonal_for(to_gate(a.gate_family), static_cast<float>(a.lower_bound), a.no_qk_norm == 0);
}

Status prepare_fused(const kda_attention_spec& a) {
  return to_status(fused::prepare_prefill_fused(to_gate(a.gate_family), to_real(a.gate_dtype), diagonal_of(a)),
                   "prefill_fused_kernel");
}

Status launch_fused(const fused::Params& p, const kda_attention_spec& a, int32_t device, int32_t multiprocessors,
                    void* stream) {
  const DeviceGuard guard(device);
  KDA_RETURN_IF_ERROR(guard.status());
  const cudaError_t error = fused::launch_prefill_fused(p, to_gate(a.gate_family), to_real(a.gate_dtype),
                                                        multiprocessors, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) (void)cudaGetLastError();  // reported here; not left for the caller's next call
  return to_status(error, "prefill_fused_kernel");
}

namespace {

Status check_layout(const kda_prefill_args& args) {
  KDA_RETURN_IF_ERROR(check_fused_rows("q", args.q));
  KDA_RETURN_IF_ERROR(check_fused_rows("k", args.k));
  KDA_RETURN_IF_ERROR(check_fused_rows("v", args.v));
  KDA_RETURN_IF_ERROR(check_fused_rows("gate", args.gate));
  return check_fused_rows("out", args.out);
}

class FusedPrefillKernel final : public Kernel<Prefill> {
 public:
  FusedPrefillKernel(const kda_prefill_desc& desc, const Context& context)
      : desc_(desc),
        device_(context.device.index),
        multiprocessors_(context.facts.multiprocessors),
        diagonal_(diagonal_of(desc.attention)),
        says_forms_(is_verbose()) {}

  Status prepare() const { return prepare_fused(desc_.attention); }

  // For runs whose rows this kernel cannot load, in plans that did not ask for it by name.
  void set_fallback(std::unique_ptr<Kernel<Prefill>> kernel) { fallback_ = std::move(kernel); }

  // Books the stages or what clusters leave to one another, and the segment space (S-6, S-8), for every run that
  // these bounds allow.
  void book_space(WorkspaceBook& book) {
    const int64_t most = std::min(desc_.max_sequences, fused::kMostTabledSequences);
    for (int64_t n = 1; n <= most; ++n) {
      for (int64_t tokens = desc_.max_tokens; tokens >= 1; tokens -= (tokens + 3) / 4) {
        const Space wanted = space(n, tokens, false);
        // How a sequence is cut changes with its length, and not by size: the most that any cut takes.
        if (wanted.segment_bytes > 0)
          booked_.segment_bytes =
              std::max(booked_.segment_bytes, fused::most_segment_matrices(n * desc_.attention.num_value_heads) *
                                                  fused::kSegmentMatrixBytes);
        booked_.scratch_bytes = std::max(booked_.scratch_bytes, wanted.scratch_bytes);
      }
    }
    const bool may_balance = desc_.max_checkpoints == 0 &&
                             most * desc_.attention.num_value_heads > fused::fused_clusters(multiprocessors_);
    if (may_balance)
      booked_.scratch_bytes = std::max(booked_.scratch_bytes, fused::balance_workspace(multiprocessors_));
    if (booked_.segment_bytes > 0) segment_section_ = book.book_bytes("segments", booked_.segment_bytes);
    if (booked_.scratch_bytes > 0) scratch_section_ = book.book_bytes("scratch", booked_.scratch_bytes);
  }

  Status run(const kda_prefill_args& args, const WorkspaceGrant& workspace, void* stream) const override {
    const Status layout = check_layout(args);
    if (!layout.ok()) return fallback_ ? fallback_->run(args, workspace, stream) : layout;
    fused::Params p;
    fill_tokens(args, p);
    fill_fused_sequences(args.sequences, args.q, p);
    fill_states(args, p);
    fill_checkpoints(args, p);
    const int64_t tokens = args.q.rank > 3 ? p.tokens * p.sequences : p.tokens;
    const Space wanted = space(p.sequences, tokens, args.q.rank > 3);
    if (wanted.segment_bytes <= booked_.segment_bytes && wanted.scratch_bytes <= booked_.scratch_bytes) {
      p.cut = wanted.form.cut, p.wave = wanted.form.wave, p.prepare_ctas = wanted.form.prepare_ctas;
      if (wanted.segment_bytes > 0) p.segment_space = workspace.get<float>(segment_section_);
      if (wanted.form.is_staged) p.stages = workspace.get<char>(scratch_section_);
      if (wanted.form.is_balanced) p.balance_space = workspace.get<float>(scratch_section_);
    }
    if (present(args.stages) && fused::may_be_staged(p)) {
      p.cut = {}, p.wave = 0, p.stages_are_ready = 1, p.balance_space = nullptr;
      KDA_RETURN_IF_ERROR(give_stages(args.stages, p));
    }
    if (says_forms_) say_form(p, tokens);
    return launch_fused(p, desc_.attention, device_, multiprocessors_, stream);
  }

 private:
  // With KDA_VERBOSE, which form a run takes, where it is another than the last one's.
  void say_form(const fused::Params& p, int64_t tokens) const {
    const int form = 8 * p.cut.segments + (p.stages != nullptr ? 1 : 0) + (p.wave > 0 ? 2 : 0) +
                     (p.balance_space != nullptr ? 4 : 0);
    if (said_form_.exchange(form) == form) return;
    std::string text = "prefill fused: " + std::to_string(p.sequences) + " sequences, " + std::to_string(tokens) +
                       " tokens, " + std::to_string(p.value_heads) + " value heads: ";
    text += p.stages != nullptr ? "staged" : "fused in one kernel";
    if (p.balance_space != nullptr) text += ", works shared out by time";
    if (p.wave > 0 && p.prepare_ctas < multiprocessors_) text += ", chains beside their preparation";
    if (p.cut.segments > 1) text += ", at most " + std::to_string(p.cut.segments) + " segments a sequence";
    log_message(KDA_LOG_INFO, text);
  }

  // What a run of this size wants of the workspace; nothing where there are checkpoints, which the fused form serves.
  struct Space {
    fused::Form form;
    int64_t segment_bytes = 0, scratch_bytes = 0;
  };
  Space space(int64_t sequences, int64_t tokens, bool is_even) const {
    Space space;
    if (desc_.max_checkpoints > 0) return space;
    const bool may_cut = desc_.segments != KDA_SEGMENTS_OFF && (desc_.flags & KDA_PLAN_BATCH_INVARIANT) == 0;
    const auto heads = static_cast<int32_t>(desc_.attention.num_value_heads);
    space.form = fused::choose_form({sequences, heads, tokens, multiprocessors_, may_cut,
                                     sequences <= fused::kMostTabledSequences, diagonal_, is_even});
    space.segment_bytes = fused::prefill_fused_workspace(sequences, heads, space.form.cut);
    if (space.form.is_staged)
      space.scratch_bytes = fused::staged_workspace(fused::staged_positions(sequences, tokens), heads);
    if (space.form.is_balanced) space.scratch_bytes = fused::balance_workspace(multiprocessors_);
    return space;
  }

  void fill_tokens(const kda_prefill_args& args, fused::Params& p) const {
    fill_fused_tokens(desc_.attention, {args.q, args.k, args.v, args.gate, args.beta, args.A_log, args.dt_bias}, p);
    p.out = args.out.data, p.out_rows = to_rows(args.out, 3);
    p.out_row_of = to_indices(args.out_rows);
    p.out_row_count = args.out.shape[args.out.rank > 3 ? 1 : 0];
  }

  void fill_states(const kda_prefill_args& args, fused::Params& p) const {
    p.initial = to_initial(desc_.initial_state);
    p.null_slot = desc_.null_slot;
    p.slots = to_indices(args.slots);
    p.write_slots = to_indices(args.write_slots);
    p.has_initial = static_cast<const uint8_t*>(args.has_initial_state.data);
    if (present(args.has_initial_state)) p.has_initial_stride = args.has_initial_state.strides[0];
    if (present(args.state)) {
      p.state_in = args.state.data;
      p.state_in_type = to_real(args.state.dtype);
      p.state_in_stride = args.state.strides[0];
      p.state_in_slots = args.state.shape[0];
    }
    if (args.no_final_state != 0) return;
    p.state_out_is_packed = present(args.final_state);
    const kda_tensor& to = p.state_out_is_packed ? args.final_state : args.state;
    if (!present(to)) return;
    p.state_out = to.data;
    p.state_out_type = to_real(to.dtype);
    p.state_out_stride = to.strides[0];
    p.state_out_slots = to.shape[0];
  }

  static void fill_checkpoints(const kda_prefill_args& args, fused::Params& p) {
    if (!present(args.checkpoint_offsets)) return;
    p.checkpoints = static_cast<int32_t>(args.checkpoint_offsets.shape[1]);
    p.checkpoint_offsets = to_table(args.checkpoint_offsets);
    p.checkpoint_slots = to_table(args.checkpoint_slots);
    const bool paged = present(args.checkpoint_slots);
    const kda_tensor& to = paged ? args.state : args.checkpoint_states;
    p.checkpoint_out = to.data;
    p.checkpoint_type = to_real(to.dtype);
    if (paged) {
      p.checkpoint_slot_count = to.shape[0];
      p.checkpoint_stride = to.strides[0];
    } else {
      p.checkpoint_row_stride = to.strides[0];
      p.checkpoint_stride = to.strides[1];
    }
  }

  kda_prefill_desc desc_;
  int32_t device_, multiprocessors_;
  fused::Diagonal diagonal_;
  bool says_forms_;
  mutable std::atomic<int> said_form_{0};
  std::unique_ptr<Kernel<Prefill>> fallback_;
  Space booked_;
  WorkspaceBook::Id segment_section_{}, scratch_section_{};
};

Result<std::unique_ptr<Kernel<Prefill>>> create(const kda_prefill_desc& desc, const Context& context,
                                                WorkspaceBook& book) {
  auto kernel = std::make_unique<FusedPrefillKernel>(desc, context);
  kernel->book_space(book);
  KDA_RETURN_IF_ERROR(kernel->prepare());
  auto request = requested_backend(Prefill::kOp, desc.backend, Prefill::kEnvironment);
  if (!request.ok()) return request.status();
  if (request.value().name == "auto") {
    WorkspaceBook none;  // the portable kernel books nothing
    auto portable = portable_prefill()->create(desc, context, none);
    if (!portable.ok()) return portable.status();
    kernel->set_fallback(std::move(portable.value()));
  }
  return std::unique_ptr<Kernel<Prefill>>(std::move(kernel));
}

}  // namespace

const Candidate<Prefill>* fused_prefill() {
  static const CudaCandidate<Prefill> candidate(
      "fused", [](const auto& d, const auto& c, auto& r) { check_prefill(kFusedPrefill, d, c, r); }, create);
  return &candidate;
}

}  // namespace kda::cuda
