#include "conformance/vector_cases.h"

#include <algorithm>
#include <filesystem>
#include <kda/kda.hpp>
#include <stdexcept>

#include "conformance/api.h"
#include "conformance/layer_vectors.h"
#include "conformance/limits.h"
#include "conformance/vectors.h"

namespace kda::conformance {
namespace {

namespace fs = std::filesystem;

// A file's tensors, a group's own before the shared ones.
class Group {
 public:
  Group(const Vectors& vectors, std::string name) : vectors_(vectors), name_(std::move(name)) {}
  const Tensor* find(const std::string& tensor) const {
    for (const std::string& key : {name_ + "." + tensor, tensor}) {
      if (const auto at = vectors_.find(key); at != vectors_.end()) return &at->second;
    }
    return nullptr;
  }
  const Tensor& get(const std::string& tensor) const {
    if (const Tensor* t = find(tensor)) return *t;
    throw std::runtime_error("wanted a tensor '" + tensor + "' for group '" + name_ + "', got none");
  }

 private:
  const Vectors& vectors_;
  std::string name_;
};

void set_gate(const Group& g, const std::string& family, Problem& p) {
  p.A_log = g.get("A_log");
  p.dt_bias = g.get("dt_bias");
  p.spec.gate_family = family == "bounded" ? KDA_GATE_BOUNDED : KDA_GATE_SOFTPLUS;
  if (family == "bounded") p.spec.lower_bound = -5;
}

Problem prefill_problem(const Group& g, const std::string& family, kda_dtype io) {
  Problem p;
  const std::vector<double> cu = g.get("cu_seqlens").values();
  for (size_t n = 0; n + 1 < cu.size(); ++n) p.lengths.push_back(static_cast<int64_t>(cu[n + 1] - cu[n]));
  p.q = g.get("q").copy(io);
  p.k = g.get("k").copy(io);
  p.v = g.get("v").copy(io);
  p.gate = g.get("raw_g").copy(io);
  p.beta = g.get("beta_logits").copy(io);
  p.spec.num_heads = p.q.shape().at(1);
  p.spec.num_value_heads = p.v.shape().at(1);
  p.spec.key_dim = p.q.shape().at(2);
  p.spec.value_dim = p.v.shape().at(2);
  p.spec.io_dtype = p.spec.gate_dtype = p.spec.beta_dtype = io;
  set_gate(g, family, p);
  if (const Tensor* s = g.find("initial_state")) p.state = s->copy(KDA_FP32);
  return p;
}

void run_prefill(const Vectors& vectors, const std::string& family, kda_dtype io, const Setting& setting,
                 Report& report) {
  const Group g(vectors, family);
  const Problem p = prefill_problem(g, family, io);
  PrefillOptions options;
  options.backend = setting.backend.c_str();
  options.context = setting.context;
  if (!report.accept(make_plan(prefill_desc(p, options.backend), setting.context))) return;
  const Outcome r = prefill(p, options);
  if (!report.succeeded("run", r.status, r.message)) return;
  const int64_t HV = p.spec.num_value_heads, V = p.spec.value_dim, K = p.spec.key_dim;
  const Limits limit = limits(io, false, report.arithmetic());
  report.measure("out", compare_outputs(r.out.values(), g.get("o").values(), p.lengths, HV, V, absolute_floor(io)),
                 limit.out, io, r.out.size(), V);
  report.measure("state", compare_states(r.state.values(), g.get("final_state").values(), HV, V * K), limit.state,
                 KDA_FP32, r.state.size(), V * K);
}

// Each step is a call of its own, on the state that the one before left.
void run_decode(const Vectors& vectors, kda_dtype io, const Setting& setting, Report& report) {
  const Group g(vectors, "bounded");
  const Shape& shape = g.get("q").shape();  // [steps, N, H, K]
  const int64_t steps = shape.at(0), N = shape.at(1), H = shape.at(2), K = shape.at(3), V = g.get("v").shape().at(3);
  const auto step_of = [&](const char* name, int64_t step) {
    const kda_tensor t = select(g.get(name), 0, step);
    return Tensor::of(io, Shape(t.shape, t.shape + t.rank), values(t));
  };
  Problem p;
  p.lengths.assign(static_cast<size_t>(N), 1);
  p.spec.num_heads = p.spec.num_value_heads = H;
  p.spec.key_dim = K;
  p.spec.value_dim = V;
  p.spec.io_dtype = p.spec.gate_dtype = p.spec.beta_dtype = io;
  set_gate(g, "bounded", p);
  p.q = step_of("q", 0);
  Plan plan = make_plan(decode_desc(p, setting.backend.c_str()), setting.context);
  if (!report.accept(plan)) return;
  const Tensor pool = g.get("initial_state").copy(KDA_FP32), offsets = Tensor::ints(p.offsets());
  Tensor out(io, {N, H, V});
  std::vector<double> all;
  const Limits limit = limits(io);
  const auto compare_state = [&](const char* name) {
    report.measure(name, compare_states(pool.values(), g.get(name).values(), H, V * K), limit.state, KDA_FP32,
                   pool.size(), V * K);
  };
  for (int64_t step = 0; step < steps; ++step) {
    p.q = step_of("q", step);
    p.k = step_of("k", step);
    p.v = step_of("v", step);
    p.gate = step_of("raw_g", step);
    p.beta = step_of("beta_logits", step);
    kda_decode_args args = decode_args(p);
    args.sequences.cu_seqlens = offsets;
    args.state = pool;
    args.out = out;
    if (!report.succeeded("step " + std::to_string(step), plan.run(args), plan.message())) return;
    const std::vector<double> o = out.values();
    all.insert(all.end(), o.begin(), o.end());
    if (step == 0) compare_state("state_after_step_1");
  }
  compare_state("final_state");
  // [steps, N, H, V]: every (step, sequence) as a row of one sequence.
  report.measure("out", compare_outputs(all, g.get("o").values(), {steps * N}, H, V, absolute_floor(io)), limit.out,
                 io, static_cast<int64_t>(all.size()), steps * N * V);
}

// Reads the file when the case runs; what it throws is the case's fault.
template <class F>
void add(std::vector<Case>& cases, kda_operator op, const fs::path& path, const std::string& group, const F& run) {
  for (const kda_dtype io : {KDA_FP32, KDA_BF16}) {
    const std::string name = "vectors/" + path.stem().string() + (group.empty() ? "" : "/" + group);
    cases.push_back({op, name + ",io=" + kda_dtype_name(io), true, [path, run, io](const Setting& s, Report& report) {
                       try {
                         run(read_vectors(path.string()), io, s, report);
                       } catch (const std::exception& e) {
                         report.fault(path.string() + ": " + e.what());
                       }
                     }});
  }
}

}  // namespace

VectorCases vector_cases(const std::string& directory) {
  std::error_code error;
  std::vector<fs::path> paths;
  for (fs::directory_iterator i(directory, error), end; !error && i != end; i.increment(error)) {
    if (i->path().extension() == ".safetensors") paths.push_back(i->path());
  }
  if (error) throw std::runtime_error(directory + ": cannot be listed: " + error.message());
  std::sort(paths.begin(), paths.end());

  VectorCases found;
  for (const fs::path& path : paths) {
    const std::string name = path.stem().string();
    if (name == "varlen_prefill" || name == "hard_prefill" || name == "gva_prefill") {
      for (const std::string family : {"bounded", "softplus"}) {
        if (name == "gva_prefill" && family == "softplus") continue;
        add(found.cases, KDA_OP_PREFILL, path, family,
            [family](const Vectors& v, kda_dtype io, const Setting& s, Report& r) {
              run_prefill(v, family, io, s, r);
            });
      }
    } else if (name == "decode_32") {
      add(found.cases, KDA_OP_DECODE, path, "", run_decode);
    } else if (name.rfind("layer_", 0) == 0) {
      add(found.cases, KDA_OP_LAYER, path, "", [path](const Vectors&, kda_dtype io, const Setting& s, Report& r) {
        run_layer_vectors(path.string(), io, s, r);
      });
    } else {
      found.unknown.push_back(path.filename().string());
    }
  }
  return found;
}

}  // namespace kda::conformance
