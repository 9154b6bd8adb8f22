// The CUDA candidates' own tables in the resolver (spec ), on made-up devices: no GPU and
// no CUDA toolkit are needed.
#include "cuda/host/gates.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "core/plan.h"

namespace kda::cuda {
namespace {

const std::vector<std::string> kGates = {
    "not_built",  "disabled",   "device_type", "no_device_image", "driver",          "head_dim",
    "io_dtype",   "gate_dtype", "gate_family", "lower_bound",     "grouped_heads",   "neg_eigval",
    "pool_dtype", "layout",     "index_dtype", "checkpoints",     "batch_invariant", "size"};

// Gates named in a message: "  fused: head_dim: wanted ...; io_dtype: wanted ...".
std::vector<std::string> gates_in(const std::string& message) {
  std::vector<std::string> found;
  for (const std::string& gate : kGates) {
    if (message.find(" " + gate + ": wanted") != std::string::npos) found.push_back(gate);
  }
  return found;
}

// A candidate that has a table of the backend and a kernel that does nothing.
template <class Op>
class Stub final : public Candidate<Op> {
 public:
  using Check = void (*)(const typename Op::Desc&, const Context&, Refusals&);
  Stub(std::string_view name, kda_device_type device, Check gates) : name_(name), device_(device), check_(gates) {}
  std::string_view name() const override { return name_; }
  kda_device_type device() const override { return device_; }
  void check(const typename Op::Desc& d, const Context& c, Refusals& r) const override {
    if (check_ != nullptr) check_(d, c, r);
  }
  Result<std::unique_ptr<Kernel<Op>>> create(const typename Op::Desc&, const Context&,
                                             WorkspaceBook&) const override {
    class Nothing final : public Kernel<Op> {
      Status run(const typename Op::Args&, const WorkspaceGrant&, void*) const override { return {}; }
    };
    return std::unique_ptr<Kernel<Op>>(new Nothing);
  }

 private:
  std::string_view name_;
  kda_device_type device_;
  Check check_;
};

DeviceFacts h200() {
  DeviceFacts f;
  f.name = "made up";
  f.major = 9;
  f.multiprocessors = 132;
  f.driver_version = f.runtime_version = 13000;
  return f;
}

class Gates : public testing::Test {
 public:
  Gates() {
    for (auto* c : {&fused_, &portable_, &cpu_, &reference_}) backends_.add<Prefill>(c);
    for (auto* c : {&fused_decode_, &portable_decode_}) backends_.add<Decode>(c);
    context_.backends = &backends_;
    context_.device = {KDA_CUDA, 0};
    context_.isa = "sm_90";
    context_.facts = h200();
    kda_prefill_desc_init(&desc_);
    desc_.attention = attention();
    kda_decode_desc_init(&decode_);
    decode_.attention = attention();
    unsetenv("KDA_PREFILL_BACKEND");
  }
  ~Gates() override { unsetenv("KDA_PREFILL_BACKEND"); }

  static kda_attention_spec attention() {
    kda_attention_spec a{};
    a.num_heads = 2;
    a.key_dim = a.value_dim = 128;
    a.io_dtype = KDA_BF16;
    a.gate_family = KDA_GATE_BOUNDED;
    a.lower_bound = -5;
    return a;
  }
  // The chosen candidate, or the gates that a refusal names, sorted as in kGates.
  std::string prefill(const char* backend) {
    desc_.backend = backend;
    auto p = create_plan<Prefill>(context_, &desc_);
    message_ = p.ok() ? "" : p.status().message();
    if (p.ok()) return p.value()->backend;
    if (p.status().code() == KDA_INVALID_ARGUMENT) return "invalid";
    std::string s;
    for (const std::string& g : gates_in(message_)) s += (s.empty() ? "" : " ") + g;
    return s;
  }
  std::string decode(const char* backend) {
    decode_.backend = backend;
    auto p = create_plan<Decode>(context_, &decode_);
    message_ = p.ok() ? "" : p.status().message();
    if (p.ok()) return p.value()->backend;
    std::string s;
    for (const std::string& g : gates_in(message_)) s += (s.empty() ? "" : " ") + g;
    return s;
  }

