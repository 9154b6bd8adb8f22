// Convolution and its windows: F21, F36, F61, W-1..W-5, K-2, L-9.
#include "conv_fixture.h"

namespace kda::conformance::test {

KDA_FOR_BACKENDS(ConvTest);

TEST_P(ConvTest, F21_HistoryOfShortPrompts) {
  const std::vector<double> w = {0.25, 0.5, 1, 2};
  const std::vector<std::vector<double>> after_with = {{1, 2, 3}, {2, 3, 4}, {3, 4, 5}, {4, 5, 6}, {5, 6, 7}};
  const std::vector<std::vector<double>> after_without = {{0, 0, 0}, {0, 0, 4}, {0, 4, 5}, {4, 5, 6}, {5, 6, 7}};
  const double sums_with[] = {12.25, 16, 19.75, 23.5}, sums_without[] = {8, 14, 19, 23.5};
  for (const kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) {
    for (const kda_dtype pool : {KDA_BF16, KDA_FP32}) {
      for (const bool history : {true, false}) {
        for (int64_t n = 0; n <= 4; ++n) {
          SCOPED_TRACE(testing::Message()
                       << "layout " << layout << " pool " << pool << " history " << history << " n " << n);
          const int64_t C = 100;
          ConvCall prompt(KDA_CONV_PREFILL, {C}, backend());
          prompt.desc.layout = layout;
          prompt.make_pool(3, 3, pool);
          for (int64_t c = 0; c < C; ++c) prompt.set_window(1, c, {1, 2, 3});
          prompt.weight[0] = taps(w, C);
          std::vector<double> tokens = {4, 5, 6, 7};
          tokens.resize(static_cast<size_t>(n));
          prompt.x[0] = inputs(tokens, C);
          prompt.lengths = {n};
          prompt.slots = Tensor::ints({1});
          prompt.desc.initial_state = KDA_INITIAL_FLAGS;
          prompt.flags = Tensor::flags({history});
          prompt.make_outputs();
          const Snapshot before(prompt.state[0]);
          ASSERT_EQ(prompt.run(), KDA_OK) << prompt.message;
          EXPECT_EQ(before.changes_outside(prompt.state[0], {1}), "");
          EXPECT_EQ(prompt.out[0].guard_report(), "");
          expect_window(prompt, 1, (history ? after_with : after_without)[static_cast<size_t>(n)]);
          const double* sums = history ? sums_with : sums_without;
          for (int64_t t = 0; t < n; ++t) {
            EXPECT_EQ(prompt.out[0].get({t, C - 1}), round_to(KDA_BF16, silu(sums[t])));
          }
          // Then the rest, token by token.
          ConvCall step(KDA_CONV_COLUMNS, {C}, backend());
          step.desc.layout = layout;
          step.desc.state_dtype = pool;
          step.state[0] = prompt.state[0];
          step.weight[0] = prompt.weight[0];
          step.slots = prompt.slots;
          step.lengths = {1};
          for (int64_t t = n; t < 4; ++t) {
            step.x[0] = inputs({static_cast<double>(4 + t)}, C);
            step.make_outputs();
            ASSERT_EQ(step.run(), KDA_OK) << step.message;
            EXPECT_EQ(step.out[0].get({0, 7}), round_to(KDA_BF16, silu(sums[t])));
          }
          if (n < 4) expect_window(step, 1, {5, 6, 7});
        }
      }
    }
  }
}

TEST_P(ConvTest, F21_SiluValues) {
  ConvCall call(KDA_CONV_PREFILL, {2}, backend());
  call.weight[0] = taps({0.25, 0.5, 1, 2}, 2);
  call.lengths = {4};
  for (const kda_dtype io : {KDA_FP32, KDA_BF16}) {
    call.desc.io_dtype = call.desc.state_dtype = io;
    call.x[0] = inputs({-1, 0.5, -0.25, 2}, 2, io);
    call.make_outputs();
    ASSERT_EQ(call.run(), KDA_OK) << call.message;
    const double exact[] = {-0.2384058, 0, -0.1887703, 3.6638349}, bf16[] = {-0.23828125, 0, -0.18847656, 3.65625};
    for (int64_t t = 0; t < 4; ++t) {
      // bf16: the numbers are printed with eight decimals.
      EXPECT_NEAR(call.out[0].get({t, 1}), io == KDA_BF16 ? bf16[t] : exact[t], io == KDA_BF16 ? 5e-9 : 3e-7);
    }
  }
}

TEST_P(ConvTest, F36_OneOrThreeTensorsBothOrders) {
  const int64_t P = 1536;
  for (const kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) {
    ConvCall merged(KDA_CONV_PREFILL, {3 * P}, backend()), apart(KDA_CONV_PREFILL, {P, P, P}, backend());
    const Tensor w = Tensor::of(KDA_FP32, {3 * P, 4}, uniform_vector(9, 3 * P * 4));
    merged.weight[0] = Tensor::of(KDA_FP32, {3 * P, 1, 4}, w.values());  // packed [3P, 1, 4]
    for (ConvCall* c : {&merged, &apart}) {
      c->desc.layout = layout;
      c->make_pool(4, 3, KDA_BF16);
      c->lengths = {5};
      c->slots = Tensor::ints({2});
    }
    merged.x[0] = inputs({1, 2, 3, 4, 5}, 3 * P);
    for (int i = 0; i < 3; ++i) {
      apart.x[i] = inputs({1, 2, 3, 4, 5}, P);
      apart.weight[i] = Tensor::of(KDA_FP32, i == 1 ? Shape{P, 1, 4} : Shape{P, 4}, values(narrow(w, 0, i * P, P)));
    }
    merged.make_outputs();
    apart.make_outputs();
    ASSERT_EQ(merged.run(), KDA_OK) << merged.message;
    ASSERT_EQ(apart.run(), KDA_OK) << apart.message;
    expect_window(merged, 2, {3, 4, 5});
    expect_window(apart, 2, {3, 4, 5});
    for (int i = 0; i < 3; ++i) EXPECT_EQ(first_difference(narrow(merged.out[0], 1, i * P, P), apart.out[i]), "");
    // Pools of different slot counts are refused.
    apart.state[2] = canary_pool(KDA_BF16, layout == KDA_CONV_SD ? Shape{3, 3, P} : Shape{3, P, 3});
    EXPECT_EQ(apart.run(), KDA_INVALID_ARGUMENT);
  }
}

TEST_P(ConvTest, F61_K02_WindowAtTheBoundary) {
  for (const kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) {
    const int64_t C = 70;
    std::vector<double> tokens;
    for (int t = 1; t <= 70; ++t) tokens.push_back(t);
    ConvCall call(KDA_CONV_PREFILL, {C}, backend());
    call.desc.layout = layout;
    call.desc.max_checkpoints = 3;
    call.make_pool(5, 3, KDA_FP32);
    call.x[0] = inputs(tokens, C);
    call.weight[0] = taps({0.25, 0.5, 1, 2}, C);
    call.lengths = {70};
    call.slots = Tensor::ints({0});
    call.checkpoint_offsets = Tensor::of(KDA_INT64, {1, 3}, {64, 2, 71});
    call.checkpoint_slots = Tensor::of(KDA_INT32, {1, 3}, {3, 4, 1});
    call.make_outputs();
    const Snapshot before(call.state[0]);
    ASSERT_EQ(call.run(), KDA_OK) << call.message;
    EXPECT_EQ(before.changes_outside(call.state[0], {0, 3, 4}), "");
    expect_window(call, 3, {62, 63, 64});
    expect_window(call, 4, {0, 1, 2});  // offset < W-1: reaches into the (fresh) context
    expect_window(call, 0, {68, 69, 70});
    // Restore (slot 3) and 4 more tokens.
    ConvCall more(KDA_CONV_PREFILL, {C}, backend());
    more.desc.layout = layout;
    more.desc.state_dtype = KDA_FP32;
    more.desc.initial_state = KDA_INITIAL_ALL;
    more.state[0] = call.state[0];
    more.weight[0] = call.weight[0];
    more.x[0] = inputs({65, 66, 67, 68}, C);
    more.lengths = {4};
    more.slots = Tensor::ints({3});
    more.make_outputs();
    ASSERT_EQ(more.run(), KDA_OK) << more.message;
    expect_window(more, 3, {66, 67, 68});
    EXPECT_EQ(first_difference(more.out[0], narrow(call.out[0], 0, 64, 4)), "");
  }
}

// W-3 over random verify steps: the window always shows the last accepted inputs.
TEST_P(ConvTest, W03_W05_OffsetWindowsOverRandomSteps) {
  for (const int64_t C : {66, 64}) {  // one element behind groups of four; whole groups
    for (const int32_t W : {2, 3, 4, 8}) {
      for (int64_t S : {0, 1, 3, 5}) {
        for (const kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) {
          const int64_t L = W - 1 + S;
          std::vector<double> weights;
          for (int32_t j = 0; j < W; ++j) weights.push_back(uniform(9, static_cast<uint64_t>(j)));
          ConvCall step(KDA_CONV_COLUMNS, {C}, backend());
          step.desc.width = W;
          step.desc.layout = layout;
          step.desc.verify_width = static_cast<int32_t>(1 + S);
          step.make_pool(3, L, KDA_BF16);
          step.slots = Tensor::ints({1});
          step.weight[0] = taps(weights, C);
          std::vector<double> text(static_cast<size_t>(W - 1), 0);  // accepted inputs so far
          for (int64_t c = 0; c < C; ++c) step.set_window(1, c, text);
          int64_t accepted = 1;
          double next = 1;
          for (int round = 0; round < 25; ++round) {
            const uint64_t r = splitmix64(static_cast<uint64_t>(round + 100 * S + 1000 * W));
            const int64_t length = 1 + static_cast<int64_t>(r % static_cast<uint64_t>(1 + S));
            std::vector<double> tokens, stream = text;
            for (int64_t t = 0; t < length; ++t) tokens.push_back(next++);
            next = std::fmod(next, 200);
            stream.insert(stream.end(), tokens.begin(), tokens.end());
            step.x[0] = inputs(tokens, C);
            step.lengths = {length};
            step.accepted = Tensor::ints({accepted});
            step.make_outputs();
            const Snapshot before(step.state[0]);
            ASSERT_EQ(step.run(), KDA_OK) << step.message;
            ASSERT_EQ(before.changes_outside(step.state[0], {1}), "");
            for (int64_t t = 0; t < length; ++t) {
              double sum = 0;
              for (int32_t j = 0; j < W; ++j) {
                sum += static_cast<double>(static_cast<float>(weights[static_cast<size_t>(j)])) *
                       stream[stream.size() - static_cast<size_t>(length - t) - static_cast<size_t>(W - 1 - j)];
              }
              // One bf16 rounding, and fp32 sums that may fall on the other side of a tie.
              ASSERT_NEAR(step.out[0].get({t, C - 1}), silu(sum), std::fabs(silu(sum)) * 0x1p-8 + 1e-5)
                  << "W " << W << " S " << S << " round " << round;
            }
            accepted = 1 + static_cast<int64_t>((r >> 20) % static_cast<uint64_t>(length));
            text = stream;
            text.resize(stream.size() - static_cast<size_t>(length - accepted));
            // The next step will read new[a-1 .. a+W-3]: the last W-1 accepted inputs.
            for (int32_t i = 0; i < W - 1; ++i) {
              ASSERT_EQ(step.window(1, 5, accepted - 1 + i), text[text.size() - static_cast<size_t>(W - 1 - i)]);
            }
          }
        }
      }
    }
  }
}

// W-4: verify leaves the committed columns alone; commit moves by c, for every c, also folded into the next verify.
TEST_P(ConvTest, W04_RecordedInputs) {
  const int64_t S = 3, L = 4 + S;
  for (const int64_t C : {33, 32}) {
    for (const kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) {
      for (int64_t c = 0; c <= 1 + S; ++c) {
        ConvCall verify(KDA_CONV_RECORDS, {C}, backend());
        verify.desc.layout = layout;
        verify.desc.verify_width = 1 + S;
        verify.make_pool(3, L, KDA_BF16);
        for (int64_t ch = 0; ch < C; ++ch) verify.set_window(2, ch, {1, 2, 3});
        verify.weight[0] = taps({0.25, 0.5, 1, 2}, C);
        verify.x[0] = inputs({4, 5, 6, 7}, C);
        verify.lengths = {4};
        verify.slots = Tensor::ints({2});
        verify.make_outputs();
        const Snapshot before(verify.state[0]);
        ASSERT_EQ(verify.run(), KDA_OK) << verify.message;
        EXPECT_EQ(before.changes_outside(verify.state[0], {2}), "");
        expect_window(verify, 2, {1, 2, 3, 4, 5, 6, 7});
        const double sums[] = {12.25, 16, 19.75, 23.5};
        for (int64_t t = 0; t < 4; ++t) EXPECT_EQ(verify.out[0].get({t, 0}), round_to(KDA_BF16, silu(sums[t])));

        ConvCall fold = verify;
        fold.desc.fold = 1;
        fold.x[0] = inputs({20}, C);
        fold.lengths = {1};
        fold.accepted = Tensor::ints({c});
        fold.record_count = Tensor::ints({0, 0, 4});
        fold.make_outputs();
        ASSERT_EQ(fold.run(), KDA_OK) << fold.message;
        const double first = static_cast<double>(c + 1);
        expect_window(fold, 2, {first, first + 1, first + 2, 20});
        EXPECT_EQ(fold.out[0].get({0, 3}),
                  round_to(KDA_BF16, silu(0.25 * first + 0.5 * (first + 1) + first + 2 + 40)));
        EXPECT_EQ(fold.record_count.values(), (std::vector<double>{0, 0, 4}));  // read only

        // Out of range: the row is inactive and everything stays.
        for (const int64_t bad : {int64_t{-1}, int64_t{5}}) {
          ConvCall wrong = fold;
          wrong.state[0] = verify.state[0];
          wrong.accepted = Tensor::ints({bad});
          const Snapshot kept(wrong.state[0]);
          ASSERT_EQ(wrong.run(), KDA_OK) << wrong.message;
          EXPECT_EQ(kept.changes_outside(wrong.state[0]), "");
          EXPECT_EQ(wrong.out[0].get({0, 3}), 0);
        }
      }
    }
  }
}

TEST_P(ConvTest, P05_P11_InactiveAndEmptyRows) {
  const int64_t C = 40;
  ConvCall call(KDA_CONV_PREFILL, {C}, backend());
  call.make_pool(6, 3, KDA_BF16);
  call.weight[0] = taps({0.25, 0.5, 1, 2}, C);
  call.x[0] = inputs({4, 5, 6, 7}, C);
  call.lengths = {1, 0, 0, 1, 2};
  call.slots = Tensor::ints({-1, 2, 3, 5, 6});  // dead, empty with state, empty fresh, null, too large
  call.desc.null_slot = 5;
  call.desc.initial_state = KDA_INITIAL_FLAGS;
  call.flags = Tensor::flags({1, 1, 0, 1, 1});
  call.make_outputs();
  const Snapshot before(call.state[0]);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.state[0], {3}), "");
  expect_window(call, 3, {0, 0, 0});
  for (const double y : call.out[0].values()) EXPECT_EQ(y, 0);
}

