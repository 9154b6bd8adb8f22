// Decode, verify, verify_record and commit plans on CUDA.
#include "base/checked.h"
#include "base/tensor.h"
#include "cuda/host/candidate.h"
#include "cuda/host/candidates.h"
#include "cuda/host/decode_lean.h"
#include "cuda/host/gates.h"
#include "cuda/host/launch.h"
#include "cuda/host/recurrence.h"
#include "cuda/host/views.h"
#include "cuda/kernels/decode/launch.h"

namespace kda::cuda {
namespace {

constexpr int32_t kMaskedChunk = 8;                // tokens at a time of rows of any length
constexpr int64_t kFewHeads = 33;                  // of all rows, states of 4 bytes: measured at 12 and 32
constexpr int64_t kManyBytes = 200 * 1000 * 1000;  // of states: several times the L2 (measured, decode.md)

class DecodeKernel final : public Kernel<Decode> {
 public:
  DecodeKernel(const kda_decode_desc& desc, const Context& context, bool exact)
      : desc_(desc), device_(context.device.index), multiprocessors_(context.facts.multiprocessors), exact_(exact) {}

  Status prepare() {
    const Flow flow = records() ? Flow::kRecords : Flow::kColumns;
    const Dtype pool = to_dtype(desc_.attention.state_dtype);
    masked_ = decode_kernel_info(pool, masked_shape(desc_.attention), flow);
    tuned_ = exact_ ? decode_kernel_info(pool, Shape::kExact128, flow) : masked_;
    const LeanCall call = records() ? LeanCall::kRecords : desc_.width > 1 ? LeanCall::kWindow : LeanCall::kToken;
    lean_ = exact_ ? lean_kernel_info(pool, call) : masked_;
    lean_of_many_ = lean_of_few_ = lean_;
    if (exact_ && call == LeanCall::kToken) {
      lean_of_few_ = lean_kernel_info(pool, LeanCall::kTokenOfFew);
      lean_of_many_ = lean_kernel_info(pool, LeanCall::kTokenOfMany);
    }
    if (exact_ && call == LeanCall::kRecords) lean_of_many_ = lean_kernel_info(pool, LeanCall::kRecordsOfMany);
    counts_ = set_counts_kernel_info();
    for (const KernelInfo* k : {&masked_, &tuned_, &lean_, &lean_of_few_, &lean_of_many_}) {
      KDA_RETURN_IF_ERROR(prepare_kernel(k->function, k->name, shared_bytes(*k)));
    }
    return prepare_kernel(counts_.function, counts_.name);
  }

  Status run(const kda_decode_args& args, const WorkspaceGrant&, void* stream) const override {
    DecodeParams p;
    fill_decode_params(desc_, args, args.q, 3, p);
    p.q = to_token(args.q, 3);
    p.k = to_token(args.k, 3);
    p.v = to_token(args.v, 3);
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    KDA_RETURN_IF_ERROR(run_states(p, stream));
    if (!records()) return {};
    return launch(counts_, {(p.sequences.count + counts_.threads - 1) / counts_.threads}, p, stream);
  }

 private:
  bool records() const { return desc_.mode == KDA_DECODE_RECORDS; }

  Status run_states(DecodeParams& p, void* stream) const {
    const auto element = static_cast<int64_t>(dtype_size(desc_.attention.state_dtype));
    if (exact_ && records()) {
      if (auto call = lean_record_call(p, element)) return run_lean(*call, call->call, stream);
    } else if (exact_) {
      if (auto call = lean_call(p, element)) return run_lean(*call, *call, stream);
    }
    // The tuned kernels prepare all tokens of a row at once: longer rows (store = final) run in the masked one.
    const bool short_rows = records() || desc_.store == KDA_STORE_PER_TOKEN || p.sequences.tokens <= KDA_MAX_VERIFY;
    const KernelInfo& kernel = p.vectors && short_rows ? tuned_ : masked_;
    p.split = split_head(int64_t{p.sequences.count} * p.form.value_heads, p.form.values, kernel.warp_rows,
                         kernel.threads / 32, multiprocessors_);
    p.split.chunk = tokens(kernel);
    LaunchShape shape;
    if (&kernel == &tuned_ && exact_ && !records()) {
      p.split.wave = int64_t{blocks_at_once(kernel, shared_bytes(kernel))} * multiprocessors_;
      // 32-bit states: many short blocks mix reads and writes better than few long ones (decode.md).
      if (dtype_size(desc_.attention.state_dtype) < 4) {
        p.split.heads = heads_of_block(p.sequences.count, p.form.value_heads, p.split.slices, p.split.wave);
      }
    }
    shape.x = ceil_div(p.form.value_heads, p.split.heads) * p.split.slices;
    shape.rest = p.sequences.count;
    shape.cluster = records() ? p.split.slices : 1;
    p.split.clustered = shape.cluster > 1;
    shape.shared_bytes = shared_bytes(kernel);
    return launch(kernel, shape, p, stream);
  }

