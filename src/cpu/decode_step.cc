// Host half of decode_step: judges attention and conv rows once, then runs (row, query heads) tasks.
#include <algorithm>

#include "base/checked.h"
#include "cpu/attention_gates.h"
#include "cpu/candidates.h"
#include "cpu/decode_step_call.h"
#include "cpu/denormals.h"
#include "cpu/portable.h"

namespace kda::cpu {
namespace {

constexpr int64_t kHeadGroup = 8;

class DecodeStepKernel final : public Kernel<DecodeStep> {
 public:
  DecodeStepKernel(const kda_decode_step_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc),
        parallel_(context.parallel),
        functions_(decode_step_functions(context_isa(context.isa))),
        scratch_floats_(DecodeStepScratch(desc_, nullptr).total) {
    rows_ = book_array<DecodeRow>(book, "rows", desc.decode.max_sequences);
    conv_rows_ = book_array<ConvRow>(book, "conv_rows", desc.decode.max_sequences);
    scratch_ = book.book("scratch", KDA_FP32, {parallel_.num_threads, scratch_floats_});
  }

  Status run(const kda_decode_step_args& args, const WorkspaceGrant& workspace, void*) const override {
    const kda_decode_args& d = args.decode;
    const SequenceTable table(d.sequences, args.x[0], 2);
    const ConvForm form = conv_form();
    const ConvRule rule{form.mode,          form.final_window,          desc_.decode.fold != 0,
                        desc_.decode.width, desc_.decode.initial_state, desc_.decode.null_slot};
    const ConvInputs inputs{args.conv_state[0], d.slots,         d.write_slots,        d.has_initial_state,
                            d.accepted,         d.records.count, d.records.record_rows};
    auto* rows = workspace.get<DecodeRow>(rows_);
    auto* conv_rows = workspace.get<ConvRow>(conv_rows_);
    for (int64_t n = 0; n < table.active(); ++n) {
      rows[n] = decode_row(desc_.decode, d, table, n);
      conv_rows[n] = conv_row(rule, inputs, table, n);
    }
    run_tasks({{&desc_.decode, &d, rows}, form, &desc_, &args, conv_rows}, table.active(),
              workspace.get<float>(scratch_));
    if (desc_.decode.mode == KDA_DECODE_RECORDS) set_record_counts(d.records, rows, table.active());
    return {};
  }

 private:
  ConvForm conv_form() const {
    ConvForm form;
    form.width = desc_.conv_width;
    form.io_dtype = desc_.decode.attention.io_dtype;
    form.mode = desc_.decode.mode == KDA_DECODE_RECORDS ? KDA_CONV_RECORDS : KDA_CONV_COLUMNS;
    form.final_window = desc_.decode.mode == KDA_DECODE_COLUMNS && desc_.decode.store == KDA_STORE_FINAL;
    form.layout = desc_.conv_layout;
    return form;
  }

  void run_tasks(const DecodeStepCall& call, int64_t active, float* scratch) const {
    const int64_t heads = desc_.decode.attention.num_heads;
    const int64_t group = std::clamp<int64_t>(active * heads / (8 * int64_t{parallel_.num_threads}), 1, kHeadGroup);
    const int64_t groups = ceil_div(heads, group);
    parallel_.for_each(active * groups, [&](int64_t task, int32_t worker) {
      const FlushDenormals flush;
      const int64_t h0 = task % groups * group;
      functions_.run(call, task / groups, h0, std::min(h0 + group, heads), scratch + worker * scratch_floats_);
    });
  }

  kda_decode_step_desc desc_;
  Parallel parallel_;
  const DecodeStepFunctions& functions_;
  int64_t scratch_floats_;
  WorkspaceBook::Id rows_, conv_rows_, scratch_;
};

struct DecodeStepGates {
  static void check(const kda_decode_step_desc& d, Refusals& refusals) {
    check_attention_gates(d.decode.attention, refusals);
  }
};

}  // namespace

const Candidate<DecodeStep>* portable_decode_step() {
  static const Portable<DecodeStep, DecodeStepKernel, DecodeStepGates> candidate;
  return &candidate;
}

}  // namespace kda::cpu
