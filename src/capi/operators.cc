// Plan creation and runs of every operator: the same two steps each, so one template each.
#include "capi/guard.h"
#include "core/plan.h"
#include "kda/kda.h"

namespace {

using kda::Status;
using kda::capi::check_pointer;
using kda::capi::guard;

template <class Op>
kda_status create(kda_context* context, const typename Op::Desc* desc, kda_plan** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto plan = kda::create_plan<Op>(*context, desc);
    if (!plan.ok()) return plan.status();
    *out = plan.value().release();
    return {};
  });
}

template <class Op>
kda_status run(const kda_plan* plan, const typename Op::Args* args, const kda_workspace& workspace, void* stream) {
  return guard([&] { return kda::run_plan<Op>(plan, args, workspace, stream); });
}

template <class Desc>
void init(Desc* desc) {
  if (desc == nullptr) return;
  *desc = Desc{};
  desc->struct_size = sizeof(Desc);
  desc->null_slot = -1;
}

}  // namespace

#define KDA_DEFINE_ENTRY_POINTS(NAME, OP)                                                                \
  kda_status kda_##NAME##_plan_create(kda_context* context, const kda::OP::Desc* desc, kda_plan** out) { \
    return create<kda::OP>(context, desc, out);                                                          \
  }                                                                                                      \
  kda_status kda_##NAME##_run(const kda_plan* plan, const kda::OP::Args* args, kda_workspace workspace,  \
                              void* stream) {                                                            \
    return run<kda::OP>(plan, args, workspace, stream);                                                  \
  }

extern "C" {

KDA_DEFINE_ENTRY_POINTS(prefill, Prefill)
KDA_DEFINE_ENTRY_POINTS(segment_summary, SegmentSummary)
KDA_DEFINE_ENTRY_POINTS(segment_merge, SegmentMerge)
KDA_DEFINE_ENTRY_POINTS(decode, Decode)
KDA_DEFINE_ENTRY_POINTS(commit, Commit)
KDA_DEFINE_ENTRY_POINTS(decode_step, DecodeStep)
KDA_DEFINE_ENTRY_POINTS(conv, Conv)
KDA_DEFINE_ENTRY_POINTS(gated_norm, GatedNorm)
KDA_DEFINE_ENTRY_POINTS(residual_norm, ResidualNorm)

kda_status kda_segment_stages_size(const kda_plan* plan, int64_t sequences, int64_t tokens, size_t* bytes) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("bytes", bytes));
    if (plan == nullptr || plan->op != KDA_OP_SEGMENT_SUMMARY)
      return kda::invalid_argument("plan: wanted a plan of segment_summary");
    if (sequences < 0 || tokens < 0) {
      return kda::invalid_argument("sequences, tokens: wanted at least 0, got ", sequences, " and ", tokens);
    }
    const auto& summary = *static_cast<const kda::Plan<kda::SegmentSummary>*>(plan);
    *bytes = static_cast<size_t>(summary.kernel->stages_bytes(sequences, tokens));
    return {};
  });
}

void kda_prefill_desc_init(kda_prefill_desc* desc) { init(desc); }
void kda_decode_desc_init(kda_decode_desc* desc) { init(desc); }
void kda_commit_desc_init(kda_commit_desc* desc) { init(desc); }
void kda_conv_desc_init(kda_conv_desc* desc) { init(desc); }

void kda_decode_step_desc_init(kda_decode_step_desc* desc) {
  if (desc == nullptr) return;
  *desc = kda_decode_step_desc{};
  desc->struct_size = sizeof(*desc);
  init(&desc->decode);
}

}  // extern "C"
