#include "harness.h"

#include <cmath>

namespace kda::conformance::test {

bool has_candidate(kda_operator op, const void* desc, const std::string& backend) {
  struct Search {
    std::string name;
    bool found = false;
  } search{backend};
  kda_context* context = cpu_context();
  if (backend.rfind("cuda_", 0) == 0) {
    context = conformance::device_context();
    search.name = backend.substr(5);
  }
  const auto look = [](void* user, const char* candidate, const char* reasons, int32_t) {
    auto* s = static_cast<Search*>(user);
    // A candidate for another device, or one that is not in this build, says so among its refusals.
    const std::string why = reasons;
    const bool here = why.find("device_type:") == std::string::npos && why.find("not_built:") == std::string::npos;
    if ((s->name == candidate || s->name == "auto") && here) s->found = true;
  };
  return kda_explain(context, op, desc, look, &search) == KDA_OK && search.found;
}

// ---- PrefillCall ----------------------------------------------------------------------------------------

PrefillCall::PrefillCall(Problem problem, const char* backend)
    : p(std::move(problem)), desc(prefill_desc(p, backend)) {
  offsets = Tensor::ints(p.offsets());
  out = Tensor(p.q.dtype(), {p.tokens(), p.spec.num_value_heads, p.spec.value_dim});
}

void PrefillCall::use_pool(int64_t count, const std::vector<int64_t>& ids, kda_dtype dtype, int64_t slot_stride,
                           int64_t offset) {
  const kda_attention_spec& a = p.spec;
  desc.attention.state_dtype = dtype;
  pool = canary_pool(dtype, {count, a.num_value_heads, a.value_dim, a.key_dim}, slot_stride, offset);
  slots = Tensor::ints(ids);
  for (size_t n = 0; p.state.present() && n < ids.size(); ++n) {
    if (ids[n] >= 0 && ids[n] < count)
      assign(select(pool, 0, ids[n]), values(select(p.state, 0, static_cast<int64_t>(n))));
  }
}

kda_prefill_args PrefillCall::args() const {
  kda_prefill_args a = prefill_args(p);
  a.sequences.cu_seqlens = begin.present() ? kda_tensor{} : offsets.view();
  a.sequences.begin = begin;
  a.sequences.length = length;
  a.sequences.num_active = active;
  a.state = pool.present() ? pool.view() : p.state.view();
  a.slots = slots;
  a.write_slots = write_slots;
  a.has_initial_state = flags;
  a.final_state = final_state;
  a.no_final_state = no_final_state;
  a.checkpoint_offsets = checkpoint_offsets;
  a.checkpoint_slots = checkpoint_slots;
  a.checkpoint_states = checkpoint_states;
  a.out = out;
  a.out_rows = out_rows;
  return a;
}

kda_status PrefillCall::run() {
  Plan plan = make_plan(desc);
  const kda_status status = plan.run(args());
  message = plan.message();
  return status;
}

// ---- DecodeCall -----------------------------------------------------------------------------------------

DecodeCall::DecodeCall(Problem problem, const char* backend, int32_t width)
    : p(std::move(problem)), desc(decode_desc(p, backend, width)) {
  offsets = Tensor::ints(p.offsets());
  out = Tensor(p.q.dtype(), {p.tokens(), p.spec.num_value_heads, p.spec.value_dim});
}

kda_decode_args DecodeCall::args() const {
  kda_decode_args a = decode_args(p);
  a.sequences.cu_seqlens = begin.present() ? kda_tensor{} : offsets.view();
  a.sequences.begin = begin;
  a.sequences.length = length;
  a.sequences.num_active = active;
  a.state = pool;
  a.slots = slots;
  a.write_slots = write_slots;
  a.accepted = accepted;
  a.has_initial_state = flags;
  a.records = {u, kg, count, record_rows};
  a.out = out;
  a.out_rows = out_rows;
  return a;
}

kda_status DecodeCall::run() {
  Plan plan = make_plan(desc);
  const kda_status status = plan.run(args());
  message = plan.message();
  return status;
}

// ---- Ledger ---------------------------------------------------------------------------------------------

Problem ledger(const std::vector<int64_t>& lengths, const std::vector<int64_t>& tokens, int64_t heads, int64_t dim) {
  const auto T = static_cast<int64_t>(tokens.size());
  Problem p;
  p.lengths = lengths;
  p.spec.num_heads = p.spec.num_value_heads = heads;
  p.spec.key_dim = p.spec.value_dim = dim;
  p.spec.io_dtype = KDA_BF16;
  p.spec.gate_dtype = p.spec.beta_dtype = KDA_FP32;
  p.spec.gate_family = KDA_GATE_PLAIN;
  p.spec.beta_form = KDA_BETA_PLAIN;
  p.spec.no_qk_norm = 1;
  p.spec.scale = 1;
  p.k = Tensor::full(KDA_BF16, {T, heads, dim}, 0);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t h = 0; h < heads; ++h) p.k.set({t, h, tokens[static_cast<size_t>(t)] % dim}, 1);
  }
  p.q = p.k;
  p.v = Tensor::full(KDA_BF16, {T, heads, dim}, 1);
  p.gate = Tensor::full(KDA_FP32, {T, heads, dim}, 0);
  p.beta = Tensor::full(KDA_FP32, {T, heads}, 0.5);
  return p;
}

