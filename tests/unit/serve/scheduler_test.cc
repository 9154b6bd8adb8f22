// The scheduler's policy: who runs, in what order, cut where.
#include "serve/scheduler.h"

#include <gtest/gtest.h>

#include <memory>

namespace kda::serve {
namespace {

class Slots : public Admission {
 public:
  explicit Slots(int free) : free_(free) {}
  bool admit(Request& r) override {
    if (free_ == 0) return false;
    --free_;
    r.prefilled = std::max(r.prefilled, cached_);
    if (r.phase == Phase::kWaiting) r.phase = Phase::kPrefilling;
    return true;
  }
  int free_;
  int64_t cached_ = 0;
};

struct Fixture {
  explicit Fixture(SchedulerLimits limits, int slots = 100) : scheduler(limits), admission(slots) {}

  Request* add(int64_t input, int64_t output, Phase phase = Phase::kWaiting) {
    requests.push_back(std::make_unique<Request>());
    Request* r = requests.back().get();
    r->trace.index = static_cast<int64_t>(requests.size()) - 1;
    r->trace.input_length = input;
    r->trace.output_length = output;
    r->phase = phase;
    if (phase == Phase::kDecoding) r->prefilled = input;
    scheduler.enqueue(r);
    return r;
  }
  const Step& plan() {
    scheduler.plan(step, admission);
    return step;
  }
  // Moves every planned request on as the engine would, all drafts kept.
  void advance() {
    for (StepRow& row : step.recurrent) {
      row.request->decoded += row.length;
      if (row.request->decoded == row.request->decode_length()) scheduler.remove(row.request);
    }
    for (StepRow& row : step.chunk) {
      row.request->prefilled += row.length;
      if (row.request->prompt_left() == 0) {
        row.request->phase = Phase::kDecoding;
        if (row.request->decode_length() == 0) scheduler.remove(row.request);
      }
    }
  }

