// Context parallel shards of a prompt (S-9): the conv history of a shard is the last W-1 raw rows of everything
// before it in its request, however many shards they come from. The recurrent half is in segments_test.cc.
#include <algorithm>

#include "harness.h"

namespace kda::conformance::test {

class ShardsTest : public BackendTest {
 protected:
  static constexpr int64_t kChannels = 40, kWidth = 4;

  // Rows [first, first + length) of request `begin`: what one rank holds of it.
  struct Piece {
    int64_t request, first, length;
  };

  void SetUp() override {
    const kda_conv_desc d = desc(1, 1);
    require(KDA_OP_CONV, &d);
  }
  kda_conv_desc desc(int64_t tokens, int64_t sequences) const {
    kda_conv_desc d;
    kda_conv_desc_init(&d);
    d.backend = backend();
    d.mode = KDA_CONV_PREFILL;
    d.width = kWidth;
    d.parts = 1;
    d.channels[0] = kChannels;
    d.io_dtype = KDA_BF16;
    d.layout = KDA_CONV_SD;
    d.max_tokens = tokens;
    d.max_sequences = sequences;
    d.initial_state = KDA_INITIAL_ALL;
    return d;
  }
  // Raw rows of all requests, one behind another; row 0 of request r is begins[r].
  static Tensor raw_rows(int64_t count) {
    Tensor x(KDA_BF16, {count, kChannels});
    for (int64_t t = 0; t < count; ++t) fill(select(x, 0, t), static_cast<double>(t + 1));
    return x;
  }

  // Runs the pieces of one rank, each from its halo: rows before its first one in its own request, zeros before that.
  // Leaves the windows [pieces, W-1, channels] in `windows`.
  Tensor run_rank(const Tensor& x, const std::vector<int64_t>& begins, const std::vector<Piece>& pieces,
                  Tensor& windows) {
    std::vector<int64_t> begin, length;
    windows = Tensor::full(KDA_BF16, {static_cast<int64_t>(pieces.size()), kWidth - 1, kChannels}, 0);
    for (size_t n = 0; n < pieces.size(); ++n) {
      const Piece& p = pieces[n];
      const int64_t row = begins[static_cast<size_t>(p.request)] + p.first;
      begin.push_back(row);
      length.push_back(p.length);
      for (int64_t back = 1; back <= std::min(p.first, kWidth - 1); ++back) {
        assign(select(select(windows, 0, static_cast<int64_t>(n)), 0, kWidth - 1 - back),
               values(select(x, 0, row - back)));
      }
    }
    Tensor out(KDA_BF16, {x.shape()[0], kChannels});
    out.fill(0);
    const Tensor weight = Tensor::of(KDA_FP32, {kChannels, kWidth}, uniform_vector(1, kChannels * kWidth));
    const Tensor begin_rows = Tensor::ints(begin), lengths = Tensor::ints(length);
    auto args = sized<kda_conv_args>();
    args.x[0] = x;
    args.weight[0] = weight;
    args.state[0] = windows;
    args.out[0] = out;
    args.sequences.begin = begin_rows;
    args.sequences.length = lengths;
    Plan plan = make_plan(desc(x.shape()[0], static_cast<int64_t>(pieces.size())));
    EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
    return out;
  }

  // The ranks give the rows of the unsplit run bit for bit, and the last rank of every request its window.
  void expect_unsplit(const std::vector<int64_t>& lengths, const std::vector<std::vector<Piece>>& ranks) {
    std::vector<int64_t> begins = {0};
    for (int64_t n : lengths) begins.push_back(begins.back() + n);
    const Tensor x = raw_rows(begins.back());
    std::vector<Piece> all;
    for (size_t r = 0; r < lengths.size(); ++r) all.push_back({static_cast<int64_t>(r), 0, lengths[r]});
    Tensor whole, windows;
    const Tensor wanted = run_rank(x, begins, all, whole);
    for (const std::vector<Piece>& pieces : ranks) {
      const Tensor out = run_rank(x, begins, pieces, windows);
      for (size_t n = 0; n < pieces.size(); ++n) {
        const Piece& p = pieces[n];
        const int64_t row = begins[static_cast<size_t>(p.request)] + p.first;
        EXPECT_EQ(first_difference(narrow(out, 0, row, p.length), narrow(wanted, 0, row, p.length)), "");
        if (p.first + p.length != lengths[static_cast<size_t>(p.request)]) continue;
        EXPECT_EQ(first_difference(select(windows, 0, static_cast<int64_t>(n)), select(whole, 0, p.request)), "");
      }
    }
    for (size_t r = 0; r < lengths.size(); ++r) {  // the last rows of the request, zeros before its first one
      for (int64_t back = 1; back < kWidth; ++back) {
        const double row = lengths[r] >= back ? static_cast<double>(begins[r + 1] - back + 1) : 0;
        EXPECT_EQ(whole.get({static_cast<int64_t>(r), kWidth - 1 - back, 7}), row);
      }
    }
  }
};
KDA_FOR_BACKENDS(ShardsTest);

TEST_P(ShardsTest, F64_S09_HistoryReachesOverShorterShards) {
  // One prompt of 6 tokens over 4 ranks; the third rank's history comes from two of them. Its window ends as [4, 5,
  // 6].
  expect_unsplit({6}, {{{0, 0, 2}}, {{0, 2, 2}}, {{0, 4, 1}}, {{0, 5, 1}}});
  // Empty shards in between.
  expect_unsplit({6}, {{{0, 0, 2}}, {{0, 2, 0}}, {{0, 2, 4}}});
}

TEST_P(ShardsTest, F64_S09_BordersBetweenRequestsResetIt) {
  expect_unsplit({1, 9}, {{{0, 0, 1}, {1, 0, 4}}, {{1, 4, 5}}});
  expect_unsplit({1, 9}, {{{0, 0, 1}, {1, 0, 1}}, {{1, 1, 8}}});
}

}  // namespace kda::conformance::test
