// Every tensor argument of every operator, spoiled in every way that the host can see (G-6, G-8, G-9, R-35): the call
// is refused, the message names the argument, and not a byte of any argument has changed.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "capi/guard.h"
#include "conformance/api.h"
#include "core/plan.h"
#include "support/serving_guard.h"

namespace kda {
namespace {

constexpr int64_t H = 1, HV = 2, K = 4, V = 3, N = 2, T = 3, W = 3, S = 2, kSlots = 5;
constexpr int64_t kChannels = 2 * H * K + HV * V;

// All arguments of a call in one block of memory.
class Arena {
 public:
  Arena() : bytes_(1 << 16, 0) {}
  kda_tensor take(kda_dtype dtype, std::initializer_list<int64_t> shape) {
    used_ = (used_ + 63) / 64 * 64;
    const kda_tensor t = make_tensor(bytes_.data() + used_, dtype, shape);
    used_ += static_cast<size_t>(num_elements(t)) * dtype_size(dtype);
    return t;
  }
  kda_tensor ints(std::initializer_list<int32_t> x) {
    const kda_tensor t = take(KDA_INT32, {static_cast<int64_t>(x.size())});
    std::copy(x.begin(), x.end(), static_cast<int32_t*>(t.data));
    return t;
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  std::vector<char> bytes_;
  size_t used_ = 0;
};

kda_attention_spec attention() {
  kda_attention_spec a{};
  a.num_heads = H;
  a.num_value_heads = HV;
  a.key_dim = K;
  a.value_dim = V;
  a.io_dtype = KDA_FP32;
  a.gate_family = KDA_GATE_SOFTPLUS;
  return a;
}

template <class Args>
void fill_tokens(Arena& m, Args& a) {
  a.q = m.take(KDA_FP32, {T, H, K});
  a.k = m.take(KDA_FP32, {T, H, K});
  a.v = m.take(KDA_FP32, {T, HV, V});
  a.gate = m.take(KDA_FP32, {T, HV, K});
  a.beta = m.take(KDA_FP32, {T, HV});
  a.A_log = m.take(KDA_FP32, {HV});
  a.dt_bias = m.take(KDA_FP32, {HV, K});
}

template <class Desc>
void fill_bounds(Desc& d) {
  d.struct_size = sizeof(Desc);
  d.attention = attention();
  d.max_tokens = T;
  d.max_sequences = N;
  d.null_slot = -1;
}

kda_records records(Arena& m) {
  return {m.take(KDA_FP32, {kSlots, HV, S, V}), m.take(KDA_FP32, {kSlots, HV, S, 2 * K}), m.take(KDA_INT32, {kSlots}),
          m.ints({0, 1})};
}

void valid(Arena& m, kda_prefill_desc& d, kda_prefill_args& a) {
  fill_bounds(d);
  d.initial_state = KDA_INITIAL_FLAGS;
  d.max_checkpoints = 1;
  fill_tokens(m, a);
  a.sequences.cu_seqlens = m.ints({0, 1, 3});
  a.sequences.num_active = m.ints({2});
  a.state = m.take(KDA_FP32, {kSlots, HV, V, K});
  a.slots = m.ints({0, 1});
  a.write_slots = m.ints({2, 3});
  a.has_initial_state = m.take(KDA_BOOL, {N});
  a.checkpoint_offsets = m.take(KDA_INT32, {N, 1});
  a.checkpoint_slots = m.take(KDA_INT32, {N, 1});
  a.chunk_indices = m.take(KDA_INT32, {2, 2});
  a.chunk_offsets = m.take(KDA_INT64, {N + 1});
  a.out = m.take(KDA_FP32, {T, HV, V});
  a.out_rows = m.ints({2, 1, 0});
}

void valid_decode(Arena& m, kda_decode_desc& d, kda_decode_args& a) {
  fill_bounds(d);
  d.width = S;
  a.gate = m.take(KDA_FP32, {T, HV, K});
  a.beta = m.take(KDA_FP32, {T, HV});
  a.A_log = m.take(KDA_FP32, {HV});
  a.dt_bias = m.take(KDA_FP32, {HV, K});
  a.sequences.begin = m.ints({0, 1});
  a.sequences.length = m.ints({1, 2});
  a.sequences.num_active = m.ints({2});
  a.state = m.take(KDA_FP32, {kSlots, HV, V, K});
  a.slots = m.take(KDA_INT32, {N, S});
  a.accepted = m.ints({1, 1});
  a.out = m.take(KDA_FP32, {T, HV, V});
  a.out_rows = m.ints({2, 1, 0});
}

void valid(Arena& m, kda_decode_desc& d, kda_decode_args& a) {
  valid_decode(m, d, a);
  fill_tokens(m, a);
  d.initial_state = KDA_INITIAL_FLAGS;
  a.has_initial_state = m.take(KDA_BOOL, {N});
  a.write_slots = m.take(KDA_INT32, {N, S});
}

void valid(Arena& m, kda_decode_step_desc& d, kda_decode_step_args& a) {
  d.struct_size = sizeof d;
  valid_decode(m, d.decode, a.decode);
  d.decode.mode = KDA_DECODE_RECORDS;
  a.decode.records = records(m);
  d.conv_width = W;
  d.conv_parts = 1;
  d.conv_layout = KDA_CONV_SD;
  a.x[0] = m.take(KDA_FP32, {T, kChannels});
  a.conv_weight[0] = m.take(KDA_FP32, {kChannels, W});
  a.conv_state[0] = m.take(KDA_FP32, {kSlots, W - 1 + S, kChannels});
  a.z = m.take(KDA_FP32, {T, HV, V});
  a.norm_weight = m.take(KDA_FP32, {V});
}

void valid(Arena& m, kda_commit_desc& d, kda_commit_args& a) {
  d.struct_size = sizeof d;
  d.attention = attention();
  d.max_sequences = N;
  d.width = S;
  d.null_slot = -1;
  d.conv_width = W;
  d.conv_parts = 1;
  d.conv_layout = KDA_CONV_DS;
  a.A_log = m.take(KDA_FP32, {HV});
  a.dt_bias = m.take(KDA_FP32, {HV, K});
  a.state = m.take(KDA_FP32, {kSlots, HV, V, K});
  a.slots = m.ints({0, 1});
  a.accepted = m.ints({0, 0});
  a.num_active = m.ints({2});
  a.records = records(m);
  a.conv_state[0] = m.take(KDA_FP32, {kSlots, kChannels, W - 1 + S});
}

void valid(Arena& m, kda_conv_desc& d, kda_conv_args& a) {
  d.struct_size = sizeof d;
  d.mode = KDA_CONV_PREFILL;
  d.width = W;
  d.parts = 1;
  d.channels[0] = kChannels;
  d.io_dtype = KDA_FP32;
  d.layout = KDA_CONV_SD;
  d.max_tokens = T;
  d.max_sequences = N;
  d.null_slot = -1;
  d.initial_state = KDA_INITIAL_FLAGS;
  d.max_checkpoints = 1;
  a.x[0] = m.take(KDA_FP32, {T, kChannels});
  a.weight[0] = m.take(KDA_FP32, {kChannels, 1, W});
  a.bias[0] = m.take(KDA_FP32, {kChannels});
  a.sequences.cu_seqlens = m.ints({0, 1, 3});
  a.sequences.num_active = m.ints({2});
  a.state[0] = m.take(KDA_FP32, {kSlots, W - 1, kChannels});
  a.slots = m.ints({0, 1});
  a.write_slots = m.ints({2, 3});
  a.has_initial_state = m.take(KDA_BOOL, {N});
  a.checkpoint_offsets = m.take(KDA_INT32, {N, 1});
  a.checkpoint_slots = m.take(KDA_INT32, {N, 1});
  a.out[0] = m.take(KDA_FP32, {T, kChannels});
  a.out_rows = m.ints({2, 1, 0});
}

void valid(Arena& m, kda_gated_norm_desc& d, kda_gated_norm_args& a) {
  d.struct_size = sizeof d;
  d.num_value_heads = HV;
  d.value_dim = V;
  d.io_dtype = KDA_FP32;
  d.max_tokens = T;
  a.o = m.take(KDA_FP32, {T, HV, V});
  a.z = m.take(KDA_FP32, {T, HV, V});
  a.weight = m.take(KDA_FP32, {V});
  a.out = m.take(KDA_FP32, {T, HV, V});
}

void valid(Arena& m, kda_residual_norm_desc& d, kda_residual_norm_args& a) {
  d.struct_size = sizeof d;
  d.hidden = 24;
  d.io_dtype = KDA_FP32;
  d.max_tokens = T;
  a.residual = m.take(KDA_FP32, {T, 24});
  a.add = m.take(KDA_FP32, {T, 24});
  a.weight = m.take(KDA_FP32, {24});
  a.out = m.take(KDA_FP32, {T, 24});
}

void valid(Arena& m, kda_prefill_desc& d, kda_segment_summary_args& a) {
  fill_bounds(d);
  fill_tokens(m, a);
  a.sequences.cu_seqlens = m.ints({0, 1, 3});
  a.summary = m.take(KDA_FP32, {N, HV, V + K, K});
}

void valid(Arena& m, kda_segment_merge_desc& d, kda_segment_merge_args& a) {
  d.struct_size = sizeof d;
  d.num_value_heads = HV;
  d.key_dim = K;
  d.value_dim = V;
  d.max_segments = 2;
  a.initial_state = m.take(KDA_FP32, {HV, V, K});
  a.summaries = m.take(KDA_FP32, {2, HV, V + K, K});
  a.present = m.take(KDA_BOOL, {2});
  a.start_states = m.take(KDA_FP32, {2, HV, V, K});
  a.final_state = m.take(KDA_FP32, {HV, V, K});
}

// A call of operator Op and its spoiled variants.
template <class Op>
class Call {
 public:
  using Args = typename Op::Args;