std::vector<int64_t> iota(int64_t count, int64_t first) {
  std::vector<int64_t> x;
  for (int64_t i = 0; i < count; ++i) x.push_back(first + i);
  return x;
}

std::vector<double> ledger_columns(const std::vector<double>& state, int64_t K) {
  std::vector<double> columns(state.begin(), state.begin() + K);
  for (size_t i = 0; i < state.size(); ++i) {
    const double expected = columns[i % static_cast<size_t>(K)];
    if (std::fabs(state[i] - expected) <= 1e-5) continue;
    ADD_FAILURE() << "ledger state: element " << i << " is " << state[i] << ", the first row has " << expected;
    break;
  }
  return columns;
}

void expect_ledger(const std::vector<double>& state, const std::vector<int64_t>& once,
                   const std::vector<int64_t>& twice, int64_t K) {
  std::vector<double> wanted(static_cast<size_t>(K), 0);
  for (int64_t c : once) wanted[static_cast<size_t>(c % K)] = 0.5;
  for (int64_t c : twice) wanted[static_cast<size_t>(c % K)] = 0.75;
  const std::vector<double> columns = ledger_columns(state, K);
  for (size_t c = 0; c < wanted.size(); ++c) EXPECT_NEAR(columns[c], wanted[c], 1e-5) << "ledger column " << c;
}

// ---- Pieces ---------------------------------------------------------------------------------------------

static Tensor token_rows(const Tensor& x, int64_t begin, int64_t count) {
  Shape shape = x.shape();
  shape[0] = count;
  Tensor t(x.dtype(), shape);
  t.assign(values(narrow(x, 0, begin, count)));
  return t;
}

Problem cut(const Problem& p, int64_t begin, int64_t count) {
  Problem c = p;
  c.lengths = {count};
  c.q = token_rows(p.q, begin, count);
  c.k = token_rows(p.k, begin, count);
  c.v = token_rows(p.v, begin, count);
  c.gate = token_rows(p.gate, begin, count);
  c.beta = token_rows(p.beta, begin, count);
  c.state = Tensor();
  return c;
}

Tensor state_of(const Tensor& states, int64_t n) { return token_rows(states, n, 1); }

std::vector<double> rows(const Tensor& x, int64_t begin, int64_t count) { return values(narrow(x, 0, begin, count)); }

Outcome oracle_with_flags(const Problem& p, const std::vector<int64_t>& has_state) {
  Problem q = p;
  for (size_t n = 0; n < has_state.size(); ++n) {
    if (!has_state[n] && q.state.present()) fill(select(q.state, 0, static_cast<int64_t>(n)), 0);
  }
  return oracle(q);
}

}  // namespace kda::conformance::test
