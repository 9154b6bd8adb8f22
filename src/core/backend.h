// What a backend implements: for each operator an ordered list of candidates, each of which can say why it
// declines a problem and can make a kernel for one that it accepts (spec R-8..R-13).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/status.h"
#include "core/context.h"
#include "core/operators.h"
#include "core/workspace.h"

namespace kda {

// The unmet gates of one candidate; all are gathered, none short-circuits (spec R-9).
class Refusals {
 public:
  template <class Wanted, class Got>
  void add(std::string_view gate, const Wanted& wanted, const Got& got) {
    if (!text_.empty()) text_ += '\n';
    text_ += str_cat(gate, ": wanted ", wanted, ", got ", got);
  }
  bool empty() const { return text_.empty(); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// A prepared implementation of one plan. Immutable; run() may be called from any number of threads. The
// arguments were validated by core; run() allocates nothing and never fails because of a device value.
template <class Op>
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual Status run(const typename Op::Args& args, const WorkspaceGrant& workspace, void* stream) const = 0;
  // Bytes of the tokens' preparation that a segment summary can leave for a prefill; 0: none.
  virtual int64_t stages_bytes(int64_t /*sequences*/, int64_t /*tokens*/) const { return 0; }
};

template <class Op>
class Candidate {
 public:
  virtual ~Candidate() = default;
  virtual std::string_view name() const = 0;  // "portable", "fused", "reference"
  virtual kda_device_type device() const = 0;
  // Where it departs from the numeric contract N-1..N-8, for kda_explain; docs/numerics.md says the same. `auto`
  // never takes a candidate that departs (spec N-15).
  virtual std::string_view deviation() const { return {}; }
  // Adds every unmet gate. Gates `device_type` and `disabled` are added by the resolver.
  virtual void check(const typename Op::Desc& desc, const Context& context, Refusals& refusals) const = 0;
  // Books workspace and prepares. Called only if check() added nothing.
  virtual Result<std::unique_ptr<Kernel<Op>>> create(const typename Op::Desc& desc, const Context& context,
                                                     WorkspaceBook& book) const = 0;
};

template <class Op>
using CandidateList = std::vector<const Candidate<Op>*>;

class CopyBackend;        // core/state_copy_backend.h
class ProjectionBackend;  // core/projection.h

// Every candidate of every operator, in the order of R-8. Filled in once, by capi.
struct Backends {
  const char* source_hash = "unknown";                // of this library, for the configuration snapshot (spec Y-11)
  std::vector<const CopyBackend*> copies;             // state copies, one backend a device type
  std::vector<const ProjectionBackend*> projections;  // of the layer, in the order of preference
  std::tuple<CandidateList<Prefill>, CandidateList<Decode>, CandidateList<Commit>, CandidateList<DecodeStep>,
             CandidateList<Conv>, CandidateList<GatedNorm>, CandidateList<SegmentSummary>,
             CandidateList<SegmentMerge>, CandidateList<ResidualNorm>>
      lists;

  template <class Op>
  const CandidateList<Op>& of() const {
    return std::get<CandidateList<Op>>(lists);
  }
  template <class Op>
  void add(const Candidate<Op>* candidate) {
    std::get<CandidateList<Op>>(lists).push_back(candidate);
  }
};

}  // namespace kda
