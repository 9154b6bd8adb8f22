// Runs one gated norm through the installed headers and library.
#include <kda/kda.hpp>

#include <cmath>
#include <cstdio>

extern "C" int version_matches(void);

int main() {
  kda::Context context(1);
  auto desc = kda::make<kda_gated_norm_desc>();
  desc.num_value_heads = 1;
  desc.value_dim = 2;
  desc.io_dtype = KDA_FP32;
  desc.max_tokens = 1;
  kda::Plan plan(context, desc);
  auto workspace = plan.make_workspace();

  const float o[2] = {3, 4}, z[2] = {0, 0}, weight[2] = {1, 1};
  float out[2] = {};
  auto args = kda::make<kda_gated_norm_args>();
  args.o = kda::tensor(o, KDA_FP32, {1, 1, 2});
  args.z = kda::tensor(z, KDA_FP32, {1, 1, 2});
  args.weight = kda::tensor(weight, KDA_FP32, {2});
  args.out = kda::tensor(out, KDA_FP32, {1, 1, 2});
  plan.run(args, workspace.get());

  const double expected = 3 / std::sqrt(12.5 + 1e-5) * 0.5;
  const bool ok = std::fabs(out[0] - expected) < 1e-6 && version_matches();
  std::printf("%s %s: %g\n", plan.backend().c_str(), plan.isa().c_str(), static_cast<double>(out[0]));
  return ok ? 0 : 1;
}
