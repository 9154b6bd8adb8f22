// decode_step (spec V-15): the chain conv -> decode -> gated norm itself, with the io roundings of L-7 in between,
// so that L-8 holds by construction. The last result is rounded to the output's dtype only (fp64: not at all).
#include "reference/candidates.h"
#include "reference/conv.h"
#include "reference/head_input.h"
#include "reference/kernel.h"

namespace kda::reference {
namespace {

// [leading..., inner...] over `data`, dense.
kda_tensor token_tensor(void* data, kda_dtype dtype, const kda_tensor& leading,
                        std::initializer_list<int64_t> inner) {
  kda_tensor t = leading;
  t.data = data;
  t.dtype = dtype;
  --t.rank;
  for (int64_t d : inner) t.shape[t.rank++] = d;
  return make_dense(t).ok() ? t : kda_tensor{};
}

class DecodeStepKernel final : public Kernel<DecodeStep> {
 public:
  DecodeStepKernel(const kda_decode_step_desc& desc, const Context& context, WorkspaceBook& book,
                   std::unique_ptr<Kernel<Decode>> decode)
      : desc_(desc),
        context_(context),
        decode_(std::move(decode)),
        conv_(make_conv(conv_desc(desc), context,
                        desc.decode.store == KDA_STORE_FINAL ? WindowEnd::kFinal : WindowEnd::kPerToken)),
        scratch_(context, book, 3 * desc.decode.attention.value_dim) {
    const kda_attention_spec& a = desc.decode.attention;
    const int64_t channels = 2 * a.num_heads * a.key_dim + a.num_value_heads * a.value_dim;
    qkv_ = book.book("qkv", a.io_dtype, {desc.decode.max_tokens, channels});
    o_ = book.book("o", a.io_dtype, {desc.decode.max_tokens, a.num_value_heads, a.value_dim});
    active_ = book.book("active", KDA_UINT8, {desc.decode.max_sequences});
  }

  static kda_decode_desc decode_desc(const kda_decode_step_desc& desc) {
    kda_decode_desc d = desc.decode;
    if (!desc.no_norm) d.attention.out_dtype = d.attention.io_dtype;
    return d;
  }

  Status run(const kda_decode_step_args& args, const WorkspaceGrant& workspace, void* stream) const override {
    const kda_attention_spec& a = desc_.decode.attention;
    kda_decode_args d = args.decode;
    run_conv(args, workspace, d, stream);

    const SequenceTable table(d.sequences, args.x[0], 2);
    auto* active = workspace.get<uint8_t>(active_);
    for (int64_t n = 0; n < table.active(); ++n) active[n] = decode_row(desc_.decode, d, table, n).active;
    if (!desc_.no_norm) {
      d.out = token_tensor(workspace.get<char>(o_), a.io_dtype, args.x[0], {a.num_value_heads, a.value_dim});
      d.out_rows = {};
    }
    KDA_RETURN_IF_ERROR(decode_->run(d, workspace, stream));
    if (desc_.no_norm) return {};
    context_.parallel.for_each(table.active(), [&](int64_t n, int32_t worker) {
      if (active[n]) norm_rows(args, d.out, table.span(n), scratch_.of(workspace, worker));
      else zero_output(args.decode.out, args.decode.out_rows, table.span(n), a.num_value_heads, a.value_dim);
    });
    return {};
  }

 private:
  static kda_conv_desc conv_desc(const kda_decode_step_desc& desc) {
    const kda_attention_spec& a = desc.decode.attention;
    const int64_t qk = a.num_heads * a.key_dim, v = a.num_value_heads * a.value_dim;
    kda_conv_desc c{};
    c.mode = desc.decode.mode == KDA_DECODE_RECORDS ? KDA_CONV_RECORDS : KDA_CONV_COLUMNS;
    c.width = desc.conv_width;
    c.parts = desc.conv_parts;
    c.channels[0] = desc.conv_parts == 1 ? 2 * qk + v : qk;
    c.channels[1] = desc.conv_parts == 1 ? 0 : qk;
    c.channels[2] = desc.conv_parts == 1 ? 0 : v;
    c.io_dtype = c.out_dtype = a.io_dtype;
    c.state_dtype = desc.conv_dtype;
    c.layout = desc.conv_layout;
    c.verify_width = desc.decode.width;
    c.fold = desc.decode.fold;
    c.initial_state = desc.decode.initial_state;
    c.null_slot = desc.decode.null_slot;
    return c;
  }

