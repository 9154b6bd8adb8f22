// Random speculation through every path of decode: outputs of accepted tokens, states and windows equal plain decode
// bit for bit (V-9, V-10, V-10b, L-8, L-9), and windows equal a plain list of inputs (W-3, W-4).
#include "unit/cpu/decode_paths.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "conformance/rounding.h"

namespace kda::conformance::test {
namespace {

// What one request did: the text position of its next base token, and what its last verify got accepted.
struct Progress {
  int64_t position = 0, accepted = 1;
};

// A verify row: `drafts` drafts of which the first accepted - 1 are the text's own.
struct Draft {
  int64_t drafts = 0, accepted = 1;
};

// Windows of the list model: the last W-1 inputs before `position`, per channel, oldest first.
std::vector<double> expected_window(const StepShape& s, int64_t request, int64_t position) {
  std::vector<double> window(static_cast<size_t>(s.channels() * (s.W - 1)), 0.0);
  for (int64_t i = 0; i < s.W - 1; ++i) {
    const int64_t p = position - (s.W - 1) + i;
    if (p < 0) continue;
    const auto x = rounded(s.io, token_values({request, p, 0}, 11, s.channels(), 1));
    for (int64_t c = 0; c < s.channels(); ++c)
      window[static_cast<size_t>(c * (s.W - 1) + i)] = x[static_cast<size_t>(c)];
  }
  return window;
}

// Runs every path beside plain decode and remembers the first difference.
class Server {
 public:
  Server(const StepShape& shape, const StepWeights& weights, int64_t requests)
      : shape_(shape), plain_(shape, weights, Mode::plain, true, requests), progress_(static_cast<size_t>(requests)) {
    for (Mode mode : {Mode::columns, Mode::records, Mode::fold}) {
      for (bool fused : {false, true}) {
        paths_.emplace_back(shape, weights, mode, fused, requests);
        modes_.push_back(mode);
      }
    }
  }

  // One step of the requests named, each with its draft.
  void step(const std::vector<int64_t>& requests, const std::vector<Draft>& drafts) {
    std::vector<StepRow> rows;
    std::vector<int64_t> accepted;
    for (size_t i = 0; i < requests.size(); ++i) {
      const Progress& p = progress_[static_cast<size_t>(requests[i])];
      StepRow row{requests[i], p.position, p.accepted, {}};
      for (int64_t t = 0; t <= drafts[i].drafts; ++t) row.variants.push_back(t < drafts[i].accepted ? 0 : 1 + t);
      rows.push_back(row);
      accepted.push_back(drafts[i].accepted);
    }
    std::vector<Outputs> got;
    const Outputs plain = plain_outputs(requests, drafts);
    for (size_t i = 0; i < paths_.size(); ++i) {
      got.push_back(paths_[i].step(rows));
      if (modes_[i] == Mode::records) paths_[i].commit(requests, accepted);
      const Outputs& want = fp32_pool() ? plain : got[peer(i)];
      for (size_t n = 0; n < rows.size(); ++n) {
        for (size_t t = 0; t < static_cast<size_t>(accepted[n]); ++t) {
          if (got[i][n][t] != want[n][t])
            fault(i, "output of row " + std::to_string(n) + " token " + std::to_string(t));
        }
      }
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      Progress& p = progress_[static_cast<size_t>(requests[i])];
      p.position += drafts[i].accepted;
      p.accepted = drafts[i].accepted;
    }
  }

  // Everything accepted is in the states; the fold paths commit their last records first.
  std::string check() {
    for (size_t r = 0; r < progress_.size(); ++r) {
      const auto request = static_cast<int64_t>(r);
      const Progress& p = progress_[r];
      const auto window = expected_window(shape_, request, p.position);
      if (plain_.window(request, 1) != window) fault_ += "window of plain decode; ";
      for (size_t i = 0; i < paths_.size(); ++i) {
        if (modes_[i] == Mode::fold) paths_[i].commit({request}, {p.accepted});
        const std::string want = fp32_pool() ? plain_.state(request, 1) : paths_[peer(i)].state(request, p.accepted);
        if (paths_[i].state(request, p.accepted) != want) fault(i, "state");
        if (paths_[i].window(request, p.accepted) != window) fault(i, "window");
        if (!paths_[i].guards().empty()) fault(i, paths_[i].guards());
      }
    }
    return fault_;
  }