  explicit Call(kda_context* context = conformance::cpu_context()) {
    args_.struct_size = sizeof args_;
    typename Op::Desc desc{};
    valid(arena_, desc, args_);
    auto plan = create_plan<Op>(*context, &desc);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (plan.ok()) plan_ = std::move(plan.value());
    workspace_.resize(static_cast<size_t>(plan_->book.total_bytes()) + 256);
    lent_ = {workspace_.data() + (256 - reinterpret_cast<uintptr_t>(workspace_.data()) % 256) % 256,
             static_cast<size_t>(plan_->book.total_bytes())};
  }

  Status run(const Args& args) { return run_plan<Op>(plan_.get(), &args, lent_, nullptr); }
  const Args& args() const { return args_; }
  const kda_workspace& lent() const { return lent_; }

  // spoil(name, tensor, written) changes a tensor and says whether it did; the call must then be refused by name.
  void each(const std::string& how, const std::function<bool(const std::string&, kda_tensor&, bool)>& spoil) {
    Op::visit_tensors(args_, [&](const char* name, const kda_tensor& tensor, bool written) {
      const auto offset = reinterpret_cast<const char*>(&tensor) - reinterpret_cast<const char*>(&args_);
      Args args = args_;
      if (!spoil(name, *reinterpret_cast<kda_tensor*>(reinterpret_cast<char*>(&args) + offset), written)) return;
      SCOPED_TRACE(testing::Message() << Op::kName << ": " << name << " " << how);
      const std::vector<char> before = arena_.bytes();
      const Status status = run(args);
      EXPECT_TRUE(status.code() == KDA_INVALID_ARGUMENT || status.code() == KDA_UNSUPPORTED) << status.message();
      EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
      EXPECT_NE(status.message().find("wanted"), std::string::npos) << status.message();
      EXPECT_NE(status.message().find("got"), std::string::npos) << status.message();
      EXPECT_TRUE(before == arena_.bytes());
    });
  }

