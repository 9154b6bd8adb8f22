// The conformance suite runs every case over each backend by name: adding a backend is adding its name to
// kBackends. A case is skipped, with its reason printed, where a backend has no candidate for the operator on this
// machine; a candidate that exists but refuses is a failure.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "conformance/compare.h"
#include "conformance/distributions.h"
#include "conformance/limits.h"
#include "conformance/random.h"
#include "conformance/rounding.h"
#include "conformance/tensor.h"
#include "support/device.h"

namespace kda::conformance::test {

// "cuda_portable" and the like: on the device of the program in tests/cuda.
#ifndef KDA_CONFORMANCE_BACKENDS
#define KDA_CONFORMANCE_BACKENDS "reference", "portable"
#endif
inline const std::vector<std::string> kBackends = {KDA_CONFORMANCE_BACKENDS};

// True if some candidate of the operator bears the name on the device that the name means. `desc` is the operator's
// description.
bool has_candidate(kda_operator op, const void* desc, const std::string& backend);

using conformance::Arithmetic;
using conformance::Limits;
using conformance::limits;
using conformance::pool_rounding;

class BackendTest : public testing::TestWithParam<std::string> {
 protected:
  const char* backend() const { return GetParam().c_str(); }
  bool is_reference() const { return GetParam() == "reference"; }
  bool on_device() const { return GetParam().rfind("cuda_", 0) == 0; }
  // Bit equality between batches, cuts and paths (N-13). The oracle computes in fp64 and can promise it with fp64
  // states only, where no rounding lies between calls.
  uint32_t invariant() const { return KDA_PLAN_BATCH_INVARIANT; }
  kda_dtype exact_pool() const { return is_reference() ? KDA_FP64 : KDA_FP32; }
  // Limits of N-9 for what the backend runs: `auto` on a device takes tensor cores for bf16 prefill, whose release
  // targets hold here.
  Limits limits(kda_dtype io, bool degenerate = false) const {
    return test::limits(io, degenerate, takes_tensor_cores(io) ? Arithmetic::kTensorCores : Arithmetic::kFp32);
  }
  bool takes_tensor_cores(kda_dtype io) const {
    return may_take_tensor_cores_ && io == KDA_BF16 && GetParam() == "cuda_auto";
  }
  bool may_take_tensor_cores_ = true;

  void require(kda_operator op, const void* desc) {
    if (!has_candidate(op, desc, GetParam())) GTEST_SKIP() << "no candidate '" << GetParam() << "' for this operator";
  }
  void SetUp() override {
    kda_prefill_desc d = prefill_desc(field_problem({{1}, 1}), "auto");
    require(KDA_OP_PREFILL, &d);
  }
};

// The same for cases that need decode alone.
class DecodeBackendTest : public BackendTest {
 protected:
  void SetUp() override {
    may_take_tensor_cores_ = false;
    kda_decode_desc d = decode_desc(field_problem({{1}, 1}), "auto");
    require(KDA_OP_DECODE, &d);
  }
};

inline std::string backend_name(const testing::TestParamInfo<std::string>& info) { return info.param; }
#define KDA_FOR_BACKENDS(SUITE) \
  INSTANTIATE_TEST_SUITE_P(Backends, SUITE, ::testing::ValuesIn(kBackends), ::kda::conformance::test::backend_name)

#define EXPECT_WITHIN(comparison, limit)                                         \
  do {                                                                           \
    const ::kda::conformance::Comparison kda_c_ = (comparison);                  \
    EXPECT_TRUE(kda_c_.within(limit)) << kda_c_.text() << "; limit " << (limit); \
  } while (0)

// A prefill over a pool (or packed states) with everything in reach of a test. Fill in, run(), look.
struct PrefillCall {
  explicit PrefillCall(Problem problem, const char* backend);

  Problem p;
  kda_prefill_desc desc;
  Tensor pool;                       // absent: packed or none
  Tensor slots, write_slots, flags;  // absent: as the ABI says
  Tensor final_state;
  Tensor offsets, begin, length, active;  // sequences: offsets by default
  Tensor checkpoint_offsets, checkpoint_slots, checkpoint_states;
  Tensor out, out_rows;
  bool no_final_state = false;
  std::string message;

  // A canary pool of `slots` slots; sequence n uses slot ids[n], which first takes the problem's initial state n.
  void use_pool(int64_t slots, const std::vector<int64_t>& ids, kda_dtype dtype = KDA_FP32, int64_t slot_stride = 0,
                int64_t offset = 0);
  kda_prefill_args args() const;
  kda_status run();
  std::vector<double> slot(int64_t s) const { return values(select(pool, 0, s)); }
};

// The same for decode and verify.
struct DecodeCall {
  explicit DecodeCall(Problem problem, const char* backend, int32_t width = 1);

  Problem p;
  kda_decode_desc desc;
  Tensor pool, slots, write_slots, accepted, flags;
  Tensor offsets, begin, length, active;
  Tensor u, kg, count, record_rows;
  Tensor out, out_rows;
  std::string message;

  kda_decode_args args() const;
  kda_status run();
  std::vector<double> slot(int64_t s) const { return values(select(pool, 0, s)); }
};

// ---- Ledger (field cases, Notation) ---------------------------------------------------------------------

// Plain form: token with number c has k = q = e_(c mod K), v = 1, g = 0, beta = 0.5, scale 1. Column c of the state
// is then 0, 0.5 or 0.75 after it was absorbed never, once or twice.
Problem ledger(const std::vector<int64_t>& lengths, const std::vector<int64_t>& tokens, int64_t heads = 2,
               int64_t dim = 128);
std::vector<int64_t> iota(int64_t count, int64_t first = 0);
// The K column values of a ledger state [HV, V, K]; fails the test if rows or heads differ.
std::vector<double> ledger_columns(const std::vector<double>& state, int64_t K = 128);
// Expects 0.5 in the named columns, `twice` 0.75, 0 elsewhere (1e-5).
void expect_ledger(const std::vector<double>& state, const std::vector<int64_t>& once,
                   const std::vector<int64_t>& twice = {}, int64_t K = 128);

// ---- Pieces of problems ---------------------------------------------------------------------------------

// Token rows [begin, begin + count) of a packed problem as one sequence, without initial state.
Problem cut(const Problem& p, int64_t begin, int64_t count);
// Initial state of sequence n as a problem's own.
Tensor state_of(const Tensor& states, int64_t n);
// Rows [begin, begin + count) of a packed output.
std::vector<double> rows(const Tensor& x, int64_t begin, int64_t count);
// The oracle's out rows and states of a packed problem whose sequences may be fresh one by one.
Outcome oracle_with_flags(const Problem& p, const std::vector<int64_t>& has_state);

}  // namespace kda::conformance::test
