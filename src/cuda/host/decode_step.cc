// decode_step plans on CUDA: the fused kernel, and the chain conv -> decode -> norm of the same bits (L-8).
#include <algorithm>

#include "base/checked.h"
#include "base/tensor.h"
#include "cuda/host/candidate.h"
#include "cuda/host/candidates.h"
#include "cuda/host/conv.h"
#include "cuda/host/gates.h"
#include "cuda/host/launch.h"
#include "cuda/host/recurrence.h"
#include "cuda/host/views.h"
#include "cuda/kernels/decode/launch.h"
#include "cuda/kernels/decode_step/lean_params.h"

namespace kda::cuda {
namespace {

// [lead..., inner...] over `data`, dense in inner; `lead` gives the leading sizes and `stride` a row's distance.
kda_tensor rows_of(void* data, kda_dtype dtype, const kda_tensor& lead, int64_t stride, int64_t heads, int64_t dim) {
  kda_tensor t{};
  t.data = data;
  t.dtype = dtype;
  t.device = lead.device;
  t.rank = lead.rank;  // [T, channels] -> [T, heads, dim]
  int64_t row = stride;
  for (int i = lead.rank - 2; i >= 0; row *= lead.shape[i], --i) {
    t.shape[i] = lead.shape[i];
    t.strides[i] = row;
  }
  t.shape[t.rank - 1] = heads;
  t.strides[t.rank - 1] = dim;
  t.shape[t.rank] = dim;
  t.strides[t.rank] = 1;
  ++t.rank;
  return t;
}

// A head tensor [T, heads, dim] seen as channels [T, heads * dim].
kda_tensor as_channels(kda_tensor t) {
  t.shape[t.rank - 2] *= t.shape[t.rank - 1];
  t.strides[t.rank - 2] = 1;
  --t.rank;
  return t;
}

class StepChain {
 public:
  Status prepare(const kda_decode_step_desc& desc, const Context& context, bool exact, WorkspaceBook& book) {
    desc_ = desc;
    const kda_attention_spec& a = desc.decode.attention;
    qk_ = a.num_heads * a.key_dim;
    v_ = a.num_value_heads * a.value_dim;
    auto conv = make_conv(conv_desc(), context, desc.decode.store == KDA_STORE_FINAL);
    if (!conv.ok()) return conv.status();
    conv_ = std::move(conv.value());
    auto decode = make_decode(desc.decode, context, exact);
    if (!decode.ok()) return decode.status();
    decode_ = std::move(decode.value());
    norm_kernel_ = step_norm_kernel_info();
    KDA_RETURN_IF_ERROR(prepare_kernel(norm_kernel_.function, norm_kernel_.name));
    qkv_id_ = book.book("qkv", a.io_dtype, {desc.decode.max_tokens, 2 * qk_ + v_});
    if (desc.no_norm) return {};
    o_id_ = book.book("o", a.io_dtype, {desc.decode.max_tokens, v_});
    if (desc.decode.mode != KDA_DECODE_RECORDS) return {};
    active_id_ = book.book("active", KDA_UINT8, {desc.decode.max_sequences});
    active_kernel_ = step_active_kernel_info();
    return prepare_kernel(active_kernel_.function, active_kernel_.name);
  }

  Status run(const kda_decode_step_args& args, const WorkspaceGrant& workspace, void* stream) const {
    const kda_attention_spec& a = desc_.decode.attention;
    kda_decode_args d = args.decode;
    KDA_RETURN_IF_ERROR(run_conv(args, workspace, d, stream));
    if (desc_.no_norm) return decode_->run(d, workspace, stream);
    StepRowsParams p;
    fill_decode_params(desc_.decode, args.decode, args.x[0], 2, p.decode);
    if (p.decode.sequences.count == 0) return {};
    d.out = rows_of(workspace.get<char>(o_id_), a.io_dtype, args.x[0], v_, a.num_value_heads, a.value_dim);
    d.out_rows = {};
    p.o = to_token(d.out, 3);
    p.z = to_token(args.z, 3);
    p.norm_weight = static_cast<const float*>(args.norm_weight.data);
    p.eps = static_cast<float>(desc_.norm_eps);
    if (desc_.decode.mode == KDA_DECODE_RECORDS) {  // the decode changes the counts that say which rows are active
      p.active = workspace.get<uint8_t>(active_id_);
      const LaunchShape shape = {ceil_div(p.decode.sequences.count, active_kernel_.threads)};
      KDA_RETURN_IF_ERROR(launch(active_kernel_, shape, p, stream));
    }
    KDA_RETURN_IF_ERROR(decode_->run(d, workspace, stream));
    return launch(norm_kernel_, {a.num_value_heads, p.decode.sequences.count}, p, stream);
  }