TEST_P(ConvTest, F51_P14_RowsBehindTheActiveCountAndTheLastOffset) {
  const int64_t C = 40;
  ConvCall call(KDA_CONV_COLUMNS, {C}, backend());
  call.make_pool(3, 3, KDA_BF16);
  for (int64_t c = 0; c < C; ++c) call.set_window(2, c, {1, 2, 3});
  call.weight[0] = taps({0.25, 0.5, 1, 2}, C);
  call.x[0] = inputs({4, NAN, NAN}, C);
  call.lengths = {1, 1};  // row 2 belongs to no sequence
  call.slots = Tensor::ints({2, 2});
  call.active = Tensor::ints({1});
  call.make_outputs();
  call.out[0].fill(7);
  const Snapshot before(call.state[0]);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.state[0], {2}), "");
  expect_window(call, 2, {2, 3, 4});
  EXPECT_EQ(call.out[0].get({0, 3}), round_to(KDA_BF16, silu(12.25)));
  for (const double y : rows(call.out[0], 1, 2)) EXPECT_EQ(y, 7);
}

TEST_P(ConvTest, F22_NaNWindowsBitExactAndConfined) {
  const int64_t C = 40;
  ConvCall call(KDA_CONV_PREFILL, {C}, backend());
  call.make_pool(3, 3, KDA_BF16);
  call.weight[0] = taps({0.25, 0.5, 1, 2}, C);
  call.x[0] = inputs({4, 5, 6, 7}, C);
  call.lengths = {2, 2};
  call.slots = Tensor::ints({0, 1});
  call.desc.initial_state = KDA_INITIAL_FLAGS;
  call.flags = Tensor::flags({1, 0});
  call.make_outputs();
  ConvCall dirty = call;
  for (int64_t c = 0; c < C; ++c) {
    for (const int64_t slot : {0, 1}) dirty.set_window(slot, c, {1, 2, NAN});
  }
  for (int64_t c = 0; c < C; ++c) call.set_window(0, c, {1, 2, 3});
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  ASSERT_EQ(dirty.run(), KDA_OK) << dirty.message;
  EXPECT_TRUE(std::isnan(dirty.out[0].get({1, 3})));
  EXPECT_TRUE(std::isnan(dirty.window(0, 3, 0)));
  EXPECT_EQ(first_difference(narrow(call.out[0], 0, 2, 2), narrow(dirty.out[0], 0, 2, 2)), "");
  EXPECT_EQ(first_difference(select(call.state[0], 0, 1), select(dirty.state[0], 0, 1)), "");
}