  std::vector<std::unique_ptr<Request>> requests;
  Scheduler scheduler;
  Slots admission;
  Step step;
};

TEST(Scheduler, H10_PromptsAreCutAtMultiplesOf64) {
  Fixture f({.max_batch_tokens = 200, .max_requests = 8});
  f.add(1000, 1);
  int64_t at = 0;
  std::vector<int32_t> lengths;
  while (!f.scheduler.idle()) {
    ASSERT_EQ(f.plan().chunk.size(), 1u);
    lengths.push_back(f.step.chunk[0].length);
    EXPECT_EQ(at % 64, 0);
    at += f.step.chunk[0].length;
    f.advance();
  }
  EXPECT_EQ(lengths, (std::vector<int32_t>{192, 192, 192, 192, 192, 40}));
}

TEST(Scheduler, F32_DecodesFirstThenPrompts) {
  Fixture f({.max_batch_tokens = 8192, .max_requests = 1000}, 1000);
  for (int i = 0; i < 953; ++i) f.add(10, 100, Phase::kDecoding);
  f.add(7239, 10);
  const Step& s = f.plan();
  ASSERT_EQ(s.recurrent.size(), 953u);
  for (size_t i = 0; i < s.recurrent.size(); ++i) {
    EXPECT_EQ(s.recurrent[i].request->trace.index, static_cast<int64_t>(i));
    EXPECT_EQ(s.recurrent[i].begin, static_cast<int64_t>(i));
    EXPECT_EQ(s.recurrent[i].length, 1);
  }
  ASSERT_EQ(s.chunk.size(), 1u);
  EXPECT_EQ(s.chunk[0].begin, 953);
  EXPECT_EQ(s.chunk[0].length, 7239);  // 8192 - 953: fits exactly
  EXPECT_EQ(s.tokens, 8192);
  EXPECT_EQ(s.recurrent_tokens, 953);
}

TEST(FieldCases, F50_OneTokenPromptsAreChunkRows) {
  Fixture f({.max_batch_tokens = 64, .max_requests = 8});
  f.add(1, 5);
  f.add(9, 5, Phase::kDecoding);
  const Step& s = f.plan();
  ASSERT_EQ(s.chunk.size(), 1u);
  EXPECT_EQ(s.chunk[0].request->trace.index, 0);
  ASSERT_EQ(s.recurrent.size(), 1u);
  EXPECT_EQ(s.recurrent[0].begin, 0);
  EXPECT_EQ(s.chunk[0].begin, 1);
}

TEST(FieldCases, F50_TheLastTokenOfAPromptIsAChunkRow) {
  Fixture f({.max_batch_tokens = 64, .max_requests = 8});
  Request* r = f.add(65, 5);
  f.plan();
  EXPECT_EQ(f.step.chunk[0].length, 64);
  f.advance();
  f.plan();
  ASSERT_EQ(f.step.chunk.size(), 1u);
  EXPECT_EQ(f.step.chunk[0].length, 1);
  EXPECT_EQ(r->phase, Phase::kPrefilling);
}

TEST(Scheduler, DraftsNeverExceedTheTokensLeft) {
  Fixture f({.max_batch_tokens = 64, .max_requests = 8, .spec = 3});
  Request* r = f.add(4, 8, Phase::kDecoding);  // 7 tokens are fed back
  EXPECT_EQ(f.plan().recurrent[0].length, 4);
  r->decoded = 4;
  EXPECT_EQ(f.plan().recurrent[0].length, 3);
  r->decoded = 6;
  EXPECT_EQ(f.plan().recurrent[0].length, 1);
}

TEST(Scheduler, ASmallBudgetGoesRound) {
  Fixture f({.max_batch_tokens = 64, .max_requests = 100, .spec = 3}, 100);
  for (int i = 0; i < 64; ++i) f.add(1, 2, Phase::kDecoding);
  EXPECT_EQ(f.plan().recurrent.size(), 64u);  // one token each: everybody is running now
  for (auto& r : f.requests) r->trace.output_length = 1000;
  std::vector<int> ran(64);
  for (int step = 0; step < 40; ++step) {  // with drafts 16 fit into a step
    f.plan();
    EXPECT_EQ(f.step.tokens, 64);
    for (const StepRow& row : f.step.recurrent) ++ran[static_cast<size_t>(row.request->trace.index)];
  }
  for (int i = 0; i < 64; ++i) EXPECT_EQ(ran[static_cast<size_t>(i)], 10) << i;
}

TEST(Scheduler, RequestAndSlotLimitsHold) {
  Fixture f({.max_batch_tokens = 640, .max_requests = 3}, 100);
  for (int i = 0; i < 5; ++i) f.add(10, 4);
  EXPECT_EQ(f.plan().chunk.size(), 3u);
  Fixture g({.max_batch_tokens = 640, .max_requests = 30}, 2);
  for (int i = 0; i < 5; ++i) g.add(10, 4);
  EXPECT_EQ(g.plan().chunk.size(), 2u);
  EXPECT_EQ(g.scheduler.waiting(), 3);
}

TEST(Scheduler, SwappedRequestsReturnBeforeNewOnes) {
  Fixture f({.max_batch_tokens = 640, .max_requests = 1});
  f.add(10, 4);
  Request back;
  back.phase = Phase::kDecoding;
  back.swapped = true;
  back.trace.input_length = 10;
  back.trace.output_length = 9;
  back.prefilled = 10;
  f.scheduler.requeue_swapped(&back);
  const Step& s = f.plan();
  ASSERT_EQ(s.recurrent.size(), 1u);
  EXPECT_EQ(s.recurrent[0].request, &back);
  EXPECT_TRUE(s.chunk.empty());
}

TEST(Scheduler, NobodyHoldsASlotWithoutRunning) {
  Fixture f({.max_batch_tokens = 100, .max_requests = 10}, 10);
  f.add(1000, 2);
  f.add(1000, 2);
  const Step& s = f.plan();  // 64 of the first; 36 left are too few for the second
  ASSERT_EQ(s.chunk.size(), 1u);
  EXPECT_EQ(s.chunk[0].length, 64);
  EXPECT_EQ(f.scheduler.running().size(), 1u);
}

TEST(Scheduler, CachedTokensAreNotPlanned) {
  Fixture f({.max_batch_tokens = 4096, .max_requests = 10});
  f.admission.cached_ = 512;
  f.add(1000, 2);
  EXPECT_EQ(f.plan().chunk[0].length, 488);
}

TEST(Scheduler, EverythingEnds) {
  for (int64_t budget : {64, 65, 100, 1000}) {
    Fixture f({.max_batch_tokens = budget, .max_requests = 7, .spec = 4}, 1000);
    int64_t wanted = 0, done = 0;
    for (int i = 0; i < 60; ++i) {
      Request* r = f.add(1 + (i * 37) % 300, i % 50);
      wanted += r->trace.input_length + r->decode_length();
    }
    for (int step = 0; !f.scheduler.idle(); ++step) {
      ASSERT_LT(step, 10000);
      const Step& s = f.plan();
      ASSERT_FALSE(s.empty());
      ASSERT_LE(s.tokens, budget);
      done += s.tokens;
      f.advance();
    }
    EXPECT_EQ(done, wanted);
  }
}

}  // namespace
}  // namespace kda::serve