 private:
  kda_conv_desc conv_desc() const {
    const kda_decode_desc& d = desc_.decode;
    kda_conv_desc c{};
    c.mode = d.mode == KDA_DECODE_RECORDS ? KDA_CONV_RECORDS : KDA_CONV_COLUMNS;
    c.width = desc_.conv_width;
    c.parts = desc_.conv_parts;
    c.channels[0] = c.parts == 1 ? 2 * qk_ + v_ : qk_;
    c.channels[1] = c.parts == 1 ? 0 : qk_;
    c.channels[2] = c.parts == 1 ? 0 : v_;
    c.io_dtype = c.out_dtype = d.attention.io_dtype;
    c.state_dtype = desc_.conv_dtype;
    c.layout = desc_.conv_layout;
    c.verify_width = d.width;
    c.fold = d.fold;
    c.max_tokens = d.max_tokens;
    c.max_sequences = d.max_sequences;
    c.initial_state = d.initial_state;
    c.null_slot = d.null_slot;
    return c;
  }

  // Convolves into the workspace and points q, k, v at the results.
  Status run_conv(const kda_decode_step_args& args, const WorkspaceGrant& workspace, kda_decode_args& d,
                  void* stream) const {
    const kda_attention_spec& a = desc_.decode.attention;
    const int64_t row = 2 * qk_ + v_, first[3] = {0, qk_, 2 * qk_};
    char* qkv = workspace.get<char>(qkv_id_);
    kda_conv_args c{};
    c.sequences = d.sequences;
    c.slots = d.slots;
    c.write_slots = d.write_slots;
    c.has_initial_state = d.has_initial_state;
    c.accepted = d.accepted;
    c.record_count = d.records.count;
    c.record_rows = d.records.record_rows;
    kda_tensor* heads[3] = {&d.q, &d.k, &d.v};
    for (int i = 0; i < 3; ++i) {
      const int64_t n = i == 2 ? a.num_value_heads : a.num_heads, dim = i == 2 ? a.value_dim : a.key_dim;
      void* data = qkv + first[i] * static_cast<int64_t>(dtype_size(a.io_dtype));
      *heads[i] = rows_of(data, a.io_dtype, args.x[0], row, n, dim);
      if (i >= desc_.conv_parts) continue;
      c.x[i] = args.x[i];
      c.weight[i] = args.conv_weight[i];
      c.state[i] = args.conv_state[i];
      c.out[i] = desc_.conv_parts == 1 ? as_channels(rows_of(qkv, a.io_dtype, args.x[0], row, 1, row))
                                       : as_channels(*heads[i]);
    }
    return conv_->run(c, workspace, stream);
  }

  kda_decode_step_desc desc_{};
  int64_t qk_ = 0, v_ = 0;
  std::unique_ptr<Kernel<Conv>> conv_;
  std::unique_ptr<Kernel<Decode>> decode_;
  KernelInfo active_kernel_, norm_kernel_;
  WorkspaceBook::Id qkv_id_ = 0, o_id_ = 0, active_id_ = 0;
};

// The common call (lean_params.h): which problems and layouts it is, and which of its kernels runs.
class LeanStep {
 public:
  static bool wants(const kda_decode_step_desc& desc) {
    const kda_decode_desc& d = desc.decode;
    const kda_attention_spec& a = d.attention;
    return d.mode == KDA_DECODE_COLUMNS && d.width == 1 && d.store == KDA_STORE_PER_TOKEN && desc.no_norm == 0 &&
           a.num_heads == a.num_value_heads && a.io_dtype != KDA_FP32 && desc.conv_dtype == a.io_dtype;
  }