  // `call` is, or is a part of, `params`.
  template <class Params>
  Status run_lean(Params& params, LeanParams& call, void* stream) const {
    const int64_t heads = int64_t{call.sequences} * desc_.attention.num_value_heads;
    const auto element = static_cast<int64_t>(dtype_size(desc_.attention.state_dtype));
    const bool few = heads <= kFewHeads;
    const KernelInfo& kernel = few ? lean_of_few_ : heads * 128 * 128 * element > kManyBytes ? lean_of_many_ : lean_;
    LaunchShape shape;
    shape.x = desc_.attention.num_value_heads * (128 / (kernel.warp_rows * kernel.threads / 32));
    shape.rest = call.sequences;
    shape.shared_bytes = shared_bytes(kernel);
    call.wave = blocks_at_once(kernel, shape.shared_bytes) * multiprocessors_;
    // Long calls of 32-bit states and single warps lose by asking: the grid before still needs the memory.
    call.asks = records() || element < 4 || shape.x * shape.rest <= call.wave;
    return launch(kernel, shape, params, stream);
  }

  // Tokens that a block prepares at once, and has shared memory for.
  int32_t tokens(const KernelInfo& kernel) const {
    if (records()) return desc_.fold ? 2 * desc_.width : desc_.width;
    if (desc_.store == KDA_STORE_PER_TOKEN) return desc_.width;
    return kernel.function == masked_.function ? kMaskedChunk : KDA_MAX_VERIFY;
  }

  int32_t shared_bytes(const KernelInfo& kernel) const {
    return kernel.block_bytes + tokens(kernel) * kernel.token_bytes;
  }

  kda_decode_desc desc_;
  int32_t device_, multiprocessors_;
  bool exact_;
  KernelInfo lean_, lean_of_few_, lean_of_many_, tuned_, masked_, counts_;
};

class CommitKernel final : public Kernel<Commit> {
 public:
  CommitKernel(const kda_commit_desc& desc, const Context& context, bool exact)
      : desc_(desc), device_(context.device.index), multiprocessors_(context.facts.multiprocessors), exact_(exact) {}

  Status prepare() {
    const Dtype pool = to_dtype(desc_.attention.state_dtype);
    masked_ = decode_kernel_info(pool, masked_shape(desc_.attention), Flow::kCommit);
    tuned_ = exact_ ? decode_kernel_info(pool, Shape::kExact128, Flow::kCommit) : masked_;
    lean_ = exact_ ? lean_kernel_info(pool, LeanCall::kRecords) : masked_;
    end_ = end_commit_kernel_info();
    for (const KernelInfo* k : {&masked_, &tuned_, &lean_}) {
      KDA_RETURN_IF_ERROR(prepare_kernel(k->function, k->name, shared_bytes(*k)));
    }
    return prepare_kernel(end_.function, end_.name);
  }

  Status run(const kda_commit_args& args, const WorkspaceGrant&, void* stream) const override {
    CommitParams p;
    p.form = to_form(desc_.attention);
    p.slots = to_slots(args.slots, {}, {}, args.state.shape[0], desc_.null_slot, KDA_INITIAL_ALL);
    p.accepted = int32_data(args.accepted);
    p.accepted_stride = stride_of(args.accepted);
    p.num_active = int32_data(args.num_active);
    p.sequences = static_cast<int32_t>(args.slots.shape[0]);
    p.width = desc_.width;
    p.gate_rule = to_gate(desc_.attention, args.A_log, args.dt_bias);
    p.gate_dtype = to_dtype(desc_.attention.gate_dtype);
    p.pool = to_pool(args.state);
    p.records = to_records(args.records);
    p.vectors = state_rows_of_16_bytes(args.state);
    p.conv_parts = desc_.conv_width == 0 ? 0 : desc_.conv_parts;
    p.conv_width = desc_.conv_width;
    for (int i = 0; i < 3 && i < p.conv_parts; ++i) {
      p.window[i] = to_window(args.conv_state[i], desc_.conv_layout);
      p.channels[i] = static_cast<int32_t>(args.conv_state[i].shape[desc_.conv_layout == KDA_CONV_SD ? 2 : 1]);
    }
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    KDA_RETURN_IF_ERROR(run_states(p, stream));
    return launch(end_, {p.sequences}, p, stream);
  }

