// The life cycle of copy sets (spec Y-5..Y-16, T-10..T-12, T-17), mostly against a stub device that fails on demand.
#include "core/state_copy_set.h"

#include <thread>

#include "state_copy_fixture.h"
#include "state_copy_stub.h"
#include "support/serving_guard.h"

namespace kda::conformance::test {
namespace {

std::atomic<int> scans{0};
std::string scanned_value = "1";
void scan_one_variable(kda::Snapshot& snapshot) {
  ++scans;
  snapshot["environment KDA_TEST"] = scanned_value;
}

class Set : public ::testing::Test {
 protected:
  Set() : world(KDA_CPU), set(world.context, options()) {
    scans = 0;
    scanned_value = "1";
  }
  static CopySet::Options options() {
    CopySet::Options o;
    o.scan = &scan_one_variable;
    return o;
  }
  kda_tensor pool(int64_t rows = 4, int shift = 0) { return make_tensor(memory_ + shift, KDA_FP32, {rows, 1, 2, 8}); }
  CopyBinding bind(const std::string& layer, const kda_tensor& t) { return {layer, nullptr, t, KDA_DTYPE_NONE}; }
  std::vector<CopyBinding> layers(int count, int first = 0) {
    std::vector<CopyBinding> out;
    for (int i = first; i < first + count; ++i) out.push_back(bind("model.layers." + std::to_string(i), pool()));
    return out;
  }
  Status gather(const CopySet& s, const char* layer) {
    int32_t row = 1;
    float out[16];
    const auto plan = s.serving(layer);
    if (!plan.ok()) return plan.status();
    const auto args = copy_args(pool(), make_tensor(&row, KDA_INT32, {1}), make_tensor(out, KDA_FP32, {1, 1, 2, 8}));
    return run_state_copy(plan.value(), CopyDirection::gather, &args, nullptr);
  }
  void expect_failed(CopySet& s, const std::string& cause) {
    EXPECT_EQ(s.state(), KDA_COPY_SET_FAILED);
    EXPECT_EQ(s.ready(), 0);
    EXPECT_NE(std::string(s.last_error()).find(cause), std::string::npos) << s.last_error();
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(gather(s, ("model.layers." + std::to_string(i)).c_str()).code(), KDA_FAILED_PRECONDITION);
    }
    EXPECT_EQ(world.device.live_allocations, 0);
  }