  Status prepare(const kda_decode_step_desc& desc, int32_t multiprocessors) {
    multiprocessors_ = multiprocessors;
    const Dtype pool = to_dtype(desc.decode.attention.state_dtype), io = to_dtype(desc.decode.attention.io_dtype);
    wide_ = pool == Dtype::kFp32;
    for (int i = 0; i < kForms; ++i) {
      kernels_[i] = lean_step_kernel_info(pool, io, static_cast<LeanStepForm>(i));
      KDA_RETURN_IF_ERROR(prepare_kernel(kernels_[i].function, kernels_[i].name, kernels_[i].block_bytes));
    }
    wanted_ = true;
    return {};
  }

  bool takes(const kda_decode_step_args& args, const DecodeStepParams& p) const {
    if (!wanted_ || p.rule.slots.write_slots.present() || p.out.rows.present() || !p.taps_aligned) return false;
    if (int64_t{p.sequences.count} * p.form.heads > INT32_MAX) return false;
    const Dtype io = p.form.io;
    bool whole = p.z.dtype == io && p.out.dtype == io;
    whole = whole && groups_of_four(p.out.data, args.decode.out.dtype,
                                    {p.out.batch_stride, p.out.row_stride, p.out.head_stride});
    const auto rows = [&](const kda_tensor& t, const void* data, std::initializer_list<int64_t> strides) {
      whole = whole && rows_of_16_bytes(data, t.dtype, 128, strides);
    };
    rows(args.decode.gate, p.gate.data, {p.gate.batch_stride, p.gate.row_stride, p.gate.head_stride});
    rows(args.z, p.z.data, {p.z.batch_stride, p.z.row_stride, p.z.head_stride});
    rows(args.norm_weight, p.norm_weight, {});
    rows(args.decode.dt_bias, p.gate_rule.dt_bias, {});
    for (int i = 0; i < 3; ++i) {
      const ConvChannels& c = p.conv[i];
      whole = whole && c.window.dtype == io && c.window.channel_stride == 1;
      rows(args.z, c.x, {c.x_batch, c.x_row});
      rows(args.z, c.window.data, {c.window.slot_stride, c.window.column_stride});
    }
    return whole;
  }

  Status run(const DecodeStepParams& from, void* stream) const {
    LeanStepParams p;
    p.form = from.form;
    p.sequences = from.sequences;
    p.rule = from.rule;
    p.gate_rule = from.gate_rule;
    p.gate = from.gate, p.beta = from.beta, p.z = from.z;
    p.pool = from.pool;
    p.out = from.out;
    for (int i = 0; i < 3; ++i) p.conv[i] = from.conv[i];
    p.norm_weight = from.norm_weight;
    p.eps = from.eps;
    const int64_t heads = int64_t{p.sequences.count} * p.form.heads;
    const LeanStepForm form = form_of(heads);
    if (form == LeanStepForm::kRing) return run_ring(p, heads, stream);
    LaunchShape shape;
    const KernelInfo& kernel = kernel_of(form);
    p.wave = int64_t{kernel.blocks} * multiprocessors_;
    shape.cluster = form == LeanStepForm::kFourSlices ? 4 : 2;
    shape.x = int64_t{p.form.heads} * shape.cluster;
    shape.rest = p.sequences.count;
    shape.shared_bytes = kernel.block_bytes;
    return launch(kernel, shape, p, stream);
  }

 private:
  static constexpr int kForms = 5;
  const KernelInfo& kernel_of(LeanStepForm form) const { return kernels_[static_cast<int>(form)]; }

  // Each slice of a head prepares its token, so that rings win where a multiprocessor has several heads. Measured at
  // 12 to 512 heads (docs/kernels/decode_step.md).
  LeanStepForm form_of(int64_t heads) const {
    if (heads * 8 <= multiprocessors_) return LeanStepForm::kFourSlices;
    if (heads <= multiprocessors_ || (wide_ && heads * 2 <= int64_t{multiprocessors_} * 3))
      return LeanStepForm::kTwoSlices;
    return !wide_ && heads <= int64_t{multiprocessors_} * 3 ? LeanStepForm::kManySlices : LeanStepForm::kRing;
  }

