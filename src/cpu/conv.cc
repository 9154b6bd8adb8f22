// Host half of conv: judges the rows once, then runs (tile, sequence, chunk) tasks, tiles outermost so that a worker
// turns a tile's taps once and keeps them.
#include <algorithm>

#include "base/checked.h"
#include "cpu/attention_gates.h"
#include "cpu/candidates.h"
#include "cpu/conv_call.h"
#include "cpu/denormals.h"
#include "cpu/portable.h"

namespace kda::cpu {
namespace {

struct Tile {
  int part;
  int64_t first, count;  // channels
};

class ConvKernel final : public Kernel<Conv> {
 public:
  ConvKernel(const kda_conv_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc), parallel_(context.parallel), functions_(conv_functions(context_isa(context.isa))) {
    for (int part = 0; part < desc.parts; ++part) tiles_ += ceil_div(desc.channels[part], kConvTile);
    rows_ = book_array<ConvRow>(book, "rows", desc.max_sequences);
    chunks_ = book.book("chunks", KDA_INT64, {checked_add(desc.max_sequences, 1).value_or(INT64_MAX)});
    cached_ = book.book("cached_tile", KDA_INT64, {parallel_.num_threads});
    scratch_ = book.book("scratch", KDA_FP32, {parallel_.num_threads, ConvScratch::kFloats});
  }

  Status run(const kda_conv_args& args, const WorkspaceGrant& workspace, void*) const override {
    const SequenceTable table(args.sequences, args.x[0], 2);
    const ConvInputs inputs{args.state[0], args.slots,        args.write_slots, args.has_initial_state,
                            args.accepted, args.record_count, args.record_rows};
    const ConvRule rule{desc_.mode, false, desc_.fold != 0, desc_.verify_width, desc_.initial_state, desc_.null_slot};
    auto* rows = workspace.get<ConvRow>(rows_);
    auto* chunks = workspace.get<int64_t>(chunks_);  // [N + 1] chunks before each sequence
    chunks[0] = 0;
    for (int64_t n = 0; n < table.active(); ++n) {
      rows[n] = conv_row(rule, inputs, table, n);
      chunks[n + 1] = chunks[n] + std::max<int64_t>(1, ceil_div(rows[n].span.length, kConvChunk));
    }
    auto* cached = workspace.get<int64_t>(cached_);
    std::fill(cached, cached + parallel_.num_threads, int64_t{-1});
    run_tasks({form(), &desc_, &args, rows}, table.active(), chunks, cached, workspace.get<float>(scratch_));
    return {};
  }

 private:
  ConvForm form() const {
    return {desc_.width, desc_.io_dtype, desc_.no_activation == 0, desc_.mode, false, desc_.layout};
  }

  void run_tasks(const ConvCall& call, int64_t active, const int64_t* chunks, int64_t* cached, float* scratch) const {
    const int64_t per_tile = chunks[active];
    parallel_.for_each(per_tile * tiles_, [&](int64_t task, int32_t worker) {
      const FlushDenormals flush;
      const int64_t index = task / per_tile, chunk = task % per_tile;
      const Tile tile = tile_of(index);
      float* mine = scratch + worker * ConvScratch::kFloats;
      if (cached[worker] != index) {
        functions_.load_taps(call, tile.part, tile.first, tile.count, mine);
        cached[worker] = index;
      }
      const int64_t n = std::upper_bound(chunks, chunks + active + 1, chunk) - chunks - 1;
      functions_.run(call, tile.part, tile.first, tile.count, n, (chunk - chunks[n]) * kConvChunk, mine);
    });
  }

  Tile tile_of(int64_t index) const {
    int part = 0;
    for (; index >= ceil_div(desc_.channels[part], kConvTile); ++part) {
      index -= ceil_div(desc_.channels[part], kConvTile);
    }
    const int64_t first = index * kConvTile;
    return {part, first, std::min(kConvTile, desc_.channels[part] - first)};
  }

  kda_conv_desc desc_;
  Parallel parallel_;
  const ConvFunctions& functions_;
  int64_t tiles_ = 0;
  WorkspaceBook::Id rows_, chunks_, cached_, scratch_;
};

struct ConvGates {
  static void check(const kda_conv_desc& d, Refusals& refusals) {
    check_out_dtype(d.io_dtype, d.out_dtype, refusals);
  }
};

}  // namespace

const Candidate<Conv>* portable_conv() {
  static const Portable<Conv, ConvKernel, ConvGates> candidate;
  return &candidate;
}

}  // namespace kda::cpu