 private:
  Arena arena_;
  Args args_{};
  std::unique_ptr<Plan<Op>> plan_;
  std::vector<char> workspace_;
  kda_workspace lent_{};
};

template <class Op>
class EveryArgument : public testing::Test {};
using Operators =
    testing::Types<Prefill, Decode, DecodeStep, Commit, Conv, GatedNorm, ResidualNorm, SegmentSummary, SegmentMerge>;
struct OperatorNames {
  template <class Op>
  static std::string GetName(int) {
    return Op::kName;
  }
};
TYPED_TEST_SUITE(EveryArgument, Operators, OperatorNames);

TYPED_TEST(EveryArgument, G06_TheUnspoiledCallIsAccepted) {
  Call<TypeParam> call;
  const Status status = call.run(call.args());
  EXPECT_TRUE(status.ok()) << status.message();
}

TYPED_TEST(EveryArgument, G06_DtypeRankDeviceAddressAndSize) {
  Call<TypeParam> call;
  call.each("of an unknown dtype", [](const auto&, kda_tensor& t, bool) {
    t.dtype = static_cast<kda_dtype>(77);
    return true;
  });
  call.each("of another dtype", [](const auto&, kda_tensor& t, bool) {
    if (!present(t)) return false;
    t.dtype = KDA_UINT8;
    return true;
  });
  // Parameters may have any shape of the right count (L-1), block tables more columns than the plan (F37).
  const std::set<std::string> parameters = {"A_log", "dt_bias", "norm_weight", "weight", "bias[0]"};
  const std::set<std::string> tables = {"slots", "write_slots"};
  call.each("of a rank too much", [&](const auto& name, kda_tensor& t, bool) {
    if (!present(t) || parameters.count(name) != 0) return false;
    if (name == "slots" && t.rank == 1 && TypeParam::kOp == KDA_OP_COMMIT) return false;  // a table of one column
    for (int i = t.rank; i > 0; --i) {
      t.shape[i] = t.shape[i - 1];
      t.strides[i] = t.strides[i - 1];
    }
    t.shape[0] = 1;
    ++t.rank;
    return true;
  });
  call.each("of rank 99", [](const auto&, kda_tensor& t, bool) {
    t.rank = 99;
    return present(t);
  });
  call.each("on another device", [](const auto&, kda_tensor& t, bool) {
    t.device.type = KDA_CUDA;
    return present(t);
  });
  call.each("without memory", [](const auto&, kda_tensor& t, bool) {
    t.data = nullptr;
    return present(t);
  });
  call.each("at an odd address", [](const auto&, kda_tensor& t, bool) {
    if (!present(t) || dtype_size(t.dtype) == 1) return false;
    t.data = static_cast<char*>(t.data) + 1;
    return true;
  });
  call.each("of a negative size", [](const auto&, kda_tensor& t, bool) {
    t.shape[0] = -1;
    return present(t);
  });
  call.each("with one element more in a row", [&](const auto& name, kda_tensor& t, bool) {
    if (!present(t) || t.rank < 2 || tables.count(name) != 0) return false;
    ++t.shape[t.rank - 1];
    return true;
  });
}

TYPED_TEST(EveryArgument, G10_SizesThatWrap) {
  Call<TypeParam> call;
  call.each("beyond 2^63 bytes", [](const auto&, kda_tensor& t, bool) {
    t.shape[0] = INT64_MAX / 2;
    return present(t);
  });
  for (const int64_t stride : {INT64_MAX, INT64_MIN}) {
    call.each("with a stride beyond 2^63 bytes", [&](const auto&, kda_tensor& t, bool) {
      t.strides[0] = stride;
      return present(t) && t.shape[0] > 1;
    });
  }
}

TYPED_TEST(EveryArgument, G09_WrittenTensorsShareNothing) {
  Call<TypeParam> call;
  call.each("with rows over one another", [](const auto&, kda_tensor& t, bool written) {
    t.strides[0] = 0;
    return written && present(t) && t.shape[0] > 1;
  });
}

TYPED_TEST(EveryArgument, R35_TheWorkspaceLiesApart) {
  Call<TypeParam> call;
  const kda_workspace lent = call.lent();
  if (lent.bytes == 0) GTEST_SKIP() << "no workspace";
  call.each("in the workspace", [&](const auto&, kda_tensor& t, bool) {
    // The tensor's last byte and the workspace's first one.
    const ByteRange range = byte_range(t);
    if (range.first == range.last) return false;
    t.data = static_cast<char*>(lent.data) - (range.last - range.first) + dtype_size(t.dtype);
    return true;
  });
}

TYPED_TEST(EveryArgument, G11_RunsAllocateLockAndLookUpNothing) {
  Call<TypeParam> call(conformance::cpu_context(1));  // of a pool's threads more is excepted
  ASSERT_TRUE(call.run(call.args()).ok());
  const conformance::test::ServingGuard guard;
  const kda_status code = call.run(call.args()).code();
  EXPECT_EQ(guard.calls().total(), 0) << guard.calls().text();
  EXPECT_EQ(code, KDA_OK);
}

// What a call does not want it refuses too, but for the vectors that a server passes whatever the mode.
TYPED_TEST(EveryArgument, G06_WhatIsNotWantedIsRefused) {
  const std::map<std::string, std::set<std::string>> ignored = {
      {"conv", {"accepted", "record_count", "record_rows"}},
  };
  Call<TypeParam> call;
  float value = 0;
  call.each("given", [&](const std::string& name, kda_tensor& t, bool) {
    const auto of = ignored.find(TypeParam::kName);
    if (present(t) || (of != ignored.end() && of->second.count(name) != 0)) return false;
    t = make_tensor(&value, KDA_FP32, {1});
    return true;
  });
}

}  // namespace
}  // namespace kda
