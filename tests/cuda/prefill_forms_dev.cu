// Checks of the forms that a plan may choose instead of the fused one, and of works shared out by time: each takes
// the checks of the fused form once more, by the defaults of the problems, and has some of its own.
#include <cmath>

#include "prefill_fused_dev.cuh"

namespace kda::cuda::prefill_fused::dev {
namespace {

// F28: calls on two streams at once, each of which alone could fill the device. Every round starts from the states of
// the one before: both streams must agree.
void expect_two_streams(const Problem& c, const std::string& form) {
  Device d[2];
  cudaStream_t streams[2];
  for (int i = 0; i < 2; ++i) {
    check(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), "stream");
    upload(c, d[i]);
    (void)run(c, d[i]);
    d[i].out.fill(0x7f);
    d[i].pool.upload(pool_bytes(c));
  }
  check(cudaDeviceSynchronize(), "two streams");
  for (int round = 0; round < 20; ++round)
    for (int i = 0; i < 2; ++i)
      check(launch_prefill_fused(d[i].p, c.family, c.gate_type, multiprocessors(), streams[i]), "launch");
  check(cudaDeviceSynchronize(), "two streams");
  expect_bits((form + ": two streams at once").c_str(),
              d[0].out.download<uint16_t>() == d[1].out.download<uint16_t>() &&
                  d[0].pool.download<uint8_t>() == d[1].pool.download<uint8_t>());
}

}  // namespace

// S-6: the same problems with sequences cut, whose errors must stay within the same limits; long ones; bits.
void segments() {
  default_staged = true;
  default_wave = 1, default_prepare_ctas = 60;
  default_cut = {4, 1, 1};
  mixed();
  distributions();
  const int cuts[][4] = {{2, 1, 1, 132}, {3, 1, 1, 2},  {3, 2, 1, 60},  {8, 1, 1, 132},
                         {8, 3, 2, 100}, {9, 4, 4, 60}, {12, 5, 4, 68}, {16, 1, 2, 44}};
  for (const auto& cut : cuts) {
    default_cut = {cut[0], cut[1], cut[2]};
    default_prepare_ctas = cut[3];
    Problem c = basic(("T=8192, " + std::to_string(cut[0]) + " segments").c_str(), {8192, 300, 0, 2999, 3000}, 1, 2);
    c.a_log = {0.0f, std::log(4.0f)};
    c.initial = Initial::kFlags;
    c.flags = {1, 0, 1, 1, 0};
    test(c);
  }
  default_prepare_ctas = 60;
  default_cut = {7, 2, 2};
  Problem c = basic("slow gates", {2048, 1500}, 1, 2);
  c.a_log = {std::log(0.01f), std::log(0.02f)};
  test(c);
  c = basic("v to bf16 max", {1030}, 1, 2);
  for (size_t i = 0; i < c.v.size(); ++i)
    if (uniform(7, i) < -0.98) c.v[i] = bf16(uniform(11, i) * 1e38);  // v - S k must not pass fp32 either
  test(c);
  c = basic("NaN in v", {1040, 700}, 1, 1);
  c.v[535 * 128 + 77] = 0x7fc0;
  test(c);
  c = varlen("determinism");
  Device d;
  upload(c, d);
  const Result first = run(c, d);
  bool same = runs_agree(c, d, first, kManyRuns);
  for (const int ctas : {2, 40, 130, 132}) {
    c.prepare_ctas = ctas;
    same = runs_agree(c, d, first, 1) && same;
  }
  expect_bits(("cut: N-12: " + std::to_string(kManyRuns) + " runs, and other divisions of the SMs").c_str(), same);
  c.prepare_ctas = 100;
  expect_two_streams(c, "cut");
  default_staged = false;
  default_wave = default_prepare_ctas = 0;
  default_cut = {};
}

// Works shared out by time: everything again, on few clusters, and the bits of works that are dealt out.
void balanced() {
  default_balanced = true, default_sm_count = 10;
  mixed();
  distributions();
  bits();
  output_list();
  for (const Gate family : {Gate::kBounded, Gate::kSoftplus, Gate::kPlain}) {
    Problem c = basic("shares", {700, 3063, 0, 130, 64, 65, 1, 2048, 63, 1300}, 9, 18);
    set_family(c, family);
    c.is_balanced = false;
    Device d;
    upload(c, d);
    const Result dealt = run(c, d);
    c.is_balanced = true;
    for (const int sm_count : {0, 2, 6, 50, 74}) {
      c.sm_count = sm_count;
      const bool same = runs_agree(c, d, dealt, 5);
      expect_bits(("balanced: bits of works dealt out, " + std::to_string(sm_count) + " SMs").c_str(), same);
    }
  }
  // Shares bounded by the longest work, and clusters that only take over and leave.
  default_sm_count = 0;
  test(basic("one long sequence", {4096, 64, 65, 200, 300, 1, 700}, 6, 12));
  test(basic("67 works", {512}, 67, 67));
  test(basic("131 works", {512}, 131, 131));
  expect_two_streams(basic("two streams", {1024, 600, 64, 2000}, 10, 20), "balanced");
  default_balanced = false;
}

// The staged form: everything again, and the fused form's bits.
void staged() {
  default_staged = true;
  mixed();
  distributions();
  bits();
  output_list();
  for (const Gate family : {Gate::kBounded, Gate::kSoftplus, Gate::kPlain}) {
    Problem c = varlen("staged");
    set_family(c, family);
    Device d;
    upload(c, d);
    const Result apart = run(c, d);
    c.is_staged = false;
    d.p.stages = nullptr;
    const Result whole = run(c, d);
    expect_bits("staged: the fused form's bits", whole.out == apart.out && whole.pool == apart.pool);
  }
  default_staged = false;
}

// The preparation beside its chains, in several divisions of the SMs.
void beside() {
  default_staged = true;
  default_wave = 2, default_prepare_ctas = 40;
  mixed();
  distributions();
  bits();
  output_list();
  const int divisions[][2] = {{1, 2}, {1, 130}, {3, 100}, {5, 66}, {66, 66}, {200, 100}};
  for (const Gate family : {Gate::kBounded, Gate::kSoftplus, Gate::kPlain}) {
    Problem c = varlen("beside");
    set_family(c, family);
    c.is_staged = false;
    Device d;
    upload(c, d);
    const Result whole = run(c, d);
    c.is_staged = true;
    for (const auto& division : divisions) {
      c.wave = division[0], c.prepare_ctas = division[1];
      const bool same = runs_agree(c, d, whole, 10);
      expect_bits(("beside: the fused form's bits, " + std::to_string(c.wave) + " works and " +
                   std::to_string(c.prepare_ctas) + " SMs")
                      .c_str(),
                  same);
    }
  }
  Problem c = varlen("two streams");
  c.wave = 32, c.prepare_ctas = 100;
  expect_two_streams(c, "beside");
  default_staged = false;
  default_wave = default_prepare_ctas = 0;
}

}  // namespace kda::cuda::prefill_fused::dev
