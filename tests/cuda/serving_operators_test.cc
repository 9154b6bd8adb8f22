// T-14 for every operator: the calls of a server's steps, eager and under capture, make launches and nothing else.
// The workloads of kda bench are the server: plans, tensors and calls of each operator in device memory.
#include <cstdio>
#include <functional>
#include <random>

#include "bench/workload.h"
#include "device_copy.h"
#include "harness.h"
#include "serving_calls.h"

namespace kda::conformance::test {
namespace {

using bench::Setting;
using cuda_test::CudaCalls;

struct Call {
  std::string name;
  std::function<void(int64_t, void*)> run;
};

// Recover mode: verify with folded commit, and a commit, over one pool.
class Recovery {
 public:
  explicit Recovery(const Context& context) : verify_(verify_call()) {
    commit_desc_.attention = verify_.desc.attention;
    commit_desc_.max_sequences = 3;
    commit_desc_.width = 4;
    commit_desc_.null_slot = -1;
    verify_plan_ = kda::Plan(context, verify_.desc);
    commit_plan_ = kda::Plan(context, commit_desc_);
    args_ = verify_.args();
    mirror_ = std::make_unique<conformance::Mirror>(memory_, conformance::tensors_of(args_), 0);
    commit_.struct_size = sizeof commit_;
    commit_.A_log = args_.A_log;
    commit_.dt_bias = args_.dt_bias;
    commit_.state = args_.state;
    commit_.slots = args_.slots;
    commit_.accepted = args_.accepted;
    commit_.records = args_.records;
  }
  void verify(void* stream) const { verify_plan_.run(args_, {}, stream); }
  void commit(void* stream) const { commit_plan_.run(commit_, {}, stream); }

 private:
  static DecodeCall verify_call() {
    FieldInput input;
    input.lengths = {12};
    input.heads = 2;
    input.gate_scale = 4;
    Problem p = field_problem(input);
    p.lengths = {4, 4, 4};
    DecodeCall call(p, "auto", 4);
    call.desc.mode = KDA_DECODE_RECORDS;
    call.desc.fold = 1;
    call.pool = canary_pool(KDA_FP32, {12, 2, 128, 128});
    call.pool.fill(0.25);
    call.slots = Tensor::ints({0, 4, -1});
    call.accepted = Tensor::ints({2, 4, 1});
    call.u = Tensor::full(KDA_FP32, {12, 2, 4, 128}, 0.5);
    call.kg = Tensor::full(KDA_BF16, {12, 2, 4, 256}, 0.5);
    call.count = Tensor::full(KDA_INT32, {12}, 4);
    return call;
  }

  DecodeCall verify_;
  kda_commit_desc commit_desc_ = make<kda_commit_desc>();
  kda::Plan verify_plan_, commit_plan_;
  kda_decode_args args_{};
  kda_commit_args commit_{};
  cuda_test::Memory memory_;
  std::unique_ptr<conformance::Mirror> mirror_;
};

// Context parallelism: summaries by both candidates, and their merge.
class Shards {
 public:
  explicit Shards(const Setting& setting) : arena_(setting) {
    auto d = make<kda_prefill_desc>();
    d.attention.num_heads = 2;
    d.attention.key_dim = d.attention.value_dim = 128;
    d.attention.gate_family = KDA_GATE_BOUNDED;
    d.attention.lower_bound = -5;
    d.max_tokens = 300;
    d.max_sequences = 3;
    d.backend = "fused";
    fused_ = kda::Plan::segment_summary(setting.context, d);
    d.backend = "portable";
    portable_ = kda::Plan::segment_summary(setting.context, d);
    auto m = make<kda_segment_merge_desc>();
    m.num_value_heads = 2;
    m.key_dim = m.value_dim = 128;
    m.max_segments = 3;
    merge_ = kda::Plan(setting.context, m);
    args_.k = arena_.random(KDA_BF16, {300, 2, 128});
    args_.v = arena_.random(KDA_BF16, {300, 2, 128});
    args_.gate = arena_.random(KDA_BF16, {300, 2, 128});
    args_.beta = arena_.random(KDA_BF16, {300, 2});
    args_.sequences.cu_seqlens = arena_.ints({0, 130, 130, 300});
    args_.summary = arena_.room(KDA_FP32, {3, 2, 256, 128});
    merging_.summaries = args_.summary;
    merging_.start_states = arena_.room(KDA_FP32, {3, 2, 128, 128});
    merging_.final_state = arena_.room(KDA_FP32, {2, 128, 128});
  }
  void fused(void* stream) const { fused_.run(args_, {}, stream); }
  void portable(void* stream) const { portable_.run(args_, {}, stream); }
  void merge(void* stream) const { merge_.run(merging_, {}, stream); }