  alignas(64) char memory_[4096] = {};
  StubWorld world;
  CopySet set;
};

TEST_F(Set, Y06_MovesInOrder) {
  EXPECT_EQ(set.state(), KDA_COPY_SET_EMPTY);
  ASSERT_TRUE(set.prepare(layers(2), 4).ok());
  EXPECT_EQ(set.state(), KDA_COPY_SET_PREPARING);
  ASSERT_TRUE(set.prepare(layers(1, 2), 4).ok());
  EXPECT_EQ(set.state(), KDA_COPY_SET_PREPARING);
  ASSERT_TRUE(set.seal().ok());
  EXPECT_EQ(set.state(), KDA_COPY_SET_SEALED);
  EXPECT_EQ(set.ready(), 0);
  ASSERT_TRUE(set.publish().ok());
  EXPECT_EQ(set.state(), KDA_COPY_SET_PUBLISHED);
  EXPECT_EQ(set.ready(), 3);
  EXPECT_TRUE(gather(set, "model.layers.1").ok());
  ASSERT_TRUE(set.reset().ok());
  EXPECT_EQ(set.state(), KDA_COPY_SET_EMPTY);
  EXPECT_EQ(set.ready(), 0);
  ASSERT_TRUE(set.prepare(layers(3), 4).ok());
}

TEST_F(Set, Y06_EveryOtherMoveIsRefusedAndChangesNothing) {
  const auto refused = [&](const Status& s, kda_copy_set_state state) {
    EXPECT_EQ(s.code(), KDA_FAILED_PRECONDITION) << s.message();
    EXPECT_EQ(set.state(), state);
  };
  refused(set.seal(), KDA_COPY_SET_EMPTY);
  refused(set.publish(), KDA_COPY_SET_EMPTY);
  refused(set.reset(), KDA_COPY_SET_EMPTY);
  refused(gather(set, "model.layers.0"), KDA_COPY_SET_EMPTY);
  ASSERT_TRUE(set.prepare(layers(1), 4).ok());
  refused(set.publish(), KDA_COPY_SET_PREPARING);
  refused(set.reset(), KDA_COPY_SET_PREPARING);
  refused(set.prepare(layers(1), 4), KDA_COPY_SET_PREPARING);  // prepared already
  refused(gather(set, "model.layers.0"), KDA_COPY_SET_PREPARING);
  refused(set.plan("model.layers.0").status(), KDA_COPY_SET_PREPARING);
  ASSERT_TRUE(set.seal().ok());
  refused(set.prepare(layers(1, 5), 4), KDA_COPY_SET_SEALED);
  refused(set.seal(), KDA_COPY_SET_SEALED);
  refused(set.reset(), KDA_COPY_SET_SEALED);
  refused(gather(set, "model.layers.0"), KDA_COPY_SET_SEALED);
  ASSERT_TRUE(set.publish().ok());
  refused(set.prepare(layers(1, 5), 4), KDA_COPY_SET_PUBLISHED);
  refused(set.seal(), KDA_COPY_SET_PUBLISHED);
  refused(set.publish(), KDA_COPY_SET_PUBLISHED);
  ASSERT_TRUE(set.reset().ok());
  EXPECT_FALSE(set.prepare(layers(1), 0).ok());
  for (auto move : {&CopySet::seal, &CopySet::publish}) refused((set.*move)(), KDA_COPY_SET_FAILED);
  const Status s = set.prepare(layers(1), 4);
  refused(s, KDA_COPY_SET_FAILED);
  EXPECT_NE(s.message().find("first cause: max_selected"), std::string::npos) << s.message();
}

TEST_F(Set, Y06_AHolderMayUseAPlanFromSealedOn) {
  ASSERT_TRUE(set.prepare(layers(1), 4).ok());
  ASSERT_TRUE(set.seal().ok());
  const auto plan = set.plan("model.layers.0");
  ASSERT_TRUE(plan.ok());
  int32_t row = 1;
  float out[16];
  const auto args = copy_args(pool(), make_tensor(&row, KDA_INT32, {1}), make_tensor(out, KDA_FP32, {1, 1, 2, 8}));
  EXPECT_TRUE(run_state_copy(plan.value(), CopyDirection::gather, &args, nullptr).ok());
  // A publish that fails unreadies it again.
  world.device.verify_faults[world.device.verifies] = Status(KDA_DEVICE_ERROR, "lost");
  EXPECT_EQ(set.publish().code(), KDA_DEVICE_ERROR);
  EXPECT_EQ(run_state_copy(plan.value(), CopyDirection::gather, &args, nullptr).code(), KDA_FAILED_PRECONDITION);
}

TEST_F(Set, Y06_SealWantsEveryExpectedLayer) {
  CopySet::Options o = options();
  o.expected_layers = {"model.layers.0", "model.layers.1"};
  CopySet strict(world.context, o);
  ASSERT_TRUE(strict.prepare(layers(1), 4).ok());
  const Status s = strict.seal();
  EXPECT_EQ(s.code(), KDA_FAILED_PRECONDITION);
  EXPECT_NE(s.message().find("'model.layers.1'"), std::string::npos) << s.message();
  EXPECT_EQ(strict.state(), KDA_COPY_SET_PREPARING);
  ASSERT_TRUE(strict.prepare(layers(1, 1), 4).ok());
  EXPECT_TRUE(strict.seal().ok());
}

TEST_F(Set, T08_Y24_UnknownLayerIsNotFoundWithTheKnownNames) {
  ASSERT_TRUE(set.prepare(layers(2), 4).ok());
  ASSERT_TRUE(set.seal().ok());
  ASSERT_TRUE(set.publish().ok());
  const Status s = gather(set, "model.layers.7");
  EXPECT_EQ(s.code(), KDA_NOT_FOUND);
  EXPECT_NE(s.message().find("model.layers.0, model.layers.1; got \"model.layers.7\""), std::string::npos)
      << s.message();
}

TEST_F(Set, T11_Y07_FaultAtAnyLayerOfAnyStepReadiesNothing) {
  const char* names[] = {"model.layers.0", "model.layers.1", "model.layers.2"};
  for (int layer = 0; layer < 3; ++layer) {
    // prepare: this layer has a layout of its own, whose launch fails.
    {
      CopySet s(world.context, options());
      auto list = layers(3);
      list[static_cast<size_t>(layer)].pool.strides[2] = 17;  // not dense
      EXPECT_EQ(s.prepare(list, 4).code(), KDA_INVALID_ARGUMENT);
      expect_failed(s, std::string("layer '") + names[layer] + "': pool: wanted the inner three dimensions dense");
      ASSERT_TRUE(s.reset().ok());
      ASSERT_TRUE(s.prepare(layers(3), 4).ok());
      ASSERT_TRUE(s.seal().ok());
      ASSERT_TRUE(s.publish().ok());
      EXPECT_EQ(s.ready(), 3);
    }
    for (const bool at_publish : {false, true}) {
      CopySet s(world.context, options());
      ASSERT_TRUE(s.prepare(layers(3), 4).ok());
      ASSERT_TRUE(!at_publish || s.seal().ok());
      world.device.verify_faults[world.device.verifies + layer] = Status(KDA_DEVICE_ERROR, "sticky error");
      EXPECT_EQ((at_publish ? s.publish() : s.seal()).code(), KDA_DEVICE_ERROR);
      expect_failed(s, std::string("layer '") + names[layer] + "': sticky error");
      world.device.verify_faults.clear();
      ASSERT_TRUE(s.reset().ok());
      ASSERT_TRUE(s.prepare(layers(3), 4).ok());
      ASSERT_TRUE(s.seal().ok());
      ASSERT_TRUE(s.publish().ok());
      EXPECT_TRUE(gather(s, names[layer]).ok());
    }
  }
}

TEST_F(Set, T11_DeviceFaultsOfThePreparationFailTheSet) {
  world.device.late_fault = Status(KDA_DEVICE_ERROR, "late");
  EXPECT_EQ(set.prepare(layers(3), 4).code(), KDA_DEVICE_ERROR);
  expect_failed(set, "layer 'model.layers.0': late");
  world.device.late_fault = {};
  ASSERT_TRUE(set.reset().ok());
  ASSERT_TRUE(set.prepare(layers(2), 4).ok());
  auto third = layers(1, 2);
  third[0].pool.shape[0] = 3;  // a key of its own
  world.device.no_memory = true;
  EXPECT_EQ(set.prepare(third, 4).code(), KDA_OUT_OF_MEMORY);
  expect_failed(set, "layer 'model.layers.2'");
}

TEST_F(Set, T08_Y26_BindingErrorsNameTheLayer) {
  const struct {
    kda_status status;
    const char* text;
    void (*spoil)(CopyBinding&);
  } cases[] = {
      {KDA_FAILED_PRECONDITION, "wanted a bound pool", [](CopyBinding& b) { b.pool = {}; }},
      {KDA_FAILED_PRECONDITION, "wanted a tensor", [](CopyBinding& b) { b.pool.dtype = static_cast<kda_dtype>(99); }},
      {KDA_INVALID_ARGUMENT, "context's device", [](CopyBinding& b) { b.pool.device.type = KDA_CUDA; }},
      {KDA_INVALID_ARGUMENT, "kda_state_copy_backend", [](CopyBinding& b) { b.backend = "fast"; }},
      {KDA_UNSUPPORTED, "cast",
       [](CopyBinding& b) { b.pool.dtype = KDA_BF16, b.packed_dtype = KDA_FP32, b.backend = "bytes"; }},
  };
  for (const auto& c : cases) {
    CopySet s(world.context, options());
    auto list = layers(2);
    c.spoil(list[1]);
    const Status status = s.prepare(list, 4);
    EXPECT_EQ(status.code(), c.status) << status.message();
    EXPECT_NE(status.message().find("layer 'model.layers.1'"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(c.text), std::string::npos) << status.message();
    EXPECT_EQ(s.state(), KDA_COPY_SET_FAILED);
  }
  auto twice = layers(2);
  twice[1].layer = twice[0].layer;
  CopySet s(world.context, options());
  EXPECT_EQ(s.prepare(twice, 4).code(), KDA_INVALID_ARGUMENT);
  CopySet t(world.context, options());
  EXPECT_EQ(t.prepare({}, 4).code(), KDA_INVALID_ARGUMENT);
}

TEST_F(Set, T10_Y09_EqualKeysShareOneTable) {
  std::vector<CopyBinding> list;
  for (int i = 0; i < 69; ++i)
    list.push_back(bind("layer" + std::to_string(i), i % 3 == 0 ? pool(3) : pool(4, 16 * (i % 5))));
  ASSERT_TRUE(set.prepare(list, 4).ok());
  auto info = sized<kda_copy_set_info>();
  ASSERT_TRUE(set.info(&info).ok());
  EXPECT_EQ(info.layers, 69);
  EXPECT_EQ(info.tables, 2);
  EXPECT_EQ(info.variants, 8);
  EXPECT_EQ(world.device.loads, 2);
  EXPECT_EQ(world.device.launches, 8);
  // Another class mod 16, another stride, dtype, packed dtype or kind is another table.
  auto more = std::vector<CopyBinding>{bind("a", pool(4, 4)), bind("b", pool()), bind("c", pool()), bind("d", pool()),
                                       bind("e", pool())};
  more[1].pool.strides[0] = 20;
  more[2].pool.dtype = KDA_BF16;
  more[3].pool.dtype = KDA_BF16, more[3].packed_dtype = KDA_FP32;
  more[4].backend = "bytes";
  ASSERT_TRUE(set.prepare(more, 8).ok());
  ASSERT_TRUE(set.info(&info).ok());
  EXPECT_EQ(info.tables, 7);
  EXPECT_EQ(info.layers, 74);
  EXPECT_EQ(info.ready, 0);
}

TEST_F(Set, T12_ConfigurationChangesBeforeSealAreRefused) {
  ASSERT_TRUE(set.prepare(layers(1), 4).ok());
  scanned_value = "2";
  const Status s = set.seal();
  EXPECT_EQ(s.code(), KDA_FAILED_PRECONDITION);
  EXPECT_NE(s.message().find("environment KDA_TEST: wanted \"1\", got \"2\""), std::string::npos) << s.message();
  EXPECT_EQ(set.state(), KDA_COPY_SET_FAILED);
  // Between two prepares, and in a device entry.
  CopySet t(world.context, options());
  ASSERT_TRUE(t.prepare(layers(1), 4).ok());
  world.device.device_entries["device driver"] = "580.159";
  const Status u = t.prepare(layers(1, 1), 4);
  EXPECT_EQ(u.code(), KDA_FAILED_PRECONDITION);
  EXPECT_NE(u.message().find("device driver: wanted unset, got \"580.159\""), std::string::npos) << u.message();
}

TEST_F(Set, T12_Y12_AfterPublishNothingIsScanned) {
  ASSERT_TRUE(set.prepare(layers(1), 4).ok());
  ASSERT_TRUE(set.seal().ok());
  ASSERT_TRUE(set.publish().ok());
  const int before = scans;
  scanned_value = "2";
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(gather(set, "model.layers.0").ok());
  EXPECT_EQ(scans, before);
}

TEST_F(Set, T11_Y07_AReaderSeesNoneOrAll) {
  for (int round = 0; round < 20; ++round) {
    CopySet s(world.context, options());
    ASSERT_TRUE(s.prepare(layers(60), 4).ok());
    ASSERT_TRUE(s.seal().ok());
    std::atomic<bool> stop{false}, started{false};
    std::atomic<int> odd{0};
    std::thread reader([&] {
      while (!stop) {
        const int64_t n = s.ready();
        if (n != 0 && n != 60) ++odd;
        // What one look-up finds, all do.
        if (n == 60 && !(s.serving("model.layers.0").ok() && s.serving("model.layers.59").ok())) ++odd;
        started = true;
      }
    });
    while (!started) std::this_thread::yield();
    EXPECT_TRUE(s.publish().ok());
    stop = true;
    reader.join();
    EXPECT_EQ(odd, 0);
  }
}

TEST_F(Set, Y15_ASecondThreadThatMovesTheSetIsRefused) {
  // The stub's fault hook is a place inside prepare: from there, another thread tries to move the same set.
  struct Reentrant : StubCopyBackend {
    using StubCopyBackend::StubCopyBackend;
    CopySet* target = nullptr;
    mutable std::vector<kda_status> seen;
    Status synchronize(const Context&) const override {
      std::thread([this] {
        seen.push_back(target->seal().code());
        seen.push_back(target->publish().code());
        seen.push_back(target->reset().code());
        seen.push_back(target->prepare({}, 4).code());
      }).join();
      return {};
    }
  };
  Reentrant device(KDA_CPU);
  Backends backends;
  backends.copies.push_back(&device);
  world.context.backends = &backends;
  CopySet s(world.context, options());
  device.target = &s;
  EXPECT_TRUE(s.prepare(layers(1), 4).ok());
  EXPECT_EQ(device.seen, std::vector<kda_status>(4, KDA_FAILED_PRECONDITION));
  EXPECT_EQ(s.state(), KDA_COPY_SET_PREPARING);
  EXPECT_TRUE(s.seal().ok());
}

TEST_F(Set, Y16_Y25_SealedContextAndObserversRefusePrepare) {
  world.context.sealed = true;
  EXPECT_EQ(set.prepare(layers(1), 4).code(), KDA_FAILED_PRECONDITION);
  EXPECT_EQ(set.state(), KDA_COPY_SET_FAILED);
  world.context.sealed = false;
  ASSERT_TRUE(set.reset().ok());
  world.context.observer = [](void*, const char*) {};
  EXPECT_EQ(set.prepare(layers(1), 4).code(), KDA_FAILED_PRECONDITION);
  world.context.observer = nullptr;
  ASSERT_TRUE(set.reset().ok());
  EXPECT_TRUE(set.prepare(layers(1), 4).ok());
}

}  // namespace
}  // namespace kda::conformance::test
