#include "capi/backends.h"

#include "cpu/candidates.h"
#include "cpu/metadata.h"
#include "cpu/state_copy.h"
#include "kda/context.h"
#include "reference/candidates.h"

namespace kda::capi {
namespace {

// A candidate of a backend that is not in this build: says so, and is never created (spec R-9 `not_built`).
template <class Op>
class NotBuilt final : public Candidate<Op> {
 public:
  explicit NotBuilt(std::string_view name) : name_(name) {}
  std::string_view name() const override { return name_; }
  kda_device_type device() const override { return KDA_CUDA; }
  void check(const typename Op::Desc&, const Context&, Refusals& refusals) const override {
    refusals.add("not_built", "a library with the CUDA backend", "one without");
  }
  Result<std::unique_ptr<Kernel<Op>>> create(const typename Op::Desc&, const Context&,
                                             WorkspaceBook&) const override {
    return internal_error("the CUDA backend is not in this build");
  }

 private:
  std::string_view name_;
};

template <class Op>
void add_not_built(Backends& list) {
  static const NotBuilt<Op> fused("fused"), portable("portable");
  list.add<Op>(&fused);
  list.add<Op>(&portable);
}

Backends make() {
  Backends list;
  list.source_hash = kda_source_hash();
  list.copies.push_back(cpu::copy_backend());
  add_not_built<Prefill>(list);
  add_not_built<Decode>(list);
  add_not_built<Commit>(list);
  add_not_built<DecodeStep>(list);
  add_not_built<Conv>(list);
  add_not_built<GatedNorm>(list);
  add_not_built<SegmentSummary>(list);
  add_not_built<SegmentMerge>(list);
  list.add(cpu::portable_prefill());
  list.add(cpu::portable_segment_summary());
  list.add(cpu::portable_segment_merge());
  list.add(cpu::portable_decode());
  list.add(cpu::portable_commit());
  list.add(reference::prefill());
  list.add(reference::decode());
  list.add(reference::commit());
  list.add(reference::decode_step());
  list.add(reference::conv());
  list.add(reference::gated_norm());
  list.add(reference::segment_summary());
  list.add(reference::segment_merge());
  return list;
}

}  // namespace

const Backends& backends() {
  static const Backends list = make();
  return list;
}

MetadataRegistry& metadata_registry() {
  static MetadataRegistry& registry = *[] {
    auto* list = new MetadataRegistry;  // never destroyed: its names live as long as the process
    (void)list->add(builtin_metadata_backend("LIBKDA_CPU", cpu::metadata_device())).ok();
    return list;
  }();
  return registry;
}

}  // namespace kda::capi
