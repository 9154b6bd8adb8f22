// Every operator once on small shapes, for compute-sanitizer: a few launches of each kernel, results not looked at.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "harness.h"
#include "runtime.h"
#include "small_copies.h"

namespace kda::conformance::test {
namespace {

int failures = 0;

void expect_ok(const char* what, kda_status status, const std::string& message) {
  if (status == KDA_OK) return;
  std::printf("%s: %s\n", what, message.c_str());
  ++failures;
}

void run_decode(const char* backend, kda_dtype pool, int64_t dim, int32_t width, bool records, int64_t heads = 2) {
  FieldInput input;
  input.lengths = {width, 1, 0, width};
  input.heads = 1;
  input.value_heads = heads;
  input.key_dim = input.value_dim = dim;
  DecodeCall call(field_problem(input), backend, width);
  call.desc.attention.state_dtype = pool;
  call.pool = canary_pool(pool, {4 * width, heads, dim, dim});
  std::vector<double> table;
  for (int i = 0; i < 4 * width; ++i) table.push_back(i % 7 == 6 ? -1 : i);
  call.slots = Tensor::of(KDA_INT32, {4, width}, table);
  if (records) {
    call.desc.mode = KDA_DECODE_RECORDS;
    call.desc.fold = 1;
    call.slots = Tensor::ints({2, 0, -1, 1});
    call.u = Tensor::full(KDA_FP32, {4 * width, heads, width, dim}, 0.1);
    call.kg = Tensor::full(KDA_BF16, {4 * width, heads, width, 2 * dim}, 0.1);
    call.count = Tensor(KDA_INT32, {4 * width});
    call.count.fill(width);
    call.accepted = Tensor::ints({width, 1, 0, 1});
  }
  const kda_status status = call.run();
  expect_ok("decode", status, call.message);
  if (!records) return;
  kda_commit_desc d;
  kda_commit_desc_init(&d);
  d.attention = call.desc.attention;
  d.backend = backend;
  d.max_sequences = 4;
  d.width = width;
  auto args = sized<kda_commit_args>();
  args.A_log = call.p.A_log;
  args.dt_bias = call.p.dt_bias;
  args.state = call.pool;
  args.slots = call.slots;
  args.accepted = call.accepted;
  args.records = {call.u, call.kg, call.count, {}};
  Plan plan = make_plan(d);
  const kda_status committed = plan.run(args);
  expect_ok("commit", committed, plan.message());
}

void run_step(const char* backend, kda_dtype pool, int32_t width, kda_conv_layout layout, int64_t H, int64_t HV) {
  const int64_t N = 3, T = N * width, channels = 2 * H * 128 + HV * 128, L = 3 + width - 1;
  kda_decode_step_desc d;
  kda_decode_step_desc_init(&d);
  d.decode.attention.num_heads = H;
  d.decode.attention.num_value_heads = HV;
  d.decode.attention.key_dim = d.decode.attention.value_dim = 128;
  d.decode.attention.gate_family = KDA_GATE_SOFTPLUS;
  d.decode.attention.state_dtype = pool;
  d.decode.backend = backend;
  d.decode.max_tokens = T;
  d.decode.max_sequences = N;
  d.decode.width = width;
  d.conv_width = 4;
  d.conv_parts = 1;
  d.conv_layout = layout;
  const Tensor x = Tensor::of(KDA_BF16, {T, channels}, uniform_vector(1, T * channels));
  const Tensor gate = Tensor::of(KDA_BF16, {T, HV, 128}, uniform_vector(2, T * HV * 128));
  const Tensor beta = Tensor::of(KDA_BF16, {T, HV}, uniform_vector(3, T * HV));
  const Tensor z = Tensor::of(KDA_BF16, {T, HV, 128}, uniform_vector(4, T * HV * 128));
  const Tensor A_log = Tensor::full(KDA_FP32, {HV}, 0), weight = Tensor::full(KDA_FP32, {channels, 4}, 0.25);
  const Tensor norm = Tensor::full(KDA_FP32, {128}, 1), out(KDA_BF16, {T, HV, 128});
  const Tensor state = canary_pool(pool, {N * width, HV, 128, 128});
  const Tensor window = layout == KDA_CONV_SD ? canary_pool(KDA_BF16, {N * width, L, channels})
                                              : canary_pool(KDA_BF16, {N * width, channels, L});
  std::vector<int64_t> cu;
  std::vector<double> table;
  for (int64_t n = 0; n <= N; ++n) cu.push_back(n * width);
  for (int64_t i = 0; i < N * width; ++i) table.push_back(static_cast<double>(i));
  const Tensor offsets = Tensor::ints(cu), slots = Tensor::of(KDA_INT32, {N, width}, table);
  const Tensor accepted = Tensor::ints({1, width, 1});
  auto a = sized<kda_decode_step_args>();
  a.decode.struct_size = sizeof(a.decode);
  a.decode.gate = gate;
  a.decode.beta = beta;
  a.decode.A_log = A_log;
  a.decode.sequences.cu_seqlens = offsets;
  a.decode.state = state;
  a.decode.slots = slots;
  a.decode.accepted = accepted;
  a.decode.out = out;
  a.x[0] = x;
  a.conv_weight[0] = weight;
  a.conv_state[0] = window;
  a.z = z;
  a.norm_weight = norm;
  Plan plan = make_plan(d);
  const kda_status status = plan.run(a);
  expect_ok("decode_step", status, plan.message());
}

void run_conv_prefill(int64_t channels, kda_dtype io) {
  const int64_t T = 70;
  kda_conv_desc d;
  kda_conv_desc_init(&d);
  d.backend = "cuda_portable";
  d.mode = KDA_CONV_PREFILL;
  d.width = 4;
  d.parts = 1;
  d.channels[0] = channels;
  d.io_dtype = io;
  d.layout = KDA_CONV_DS;
  d.max_tokens = T;
  d.max_sequences = 4;
  d.max_checkpoints = 2;
  d.initial_state = KDA_INITIAL_ALL;
  const Tensor x = Tensor::of(io, {T, channels}, uniform_vector(1, T * channels));
  const Tensor weight = Tensor::full(KDA_FP32, {channels, 4}, 0.25), out(io, {T, channels});
  const Tensor window = canary_pool(io, {8, channels, 3}), offsets = Tensor::ints({0, 2, 2, 40, 70});
  const Tensor slots = Tensor::ints({1, 3, 2, -1}), at = Tensor::of(KDA_INT32, {4, 2}, {1, 2, 0, 1, 16, 38, 3, 4});
  const Tensor to = Tensor::of(KDA_INT32, {4, 2}, {4, 5, 6, 6, 6, 7, 0, 0});
  auto a = sized<kda_conv_args>();
  a.x[0] = x;
  a.weight[0] = weight;
  a.state[0] = window;
  a.out[0] = out;
  a.sequences.cu_seqlens = offsets;
  a.slots = slots;
  a.checkpoint_offsets = at;
  a.checkpoint_slots = to;
  Plan plan = make_plan(d);
  const kda_status status = plan.run(a);
  expect_ok("conv", status, plan.message());
}

void run_prefill(const char* backend, int64_t dim, kda_dtype pool) {
  FieldInput input;
  input.lengths = {33, 0, 1, 70};
  input.heads = 1;
  input.value_heads = 2;
  input.key_dim = input.value_dim = dim;
  PrefillCall call(field_problem(input), backend);
  call.use_pool(9, {2, 0, -1, 1}, pool);
  call.desc.max_checkpoints = 2;
  call.checkpoint_offsets = Tensor::of(KDA_INT32, {4, 2}, {32, 5, 0, 1, 1, 1, 64, 70});
  call.checkpoint_slots = Tensor::of(KDA_INT32, {4, 2}, {3, 4, 5, 5, 5, 6, 7, 8});
  const kda_status status = call.run();
  expect_ok("prefill", status, call.message);
}

void run_gated_norm(int64_t dim, kda_dtype io) {
  const int64_t T = 9, HV = 5;
  auto d = sized<kda_gated_norm_desc>();
  d.backend = "cuda_portable";
  d.num_value_heads = HV;
  d.value_dim = dim;
  d.io_dtype = io;
  d.max_tokens = T;
  const Tensor o = Tensor::of(io, {T, HV, dim}, uniform_vector(1, T * HV * dim));
  const Tensor z = Tensor::of(io, {T, HV, dim}, uniform_vector(2, T * HV * dim));
  const Tensor weight = Tensor::full(KDA_FP32, {dim}, 1), out(io, {T, HV, dim});
  auto a = sized<kda_gated_norm_args>();
  a.o = o;
  a.z = z;
  a.weight = weight;
  a.out = out;
  Plan plan = make_plan(d);
  const kda_status status = plan.run(a);
  expect_ok("gated_norm", status, plan.message());
}

void run_residual_norm(int64_t dim, kda_dtype io, bool add) {
  const int64_t T = 9;
  auto d = sized<kda_residual_norm_desc>();
  d.backend = "cuda_portable";
  d.hidden = dim;
  d.io_dtype = io;
  d.max_tokens = T;
  const Tensor h = Tensor::of(io, {T, dim}, uniform_vector(1, T * dim)), more = h.copy(io), out(io, {T, dim});
  const Tensor weight = Tensor::full(KDA_FP32, {dim}, 1);
  auto a = sized<kda_residual_norm_args>();
  a.residual = h;
  if (add) a.add = more;
  a.weight = weight;
  a.out = out;
  Plan plan = make_plan(d);
  const kda_status status = plan.run(a);
  expect_ok("residual_norm", status, plan.message());
}

void run_the_operators(bool skip_barriers) {
  for (const kda_dtype pool : {KDA_FP32, KDA_BF16}) {
    for (const int32_t width : {1, 3}) {
      for (const bool records : {false, true}) {
        for (const int64_t dim : {128, 60, 132}) run_decode("cuda_portable", pool, dim, width, records);
        // Three value heads a query head: not what the lean kernels serve.
        for (const int64_t heads : {2, 3}) run_decode("cuda_fused", pool, 128, width, records, heads);
      }
      for (const char* backend : {"cuda_portable", "cuda_fused"}) {
        for (const kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) run_step(backend, pool, width, layout, 1, 2);
      }
    }
    // The common call: few heads, more, one for every multiprocessor, several.
    if (skip_barriers) continue;
    for (const int64_t H : {1, 10, 20, 80, 270}) run_step("cuda_fused", pool, 1, KDA_CONV_SD, H, H);
  }
  for (const kda_dtype pool : {KDA_FP32, KDA_BF16}) {
    for (const int64_t dim : {128, 60, 132}) run_prefill("cuda_portable", dim, pool);
    if (!skip_barriers) run_prefill("cuda_fused", 128, pool);
  }
  for (const kda_dtype io : {KDA_BF16, KDA_FP32}) {
    for (const int64_t dim : {128, 60, 300}) run_gated_norm(dim, io);
    for (const int64_t dim : {2304, 60, 8200}) {
      for (const bool add : {false, true}) run_residual_norm(dim, io, add);
    }
    for (const int64_t channels : {256, 300, 37}) run_conv_prefill(channels, io);
  }
}

}  // namespace
}  // namespace kda::conformance::test

// --copies: state copies and metadata alone.
// --skip barriers: for a tool that cannot follow barriers in shared memory (docs/kernels/prefill.md, decode_step.md).
int main(int argc, char** argv) {
  using namespace kda::conformance::test;
  const bool only_copies = argc > 1 && std::strcmp(argv[1], "--copies") == 0;
  const bool skip_barriers = argc > 2 && std::strcmp(argv[1], "--skip") == 0 && std::strcmp(argv[2], "barriers") == 0;
  kda::cuda_test::Memory memory;
  kda::conformance::set_device(kda::cuda_test::context(), &memory);
  if (!only_copies) run_the_operators(skip_barriers);
  failures += run_copies_and_metadata();
  kda::conformance::set_device(nullptr, nullptr);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
