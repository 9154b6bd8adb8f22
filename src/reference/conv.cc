// Short causal convolution + SiLU with windows in a pool (spec W-1..W-5). With x_t the raw inputs and `stream` the
// context of W-1 inputs followed by them:
//   prefill  context = columns 0..W-2, afterwards they hold the stream's last W-1 entries (W-2); checkpoints K-2
//   columns  context = columns off..off+W-2, off = accepted-1; afterwards column i holds stream[1+i] (W-3)
//   records  context = columns 0..W-2, which stay; column W-1+t takes x_t (W-4); fold commits the last records first
// Sums and SiLU are fp64, rounded once. One task is a block of channels of one sequence and part: channels are
// independent, and a block loads its context before it stores anything (W-5).
#include "reference/conv.h"

#include <algorithm>

#include "base/checked.h"
#include "core/rows.h"
#include "reference/candidates.h"
#include "reference/conv_window.h"
#include "reference/equations.h"
#include "reference/kernel.h"

namespace kda::reference {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kMaxWidth = 8;

// A block of one part's channels in one sequence.
struct Block {
  int part;
  int64_t first, count;  // channels
  int64_t n;             // sequence
};

class ConvKernel final : public Kernel<Conv> {
 public:
  ConvKernel(const kda_conv_desc& desc, const Context& context, WindowEnd end)
      : desc_(desc), context_(context), W_(desc.width), end_(end) {
    for (int part = 0; part < desc.parts; ++part) blocks_[part] = ceil_div(desc.channels[part], kBlock);
  }

  Status run(const kda_conv_args& args, const WorkspaceGrant&, void*) const override {
    const SequenceTable table(args.sequences, args.x[0], 2);
    const ConvInputs inputs{args.state[0], args.slots,        args.write_slots, args.has_initial_state,
                            args.accepted, args.record_count, args.record_rows};
    const int64_t per_sequence = blocks_[0] + blocks_[1] + blocks_[2];
    context_.parallel.for_each(table.active() * per_sequence, [&](int64_t task, int32_t) {
      const int64_t n = task / per_sequence;
      int64_t block = task % per_sequence;
      int part = 0;
      while (block >= blocks_[part]) block -= blocks_[part++];
      const int64_t first = block * kBlock;
      run_block(args, {part, first, std::min(kBlock, desc_.channels[part] - first), n},
                conv_row(rule(), inputs, table, n));
    });
    return {};
  }

 private:
  ConvRule rule() const {
    return {desc_.mode,         end_ == WindowEnd::kFinal, desc_.fold != 0,
            desc_.verify_width, desc_.initial_state,       desc_.null_slot};
  }

  void run_block(const kda_conv_args& args, const Block& b, const ConvRow& row) const {
    if (!row.active) {
      for (int64_t t = 0; t < row.span.length; ++t) {
        char* out = output_row(args, b, row, t);
        if (out != nullptr) zero_row(out, args.out[b.part].dtype, b.count);
      }
      return;
    }
    if (desc_.mode == KDA_CONV_RECORDS && row.offset > 0) {
      const ConvWindow window(args.state[b.part], desc_.layout, row.read_slot);
      for (int64_t c = 0; c < b.count; ++c) window.shift(b.first + c, row.offset, W_ - 1);
    }
    convolve(args, b, row);
    for (int64_t c = 0; c < index_row(args.checkpoint_offsets, b.n).size; ++c) store_checkpoint(args, b, row, c);
    store_window(args, b, row);
  }

  // stream[i] of a channel, i in [0, W-1 + length): its address and dtype, or null for a fresh row's zeros.
  const char* stream(const kda_conv_args& args, const Block& b, const ConvRow& row, int64_t channel, int64_t i,
                     kda_dtype& dtype) const {
    if (i >= W_ - 1) {
      const kda_tensor& x = args.x[b.part];
      dtype = x.dtype;
      return advance(token_row(x, row.span, 2, i - (W_ - 1)), dtype, channel);
    }
    if (row.fresh) return nullptr;
    dtype = args.state[b.part].dtype;
    const int64_t first = desc_.mode == KDA_CONV_COLUMNS ? row.offset : 0;
    return ConvWindow(args.state[b.part], desc_.layout, row.read_slot).element(channel, first + i);
  }