 private:
  bench::Arena arena_;
  kda::Plan fused_, portable_, merge_;
  kda_segment_summary_args args_ = make<kda_segment_summary_args>();
  kda_segment_merge_args merging_ = make<kda_segment_merge_args>();
};

class ServingOperators : public testing::Test {
 protected:
  ServingOperators() : context_(options()), setting_{context_, bench::Workers(context_), "auto", kDevice, 0} {
    add_prefills();
    for (const int64_t width : {1, 4}) {
      bench::DecodeShape s;
      s.heads = 2, s.sequences = 3, s.width = width;
      add("decode " + std::to_string(width), bench::decode(setting_, s));
      s.step = true;
      add("decode_step " + std::to_string(width), bench::decode(setting_, s));
      add("portable decode_step " + std::to_string(width), bench::decode(portable(), s));
      s.step = false;
      add("portable decode " + std::to_string(width), bench::decode(portable(), s));
    }
    for (const bool columns : {false, true}) {
      bench::ConvShape s;
      s.heads = 2, s.tokens = 70, s.sequences = 3, s.columns = columns;
      add(columns ? "conv columns" : "conv prefill", bench::conv(setting_, s));
    }
    bench::NormShape norm;
    norm.heads = 2, norm.tokens = 30;
    add("gated norm", bench::gated_norm(setting_, norm));
    bench::MetadataShape metadata;
    metadata.sequences = 16;
    add("metadata", bench::metadata(setting_, metadata));
    bench::CopyShape copy;
    copy.rows = 3, copy.heads = 2, copy.flags = true, copy.gapped = false;
    const bench::Workload copies = bench::copy(setting_, copy);
    calls_.push_back({"gather", copies.variants[0].call});
    calls_.push_back({"scatter", copies.variants[3].call});
    recovery_ = std::make_unique<Recovery>(context_);
    calls_.push_back({"verify, records", [this](int64_t, void* s) { recovery_->verify(s); }});
    calls_.push_back({"commit", [this](int64_t, void* s) { recovery_->commit(s); }});
    shards_ = std::make_unique<Shards>(setting_);
    calls_.push_back({"fused segment summary", [this](int64_t, void* s) { shards_->fused(s); }});
    calls_.push_back({"portable segment summary", [this](int64_t, void* s) { shards_->portable(s); }});
    calls_.push_back({"segment merge", [this](int64_t, void* s) { shards_->merge(s); }});
    context_.seal();
    KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
  }

  static kda_context_options options() {
    auto o = make<kda_context_options>();
    o.device = kDevice;
    return o;
  }
  Setting portable() const { return {context_, setting_.workers, "portable", kDevice, 0}; }
  void add(const std::string& name, const bench::Workload& w) { calls_.push_back({name, w.variants[0].call}); }
  void add_prefills() {
    bench::PrefillShape s;
    s.heads = 2, s.tokens = 200, s.sequences = 3, s.io = KDA_BF16;
    for (const kda_gate_family gate : {KDA_GATE_BOUNDED, KDA_GATE_SOFTPLUS, KDA_GATE_PLAIN}) {
      s.gate = gate;
      add("fused prefill", bench::prefill(setting_, s));
    }
    add("portable prefill", bench::prefill(portable(), s));
    s.tokens = 4096, s.sequences = 1;  // cut into segments: a memset and four launches
    s.gate = KDA_GATE_BOUNDED;
    add("fused prefill in segments", bench::prefill(setting_, s));
    s.io = KDA_FP32, s.tokens = 40, s.key_dim = 200, s.value_dim = 136;
    add("wide prefill", bench::prefill(setting_, s));
  }

  Context context_;
  Setting setting_;
  std::unique_ptr<Recovery> recovery_;
  std::unique_ptr<Shards> shards_;
  std::vector<Call> calls_;
};

// The first steps go through all operators in order: whatever a first call would still load shows there.
TEST_F(ServingOperators, T14_G11_Y20_TenThousandMixedStepsLaunchAndDoNothingElse) {
  std::mt19937 random(14);
  std::vector<size_t> order;
  for (size_t i = 0; i < 10000; ++i)
    order.push_back(i < 2 * calls_.size() ? i % calls_.size() : random() % calls_.size());
  const Stream stream;
  for (size_t i = 0; i < calls_.size(); ++i) {  // one operator at a time, so that a fault has a name
    const CudaCalls calls;
    calls_[i].run(0, static_cast<cudaStream_t>(stream));
    EXPECT_EQ(calls.others(), 0) << calls_[i].name << ": " << calls.text();
    EXPECT_GE(calls.launches(), 1) << calls_[i].name;
  }
  stream.wait();
  const CudaCalls calls;
  const cuda_test::HostAllocations memory;
  for (size_t i = 0; i < order.size(); ++i)
    calls_[order[i]].run(static_cast<int64_t>(i), static_cast<cudaStream_t>(stream));
  EXPECT_EQ(calls.others(), 0) << calls.text();
  EXPECT_EQ(memory.count(), 0);
  EXPECT_GE(calls.launches(), 10000);
  std::printf("10,000 steps of %zu operators: %s\n", calls_.size(), calls.text().c_str());
  stream.wait();
}

TEST_F(ServingOperators, T14_T16_R66_UnderCaptureToo) {
  const auto captured = [&](const std::vector<const Call*>& chosen, int64_t rounds) {
    long launches = 0;
    const CapturedCalls graph([&](cudaStream_t s) {
      const CudaCalls calls;
      const cuda_test::HostAllocations memory;
      for (int64_t i = 0; i < rounds; ++i) {
        for (const Call* call : chosen) call->run(i, s);
      }
      EXPECT_EQ(calls.others(), 0) << calls.text();
      EXPECT_EQ(memory.count(), 0);
      launches = calls.launches();
    });
    EXPECT_EQ(static_cast<long>(graph.nodes()), launches);
    for (int i = 0; i < 5; ++i) graph.replay();
  };
  std::vector<const Call*> all;
  for (const Call& call : calls_) {  // each alone, so that a fault has a name
    std::printf("captured: %s\n", call.name.c_str());
    captured({&call}, 3);
    all.push_back(&call);
  }
  captured(all, 20);
}

}  // namespace
}  // namespace kda::conformance::test
