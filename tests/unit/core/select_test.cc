// Resolver (spec R-6..R-18, R-60) over stub candidates, so that no device is needed.
#include "core/select.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <tuple>

#include "base/log.h"
#include "capi/backends.h"
#include "core/plan.h"

namespace kda {
namespace {

// A candidate with a capability table, as the real ones have.
class Stub final : public Candidate<Prefill> {
 public:
  struct Limits {
    bool any_head_dim = true;
    bool only_bf16 = false;
    bool softplus = true;
    double smallest_bound = -1e30;
    bool built = true;
    std::string_view deviation = {};
  };
  Stub(std::string_view name, kda_device_type device, Limits limits) : name_(name), device_(device), limits_(limits) {}
  std::string_view name() const override { return name_; }
  kda_device_type device() const override { return device_; }
  std::string_view deviation() const override { return limits_.deviation; }
  void check(const kda_prefill_desc& d, const Context&, Refusals& r) const override {
    const kda_attention_spec& a = d.attention;
    if (!limits_.built) r.add("not_built", "a CUDA build", "none");
    if (!limits_.any_head_dim && (a.key_dim != 128 || a.value_dim != 128)) {
      r.add("head_dim", "K = V = 128", str_cat(a.key_dim, ", ", a.value_dim));
    }
    if (limits_.only_bf16 && a.io_dtype != KDA_BF16) r.add("io_dtype", "bf16", dtype_name(a.io_dtype));
    if (!limits_.softplus && a.gate_family != KDA_GATE_BOUNDED) r.add("gate_family", "bounded", a.gate_family);
    if (a.gate_family == KDA_GATE_BOUNDED && a.lower_bound < limits_.smallest_bound) {
      r.add("lower_bound", limits_.smallest_bound, a.lower_bound);
    }
  }
  Result<std::unique_ptr<Kernel<Prefill>>> create(const kda_prefill_desc&, const Context&,
                                                  WorkspaceBook& book) const override {
    class Nothing final : public Kernel<Prefill> {
      Status run(const kda_prefill_args&, const WorkspaceGrant&, void*) const override { return {}; }
    };
    book.book("scratch", KDA_FP32, {16});
    return std::unique_ptr<Kernel<Prefill>>(new Nothing);
  }

 private:
  std::string_view name_;
  kda_device_type device_;
  Limits limits_;
};

class Resolver : public ::testing::Test {
 protected:
  Resolver() {
    for (const Candidate<Prefill>* c : std::initializer_list<const Candidate<Prefill>*>{&fused_, &cuda_, &cpu_, &reference_}) {
      backends_.add(c);
    }
    context_.backends = &backends_;
    context_.isa = "stub";
    context_.device = {KDA_CUDA, 0};
    desc_.struct_size = sizeof(desc_);
    desc_.attention.num_heads = 2;
    desc_.attention.key_dim = desc_.attention.value_dim = 128;
    desc_.attention.gate_family = KDA_GATE_BOUNDED;
    desc_.attention.lower_bound = -5;
    unsetenv("KDA_PREFILL_BACKEND");
  }
  ~Resolver() override { unsetenv("KDA_PREFILL_BACKEND"); }

  Result<std::unique_ptr<Plan<Prefill>>> plan(const char* backend) {
    desc_.backend = backend;
    return create_plan<Prefill>(context_, &desc_);
  }
  std::string chosen(const char* backend) {
    auto p = plan(backend);
    return p.ok() ? p.value()->backend : std::string(p.status().message());
  }