 private:
  int32_t shared_bytes(const KernelInfo& kernel) const {
    return kernel.block_bytes + desc_.width * kernel.token_bytes;
  }

  Status run_states(CommitParams& p, void* stream) const {
    LaunchShape shape;
    shape.rest = p.sequences;
    if (exact_) {
      if (auto call = lean_commit_call(p, static_cast<int64_t>(dtype_size(desc_.attention.state_dtype)))) {
        shape.x = p.form.value_heads;
        shape.shared_bytes = shared_bytes(lean_);
        call->call.wave = blocks_at_once(lean_, shape.shared_bytes) * multiprocessors_;
        return launch(lean_, shape, *call, stream);
      }
    }
    const KernelInfo& kernel = p.vectors ? tuned_ : masked_;
    p.split = split_head(int64_t{p.sequences} * p.form.value_heads, p.form.values, kernel.warp_rows,
                         kernel.threads / 32, multiprocessors_);
    shape.x = int64_t{p.form.value_heads} * p.split.slices;
    shape.shared_bytes = shared_bytes(kernel);
    return launch(kernel, shape, p, stream);
  }

  kda_commit_desc desc_;
  int32_t device_, multiprocessors_;
  bool exact_;
  KernelInfo lean_, tuned_, masked_, end_;
};

template <class Op, class KernelType, bool kExact>
Result<std::unique_ptr<Kernel<Op>>> create(const typename Op::Desc& desc, const Context& context, WorkspaceBook&) {
  auto kernel = std::make_unique<KernelType>(desc, context, kExact);
  KDA_RETURN_IF_ERROR(kernel->prepare());
  return std::unique_ptr<Kernel<Op>>(std::move(kernel));
}

}  // namespace

void fill_decode_params(const kda_decode_desc& d, const kda_decode_args& args, const kda_tensor& token, int row_dims,
                        DecodeParams& p) {
  p.form = to_form(d.attention);
  p.sequences = to_sequences(args.sequences, token, row_dims);
  p.rule.slots = to_slots(args.slots, args.write_slots, args.has_initial_state, args.state.shape[0], d.null_slot,
                          d.initial_state);
  p.rule.accepted = int32_data(args.accepted);
  p.rule.accepted_stride = stride_of(args.accepted);
  p.rule.width = d.width;
  p.rule.records = d.mode == KDA_DECODE_RECORDS;
  p.rule.per_token = d.store == KDA_STORE_PER_TOKEN;
  p.rule.fold = d.fold;
  p.gate_rule = to_gate(d.attention, args.A_log, args.dt_bias);
  p.gate = to_token(args.gate, 3);
  p.beta = to_token(args.beta, 2);
  p.pool = to_pool(args.state);
  p.records = to_records(args.records);
  p.out = to_out(args.out, args.out_rows, 3);
  p.vectors = state_rows_of_16_bytes(args.state);
}

Result<std::unique_ptr<Kernel<Decode>>> make_decode(const kda_decode_desc& desc, const Context& context, bool exact) {
  auto kernel = std::make_unique<DecodeKernel>(desc, context, exact);
  KDA_RETURN_IF_ERROR(kernel->prepare());
  return std::unique_ptr<Kernel<Decode>>(std::move(kernel));
}

const Candidate<Decode>* fused_decode() {
  static const CudaCandidate<Decode> candidate(
      "fused", [](const auto& d, const auto& c, auto& r) { check_decode(kFusedDecode, d, c, r); },
      create<Decode, DecodeKernel, true>);
  return &candidate;
}

const Candidate<Decode>* portable_decode() {
  static const CudaCandidate<Decode> candidate(
      "portable", [](const auto& d, const auto& c, auto& r) { check_decode(kPortableDecode, d, c, r); },
      create<Decode, DecodeKernel, false>);
  return &candidate;
}

const Candidate<Commit>* fused_commit() {
  static const CudaCandidate<Commit> candidate(
      "fused", [](const auto& d, const auto& c, auto& r) { check_commit(kFusedDecode, d, c, r); },
      create<Commit, CommitKernel, true>);
  return &candidate;
}

const Candidate<Commit>* portable_commit() {
  static const CudaCandidate<Commit> candidate(
      "portable", [](const auto& d, const auto& c, auto& r) { check_commit(kPortableDecode, d, c, r); },
      create<Commit, CommitKernel, false>);
  return &candidate;
}

}  // namespace kda::cuda