  Stub<Prefill> fused_{"fused", KDA_CUDA, [](const kda_prefill_desc& d, const Context& c, Refusals& r) {
                         check_prefill(kFusedPrefill, d, c, r);
                       }};
  Stub<Prefill> portable_{"portable", KDA_CUDA, [](const kda_prefill_desc& d, const Context& c, Refusals& r) {
                            check_prefill(kPortablePrefill, d, c, r);
                          }};
  Stub<Prefill> cpu_{"portable", KDA_CPU, nullptr};
  Stub<Prefill> reference_{"reference", KDA_CPU, nullptr};
  Stub<Decode> fused_decode_{"fused", KDA_CUDA, [](const kda_decode_desc& d, const Context& c, Refusals& r) {
                               check_decode(kFusedDecode, d, c, r);
                             }};
  Stub<Decode> portable_decode_{"portable", KDA_CUDA, [](const kda_decode_desc& d, const Context& c, Refusals& r) {
                                  check_decode(kPortableDecode, d, c, r);
                                }};
  Backends backends_;
  Context context_;
  kda_prefill_desc desc_{};
  kda_decode_desc decode_{};
  std::string message_;
};

TEST_F(Gates, R17_AutoOnHopper) {
  EXPECT_EQ(prefill("auto"), "fused");
  desc_.attention.gate_family = KDA_GATE_SOFTPLUS;
  desc_.attention.lower_bound = 0;
  EXPECT_EQ(prefill("auto"), kFusedPrefill.attention.softplus ? "fused" : "portable");
  EXPECT_EQ(decode("auto"), "fused");
}

TEST_F(Gates, R17_OtherTypesAndSizesGoToPortable) {
  for (kda_dtype io : {KDA_FP16, KDA_FP32}) {
    desc_.attention.io_dtype = io;
    EXPECT_EQ(prefill("auto"), "portable");
  }
  desc_.attention.io_dtype = KDA_BF16;
  for (int64_t dim : {60, 64, 100, 256}) {
    desc_.attention.value_dim = decode_.attention.value_dim = dim;
    EXPECT_EQ(prefill("auto"), "portable") << dim;
    EXPECT_EQ(decode("auto"), "portable") << dim;
  }
}

TEST_F(Gates, R17_AnotherArchitectureNeverFallsToTheCpu) {
  for (int32_t major : {8, 10, 12}) {
    context_.facts.major = major;
    EXPECT_EQ(prefill("auto"), "device_type no_device_image");  // device_type is the CPU candidate's
    EXPECT_NE(message_.find(str_cat("got ", major, ".0")), std::string::npos) << message_;
    EXPECT_EQ(decode("auto"), "no_device_image");
  }
}

TEST_F(Gates, R17_CpuTensorsGoToTheCpu) {
  context_.device = {KDA_CPU, 0};
  context_.facts = {};
  desc_.backend = "auto";
  auto p = create_plan<Prefill>(context_, &desc_);
  ASSERT_TRUE(p.ok());
  EXPECT_EQ(p.value()->backend, "portable");
  ASSERT_EQ(p.value()->refused.size(), 2u);
  for (const Refused& r : p.value()->refused) EXPECT_EQ(r.reasons.find("device_type"), 0u) << r.reasons;
}

// Each gate alone: exactly that one is named.
TEST_F(Gates, R60_EachGateAlone) {
  const struct {
    const char* gate;
    void (*spoil)(Gates&);
  } cases[] = {
      {"device_type",
       [](Gates& g) {
         g.context_.device = {KDA_CPU, 0};
       }},
      {"no_device_image", [](Gates& g) { g.context_.facts.major = 10; }},
      {"driver", [](Gates& g) { g.context_.facts.driver_version = 12090; }},
      {"head_dim", [](Gates& g) { g.desc_.attention.key_dim = 64; }},
      {"head_dim", [](Gates& g) { g.desc_.attention.value_dim = 256; }},
      {"io_dtype", [](Gates& g) { g.desc_.attention.out_dtype = KDA_FP64; }},
      {"pool_dtype", [](Gates& g) { g.desc_.attention.state_dtype = KDA_FP64; }},
      {"lower_bound", [](Gates& g) { g.desc_.attention.lower_bound = -105; }},
      {"size", [](Gates& g) { g.desc_.max_sequences = int64_t{1} << 40; }},
  };
  for (const auto& c : cases) {
    const kda_prefill_desc before = desc_;
    c.spoil(*this);
    EXPECT_EQ(prefill("fused"), c.gate) << message_;
    EXPECT_EQ(prefill("flashkda"), c.gate) << message_;
    desc_ = before;
    context_.device = {KDA_CUDA, 0};
    context_.facts = h200();
    EXPECT_EQ(prefill("fused"), "fused");
  }
}

// Capabilities are declared, not tied to a name: a narrower table refuses by its own gates.
TEST_F(Gates, R09_EveryGateOfATableIsReported) {
  AttentionCapability narrow = kFusedDecode;
  narrow.softplus = narrow.plain = narrow.grouped_heads = narrow.neg_eigval = false;
  narrow.smallest_bound = -5;
  narrow.io = narrow.gate = narrow.beta = {KDA_BF16};
  narrow.state = {KDA_FP32};
  kda_attention_spec a = attention();
  a.num_value_heads = 4;
  a.allow_neg_eigval = 1;
  a.lower_bound = -7;
  a.io_dtype = KDA_FP16;
  a.state_dtype = KDA_BF16;
  a.key_dim = 64;
  ASSERT_TRUE(normalize_attention(a).ok());
  Refusals r;
  check_attention(narrow, a, r);
  for (const char* gate :
       {"head_dim", "io_dtype", "gate_dtype", "pool_dtype", "lower_bound", "grouped_heads", "neg_eigval"}) {
    EXPECT_NE(r.text().find(str_cat(gate, ": wanted")), std::string::npos) << gate << "\n" << r.text();
  }
  EXPECT_EQ(r.text().find("gate_family"), std::string::npos);
  a.gate_family = KDA_GATE_SOFTPLUS;
  Refusals family;
  check_attention(narrow, a, family);
  EXPECT_NE(family.text().find("gate_family: wanted bounded, got softplus"), std::string::npos) << family.text();
  EXPECT_EQ(family.text().find("lower_bound"), std::string::npos);
}

TEST_F(Gates, R17_AllAtOnceNamesExactlyTheUnmetOnes) {
  context_.facts.major = 8;
  context_.facts.driver_version = 12000;
  desc_.attention.key_dim = 64;
  desc_.attention.io_dtype = KDA_FP16;
  desc_.attention.state_dtype = KDA_FP64;
  desc_.max_sequences = int64_t{1} << 40;
  EXPECT_EQ(prefill("fused"), "no_device_image driver head_dim io_dtype gate_dtype pool_dtype size") << message_;
}

TEST_F(Gates, R09_LayoutOfAnExample) {
  auto args = kda_prefill_args{};
  args.struct_size = sizeof(args);
  kda_tensor& q = args.q;
  q.dtype = KDA_BF16;
  q.rank = 3;
  q.shape[0] = 5, q.shape[1] = 2, q.shape[2] = 128;
  q.strides[0] = 256 + 4, q.strides[1] = 128, q.strides[2] = 1;
  desc_.example = &args;
  EXPECT_EQ(prefill("fused"), "layout") << message_;
  EXPECT_NE(message_.find("stride(0)"), std::string::npos) << message_;
  EXPECT_EQ(prefill("auto"), "portable");
  q.strides[0] = int64_t{1} << 27;  // 32 rows of it are 8 GiB
  EXPECT_EQ(prefill("fused"), "layout") << message_;
  q.strides[0] = int64_t{1} << 20;
  EXPECT_EQ(prefill("fused"), "fused") << message_;
}

TEST_F(Gates, R18_DecodeHasTheSameMachinery) {
  EXPECT_EQ(decode("native"), "fused");
  EXPECT_EQ(decode("triton"), "portable");
  decode_.attention.key_dim = 100;
  EXPECT_EQ(decode("fused"), "head_dim") << message_;
  decode_.attention.key_dim = 257;
  EXPECT_EQ(decode("auto"), "head_dim") << message_;
}

// Channels and rows that a kernel numbers in 32 bits.
TEST_F(Gates, R09_SizesThatKernelsCanNumber) {
  kda_conv_desc conv;
  kda_conv_desc_init(&conv);
  conv.mode = KDA_CONV_COLUMNS;
  conv.max_tokens = conv.max_sequences = conv.parts = 1;
  conv.out_dtype = KDA_BF16;
  kda_gated_norm_desc norm{};
  norm.out_dtype = KDA_BF16;
  norm.num_value_heads = 1;
  norm.value_dim = 1;
  for (const int64_t more : {0, 1}) {
    SCOPED_TRACE(more);
    Refusals of_conv, of_norm;
    conv.channels[0] = (int64_t{1} << 30) + more;
    check_conv(conv, context_, of_conv);
    EXPECT_EQ(of_conv.text().find("size: wanted channels") != std::string::npos, more == 1) << of_conv.text();
    norm.max_tokens = 0x7fffffff - 32 + more;
    check_gated_norm(norm, context_, of_norm);
    EXPECT_EQ(of_norm.text().find("size: wanted") != std::string::npos, more == 1) << of_norm.text();
  }
}

TEST_F(Gates, R09_DriverOfTheSameMajorVersionIsEnough) {
  context_.facts.runtime_version = 13020;
  context_.facts.driver_version = 13000;
  EXPECT_EQ(prefill("auto"), "fused");
  context_.facts.driver_version = 14000;
  EXPECT_EQ(prefill("auto"), "fused");
}

}  // namespace
}  // namespace kda::cuda
