// What the oracle's candidates have in common. The oracle (spec E-11) is the definition: token by token in fp64,
// nothing rounded but what is stored. It is not a serving backend: `auto` never takes it, and its speed is
// that of plain loops.
#pragma once

#include <memory>
#include <string_view>

#include "base/tensor.h"
#include "core/backend.h"

namespace kda::reference {

// Reference candidate of Op whose kernel is KernelType(desc, context, book).
template <class Op, class KernelType>
class ReferenceCandidate final : public Candidate<Op> {
 public:
  std::string_view name() const override { return "reference"; }
  kda_device_type device() const override { return KDA_CPU; }
  void check(const typename Op::Desc& desc, const Context&, Refusals& refusals) const override {
    KernelType::check(desc, refusals);
  }
  Result<std::unique_ptr<Kernel<Op>>> create(const typename Op::Desc& desc, const Context& context,
                                             WorkspaceBook& book) const override {
    return std::unique_ptr<Kernel<Op>>(std::make_unique<KernelType>(desc, context, book));
  }
};

// N-13 asks for bits that survive cuts and rollbacks with a pool. The oracle computes in fp64 and rounds to the
// pool's dtype between calls, so it can promise that for fp64 states only.
inline void check_batch_invariant(uint32_t flags, kda_dtype state_dtype, Refusals& refusals) {
  if ((flags & KDA_PLAN_BATCH_INVARIANT) == 0 || state_dtype == KDA_FP64) return;
  refusals.add("batch_invariant", "fp64 states (the oracle carries fp64 within a call)", dtype_name(state_dtype));
}

// Per-worker fp64 scratch, booked as section "scratch".
class WorkerScratch {
 public:
  WorkerScratch(const Context& context, WorkspaceBook& book, int64_t doubles)
      : doubles_(doubles), id_(book.book("scratch", KDA_FP64, {context.parallel.num_threads, doubles})) {}
  double* of(const WorkspaceGrant& grant, int32_t worker) const { return grant.get<double>(id_) + worker * doubles_; }

 private:
  int64_t doubles_;
  WorkspaceBook::Id id_;
};

}  // namespace kda::reference
