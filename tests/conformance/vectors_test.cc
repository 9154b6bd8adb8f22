// Expected values made by other implementations (tests/data/vectors, R-67).
#include "support/vectors.h"

#include "harness.h"

namespace kda::conformance::test {
namespace {

using Vectors = std::map<std::string, Tensor>;

struct Group {
  const char* file;
  const char* name;  // prefix of the expected tensors
};

// The README: float32 rounded once from float64.
constexpr double kStoredRounding = 1e-7;

Problem problem_of(const Vectors& v, const std::string& group, kda_dtype io) {
  const auto get = [&](const std::string& name) {
    const auto own = v.find(group + "." + name), shared = v.find(name);
    return own != v.end() ? own->second : shared != v.end() ? shared->second : Tensor();
  };
  Problem p;
  const std::vector<double> cu = v.at("cu_seqlens").values();
  for (size_t n = 0; n + 1 < cu.size(); ++n) p.lengths.push_back(static_cast<int64_t>(cu[n + 1] - cu[n]));
  p.q = get("q").copy(io);
  p.k = get("k").copy(io);
  p.v = get("v").copy(io);
  p.gate = get("raw_g").copy(io);
  p.beta = get("beta_logits").copy(io);
  p.A_log = get("A_log");
  p.dt_bias = get("dt_bias");
  p.spec.num_heads = p.q.shape()[1];
  p.spec.num_value_heads = p.v.shape()[1];
  p.spec.key_dim = p.q.shape()[2];
  p.spec.value_dim = p.v.shape()[2];
  p.spec.io_dtype = p.spec.gate_dtype = p.spec.beta_dtype = io;
  p.spec.gate_family = group == "bounded" ? KDA_GATE_BOUNDED : KDA_GATE_SOFTPLUS;
  if (group == "bounded") p.spec.lower_bound = -5;
  if (v.count("initial_state")) p.state = v.at("initial_state").copy(KDA_FP32);
  return p;
}

constexpr Group kGroups[] = {{"varlen_prefill", "bounded"},
                             {"varlen_prefill", "softplus"},
                             {"gva_prefill", "bounded"},
                             {"hard_prefill", "bounded"},
                             {"hard_prefill", "softplus"}};

}  // namespace

class VectorsTest : public BackendTest {};
KDA_FOR_BACKENDS(VectorsTest);

TEST_P(VectorsTest, R67_E04_E06_E07_E08_PrefillAgreesWithOtherImplementations) {
  for (const Group& g : kGroups) {
    SCOPED_TRACE(std::string(g.file) + " " + g.name);
    const Vectors v = load_vectors(g.file);
    for (const kda_dtype io : {KDA_BF16, KDA_FP32}) {
      const Problem p = problem_of(v, g.name, io);
      PrefillOptions options;
      options.backend = backend();
      if (is_reference()) options.out_dtype = options.state_dtype = KDA_FP64;
      const Outcome r = prefill(p, options);
      ASSERT_EQ(r.status, KDA_OK) << r.message;
      const Limits limit = is_reference() ? Limits{kStoredRounding, kStoredRounding} : limits(io);
      const int64_t HV = p.spec.num_value_heads;
      EXPECT_WITHIN(
          compare_outputs(r.out.values(), v.at(std::string(g.name) + ".o").values(), p.lengths, HV, p.spec.value_dim),
          limit.out);
      EXPECT_WITHIN(compare_states(r.state.values(), v.at(std::string(g.name) + ".final_state").values(), HV,
                                   p.spec.value_dim * p.spec.key_dim),
                    limit.state);
    }
  }
}

class DecodeVectorsTest : public DecodeBackendTest {};
KDA_FOR_BACKENDS(DecodeVectorsTest);

TEST_P(DecodeVectorsTest, R67_E07_ThirtyTwoDecodeSteps) {
  const Vectors v = load_vectors("decode_32");
  for (const kda_dtype io : {KDA_BF16, KDA_FP32}) {
    const int64_t N = 2, H = 2, K = 128;
    Problem p;
    p.lengths = {1, 1};
    p.spec.num_heads = p.spec.num_value_heads = H;
    p.spec.key_dim = p.spec.value_dim = K;
    p.spec.io_dtype = p.spec.gate_dtype = p.spec.beta_dtype = io;
    p.spec.gate_family = KDA_GATE_BOUNDED;
    p.spec.lower_bound = -5;
    p.A_log = v.at("A_log");
    p.dt_bias = v.at("dt_bias");
    const auto step_of = [&](const char* name, int64_t step, Shape shape) {
      return Tensor::of(io, std::move(shape), values(select(v.at(name), 0, step)));
    };
    Tensor pool = v.at("initial_state").copy(is_reference() ? KDA_FP64 : KDA_FP32);
    std::vector<double> out;
    const Limits limit = is_reference() ? Limits{kStoredRounding, kStoredRounding} : limits(io);
    for (int64_t step = 0; step < 32; ++step) {
      p.q = step_of("q", step, {N, H, K});
      p.k = step_of("k", step, {N, H, K});
      p.v = step_of("v", step, {N, H, K});
      p.gate = step_of("raw_g", step, {N, H, K});
      p.beta = step_of("beta_logits", step, {N, H});
      DecodeCall call(p, backend());
      call.desc.attention.state_dtype = pool.dtype();
      if (is_reference()) {
        call.desc.attention.out_dtype = KDA_FP64;
        call.out = Tensor(KDA_FP64, {N, H, K});
      }
      call.pool = pool;
      ASSERT_EQ(call.run(), KDA_OK) << call.message;
      pool = call.pool;
      const std::vector<double> o = call.out.values();
      out.insert(out.end(), o.begin(), o.end());
      if (step == 0) {
        EXPECT_WITHIN(compare_states(pool.values(), v.at("state_after_step_1").values(), H, K * K), limit.state);
      }
    }
    EXPECT_WITHIN(compare_flat(out, v.at("o").values()), limit.out);
    EXPECT_WITHIN(compare_states(pool.values(), v.at("final_state").values(), H, K * K), limit.state);
  }
}

}  // namespace kda::conformance::test