TEST_P(ConvTest, L11_BiasAndNoActivation) {
  ConvCall call(KDA_CONV_PREFILL, {3}, backend());
  call.desc.io_dtype = call.desc.state_dtype = KDA_FP32;
  call.weight[0] = taps({0.25, 0.5, 1, 2}, 3);
  call.bias[0] = Tensor::of(KDA_FP32, {3}, {0, 1, -20});
  call.x[0] = inputs({4, 5}, 3, KDA_FP32);
  call.lengths = {2};
  call.make_outputs();
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_NEAR(call.out[0].get({1, 1}), silu(15), 1e-5);
  EXPECT_NEAR(call.out[0].get({1, 2}), silu(-6), 1e-7);
  call.desc.no_activation = 1;
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(call.out[0].get({1, 2}), -6);
}

TEST_P(ConvTest, N09_RandomInputsAgainstFp64) {
  for (const kda_dtype io : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    const int64_t T = 37, C = 200;
    ConvCall call(KDA_CONV_PREFILL, {C}, backend());
    call.desc.io_dtype = call.desc.state_dtype = io;
    call.x[0] = Tensor::of(io, {T, C}, uniform_vector(1, T * C)).copy(io, {C + 9, 1}, 2);
    call.weight[0] = Tensor::of(KDA_FP32, {C, 4}, uniform_vector(2, C * 4));
    call.lengths = {T};
    call.out[0] = Tensor(io, {T, C}, {C + 5, 1}, 1);
    ASSERT_EQ(call.run(), KDA_OK) << call.message;
    EXPECT_EQ(call.out[0].guard_report(), "");
    const std::vector<double> x = call.x[0].values(), w = call.weight[0].values();
    std::vector<double> wanted(static_cast<size_t>(T * C));
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t c = 0; c < C; ++c) {
        double sum = 0;
        for (int64_t j = 0; j < 4; ++j) {
          if (t - 3 + j >= 0) sum += w[static_cast<size_t>(c * 4 + j)] * x[static_cast<size_t>((t - 3 + j) * C + c)];
        }
        wanted[static_cast<size_t>(t * C + c)] = silu(sum);
      }
    }
    EXPECT_WITHIN(compare_flat(call.out[0].values(), wanted), io == KDA_FP32 ? 1e-6 : limits(io).out);
  }
}

TEST_P(ConvTest, V06_RowsThatDecodeFindsInactive) {
  const int64_t C = 17;
  ConvCall call(KDA_CONV_COLUMNS, {C}, backend());
  call.desc.verify_width = 3;
  call.make_pool(9, 5, KDA_BF16);
  call.weight[0] = taps({0.25, 0.5, 1, 2}, C);
  call.x[0] = inputs({4, 5, 6, 7, 8, 9, 10}, C);
  call.lengths = {1, 1, 4, 1};
  call.slots = Tensor::of(KDA_INT32, {4, 3}, {0, 1, 2, 3, -1, 4, 5, 6, 7, 8, -1, -1});
  call.accepted = Tensor::ints({4, 2, 1, 1});  // out of range; dead start column; too many tokens; fine
  call.make_outputs();
  const Snapshot before(call.state[0]);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.state[0], {8}), "");
  for (const double y : values(narrow(call.out[0], 0, 0, 6))) EXPECT_EQ(y, 0);
  EXPECT_NE(call.out[0].get({6, 0}), 0);
}

}  // namespace kda::conformance::test