  // Runs the convolution into the workspace and points q, k, v at its results.
  void run_conv(const kda_decode_step_args& args, const WorkspaceGrant& workspace, kda_decode_args& d,
                void* stream) const {
    const kda_attention_spec& a = desc_.decode.attention;
    const int64_t qk = a.num_heads * a.key_dim, v = a.num_value_heads * a.value_dim;
    const kda_tensor qkv = token_tensor(workspace.get<char>(qkv_), a.io_dtype, args.x[0], {2 * qk + v});
    const int64_t begin[3] = {0, qk, 2 * qk}, count[3] = {qk, qk, v};
    kda_conv_args c{};
    c.sequences = d.sequences;
    c.slots = d.slots;
    c.write_slots = d.write_slots;
    c.has_initial_state = d.has_initial_state;
    c.accepted = d.accepted;
    c.record_count = d.records.count;
    c.record_rows = d.records.record_rows;
    kda_tensor heads[3];
    for (int part = 0; part < 3; ++part) {
      c.x[part] = args.x[part];
      c.weight[part] = args.conv_weight[part];
      c.state[part] = args.conv_state[part];
      c.out[part] = qkv;
      c.out[part].data = advance(static_cast<char*>(qkv.data), a.io_dtype, begin[part]);
      c.out[part].shape[qkv.rank - 1] = desc_.conv_parts == 1 ? 2 * qk + v : count[part];
      // The same columns as [..., heads, dim].
      const int64_t dim = part == 2 ? a.value_dim : a.key_dim;
      heads[part] = c.out[part];
      heads[part].rank = qkv.rank + 1;
      heads[part].shape[qkv.rank - 1] = count[part] / dim;
      heads[part].strides[qkv.rank - 1] = dim;
      heads[part].shape[qkv.rank] = dim;
      heads[part].strides[qkv.rank] = 1;
    }
    d.q = heads[0];
    d.k = heads[1];
    d.v = heads[2];
    (void)conv_->run(c, workspace, stream);
  }

  void norm_rows(const kda_decode_step_args& args, const kda_tensor& o, const TokenSpan& span,
                 double* scratch) const {
    const int64_t V = desc_.decode.attention.value_dim;
    double *x = scratch, *z = scratch + V, *weight = scratch + 2 * V;
    load_row(static_cast<const char*>(args.norm_weight.data), args.norm_weight.dtype, V, weight);
    for (int64_t t = 0; t < span.length; ++t) {
      for (int64_t head = 0; head < desc_.decode.attention.num_value_heads; ++head) {
        load_row(advance(token_row(o, span, 3, t), o.dtype, head * o.strides[o.rank - 2]), o.dtype, V, x);
        load_row(advance(token_row(args.z, span, 3, t), args.z.dtype, head * args.z.strides[args.z.rank - 2]),
                 args.z.dtype, V, z);
        gated_norm(x, z, weight, V, desc_.norm_eps);
        store_output(args.decode.out, args.decode.out_rows, span, t, head, V, x);
      }
    }
  }

  kda_decode_step_desc desc_;
  const Context& context_;
  std::unique_ptr<Kernel<Decode>> decode_;
  std::unique_ptr<Kernel<Conv>> conv_;
  WorkerScratch scratch_;
  WorkspaceBook::Id qkv_, o_, active_;
};

class DecodeStepCandidate final : public Candidate<DecodeStep> {
 public:
  std::string_view name() const override { return "reference"; }
  kda_device_type device() const override { return KDA_CPU; }
  void check(const kda_decode_step_desc& desc, const Context&, Refusals& refusals) const override {
    check_batch_invariant(desc.decode.flags, desc.decode.attention.state_dtype, refusals);
  }
  Result<std::unique_ptr<Kernel<DecodeStep>>> create(const kda_decode_step_desc& desc, const Context& context,
                                                     WorkspaceBook& book) const override {
    auto piece = decode()->create(DecodeStepKernel::decode_desc(desc), context, book);
    if (!piece.ok()) return piece.status();
    return std::unique_ptr<Kernel<DecodeStep>>(
        std::make_unique<DecodeStepKernel>(desc, context, book, std::move(piece.value())));
  }
};

}  // namespace

const Candidate<DecodeStep>* decode_step() {
  static const DecodeStepCandidate candidate;
  return &candidate;
}

}  // namespace kda::reference
