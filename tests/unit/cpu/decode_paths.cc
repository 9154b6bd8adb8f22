#include "unit/cpu/decode_paths.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "conformance/rounding.h"

namespace kda::conformance::test {
namespace {

int64_t part_channels(const StepShape& s, int part) {
  if (s.parts == 1) return s.channels();
  return part < 2 ? s.qk() : s.v();
}

std::string raw(const kda_tensor& t) {
  const auto size = kda_dtype_size(t.dtype);
  std::string bytes;
  for (int64_t i = 0, n = product(Shape(t.shape, t.shape + t.rank)); i < n; ++i) {
    bytes.append(element(t, i), size);
  }
  return bytes;
}

// Columns [first, first + n) of [T, channels] seen as [T, heads, dim].
kda_tensor heads_view(const Tensor& x, int64_t first, int64_t heads, int64_t dim) {
  kda_tensor t = narrow(x.view(), 1, first, heads * dim);
  t.rank = 3;
  t.shape[1] = heads, t.shape[2] = dim;
  t.strides[1] = dim, t.strides[2] = 1;
  return t;
}

}  // namespace

kda_attention_spec StepShape::spec() const {
  kda_attention_spec a{};
  a.num_heads = H;
  a.num_value_heads = HV;
  a.key_dim = K;
  a.value_dim = V;
  a.io_dtype = io;
  a.gate_dtype = gate;
  a.state_dtype = state;
  a.gate_family = family;
  a.lower_bound = family == KDA_GATE_BOUNDED ? -5 : 0;
  a.no_qk_norm = qk_norm ? 0 : 1;
  return a;
}

const char* mode_name(Mode mode) {
  switch (mode) {
    case Mode::plain: return "plain";
    case Mode::columns: return "columns";
    case Mode::records: return "records";
    case Mode::fold: return "fold";
  }
  return "?";
}

std::vector<double> token_values(const Content& c, uint32_t stream, int64_t n, double scale) {
  std::vector<double> x(static_cast<size_t>(n));
  const uint64_t seed = static_cast<uint64_t>((c.request * 4096 + c.position) * 16 + c.variant) << 16;
  for (int64_t i = 0; i < n; ++i)
    x[static_cast<size_t>(i)] = scale * uniform(stream, seed + static_cast<uint64_t>(i));
  return x;
}

StepWeights::StepWeights(const StepShape& s) {
  std::vector<double> a(static_cast<size_t>(s.HV));
  for (size_t i = 0; i < a.size(); ++i) a[i] = std::log(1.0 + static_cast<double>(i));
  if (s.family != KDA_GATE_PLAIN) {
    A_log = Tensor::of(KDA_FP32, {s.HV}, a);
    dt_bias = Tensor::of(KDA_FP32, {s.HV, s.K}, uniform_vector(21, s.HV * s.K));
  }
  norm = Tensor::of(KDA_FP32, {s.V}, uniform_vector(22, s.V));
  // One set of taps, whole or cut into three.
  const auto taps = uniform_vector(23, s.channels() * s.W);
  int64_t first = 0;
  for (int part = 0; part < s.parts; ++part) {
    const int64_t n = part_channels(s, part);
    conv[part] = Tensor::of(KDA_FP32, {n, s.W}, {taps.begin() + first * s.W, taps.begin() + (first + n) * s.W});
    first += n;
  }
}

Path::Path(const StepShape& shape, const StepWeights& weights, Mode mode, bool fused, int64_t requests)
    : s_(shape), w_(weights), mode_(mode), fused_(fused), requests_(requests) {
  columns_ = mode == Mode::columns ? s_.width : 1;
  const int64_t slots = requests * columns_ + 2, payload = s_.HV * s_.V * s_.K;
  pool_ = canary_pool(s_.state, {slots, s_.HV, s_.V, s_.K}, payload + 5, 3);
  const int64_t L = s_.W - 1 + (mode == Mode::plain ? 1 : s_.width) - (records() ? 0 : 1);
  for (int part = 0; part < s_.parts; ++part) {
    const int64_t n = part_channels(s_, part);
    const bool sd = s_.layout == KDA_CONV_SD;
    conv_[part] = canary_pool(s_.conv, sd ? Shape{slots, L, n} : Shape{slots, n, L}, L * n + 7, 2);
  }
  for (int64_t r = 0; r < requests; ++r) {  // every request starts from zero, as after an empty prefill
    fill(select(pool_.view(), 0, slot(r, 0)), 0);
    for (int part = 0; part < s_.parts; ++part) fill(select(conv_[part].view(), 0, slot(r, 0)), 0);
  }
  if (!records()) return;
  u_ = Tensor(KDA_FP32, {slots, s_.HV, s_.width, s_.V});
  kg_ = Tensor(s_.gate, {slots, s_.HV, s_.width, 2 * s_.K});
  count_ = Tensor::full(KDA_INT32, {slots}, 0);
}

// Slots run backwards and leave slot 0 and the last one to the canary.
int64_t Path::slot(int64_t request, int64_t column) const {
  return 1 + (requests_ - 1 - request) * columns_ + column;
}

std::string Path::name() const {
  return std::string(mode_name(mode_)) + (fused_ ? " decode_step" : " chain") + " on " + s_.isa;
}

// The tensors of one step, one row after another.
struct Path::Inputs {
  std::vector<int64_t> offsets = {0};
  int64_t T = 0, N = 0;
  Tensor x[3], gate, beta, z, cu, slots, accepted, out;

