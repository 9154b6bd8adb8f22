// Chunk tables (spec M-14..M-20, M-30): bound, definition, every registered hook.
#include "core/chunk_tables.h"

#include <functional>
#include <random>

#include "conformance/covering.h"
#include "metadata_fixture.h"
#include "support/serving_guard.h"

namespace kda::conformance::test {
namespace {

int64_t bound(int64_t tokens, int64_t sequences, int64_t chunk) {
  int64_t rows = -1;
  EXPECT_EQ(kda_chunk_bound(tokens, sequences, chunk, &rows), KDA_OK);
  return rows;
}

TEST(ChunkBound, M16_AttainedForEverySmallCaseAndNeverExceeded) {
  for (int64_t chunk : {1, 2, 3, 4, 16}) {
    for (int64_t n = 0; n <= 4; ++n) {
      for (int64_t tokens = 0; tokens < 15; ++tokens) {
        if (n == 0 && tokens > 0) continue;  // tokens of no sequence give no chunk; the bound may only be larger
        int64_t most = 0;
        std::function<void(int64_t, int64_t, int64_t)> split = [&](int64_t left, int64_t sequences, int64_t count) {
          if (sequences == 0) {
            most = std::max(most, count);
            return;
          }
          for (int64_t length = 0; length <= left; ++length)
            split(left - length, sequences - 1, count + (length + chunk - 1) / chunk);
        };
        split(tokens, n, 0);
        EXPECT_EQ(bound(tokens, n, chunk), most) << "T " << tokens << " N " << n << " C " << chunk;
        EXPECT_LE(most, (tokens + chunk - 1) / chunk + n);
        EXPECT_LE(chunk * most, tokens + n * (chunk - 1));
      }
    }
  }
}

TEST(ChunkBound, M16_RandomLengthsStayBelow) {
  std::mt19937_64 random(16);
  for (int round = 0; round < 20000; ++round) {
    const auto chunk = static_cast<int64_t>(1 + random() % 100);
    const auto n = static_cast<int64_t>(1 + random() % 40);
    int64_t tokens = 0, chunks = 0;
    for (int64_t i = 0; i < n; ++i) {
      const auto length = static_cast<int64_t>(random() % (random() % 300 + 1));
      tokens += length;
      chunks += (length + chunk - 1) / chunk;
    }
    ASSERT_LE(chunks, bound(tokens, n, chunk));
  }
}

TEST(ChunkBound, F26_ManyShortSequences) {
  // 127 sequences of 16, 32, 64, ...: 4,720 tokens, 8,128 padded rows at C = 64; bounds of padded rows T + N*(C-1).
  Ints lengths;
  int64_t tokens = 0;
  for (int i = 0; i < 127; ++i) lengths.push_back(16 << (i % 3)), tokens += lengths.back();
  EXPECT_EQ(tokens, 4720);
  EXPECT_EQ(64 * model_chunks(lengths, 64).offsets.back(), 8128);
  EXPECT_LE(64 * bound(4720, 127, 64), 12721);
  EXPECT_LE(16 * bound(4720, 127, 16), 6625);
  EXPECT_GE(64 * bound(4720, 127, 64), 8128);
  EXPECT_EQ(bound(80, 1, 64), 2);
  EXPECT_EQ(bound(129, 1, 64), 3);
}

TEST(ChunkBound, BadArguments) {
  int64_t rows = 7;
  EXPECT_EQ(kda_chunk_bound(-1, 1, 64, &rows), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_chunk_bound(1, -1, 64, &rows), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_chunk_bound(1, 1, 0, &rows), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_chunk_bound(1, 1, 64, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(rows, 7);
  EXPECT_EQ(bound(INT64_MAX, INT64_MAX, 1), INT64_MAX);
}

// ---- The tables.

// A hook: a registered backend's own, or `host`.
struct Hook {
  std::string name;
  const char* backend;
  const char* hook;
};
std::vector<Hook> registered_hooks() {
  std::vector<Hook> hooks;
  const char* name = nullptr;
  for (size_t i = 0; kda_metadata_backend_name(i, &name) == KDA_OK; ++i) {
    kda_device_type device;
    EXPECT_EQ(kda_metadata_find(name, &device, nullptr), KDA_OK);
    if (device != (on_device() ? KDA_CUDA : KDA_CPU) || std::string(name).rfind("TEST_", 0) == 0)
      continue;  // faulty ones of other tests
    hooks.push_back({name, name, nullptr});
    hooks.push_back({std::string(name) + " host", name, "host"});
  }
  return hooks;
}

struct ChunkCall {
  ChunkCall(const Ints& offsets, kda_dtype dtype, int64_t num_tokens, int64_t rows, bool host)
      : cu(Tensor::ints(offsets, dtype)),
        indices(dtype, rows, 2),
        chunk_offsets(KDA_INT64, static_cast<int64_t>(offsets.size())),
        request(sized<kda_chunk_request>()) {
    request.cu_seqlens = cu.view();
    if (host) request.cu_seqlens_host = cu.view();
    request.num_tokens = num_tokens;
    request.num_sequences = static_cast<int64_t>(offsets.size()) - 1;
    request.chunk_indices = indices.view();
    request.chunk_offsets = chunk_offsets.view();
  }
  kda_status run(const Plan& plan) {
    kda_chunk_request r = request;
    const auto call = [&] { return kda_metadata_chunk_tables(plan.get(), &r, nullptr); };
    return on_device() ? call_there({&r.cu_seqlens, &r.chunk_indices, &r.chunk_offsets}, call) : call();
  }
  Tensor cu;
  Table indices, chunk_offsets;
  kda_chunk_request request;
};

Plan chunk_plan(int64_t tokens, int64_t sequences, int32_t chunk, const Hook& hook) {
  auto desc = metadata_desc(tokens, sequences);
  desc.chunk = chunk;
  desc.backend = hook.backend;
  desc.hook = hook.hook;
  return metadata_plan(desc);
}

void expect_chunks(ChunkCall& call, const Plan& plan, const Ints& lengths, int64_t chunk) {
  ASSERT_EQ(call.run(plan), KDA_OK) << kda_last_error();
  Chunks wanted = model_chunks(lengths, chunk);
  wanted.indices.resize(call.indices.values().size(), -1);
  EXPECT_TRUE(call.indices.values() == wanted.indices);
  EXPECT_TRUE(call.chunk_offsets.values() == wanted.offsets);
  EXPECT_TRUE(call.indices.guards_intact() && call.chunk_offsets.guards_intact());
}

Ints offsets_of(const Ints& lengths) {
  Ints cu{0};
  for (int64_t l : lengths) cu.push_back(cu.back() + l);
  return cu;
}

TEST(ChunkTables, M14_F49_Examples) {
  const struct {
    Ints cu;
    int32_t chunk;
    Ints indices, offsets;
  } cases[] = {{{0, 128, 128, 256}, 64, {0, 0, 0, 1, 2, 0, 2, 1}, {0, 2, 2, 4}}, {{0, 0, 64}, 64, {1, 0}, {0, 0, 1}},
               {{0, 0, 65, 65, 70}, 64, {1, 0, 1, 1, 3, 0}, {0, 0, 2, 2, 3}},    {{0, 0, 0}, 64, {}, {0, 0, 0}},
               {{0, 5, 5, 22, 22}, 16, {0, 0, 2, 0, 2, 1}, {0, 1, 1, 3, 3}},     {{0}, 64, {}, {0}}};
  for (const auto& c : cases) {
    for (kda_dtype dtype : {KDA_INT32, KDA_INT64}) {
      for (const Hook& hook : registered_hooks()) {
        // Exact (M-17): the host has the lengths, the table has NT rows.
        ChunkCall call(c.cu, dtype, c.cu.back(), static_cast<int64_t>(c.indices.size()) / 2, true);
        const Plan plan = chunk_plan(300, 8, c.chunk, hook);
        ASSERT_TRUE(plan.ok()) << plan.message();
        ASSERT_EQ(call.run(plan), KDA_OK) << hook.name << ": " << kda_last_error();
        EXPECT_EQ(call.indices.values(), c.indices) << hook.name;
        EXPECT_EQ(call.chunk_offsets.values(), c.offsets) << hook.name;
        EXPECT_TRUE(call.indices.guards_intact() && call.chunk_offsets.guards_intact());
      }
    }
  }
}

// Lengths of one kind for n sequences (M-30).
Ints lengths_of(int kind, int64_t n, int64_t chunk) {
  Ints x(static_cast<size_t>(n), 20);
  const auto set = [&](int64_t i, int64_t value) {
    if (i >= 0 && i < n) x[static_cast<size_t>(i)] = value;
  };
  std::mt19937_64 random(static_cast<uint64_t>(kind * 1000 + n));
  switch (kind) {
    case 0: return Ints(static_cast<size_t>(n), 0);
    case 1: set(0, 0); break;
    case 2: set(n / 2, 0); break;
    case 3: set(n - 1, 0); break;
    case 4:
    case 5:
    case 6:
    case 7:
    case 8:
    case 9:
    case 10: {
      const int64_t each[] = {1, 15, 16, 17, 63, 64, 65};
      return Ints(static_cast<size_t>(n), each[kind - 4]);
    }
    case 11: return Ints(static_cast<size_t>(n), 2 * chunk);
    case 12: x.assign(x.size(), 1), set(n / 3, 5000); break;
    default:
      for (auto& l : x) l = static_cast<int64_t>(random() % 70);
  }
  return x;
}

TEST(ChunkTables, M30_EveryHookEqualsTheDefinition) {
  const int64_t counts[] = {0, 1, 2, 3, 31, 32, 33, 64, 65, 127, 1000, 4096, 70000};
  const int32_t chunks[] = {16, 32, 64};
  const std::vector<Hook> hooks = registered_hooks();
  ASSERT_GE(hooks.size(), 2u);
  for (const auto& c : covering_pairs({static_cast<int>(hooks.size()), 2, 3, 13, 14})) {
    const Hook& hook = hooks[static_cast<size_t>(c[0])];
    const kda_dtype dtype = c[1] == 0 ? KDA_INT32 : KDA_INT64;
    const int32_t chunk = chunks[c[2]];
    const int64_t n = counts[c[3]];
    const Ints lengths = lengths_of(c[4], n, chunk), cu = offsets_of(lengths);
    SCOPED_TRACE(hook.name + " N " + std::to_string(n) + " kind " + std::to_string(c[4]) + " C " +
                 std::to_string(chunk));
    const Plan plan = chunk_plan(cu.back() + 3, n, chunk, hook);
    ASSERT_TRUE(plan.ok()) << plan.message();
    // Bounded, with three token rows of no sequence.
    ChunkCall call(cu, dtype, cu.back() + 3, bound(cu.back() + 3, n, chunk), true);
    expect_chunks(call, plan, lengths, chunk);
  }
}

TEST(ChunkTables, M17_BoundedWithoutHostLengths) {
  const Hook device = registered_hooks().front();
  const Ints lengths{0, 65, 0, 5};
  ChunkCall call(offsets_of(lengths), KDA_INT32, 70, bound(70, 4, 64), false);
  const Plan plan = chunk_plan(70, 4, 64, device);
  expect_chunks(call, plan, lengths, 64);
  // Fewer rows than the bound need the lengths; and never fewer than NT.
  ChunkCall exact(offsets_of(lengths), KDA_INT32, 70, 3, false);
  EXPECT_EQ(exact.run(plan), KDA_INVALID_ARGUMENT);
  EXPECT_TRUE(exact.indices.untouched());
  ChunkCall few(offsets_of(lengths), KDA_INT32, 70, 2, true);
  EXPECT_EQ(few.run(plan), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("[>= 3, 2]"), std::string::npos) << kda_last_error();
}

TEST(ChunkTables, M15_Int32OffsetsOfTooManyTokensAreRefused) {
  const Hook device = registered_hooks().front();
  const int64_t tokens = int64_t{1} << 31;
  const Plan plan = chunk_plan(tokens, 1, 1 << 30, device);
  ASSERT_TRUE(plan.ok()) << plan.message();
  ChunkCall narrow({0, 70}, KDA_INT32, tokens, 2, false);
  EXPECT_EQ(narrow.run(plan), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("int64 for 2147483648 tokens"), std::string::npos) << kda_last_error();
  ChunkCall wide({0, tokens}, KDA_INT64, tokens, 2, false);
  EXPECT_EQ(wide.run(plan), KDA_OK) << kda_last_error();
  EXPECT_EQ(wide.indices.values(), (Ints{0, 0, 0, 1}));
}

TEST(ChunkTables, M15_OffsetsThroughTheirStride) {
  const Hook device = registered_hooks().front();
  const Plan plan = chunk_plan(70, 2, 64, device);
  ChunkCall call({0, 65, 70}, KDA_INT64, 70, bound(70, 2, 64), false);
  Tensor wide = Tensor::ints({0, 9999, 65, 9999, 70}, KDA_INT64);
  call.request.cu_seqlens = wide.view();
  call.request.cu_seqlens.shape[0] = 3;
  call.request.cu_seqlens.strides[0] = 2;
  expect_chunks(call, plan, {65, 5}, 64);
}

TEST(ChunkTables, M19_NoEntryPointsBeyondASequence) {
  const Hook device = registered_hooks().front();
  std::mt19937_64 random(19);
  for (int round = 0; round < 300; ++round) {
    const auto n = static_cast<int64_t>(random() % 6);
    Ints cu;
    for (int64_t i = 0; i <= n; ++i) cu.push_back(static_cast<int64_t>(random() % 400) - 100);
    const int64_t tokens = 200;
    ChunkCall call(cu, KDA_INT32, tokens, bound(tokens, n, 16), false);
    ASSERT_EQ(call.run(chunk_plan(tokens, 6, 16, device)), KDA_OK);
    ASSERT_TRUE(call.indices.guards_intact() && call.chunk_offsets.guards_intact());
    const Ints indices = call.indices.values();
    for (size_t r = 0; r < indices.size(); r += 2) {
      if (indices[r] < 0) continue;
      ASSERT_LT(indices[r], n);
      const auto at = static_cast<size_t>(indices[r]);
      const int64_t length = std::clamp<int64_t>(cu[at + 1], 0, tokens) - std::clamp<int64_t>(cu[at], 0, tokens);
      ASSERT_LT(indices[r + 1] * 16, length);
    }
  }
}

TEST(ChunkTables, M20_RequestsAreChecked) {
  const Hook device = registered_hooks().front(), host = registered_hooks()[1];
  const Plan plan = chunk_plan(70, 2, 64, device);
  const struct {
    const char* text;
    void (*spoil)(kda_chunk_request&);
  } cases[] = {
      {"num_tokens", [](kda_chunk_request& r) { r.num_tokens = 71; }},
      {"num_tokens", [](kda_chunk_request& r) { r.num_tokens = -1; }},
      {"num_sequences", [](kda_chunk_request& r) { r.num_sequences = -1; }},
      {"cu_seqlens", [](kda_chunk_request& r) { r.num_sequences = 1; }},
      {"cu_seqlens", [](kda_chunk_request& r) { r.cu_seqlens = {}; }},
      {"cu_seqlens", [](kda_chunk_request& r) { r.cu_seqlens.dtype = KDA_BOOL; }},
      {"cu_seqlens_host[2]: wanted a value in [65, 69]", [](kda_chunk_request& r) { r.num_tokens = 69; }},
      {"chunk_indices",
       [](kda_chunk_request& r) {
         r.chunk_indices.dtype = KDA_INT64;
         r.chunk_indices.shape[0] = 1;
       }},
      {"chunk_indices", [](kda_chunk_request& r) { r.chunk_indices = {}; }},
      {"chunk_offsets", [](kda_chunk_request& r) { r.chunk_offsets.dtype = KDA_INT32; }},
      {"chunk_offsets", [](kda_chunk_request& r) { r.chunk_offsets.shape[0] = 2; }},
      {"apart from", [](kda_chunk_request& r) { r.chunk_offsets.data = r.chunk_indices.data; }},
      {"struct_size", [](kda_chunk_request& r) { r.struct_size = 1; }},
  };
  for (const auto& c : cases) {
    ChunkCall call({0, 65, 70}, KDA_INT32, 70, bound(70, 2, 64), true);
    c.spoil(call.request);
    EXPECT_EQ(call.run(plan), KDA_INVALID_ARGUMENT) << c.text;
    EXPECT_NE(std::string(kda_last_error()).find(c.text), std::string::npos) << c.text << ": " << kda_last_error();
    EXPECT_TRUE(call.indices.untouched() && call.chunk_offsets.untouched()) << c.text;
  }
  // The host hook needs the host copy.
  ChunkCall call({0, 65, 70}, KDA_INT32, 70, bound(70, 2, 64), false);
  EXPECT_EQ(call.run(chunk_plan(70, 2, 64, host)), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("cu_seqlens_host"), std::string::npos);
  EXPECT_EQ(kda_metadata_chunk_tables(nullptr, &call.request, nullptr), KDA_INVALID_ARGUMENT);
}

TEST(ChunkTables, M31_BuildsAllocateNothing) {
  KDA_HOST_MEMORY_ONLY();
  const Hook device = registered_hooks().front();
  const Plan plan = chunk_plan(700, 20, 64, device);
  ChunkCall call({0, 65, 70, 300, 300, 700}, KDA_INT32, 700, bound(700, 5, 64), true);
  const ServingGuard guard;
  for (int i = 0; i < 100; ++i) (void)call.run(plan);
  EXPECT_EQ(guard.calls().total(), 0) << guard.calls().text();
}

}  // namespace
}  // namespace kda::conformance::test
