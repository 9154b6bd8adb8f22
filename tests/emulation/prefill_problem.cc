#include "prefill_problem.h"

#include <cmath>
#include <numeric>

#include "cuda/ptx/math.h"

namespace kda::emulated {

using cuda::prefill_fused::Gate;

namespace {

// R(s, i) of field-cases: uniform in [-1, 1).
double uniform(uint64_t stream, uint64_t i) {
  uint64_t z = stream * (uint64_t{1} << 32) + i + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<double>(z >> 40) * 0x1p-23 - 1.0;
}

double widen(uint16_t bits) { return static_cast<double>(cuda::ptx::from_bf16(bits)); }

double norm_factor(const uint16_t* row) {
  double sum = 0;
  for (int i = 0; i < 128; ++i) sum += widen(row[i]) * widen(row[i]);
  return 1.0 / std::sqrt(sum + 1e-6);
}

double decay(Gate family, double a_log, double x) {
  if (family == Gate::kPlain) return std::exp(x);
  const double a = std::exp(a_log);
  if (family == Gate::kSoftplus) return std::exp(-a * std::log1p(std::exp(x)));
  return std::exp(-5.0 / (1.0 + std::exp(-a * x)));
}

struct Sums {
  double error = 0, norm = 0;
  void add(double x, double reference) {
    error += (x - reference) * (x - reference);
    norm += reference * reference;
  }
  double ratio() const { return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error); }
};

}  // namespace

uint16_t bf16_bits(double x) { return static_cast<uint16_t>(cuda::ptx::to_bf16(static_cast<float>(x))); }

int64_t PrefillProblem::tokens() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }

PrefillProblem::PrefillProblem(std::vector<int64_t> sequence_lengths, int head_count, Gate gate_family,
                               double gate_mean)
    : lengths(std::move(sequence_lengths)), heads(head_count), family(gate_family) {
  const int64_t rows = tokens() * heads;
  for (int64_t i = 0; i < rows * 128; ++i) {
    q.push_back(bf16_bits(uniform(1, i)));
    k.push_back(bf16_bits(uniform(2, i)));
    v.push_back(bf16_bits(uniform(3, i)));
    const double raw = family == Gate::kPlain ? -std::exp(-4 + 3 * uniform(4, i)) : gate_mean + 4 * uniform(4, i);
    gate.push_back(cuda::ptx::from_bf16(bf16_bits(raw)));
  }
  for (int64_t i = 0; i < rows; ++i) beta.push_back(bf16_bits(3 * uniform(5, i)));
  const int64_t states = static_cast<int64_t>(lengths.size()) * heads * 128 * 128;
  for (int64_t i = 0; i < states; ++i) state.push_back(static_cast<float>(0.1 * uniform(6, i)));
}

PrefillErrors compare_with_oracle(const PrefillProblem& problem, const PrefillResult& result) {
  Sums out, final_states;
  int64_t first = 0;
  for (size_t n = 0; n < problem.lengths.size(); first += problem.lengths[n], ++n) {
    for (int h = 0; h < problem.heads; ++h) {
      const size_t state_at = (n * problem.heads + h) * 128 * 128;
      std::vector<double> state(problem.state.begin() + state_at, problem.state.begin() + state_at + 128 * 128);
      for (int64_t t = first; t < first + problem.lengths[n]; ++t) {
        const size_t at = (t * problem.heads + h) * 128;
        const double q_norm = norm_factor(&problem.q[at]) / std::sqrt(128.0), k_norm = norm_factor(&problem.k[at]);
        const double beta = 1.0 / (1.0 + std::exp(-widen(problem.beta[t * problem.heads + h])));
        double q[128], k[128], d[128];
        for (int i = 0; i < 128; ++i) {
          q[i] = widen(problem.q[at + i]) * q_norm, k[i] = widen(problem.k[at + i]) * k_norm;
          d[i] = decay(problem.family, problem.a_log, problem.gate[at + i]);
        }
        for (int r = 0; r < 128; ++r) {
          double* row = &state[r * 128];
          double dot = 0, o = 0;
          for (int i = 0; i < 128; ++i) row[i] *= d[i], dot += row[i] * k[i];
          const double u = beta * (widen(problem.v[at + r]) - dot);
          for (int i = 0; i < 128; ++i) row[i] += u * k[i], o += row[i] * q[i];
          out.add(widen(result.out[at + r]), o);
        }
      }
      for (int i = 0; i < 128 * 128; ++i) final_states.add(result.state[state_at + i], state[i]);
    }
  }
  return {out.ratio(), final_states.ratio()};
}

}  // namespace kda::emulated