  // W-1 for all tokens of the block, over a ring of the last W inputs.
  void convolve(const kda_conv_args& args, const Block& b, const ConvRow& row) const {
    double ring[kMaxWidth][kBlock], taps[kMaxWidth][kBlock], bias[kBlock], y[kBlock];
    for (int64_t c = 0; c < b.count; ++c) {
      for (int64_t j = 0; j < W_; ++j) taps[j][c] = parameter(args.weight[b.part], (b.first + c) * W_ + j, 0);
      bias[c] = parameter(args.bias[b.part], b.first + c, 0);
    }
    kda_dtype dtype = KDA_FP32;
    for (int64_t i = 0; i < W_ - 1; ++i) {
      for (int64_t c = 0; c < b.count; ++c) {
        const char* p = stream(args, b, row, b.first + c, i, dtype);
        ring[i][c] = p == nullptr ? 0 : load(p, dtype);
      }
    }
    for (int64_t t = 0; t < row.span.length; ++t) {
      const int64_t newest = (W_ - 1 + t) % W_;
      const kda_tensor& x = args.x[b.part];
      load_row(advance(token_row(x, row.span, 2, t), x.dtype, b.first), x.dtype, b.count, ring[newest]);
      std::fill(y, y + b.count, 0.0);
      for (int64_t j = 0; j < W_; ++j) {
        const double* past = ring[(t + j) % W_];
        for (int64_t c = 0; c < b.count; ++c) y[c] += taps[j][c] * past[c];
      }
      for (int64_t c = 0; c < b.count; ++c) y[c] = desc_.no_activation ? y[c] + bias[c] : silu(y[c] + bias[c]);
      char* out = output_row(args, b, row, t);
      if (out != nullptr) store_row(out, args.out[b.part].dtype, b.count, y);
    }
  }

  // to[column] := stream[from + column - to_column] for `count` columns.
  void copy_stream(const kda_conv_args& args, const Block& b, const ConvRow& row, int64_t from, int64_t slot,
                   int64_t to_column, int64_t count) const {
    const ConvWindow window(args.state[b.part], desc_.layout, slot);
    const auto size = dtype_size(window.dtype());
    for (int64_t channel = b.first; channel < b.first + b.count; ++channel) {
      for (int64_t i = 0; i < count; ++i) {
        kda_dtype dtype = window.dtype();
        const char* p = stream(args, b, row, channel, from + i, dtype);
        char* to = window.element(channel, to_column + i);
        if (p == nullptr) std::memset(to, 0, size);
        else if (dtype == window.dtype()) std::memmove(to, p, size);
        else store(to, window.dtype(), load(p, dtype));
      }
    }
  }

  void store_checkpoint(const kda_conv_args& args, const Block& b, const ConvRow& row, int64_t c) const {
    const int64_t offset = index_row(args.checkpoint_offsets, b.n)[c];
    const int64_t slot = index_row(args.checkpoint_slots, b.n)[c];
    if (offset <= 0 || offset > row.span.length) return;
    if (!slot_is_live(slot, args.state[0].shape[0], desc_.null_slot)) return;
    copy_stream(args, b, row, offset, slot, 0, W_ - 1);
  }

  // In place the stream's columns move down, so copying them in ascending order is safe.
  void store_window(const kda_conv_args& args, const Block& b, const ConvRow& row) const {
    if (!present(args.state[0]) || row.write_slot < 0) return;
    const int64_t length = row.span.length;
    if (desc_.mode == KDA_CONV_RECORDS) return copy_stream(args, b, row, W_ - 1, row.write_slot, W_ - 1, length);
    const bool final = desc_.mode == KDA_CONV_PREFILL || end_ == WindowEnd::kFinal;
    if (length == 0 && !row.fresh && desc_.mode == KDA_CONV_COLUMNS) return;  // keeps its bits (P-11)
    if (final || length == 0) return copy_stream(args, b, row, length, row.write_slot, 0, W_ - 1);
    copy_stream(args, b, row, 1, row.write_slot, 0, W_ - 2 + length);
  }

  char* output_row(const kda_conv_args& args, const Block& b, const ConvRow& row, int64_t t) const {
    const kda_tensor& out = args.out[b.part];
    const int64_t to = out_row(out, args.out_rows, row.span, 2, t);
    if (to < 0) return nullptr;
    const bool batched = out.rank > 2;
    return advance(static_cast<char*>(out.data), out.dtype,
                   (batched ? row.span.batch * out.strides[0] : 0) + to * out.strides[batched ? 1 : 0] + b.first);
  }

  kda_conv_desc desc_;
  const Context& context_;
  int64_t W_;
  WindowEnd end_;
  int64_t blocks_[3] = {};
};

class ConvCandidate final : public Candidate<Conv> {
 public:
  std::string_view name() const override { return "reference"; }
  kda_device_type device() const override { return KDA_CPU; }
  void check(const kda_conv_desc&, const Context&, Refusals&) const override {}
  Result<std::unique_ptr<Kernel<Conv>>> create(const kda_conv_desc& desc, const Context& context,
                                               WorkspaceBook&) const override {
    return make_conv(desc, context, WindowEnd::kPerToken);
  }
};

}  // namespace

std::unique_ptr<Kernel<Conv>> make_conv(const kda_conv_desc& desc, const Context& context, WindowEnd end) {
  return std::make_unique<ConvKernel>(desc, context, end);
}

const Candidate<Conv>* conv() {
  static const ConvCandidate candidate;
  return &candidate;
}

}  // namespace kda::reference