  // How heads are dealt: blocks of a multiprocessor; of the heads so many in a hundred in fixed lists, the others in
  // runs. Fixed lists start least often, but end unevenly, as multiprocessors do not share the memory evenly; blocks
  // that the hardware hands out end together, and each costs a start. Measured at 2 to 8, 12, 31 and 186 heads a
  // multiprocessor (`share`).
  struct Deal {
    int32_t blocks;
    int64_t listed, run;
  };
  Deal deal_of(int64_t share) const {
    if (wide_) {
      if (share >= 96) return {2, 0, 1};
      return share >= 6 ? Deal{2, 80, 1} : Deal{1, 100, 1};
    }
    if (share >= 96) return {2, 85, 2};
    return share >= 8 ? Deal{2, 94, 1} : Deal{2, 100, 1};
  }

  Status run_ring(LeanStepParams& p, int64_t heads, void* stream) const {
    const Deal deal = deal_of(heads / multiprocessors_);
    const KernelInfo& kernel = kernel_of(deal.blocks == 1 ? LeanStepForm::kRing : LeanStepForm::kTwoRings);
    const int64_t wave = int64_t{kernel.blocks} * multiprocessors_;
    const int64_t list = deal.listed == 100 ? ceil_div(heads, wave) : heads * deal.listed / 100 / wave;
    p.wave = wave;
    p.lists = list > 0 ? static_cast<uint32_t>(wave) : 0;
    p.list = static_cast<uint32_t>(list);
    p.run = static_cast<uint32_t>(deal.run);
    LaunchShape shape;
    shape.x = p.lists + ceil_div(std::max<int64_t>(heads - p.lists * list, 0), int64_t{p.run});
    shape.shared_bytes = kernel.block_bytes;
    return launch(kernel, shape, p, stream);
  }

  bool wanted_ = false, wide_ = true;
  int32_t multiprocessors_ = 0;
  KernelInfo kernels_[kForms];
};

class DecodeStepKernel final : public Kernel<DecodeStep> {
 public:
  DecodeStepKernel(const kda_decode_step_desc& desc, const Context& context, bool fused)
      : desc_(desc), device_(context.device.index), multiprocessors_(context.facts.multiprocessors), fused_(fused) {}

  Status prepare(const Context& context, WorkspaceBook& book) {
    // Layouts that the fused kernel cannot load take the chain, which gives the same bits.
    KDA_RETURN_IF_ERROR(chain_.prepare(desc_, context, fused_, book));
    if (!fused_) return {};
    kernel_ = decode_step_kernel_info(to_dtype(desc_.decode.attention.state_dtype), records());
    counts_ = set_counts_kernel_info();
    KDA_RETURN_IF_ERROR(prepare_kernel(kernel_.function, kernel_.name, shared_bytes()));
    if (lean_.wants(desc_)) KDA_RETURN_IF_ERROR(lean_.prepare(desc_, multiprocessors_));
    return prepare_kernel(counts_.function, counts_.name);
  }

  Status run(const kda_decode_step_args& args, const WorkspaceGrant& workspace, void* stream) const override {
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    DecodeStepParams p;
    if (fused_) fill(args, p);
    const bool short_rows = desc_.decode.store == KDA_STORE_PER_TOKEN || p.sequences.tokens <= KDA_MAX_VERIFY;
    if (!fused_ || !p.vectors || !short_rows || chain_is_faster(p)) return chain_.run(args, workspace, stream);
    if (lean_.takes(args, p)) return lean_.run(p, stream);
    const int32_t ratio = p.form.value_heads / p.form.heads;
    // A block holds all of a head: cutting one over a cluster costs more in its barriers than it saves in loads,
    // which the L2 has been asked for before.
    p.split = split_head(int64_t{p.sequences.count} * p.form.value_heads, p.form.values, kernel_.warp_rows,
                         kernel_.threads / 32, multiprocessors_, 1);
    p.split.chunk = tokens();
    p.split.wave = int64_t{blocks_at_once(kernel_, shared_bytes())} * multiprocessors_;
    LaunchShape shape;
    shape.x = int64_t{p.form.value_heads} * p.split.slices;
    shape.rest = p.sequences.count;
    shape.cluster = ratio * p.split.slices;
    p.split.clustered = shape.cluster > 1;
    shape.shared_bytes = shared_bytes();
    KDA_RETURN_IF_ERROR(launch(kernel_, shape, p, stream));
    if (!records()) return {};
    const DecodeParams& decode = p;
    return launch(counts_, {ceil_div(p.sequences.count, counts_.threads)}, decode, stream);
  }