  Inputs(const StepShape& s, const Path& path, const std::vector<StepRow>& rows) {
    std::vector<int64_t> slot_list, accepted_list;
    for (const StepRow& row : rows) {
      offsets.push_back(offsets.back() + static_cast<int64_t>(row.variants.size()));
      for (int64_t c = 0; c < path.columns_; ++c) slot_list.push_back(path.slot(row.request, c));
      accepted_list.push_back(row.accepted);
    }
    T = offsets.back();
    N = static_cast<int64_t>(rows.size());
    for (int part = 0; part < s.parts; ++part) x[part] = Tensor(s.io, {T, part_channels(s, part)});
    gate = Tensor(s.gate, {T, s.HV, s.K});
    beta = Tensor(s.io, {T, s.HV});
    z = Tensor(s.io, {T, s.HV, s.V});
    out = Tensor(s.io, {T, s.HV, s.V});
    cu = Tensor::ints(offsets);
    slots = Tensor::ints(slot_list, N % 2 ? KDA_INT32 : KDA_INT64);
    accepted = Tensor::ints(accepted_list);
    for (size_t n = 0; n < rows.size(); ++n) {
      for (size_t t = 0; t < rows[n].variants.size(); ++t) {
        const auto at = static_cast<int64_t>(t);
        fill_token(s, {rows[n].request, rows[n].position + at, rows[n].variants[t]}, offsets[n] + at);
      }
    }
  }

