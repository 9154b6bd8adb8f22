// What a plan says of itself and what a description is refused for (G-4, E-5, E-6, R-30, R-32, R-33, R-63).
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>
#include <string>

#include "conformance/api.h"
#include "conformance/distributions.h"
#include "conformance/tensor.h"

namespace kda::conformance::test {
namespace {

Problem small() {
  FieldInput input;
  input.lengths = {3, 2};
  input.heads = 2;
  input.value_heads = 4;
  input.key_dim = input.value_dim = 8;
  return field_problem(input);
}

struct Section {
  std::string name;
  size_t offset = 0, bytes = 0;
};
std::vector<Section> sections(const Plan& plan) {
  std::vector<Section> list;
  const char* name = nullptr;
  Section s;
  while (kda_plan_workspace_section(plan.get(), list.size(), &name, &s.offset, &s.bytes) == KDA_OK) {
    s.name = name;
    list.push_back(s);
  }
  return list;
}

// Frozen numbers: other languages and stored logs know them.
TEST(Status, G04_CodesAreFrozen) {
  const std::pair<int, const char*> codes[] = {{0, "OK"},
                                               {1, "INVALID_ARGUMENT"},
                                               {2, "UNSUPPORTED"},
                                               {3, "OUT_OF_MEMORY"},
                                               {4, "WORKSPACE_TOO_SMALL"},
                                               {5, "DEVICE_ERROR"},
                                               {6, "NOT_FOUND"},
                                               {7, "INTERNAL"},
                                               {8, "FAILED_PRECONDITION"}};
  for (const auto& [number, name] : codes) EXPECT_STREQ(kda_status_name(static_cast<kda_status>(number)), name);
  EXPECT_STREQ(kda_status_name(static_cast<kda_status>(9)), "UNKNOWN");
}

TEST(PlanSections, R33_R30_AlignedApartAndAllOfTheTotal) {
  const Problem p = small();
  const kda_prefill_desc prefill = prefill_desc(p, "portable");
  const kda_decode_desc decode = decode_desc(p, "portable", 3);
  for (const Plan& plan :
       {make_plan(prefill), make_plan(decode), make_summary_plan(prefill), make_plan(prefill_desc(p, "reference"))}) {
    ASSERT_TRUE(plan.ok()) << plan.message();
    const std::vector<Section> list = sections(plan);
    std::set<std::string> names;
    size_t end = 0;
    for (const Section& s : list) {
      EXPECT_EQ(s.offset % KDA_WORKSPACE_ALIGNMENT, 0u) << s.name;
      EXPECT_GE(s.offset, end) << s.name;
      end = s.offset + s.bytes;
      EXPECT_TRUE(names.insert(s.name).second) << s.name << " is booked twice";
    }
    EXPECT_LE(end, plan.workspace_bytes());
    EXPECT_LT(plan.workspace_bytes() - end, size_t{KDA_WORKSPACE_ALIGNMENT});
    // A candidate's own scratch; calls that go from pool to pool book nothing of the packed forms.
    EXPECT_EQ(names.count("scratch"), 1u);
    for (const char* packed : {"out", "final", "checkpoint", "segments"})
      EXPECT_EQ(names.count(packed), 0u) << packed;
    EXPECT_EQ(kda_plan_workspace_section(plan.get(), list.size(), nullptr, nullptr, nullptr), KDA_NOT_FOUND);
  }
}

TEST(PlanSections, R32_WhatTheSizeDependsOn) {
  const Problem p = small();
  for (const char* backend : {"portable", "reference"}) {
    const auto bytes = [&](const std::function<void(kda_prefill_desc&)>& change) {
      kda_prefill_desc d = prefill_desc(p, backend);
      change(d);
      const Plan plan = make_plan(d);
      EXPECT_TRUE(plan.ok()) << plan.message();
      return plan.workspace_bytes();
    };
    const size_t plain = bytes([](kda_prefill_desc&) {});
    EXPECT_EQ(bytes([](kda_prefill_desc& d) { d.attention.lower_bound = -1; }), plain);
    EXPECT_EQ(bytes([](kda_prefill_desc& d) { d.attention.scale = 3; }), plain);
    EXPECT_EQ(bytes([](kda_prefill_desc& d) { d.attention.num_heads = 1; }), plain);
    EXPECT_EQ(bytes([](kda_prefill_desc& d) { d.attention.allow_neg_eigval = d.attention.no_qk_norm = 1; }), plain);
    EXPECT_EQ(bytes([](kda_prefill_desc& d) { d.null_slot = 0; }), plain);
    EXPECT_EQ(bytes([](kda_prefill_desc& d) { d.initial_state = KDA_INITIAL_FLAGS; }), plain);
    EXPECT_EQ(bytes([](kda_prefill_desc& d) { d.flags = KDA_PLAN_CHECKED; }), plain);
    EXPECT_GT(bytes([](kda_prefill_desc& d) { d.attention.value_dim = 300; }), plain);
  }
}

// One message: the status and that it names the field.
void refused(const Plan& plan, kda_status status, std::initializer_list<const char*> words) {
  EXPECT_EQ(plan.status(), status) << plan.message();
  for (const char* word : words)
    EXPECT_NE(plan.message().find(word), std::string::npos) << word << " in: " << plan.message();
}

TEST(Descriptions, R63_ShapesThatOverflow) {
  constexpr int64_t kMost = INT64_MAX;
  for (const char* backend : {"portable", "reference"}) {
    kda_prefill_desc d = prefill_desc(small(), backend);
    d.attention.key_dim = d.attention.value_dim = kMost;
    refused(make_plan(d), KDA_INVALID_ARGUMENT, {"attention", "2^63"});
    d = prefill_desc(small(), backend);
    d.attention.num_heads = d.attention.num_value_heads = kMost / 2;
    refused(make_plan(d), KDA_INVALID_ARGUMENT, {"attention", "2^63"});
  }
  // A plan of more sequences than memory has bytes: the candidate's tables overflow (gate `size`).
  kda_prefill_desc d = prefill_desc(small(), "portable");
  d.max_sequences = kMost;
  refused(make_plan(d), KDA_UNSUPPORTED, {"size"});
  refused(make_summary_plan(d), KDA_UNSUPPORTED, {"size"});
  kda_decode_desc decode = decode_desc(small(), "portable");
  decode.max_sequences = kMost;
  refused(make_plan(decode), KDA_UNSUPPORTED, {"size"});

  kda_segment_merge_desc merge = sized<kda_segment_merge_desc>();
  merge.num_value_heads = 1;
  merge.key_dim = merge.value_dim = kMost;
  refused(make_plan(merge), KDA_INVALID_ARGUMENT, {"segment_merge", "2^63"});
  kda_gated_norm_desc norm = sized<kda_gated_norm_desc>();
  norm.num_value_heads = 2;
  norm.value_dim = kMost;
  refused(make_plan(norm), KDA_INVALID_ARGUMENT, {"gated_norm"});
  kda_conv_desc conv;
  kda_conv_desc_init(&conv);
  conv.mode = KDA_CONV_PREFILL;
  conv.width = 4;
  conv.parts = 1;
  conv.layout = KDA_CONV_SD;
  conv.channels[0] = kMost;
  conv.max_sequences = kMost;
  refused(make_plan(conv), KDA_UNSUPPORTED, {"size"});
}

TEST(Descriptions, E06_TheScaleIsFinite) {
  for (const double scale :
       {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    kda_prefill_desc d = prefill_desc(small(), "portable");
    d.attention.scale = scale;
    refused(make_plan(d), KDA_INVALID_ARGUMENT, {"scale", "finite"});
    kda_decode_desc decode = decode_desc(small(), "portable");
    decode.attention.scale = scale;
    refused(make_plan(decode), KDA_INVALID_ARGUMENT, {"scale", "finite"});
  }
}

TEST(Descriptions, E05_BetaPerChannelIsUnsupported) {
  const Problem p = small();
  kda_prefill_desc d = prefill_desc(p, "portable");
  kda_prefill_args args = prefill_args(p);
  const Tensor cu = Tensor::ints({0, 3, 5}), beta = Tensor::full(KDA_BF16, {5, 4, 8}, 0), out(KDA_BF16, {5, 4, 8});
  args.sequences.cu_seqlens = cu;
  args.beta = beta;
  args.out = out;
  Plan plan = make_plan(d);
  EXPECT_EQ(plan.run(args), KDA_UNSUPPORTED);
  EXPECT_NE(plan.message().find("per-channel beta"), std::string::npos) << plan.message();
}

}  // namespace
}  // namespace kda::conformance::test