 private:
  bool records() const { return desc_.decode.mode == KDA_DECODE_RECORDS; }

  // Windows of several tokens by columns. One after the other the operators spread them over more warps; the fused
  // kernel saves launches, which only short calls of 16-bit states notice (docs/kernels/decode_step.md). The
  // convolution by itself takes conv pools of another dtype than the inputs' element by element.
  bool chain_is_faster(const DecodeStepParams& p) const {
    if (records() || desc_.decode.width == 1 || p.sequences.rows() <= p.sequences.count) return false;
    if (p.conv[0].window.dtype != p.form.io) return false;
    const int64_t heads = int64_t{p.sequences.count} * p.form.value_heads;
    return desc_.decode.attention.state_dtype == KDA_FP32 || heads > 2 * int64_t{multiprocessors_};
  }

  // Tokens of a row that the fused kernel has shared memory for.
  int32_t tokens() const {
    if (desc_.decode.store == KDA_STORE_FINAL) return KDA_MAX_VERIFY;
    return desc_.decode.fold ? 2 * desc_.decode.width : desc_.decode.width;
  }

  int32_t shared_bytes() const { return kernel_.block_bytes + tokens() * kernel_.token_bytes; }

  void fill(const kda_decode_step_args& args, DecodeStepParams& p) const {
    const kda_decode_desc& d = desc_.decode;
    const kda_attention_spec& a = d.attention;
    fill_decode_params(d, args.decode, args.x[0], 2, p);
    p.conv_rule.slots = p.rule.slots;
    p.conv_rule.slots.count = args.conv_state[0].shape[0];
    p.conv_rule.accepted = p.rule.accepted;
    p.conv_rule.accepted_stride = p.rule.accepted_stride;
    p.conv_rule.mode = records() ? ConvMode::kRecords : ConvMode::kColumns;
    p.conv_rule.final_window = d.store == KDA_STORE_FINAL;
    p.conv_rule.fold = d.fold;
    p.conv_rule.width = d.width;
    const int64_t qk = a.num_heads * a.key_dim, first[3] = {0, qk, 2 * qk};
    p.taps_aligned = 1;
    for (int i = 0; i < 3; ++i) {
      const int part = desc_.conv_parts == 1 ? 0 : i;
      p.conv[i] = to_channels(args.x[part], args.conv_weight[part], {}, args.conv_state[part], desc_.conv_layout,
                              desc_.conv_width, desc_.conv_parts == 1 ? first[i] : 0);
      p.taps_aligned = p.taps_aligned && reinterpret_cast<uintptr_t>(p.conv[i].weight) % 16 == 0;
    }
    p.norm = desc_.no_norm == 0;
    p.eps = static_cast<float>(desc_.norm_eps);
    p.z = to_token(args.z, 3);
    p.norm_weight = static_cast<const float*>(args.norm_weight.data);
  }

  kda_decode_step_desc desc_;
  int32_t device_, multiprocessors_;
  bool fused_;
  StepChain chain_;
  LeanStep lean_;
  KernelInfo kernel_, counts_;
};

template <bool kFused>
Result<std::unique_ptr<Kernel<DecodeStep>>> create(const kda_decode_step_desc& desc, const Context& context,
                                                   WorkspaceBook& book) {
  auto kernel = std::make_unique<DecodeStepKernel>(desc, context, kFused);
  KDA_RETURN_IF_ERROR(kernel->prepare(context, book));
  return std::unique_ptr<Kernel<DecodeStep>>(std::move(kernel));
}

}  // namespace

const Candidate<DecodeStep>* fused_decode_step() {
  static const CudaCandidate<DecodeStep> candidate(
      "fused", [](const auto& d, const auto& c, auto& r) { check_decode_step(kFusedDecode, true, d, c, r); },
      create<true>);
  return &candidate;
}

const Candidate<DecodeStep>* portable_decode_step() {
  static const CudaCandidate<DecodeStep> candidate(
      "portable", [](const auto& d, const auto& c, auto& r) { check_decode_step(kPortableDecode, false, d, c, r); },
      create<false>);
  return &candidate;
}

}  // namespace kda::cuda