 private:
  using Outputs = std::vector<std::vector<std::string>>;

  bool fp32_pool() const { return shape_.state == KDA_FP32; }
  // 16-bit pools round per token in columns mode and per commit in the others (N-2): equal among themselves only.
  size_t peer(size_t i) const { return modes_[i] == Mode::columns ? 0 : 2; }
  void fault(size_t i, const std::string& what) { fault_ += paths_[i].name() + ": " + what + "; "; }

  // The accepted tokens one call at a time, each request alone.
  Outputs plain_outputs(const std::vector<int64_t>& requests, const std::vector<Draft>& drafts) {
    Outputs outputs(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      for (int64_t t = 0; t < drafts[i].accepted; ++t) {
        const int64_t position = progress_[static_cast<size_t>(requests[i])].position + t;
        outputs[i].push_back(plain_.step({{requests[i], position, 1, {0}}})[0][0]);
      }
    }
    return outputs;
  }

  StepShape shape_;
  Path plain_;
  std::vector<Path> paths_;
  std::vector<Mode> modes_;
  std::vector<Progress> progress_;
  std::string fault_;
};

StepShape random_shape() {
  StepShape s;
  const int64_t ratio = *rc::gen::element<int64_t>(1, 1, 2, 3);
  s.H = *rc::gen::inRange<int64_t>(1, 3);
  s.HV = s.H * ratio;
  s.K = *rc::gen::element<int64_t>(1, 2, 8, 16, 20, 33, 64);
  s.V = *rc::gen::element<int64_t>(1, 4, 7, 16, 37, 64);
  s.W = *rc::gen::inRange<int64_t>(2, 9);
  s.width = *rc::gen::inRange<int32_t>(1, 7);
  s.io = *rc::gen::element(KDA_FP32, KDA_BF16, KDA_FP16);
  s.gate = *rc::gen::element(s.io, KDA_FP32);
  s.conv = *rc::gen::element(s.io, KDA_FP32);
  s.layout = *rc::gen::element(KDA_CONV_SD, KDA_CONV_DS);
  s.parts = *rc::gen::element(1, 3);
  s.family = *rc::gen::element(KDA_GATE_BOUNDED, KDA_GATE_SOFTPLUS, KDA_GATE_PLAIN);
  s.isa = *rc::gen::elementOf(isas());
  s.threads = *rc::gen::element(1, 2, 3);
  return s;
}

void run_random_steps(kda_dtype pool) {
  StepShape shape = random_shape();
  shape.state = pool;
  const StepWeights weights(shape);
  const int64_t requests = *rc::gen::inRange<int64_t>(1, 4);
  Server server(shape, weights, requests);
  const int steps = *rc::gen::inRange(1, 6);
  for (int i = 0; i < steps; ++i) {
    std::vector<int64_t> rows;
    std::vector<Draft> drafts;
    for (int64_t r = 0; r < requests; ++r) {
      if (r + 1 < requests && *rc::gen::weightedElement<bool>({{1, true}, {3, false}})) continue;
      Draft d;
      d.drafts = *rc::gen::inRange<int64_t>(0, shape.width);
      d.accepted = 1 + *rc::gen::inRange<int64_t>(0, d.drafts + 1);
      rows.push_back(r);
      drafts.push_back(d);
    }
    server.step(rows, drafts);
  }
  RC_ASSERT(server.check() == "");
}

TEST(DecodePaths, V09_V10_EveryPathHoldsTheBitsOfPlainDecode) {
  EXPECT_TRUE(rc::check("fp32 pool", [] { run_random_steps(KDA_FP32); }));
}

TEST(DecodePaths, L08_FusedEqualsChainWith16BitPools) {
  EXPECT_TRUE(rc::check("bf16 pool", [] { run_random_steps(KDA_BF16); }));
  EXPECT_TRUE(rc::check("fp16 pool", [] { run_random_steps(KDA_FP16); }));
}

}  // namespace
}  // namespace kda::conformance::test
