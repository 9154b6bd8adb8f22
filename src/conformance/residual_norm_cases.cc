// The residual sum and its RMS norm (kda/residual_norm.h).
#include "conformance/api.h"
#include "conformance/cases.h"
#include "conformance/limits.h"
#include "conformance/random.h"

namespace kda::conformance {
namespace {

constexpr int64_t kTokens[] = {0, 1, 3, 65}, kDims[] = {2304, 7168, 8192, 256, 72, 60, 1, 8200};
constexpr double kLevels[] = {1, 1e-4, 1000};
constexpr kda_dtype kIo[] = {KDA_FP32, KDA_BF16, KDA_FP16};
const std::vector<Axis> kAxes = {
    {"tokens", {"0", "1", "3", "65"}},
    {"hidden", {"2304", "7168", "8192", "256", "72", "60", "1", "8200"}},
    {"level", {"1", "1e-4", "1000"}},
    {"io", {"fp32", "bf16", "fp16"}},
    {"add", {"yes", "no"}},
    {"weight", {"yes", "no"}},
    {"layout", {"dense", "padded"}},
};

struct Choice {
  int64_t T, D;
  double level;
  kda_dtype io;
  bool add, weight, padded;
};

Choice choice_of(const std::vector<int>& r) {
  return {kTokens[r[0]], kDims[r[1]], kLevels[r[2]], kIo[r[3]], r[4] == 0, r[5] == 0, r[6] == 1};
}

void run(const Choice& c, const Setting& setting, Report& report) {
  const Shape shape = {c.T, c.D};
  const auto random = [&](uint32_t stream) {
    Tensor t(c.io, shape, {c.D + (c.padded ? 5 : 0), 1}, c.padded ? 3 : 0);
    std::vector<double> x = uniform_vector(stream, t.size());
    for (double& v : x) v *= c.level;
    t.assign(x);
    return t;
  };
  const Tensor start = random(1), add = random(2), weight = Tensor::of(KDA_FP32, {c.D}, uniform_vector(3, c.D));
  auto d = sized<kda_residual_norm_desc>();
  d.backend = setting.backend.c_str();
  d.hidden = c.D;
  d.io_dtype = c.io;
  d.max_tokens = c.T;
  auto args = sized<kda_residual_norm_args>();
  if (c.add) args.add = add;
  if (c.weight) args.weight = weight;
  const auto run_once = [&](Plan& plan, const char* what, Tensor& h, Tensor& out) {
    args.residual = h;
    args.out = out;
    return report.succeeded(what, plan.run(args), plan.message());
  };
  Plan plan = make_plan(d, setting.context), again = make_plan(d, setting.other);
  if (!report.accept(plan)) return;
  Tensor h = start, other = start, exact = start, out = random(4), second = random(4), oracle(KDA_FP64, shape);
  d.backend = "reference";
  d.out_dtype = KDA_FP64;
  Plan reference = make_plan(d, cpu_context());
  if (!run_once(plan, "run", h, out) || !run_once(again, "second run", other, second)) return;
  if (!run_once(reference, "reference", exact, oracle)) return;
  for (Tensor* t : {&out, &second}) {
    if (setting.spoil) setting.spoil("out", *t);
  }
  report.expect_none("out bits of the second run (N-12)", first_difference(out, second));
  report.expect_none("residual bits of the second run", first_difference(h, other));
  // One sum of two numbers and one rounding: the same bits everywhere.
  report.expect_none("residual", first_difference(h, exact));
  if (!out.guard_report().empty() || !h.guard_report().empty()) report.fault(out.guard_report() + h.guard_report());
  if (c.T == 0) return;
  report.measure("out", compare_flat(out.values(), oracle.values(), absolute_floor(c.io)), limits(c.io).out, c.io,
                 c.T * c.D, c.T * c.D);
}

}  // namespace

std::vector<Case> residual_norm_cases() {
  return covering_cases(
      KDA_OP_RESIDUAL_NORM, kAxes, [](const std::vector<int>&) { return true; }, choice_of, run, 4);
}

}  // namespace kda::conformance