  Stub fused_{"fused", KDA_CUDA, {false, true, false, -5, true}};
  Stub cuda_{"portable", KDA_CUDA, {}};
  Stub cpu_{"portable", KDA_CPU, {}};
  Stub reference_{"reference", KDA_CPU, {}};
  Backends backends_;
  Context context_;
  kda_prefill_desc desc_{};
};

TEST_F(Resolver, R17_R08_AutoTakesTheFirstWithoutRefusal) {
  EXPECT_EQ(chosen(nullptr), "fused");
  EXPECT_EQ(chosen("auto"), "fused");
}

TEST_F(Resolver, R17_R10_R12_AutoPassesOverAndReportsWhy) {
  desc_.attention.gate_family = KDA_GATE_SOFTPLUS;
  desc_.attention.lower_bound = 0;
  auto p = plan("auto");
  ASSERT_TRUE(p.ok());
  EXPECT_EQ(p.value()->backend, "portable");
  ASSERT_EQ(p.value()->refused.size(), 1u);
  EXPECT_EQ(p.value()->refused[0].candidate, "fused");
  EXPECT_NE(p.value()->refused[0].reasons.find("gate_family"), std::string::npos);
}

TEST_F(Resolver, R17_OtherTypesAndSizesGoToPortable) {
  desc_.attention.io_dtype = KDA_FP16;
  EXPECT_EQ(chosen("auto"), "portable");
  desc_.attention.io_dtype = KDA_BF16;
  desc_.attention.key_dim = 64;
  EXPECT_EQ(chosen("auto"), "portable");
}

TEST_F(Resolver, R17_R08_R10_CpuTensorsGoToTheCpuAndNeverToTheReference) {
  context_.device = {KDA_CPU, 0};
  auto p = plan("auto");
  ASSERT_TRUE(p.ok());
  EXPECT_EQ(p.value()->backend, "portable");
  EXPECT_EQ(p.value()->refused.size(), 2u);  // both CUDA candidates, by device_type
  Backends only_reference;
  only_reference.add<Prefill>(&reference_);
  context_.backends = &only_reference;
  EXPECT_EQ(plan("auto").status().code(), KDA_UNSUPPORTED);
  EXPECT_EQ(chosen("reference"), "reference");
}

TEST_F(Resolver, R11_NamedBackendFailsWithEveryUnmetGateAndNoOther) {
  desc_.attention.key_dim = 64;
  desc_.attention.io_dtype = KDA_FP32;
  desc_.attention.lower_bound = -7;
  context_.device = {KDA_CPU, 0};
  const Status all = plan("flashkda").status();
  EXPECT_EQ(all.code(), KDA_UNSUPPORTED);
  for (const char* gate : {"device_type", "head_dim", "io_dtype", "lower_bound"}) {
    EXPECT_NE(all.message().find(gate), std::string::npos) << all.message();
  }
  for (const char* gate : {"gate_family", "not_built", "disabled"}) {
    EXPECT_EQ(all.message().find(gate), std::string::npos) << all.message();
  }
  desc_.attention.key_dim = 128;
  desc_.attention.io_dtype = KDA_BF16;
  context_.device = {KDA_CUDA, 0};
  const Status one = plan("fused").status();
  EXPECT_NE(one.message().find("lower_bound"), std::string::npos);
  EXPECT_EQ(one.message().find("head_dim"), std::string::npos) << one.message();
}

TEST_F(Resolver, R17_R06_NamesAndAliases) {
  EXPECT_EQ(chosen("flashkda"), "fused");
  EXPECT_EQ(chosen("triton"), "portable");
  EXPECT_EQ(chosen("portable"), "portable");
  for (const char* wrong : {"Triton", "", "flash"}) {
    const Status s = plan(wrong).status();
    EXPECT_EQ(s.code(), KDA_INVALID_ARGUMENT);
    EXPECT_NE(s.message().find(str_cat('"', wrong, '"')), std::string::npos) << s.message();
    EXPECT_NE(s.message().find("portable"), std::string::npos);
  }
}

TEST_F(Resolver, R07_EnvironmentCountsUnlessThePlanNames) {
  setenv("KDA_PREFILL_BACKEND", "portable", 1);
  EXPECT_EQ(chosen("auto"), "portable");
  EXPECT_EQ(chosen("fused"), "fused");
  setenv("KDA_PREFILL_BACKEND", "wrong", 1);
  EXPECT_EQ(plan("fused").status().code(), KDA_INVALID_ARGUMENT);
}

// A name that would disable nothing is not passed over.
TEST_F(Resolver, R15_R07_UnknownNamesInTheListAreRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto child = [this] {
    setenv("KDA_DISABLE", "fused,fusd", 1);
    const Status s = plan("auto").status();
    std::exit(s.code() == KDA_INVALID_ARGUMENT && s.message().find("\"fusd\"") != std::string::npos ? 0 : 1);
  };
  EXPECT_EXIT(child(), testing::ExitedWithCode(0), "");
}

// Two candidates may bear one name.
TEST_F(Resolver, R16_MessagesNameTheDeviceOfACandidate) {
  context_.device = {KDA_CUDA, 1};
  cuda_ = Stub{"portable", KDA_CUDA, {true, false, true, -1e30, false}};
  const std::string message = plan("portable").status().message();
  EXPECT_NE(message.find("portable (cuda): "), std::string::npos) << message;
  EXPECT_NE(message.find("portable (cpu): device_type"), std::string::npos) << message;
}

// The variable is read once a process, so a process of its own looks at it.
TEST_F(Resolver, R15_DisabledCandidatesAreRefusedNotReplaced) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto child = [this] {
    setenv("KDA_DISABLE", ",fused", 1);
    const Status s = plan("fused").status();
    const bool refused = s.code() == KDA_UNSUPPORTED && s.message().find("disabled") != std::string::npos;
    const bool passed_over = chosen("auto") == "portable" && chosen("portable") == "portable";
    unsetenv("KDA_DISABLE");
    std::exit(refused && passed_over && plan("fused").status().code() == KDA_UNSUPPORTED ? 0 : 1);
  };
  EXPECT_EXIT(child(), testing::ExitedWithCode(0), "");
}

TEST_F(Resolver, R17_E03_BadLowerBoundsAreRefusedBeforeResolution) {
  for (double lb : std::initializer_list<double>{0.0, std::nan(""), 1.0, -INFINITY, INFINITY}) {
    desc_.attention.lower_bound = lb;
    EXPECT_EQ(plan("wrong name").status().code(), KDA_INVALID_ARGUMENT);
    EXPECT_NE(plan("fused").status().message().find("lower_bound"), std::string::npos);
  }
}

TEST_F(Resolver, F62_NoBoundMeansSoftplusNeverASilentDefault) {
  desc_.attention.gate_family = KDA_GATE_SOFTPLUS;
  desc_.attention.lower_bound = -5;
  EXPECT_EQ(plan("auto").status().code(), KDA_INVALID_ARGUMENT);
  desc_.attention.lower_bound = 0;
  EXPECT_EQ(plan("fused").status().code(), KDA_UNSUPPORTED);
  EXPECT_EQ(chosen("auto"), "portable");
}

TEST_F(Resolver, N15_ACandidateThatDeviatesIsNeverAutosChoice) {
  const Stub bf16_carry{"fused", KDA_CUDA, {true, false, true, -1e30, true, "N-1: carries the state in bf16"}};
  Backends backends;
  backends.add<Prefill>(&bf16_carry);
  backends.add<Prefill>(&cuda_);
  context_.backends = &backends;
  auto p = plan("auto");
  ASSERT_TRUE(p.ok()) << p.status().message();
  EXPECT_EQ(p.value()->backend, "portable");
  ASSERT_EQ(p.value()->refused.size(), 1u);
  EXPECT_NE(p.value()->refused[0].reasons.find("deviation"), std::string::npos);
  EXPECT_NE(p.value()->refused[0].reasons.find("N-1: carries the state in bf16"), std::string::npos);
  EXPECT_EQ(chosen("fused"), "fused");  // by name it is a choice
  Backends alone;
  alone.add<Prefill>(&bf16_carry);
  context_.backends = &alone;
  EXPECT_EQ(plan("auto").status().code(), KDA_UNSUPPORTED);
}

// What docs/numerics.md says of the candidates of this library: none deviates.
TEST(Candidates, N15_NoneOfThisLibraryDeviates) {
  std::apply(
      [](const auto&... lists) {
        const auto none_of = [](const auto& list) {
          for (const auto* candidate : list) EXPECT_EQ(candidate->deviation(), "") << candidate->name();
        };
        (none_of(lists), ...);
      },
      capi::backends().lists);
}

// The log as a reader of it sees it. A text is logged once a process: every test has texts of its own.
class ChoiceLog : public Resolver {
 protected:
  ChoiceLog() {
    set_log_callback([](void* user, kda_log_level,
                        const char* text) { static_cast<std::string*>(user)->append(text).append("\n"); },
                     &text_);
  }
  ~ChoiceLog() override { set_log_callback(nullptr, nullptr); }
  std::string text_;
};

TEST_F(ChoiceLog, R16_TheChoiceNamesCandidateReasonAndTheWayBack) {
  log_choice(KDA_OP_PREFILL, "fused", {}, {{"other", "gate: wanted 1, got 2"}},
             way_back_from("fused", "KDA_PREFILL_BACKEND"));
  for (const char* part :
       {"prefill: chose fused", "other (cpu): gate: wanted 1, got 2", "auto: the first without a refusal",
        "to go back: backend 'portable'", "KDA_PREFILL_BACKEND=portable"}) {
    EXPECT_NE(text_.find(part), std::string::npos) << part << " in " << text_;
  }
  text_.clear();
  log_choice(KDA_OP_DECODE, "portable", {"portable", "KDA_DECODE_BACKEND"}, {{"fused", "disabled: wanted x, got y", KDA_CUDA}});
  for (const char* part :
       {"decode: chose portable", "named by KDA_DECODE_BACKEND", "passed over:", "fused (cuda): disabled"}) {
    EXPECT_NE(text_.find(part), std::string::npos) << part << " in " << text_;
  }
  EXPECT_EQ(text_.find("to go back"), std::string::npos) << text_;
}

TEST_F(ChoiceLog, R16_PlanCreationLogsItsChoiceOnce) {
  const Stub shallow{"fused", KDA_CUDA, {true, false, true, -0.123, true, {}}};
  const Stub fused{"fused", KDA_CUDA, {true, false, true, -1e30, true, {}}};
  Backends backends;
  backends.add<Prefill>(&shallow);
  backends.add<Prefill>(&fused);
  context_.backends = &backends;
  ASSERT_TRUE(plan("flashkda").ok());
  EXPECT_EQ(text_,
            "prefill: chose fused (named by the plan; to go back: backend 'portable' or "
            "KDA_PREFILL_BACKEND=portable); passed over:\n  fused (cuda): lower_bound: wanted -0.123, got -5\n");
  text_.clear();
  ASSERT_TRUE(plan("flashkda").ok());
  EXPECT_EQ(text_, "");
}

TEST_F(ChoiceLog, R07_APlanThatOverridesTheEnvironmentIsLogged) {
  setenv("KDA_PREFILL_BACKEND", "reference", 1);
  EXPECT_EQ(chosen("fused"), "fused");
  EXPECT_NE(text_.find("the plan's backend 'fused' overrides KDA_PREFILL_BACKEND=reference"), std::string::npos)
      << text_;
}

TEST_F(Resolver, Y25_ForeignObserversVoidPlansAndRuns) {
  auto p = plan("portable");
  ASSERT_TRUE(p.ok());
  auto args = kda_prefill_args{};
  context_.observer = [](void*, const char*) {};
  EXPECT_EQ(plan("portable").status().code(), KDA_FAILED_PRECONDITION);
  const Status run = run_plan<Prefill>(p.value().get(), &args, {}, nullptr);
  EXPECT_EQ(run.code(), KDA_FAILED_PRECONDITION);
  EXPECT_NE(run.message().find("observer"), std::string::npos) << run.message();
  context_.allow_observers = true;
  EXPECT_EQ(chosen("portable"), "portable");
  EXPECT_EQ(run_plan<Prefill>(p.value().get(), &args, {}, nullptr).code(),
            KDA_INVALID_ARGUMENT);  // of the empty struct
}

TEST_F(Resolver, Y16_NoPlansAfterSealUnlessAllowed) {
  context_.sealed = true;
  EXPECT_EQ(plan("auto").status().code(), KDA_FAILED_PRECONDITION);
  context_.allow_late_plans = true;
  EXPECT_EQ(chosen("auto"), "fused");
}

TEST_F(Resolver, ThePlanKeepsNoPointerOfTheCaller) {
  auto p = plan("fused");
  ASSERT_TRUE(p.ok());
  EXPECT_EQ(p.value()->desc.backend, nullptr);
  EXPECT_EQ(p.value()->desc.example, nullptr);
}

}  // namespace
}  // namespace kda
