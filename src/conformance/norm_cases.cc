// Gated RMS norm (spec L-7.4).
#include "conformance/api.h"
#include "conformance/attention.h"
#include "conformance/cases.h"
#include "conformance/limits.h"
#include "conformance/random.h"
#include "conformance/tokens.h"

namespace kda::conformance {
namespace {

struct Value {
  const char* name;
  double value;
};
const std::vector<Value> kTokens = {{"0", 0}, {"1", 1}, {"3", 3}, {"64", 64}, {"257", 257}};
const std::vector<Value> kHeads = {{"1", 1}, {"12", 12}, {"96", 96}};
const std::vector<Value> kDims = {{"128", 128}, {"64", 64},   {"60", 60},    {"5", 5},
                                  {"1", 1},     {"512", 512}, {"1024", 1024}};
const std::vector<Value> kEps = {{"1e-5", 0}, {"1e-6", 1e-6}, {"0.1", 0.1}};
const std::vector<Value> kLevels = {{"1", 1}, {"1e-4", 1e-4}, {"1000", 1000}};  // of o; of z: 8 times random
constexpr kda_dtype kIo[] = {KDA_FP32, KDA_BF16, KDA_FP16};

struct Choice {
  int64_t T, HV, V;
  double eps, level;
  kda_dtype io;
  bool batched, padded;
};

std::vector<Axis> axes() {
  return {{"tokens", names_of(kTokens)},  {"heads", names_of(kHeads)},  {"dim", names_of(kDims)},
          {"eps", names_of(kEps)},        {"level", names_of(kLevels)}, {"io", {"fp32", "bf16", "fp16"}},
          {"layout", {"dense", "padded"}}};
}

bool allowed(const std::vector<int>& c) {
  const auto at = [&](const std::vector<Value>& values, size_t axis) {
    return c[axis] < 0 ? 1 : values[static_cast<size_t>(c[axis])].value;
  };
  return at(kTokens, 0) * at(kHeads, 1) * at(kDims, 2) <= 1 << 20;
}

void run(const Choice& c, const Setting& setting, Report& report) {
  const TokenRows rows = place(Form::kOffsets32, {c.T}, false, false);
  const Shape shape = {c.T, c.HV, c.V};
  const int64_t head = c.V + (c.padded ? 3 : 0);
  const auto random = [&](uint32_t stream, double level) {
    Tensor t(c.io, shape, {c.HV * head + (c.padded ? 9 : 0), head, 1}, c.padded ? 2 : 0);
    std::vector<double> x = uniform_vector(stream, t.size());
    for (double& v : x) v *= level;
    t.assign(x);
    return t;
  };
  const Tensor o = random(1, c.level), z = random(2, 8), weight = Tensor::of(KDA_FP32, {c.V}, uniform_vector(3, c.V));
  kda_gated_norm_desc d = sized<kda_gated_norm_desc>();
  d.backend = setting.backend.c_str();
  d.num_value_heads = c.HV;
  d.value_dim = c.V;
  d.io_dtype = c.io;
  d.eps = c.eps;
  d.max_tokens = c.T;
  const Tensor before = out_buffer(c.io, c.T, c.HV, c.V, c.padded);
  Tensor first = before, second = before, oracle(KDA_FP64, shape);
  kda_gated_norm_args args = sized<kda_gated_norm_args>();
  args.o = o;
  args.z = z;
  args.weight = weight;
  Plan plan = make_plan(d, setting.context), again = make_plan(d, setting.other);
  d.backend = "reference";
  d.out_dtype = KDA_FP64;
  Plan reference = make_plan(d, setting.context);
  if (!report.accept(plan)) return;
  args.out = first;
  if (!report.succeeded("run", plan.run(args), plan.message())) return;
  args.out = second;
  if (!report.succeeded("second run", again.run(args), again.message())) return;
  args.out = oracle;
  if (!report.succeeded("reference", reference.run(args), reference.message())) return;
  for (Tensor* t : {&first, &second}) {
    if (setting.spoil) setting.spoil("out", *t);
  }
  report.expect_none("out bits of the second run (N-12)", first_difference(first, second));
  check_out(report, "out", rows, Tensor(), before, first, oracle, limits(c.io).out);
}

Choice choice_of(const std::vector<int>& r) {
  const auto at = [&](const std::vector<Value>& values, size_t axis) {
    return values[static_cast<size_t>(r[axis])].value;
  };
  return {static_cast<int64_t>(at(kTokens, 0)),
          static_cast<int64_t>(at(kHeads, 1)),
          static_cast<int64_t>(at(kDims, 2)),
          at(kEps, 3),
          at(kLevels, 4),
          kIo[r[5]],
          false,
          r[6] == 1};
}

}  // namespace

std::vector<Case> gated_norm_cases() { return covering_cases(KDA_OP_GATED_NORM, axes(), allowed, choice_of, run, 4); }

}  // namespace kda::conformance