  void fill_token(const StepShape& s, const Content& c, int64_t at) {
    const auto qkv = token_values(c, 11, s.channels(), 1);
    int64_t first = 0;
    for (int part = 0; part < s.parts; ++part) {
      const int64_t count = part_channels(s, part);
      assign(select(x[part].view(), 0, at), {qkv.begin() + first, qkv.begin() + first + count});
      first += count;
    }
    auto g = token_values(c, 12, s.HV * s.K, 3);
    if (s.family == KDA_GATE_PLAIN) {
      for (double& value : g) value = -std::fabs(value);
    }
    assign(select(gate.view(), 0, at), g);
    assign(select(beta.view(), 0, at), token_values(c, 13, s.HV, 3));
    assign(select(z.view(), 0, at), token_values(c, 14, s.HV * s.V, 2));
  }
};

kda_decode_step_desc Path::step_desc(int64_t T, int64_t N) const {
  kda_decode_step_desc d;
  kda_decode_step_desc_init(&d);
  d.decode.attention = s_.spec();
  d.decode.backend = "portable";
  d.decode.max_tokens = T;
  d.decode.max_sequences = N;
  d.decode.width = mode_ == Mode::plain ? 1 : s_.width;
  d.decode.mode = records() ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
  d.decode.fold = mode_ == Mode::fold;
  d.decode.flags = KDA_PLAN_BATCH_INVARIANT;
  d.conv_width = static_cast<int32_t>(s_.W);
  d.conv_parts = s_.parts;
  d.conv_layout = s_.layout;
  d.conv_dtype = s_.conv;
  return d;
}

std::vector<std::vector<std::string>> Path::step(const std::vector<StepRow>& rows) {
  const Inputs in(s_, *this, rows);
  const kda_decode_step_desc d = step_desc(in.T, in.N);
  auto args = sized<kda_decode_step_args>();
  args.decode.struct_size = sizeof args.decode;
  args.decode.gate = in.gate;
  args.decode.beta = in.beta;
  args.decode.A_log = w_.A_log;
  args.decode.dt_bias = w_.dt_bias;
  args.decode.sequences.cu_seqlens = in.cu;
  args.decode.state = pool_;
  args.decode.slots = columns_ > 1 ? reshape(in.slots, {in.N, columns_}) : in.slots.view();
  if (mode_ == Mode::columns || mode_ == Mode::fold) args.decode.accepted = in.accepted;
  if (records()) args.decode.records = {u_, kg_, count_, {}};
  args.decode.out = in.out;
  for (int part = 0; part < s_.parts; ++part) {
    args.x[part] = in.x[part];
    args.conv_weight[part] = w_.conv[part];
    args.conv_state[part] = conv_[part];
  }
  args.z = in.z;
  args.norm_weight = w_.norm;
  if (fused_) {
    Plan plan = make_plan(d, isa_context(s_.isa, s_.threads));
    EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
  } else {
    run_chain(d, args);
  }
  EXPECT_EQ(in.out.guard_report(), "");
  std::vector<std::vector<std::string>> result(rows.size());
  for (size_t n = 0; n < rows.size(); ++n) {
    for (int64_t t = in.offsets[n]; t < in.offsets[n + 1]; ++t) {
      result[n].push_back(raw(select(in.out.view(), 0, t)));
    }
  }
  return result;
}

void Path::run_chain(const kda_decode_step_desc& d, const kda_decode_step_args& step) const {
  kda_context* const context = isa_context(s_.isa, s_.threads);
  const int64_t T = step.decode.gate.shape[0];
  Tensor post[3];
  run_conv(d, step, post);
  const bool merged = s_.parts == 1;
  Tensor o(s_.io, {T, s_.HV, s_.V});
  kda_decode_args args = step.decode;
  args.q = heads_view(post[0], 0, s_.H, s_.K);
  args.k = heads_view(post[merged ? 0 : 1], merged ? s_.qk() : 0, s_.H, s_.K);
  args.v = heads_view(post[merged ? 0 : 2], merged ? 2 * s_.qk() : 0, s_.HV, s_.V);
  args.out = o;
  Plan decode = make_plan(d.decode, context);
  EXPECT_EQ(decode.run(args), KDA_OK) << decode.message();

  auto norm_desc = sized<kda_gated_norm_desc>();
  norm_desc.backend = "portable";
  norm_desc.num_value_heads = s_.HV;
  norm_desc.value_dim = s_.V;
  norm_desc.io_dtype = s_.io;
  norm_desc.max_tokens = T;
  auto norm_args = sized<kda_gated_norm_args>();
  norm_args.o = o;
  norm_args.z = step.z;
  norm_args.weight = step.norm_weight;
  norm_args.out = step.decode.out;
  Plan norm = make_plan(norm_desc, context);
  EXPECT_EQ(norm.run(norm_args), KDA_OK) << norm.message();
}

void Path::run_conv(const kda_decode_step_desc& step_desc, const kda_decode_step_args& step, Tensor* post) const {
  kda_conv_desc d;
  kda_conv_desc_init(&d);
  d.backend = "portable";
  d.mode = records() ? KDA_CONV_RECORDS : KDA_CONV_COLUMNS;
  d.width = step_desc.conv_width;
  d.parts = s_.parts;
  d.io_dtype = s_.io;
  d.state_dtype = s_.conv;
  d.layout = s_.layout;
  d.verify_width = step_desc.decode.width;
  d.fold = step_desc.decode.fold;
  d.max_tokens = step_desc.decode.max_tokens;
  d.max_sequences = step_desc.decode.max_sequences;
  auto args = sized<kda_conv_args>();
  for (int part = 0; part < s_.parts; ++part) {
    d.channels[part] = part_channels(s_, part);
    post[part] = Tensor(s_.io, {d.max_tokens, d.channels[part]});
    args.x[part] = step.x[part];
    args.weight[part] = step.conv_weight[part];
    args.state[part] = step.conv_state[part];
    args.out[part] = post[part];
  }
  args.sequences = step.decode.sequences;
  args.slots = step.decode.slots;
  args.accepted = step.decode.accepted;
  if (d.fold) args.record_count = count_;
  Plan plan = make_plan(d, isa_context(s_.isa, s_.threads));
  EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
}

void Path::commit(const std::vector<int64_t>& requests, const std::vector<int64_t>& accepted) {
  kda_commit_desc d;
  kda_commit_desc_init(&d);
  d.attention = s_.spec();
  d.backend = "portable";
  d.max_sequences = static_cast<int64_t>(requests.size());
  d.width = s_.width;
  d.conv_width = static_cast<int32_t>(s_.W);
  d.conv_parts = s_.parts;
  d.conv_layout = s_.layout;
  d.conv_dtype = s_.conv;
  std::vector<int64_t> slots;
  for (int64_t r : requests) slots.push_back(slot(r, 0));
  const Tensor slots_t = Tensor::ints(slots), accepted_t = Tensor::ints(accepted);
  auto args = sized<kda_commit_args>();
  args.A_log = w_.A_log;
  args.dt_bias = w_.dt_bias;
  args.state = pool_;
  args.slots = slots_t;
  args.accepted = accepted_t;
  args.records.u = u_;
  args.records.kg = kg_;
  args.records.count = count_;
  for (int part = 0; part < s_.parts; ++part) args.conv_state[part] = conv_[part];
  Plan plan = make_plan(d, isa_context(s_.isa, s_.threads));
  EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
}

std::string Path::state(int64_t request, int64_t accepted) const {
  return raw(select(pool_.view(), 0, slot(request, columns_ > 1 ? accepted - 1 : 0)));
}

std::vector<double> Path::window(int64_t request, int64_t accepted) const {
  const int64_t offset = mode_ == Mode::columns ? accepted - 1 : 0;
  std::vector<double> columns;
  for (int part = 0; part < s_.parts; ++part) {
    const kda_tensor all = select(conv_[part].view(), 0, slot(request, 0));
    const int column_dim = s_.layout == KDA_CONV_SD ? 0 : 1;
    const kda_tensor used = narrow(all, column_dim, offset, s_.W - 1);
    const auto x = values(used);
    const int64_t n = part_channels(s_, part);
    for (int64_t c = 0; c < n; ++c) {
      for (int64_t i = 0; i < s_.W - 1; ++i) {
        columns.push_back(x[static_cast<size_t>(column_dim == 0 ? i * n + c : c * (s_.W - 1) + i)]);
      }
    }
  }
  return columns;
}

std::string Path::guards() const {
  std::string report = pool_.guard_report();
  for (int part = 0; part < s_.parts; ++part) report += conv_[part].guard_report();
  return report + u_.guard_report() + kg_.guard_report() + count_.guard_report();
}

}  // namespace kda::conformance::test
