// The numerical contract of the state copies (spec C-1..C-22, T-1..T-7) on the CPU, and, in tests/cuda, on a device.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>

#include "conformance/covering.h"
#include "conformance/rounding.h"
#include "state_copy_fixture.h"

namespace kda::conformance::test {
namespace {

constexpr int64_t kMaxSelected = 131;

// A valid row for every i as long as there are any, then invalid ones; a fixed mixture of both for larger n.
std::vector<int64_t> distinct_indices(int64_t n, int64_t rows, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(rows));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  uint64_t state = seed + 99;
  for (size_t i = order.size(); i > 1; --i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(order[i - 1], order[(state >> 33) % i]);
  }
  const int64_t bad[] = {-1, rows, rows + 1, INT32_MIN, INT32_MAX};
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n; ++i) {
    const bool valid = i % 5 != 3 && !order.empty();
    out.push_back(valid ? order.back() : bad[static_cast<size_t>(i) % 5]);
    if (valid) order.pop_back();
  }
  return out;
}

struct Layout {
  int64_t hv, v, k;
};
constexpr Layout kPayloads[] = {{2, 3, 4}, {1, 1, 129}, {1, 1, 8193}, {12, 128, 128}, {32, 128, 128}};
constexpr kda_dtype kDtypes[] = {KDA_FP32, KDA_BF16, KDA_FP16, KDA_INT8, KDA_INT64};
constexpr int64_t kCounts[] = {0, 1, 2, 7, 64, 65, 80, 129, kMaxSelected};
constexpr int64_t kStrides[] = {1, 9};
constexpr int64_t kGaps[] = {0, 17, -1};  // -1: a total row stride of 540672 elements
constexpr int64_t kOffsets[] = {0, 393216};
constexpr int kClasses[] = {0, 2, 4, 8};

// Bytes that a case may touch on the packed side: large payloads of wide types meet small n in another case.
constexpr int64_t kCaseBytes = 96 << 20;

TEST(StateCopy, T01_C01_C02_C04_C13_C05_C14_C19_EveryPairOfLayoutsIsBitEqualToAPlainLoop) {
  const auto cases = covering_pairs({5, 5, 2, 9, 2, 3, 2, 4, 3});
  int run = 0;
  for (const auto& c : cases) {
    const Layout& l = kPayloads[c[0]];
    PoolShape s{0, l.hv, l.v, l.k, kDtypes[c[1]]};
    int64_t n = kCounts[c[3]];
    while (n > 2 && n * s.payload() * s.size() > kCaseBytes) n /= 2;
    s.gap = kGaps[c[5]] >= 0 ? kGaps[c[5]] : 540672 - s.payload();
    s.rows = std::min<int64_t>(n + 3, std::max<int64_t>(3, (24 << 20) / (s.stride() * s.size())));
    s.offset = kOffsets[c[6]];
    s.alignment = kClasses[c[7]];
    Pool pool(s, static_cast<uint64_t>(run) + 1);
    const Indices idx(distinct_indices(n, s.rows, static_cast<uint64_t>(run)), c[2] != 0 ? KDA_INT64 : KDA_INT32,
                      kStrides[c[4]]);
    std::vector<uint8_t> flags;
    if (c[8] > 0) {
      for (int64_t i = 0; i < n; ++i) flags.push_back(c[8] == 1 ? 0 : static_cast<uint8_t>(i % 3 * 85));
    }
    SCOPED_TRACE("case " + std::to_string(run) + ": " + describe(pool.view()) + " n " + std::to_string(n));
    const Plan plan = copy_plan(copy_desc(pool.view(), kMaxSelected));
    ASSERT_TRUE(plan.ok()) << plan.message();
    // A device's fused kernels want the base aligned to its element (Y-2).
    const bool fused = c[1] < 3 && (!on_device() || s.alignment % s.size() == 0);
    EXPECT_EQ(plan.backend(), fused ? "fused" : "bytes");

    Packed packed(s, n, 3, run % 16, run % 2 * 5);
    Packed wanted = packed;
    const Pool untouched = pool;
    model_gather(pool, idx, flags, wanted);
    const kda_tensor flag_view = c[8] > 0 ? flags_view(flags) : kda_tensor{};
    auto args = copy_args(pool.view(), idx.view(), packed.view(), flag_view);
    ASSERT_EQ(gather(plan, args), KDA_OK) << kda_last_error();
    EXPECT_TRUE(packed.memory == wanted.memory);
    EXPECT_TRUE(pool.memory == untouched.memory);

    Packed source(s, n, 5, 3);
    Pool wanted_pool = pool;
    model_scatter(wanted_pool, idx, source);
    const Packed source_before = source;
    args.packed = source.view();
    ASSERT_EQ(scatter(plan, args), KDA_OK) << kda_last_error();
    EXPECT_TRUE(pool.memory == wanted_pool.memory);
    EXPECT_TRUE(source.memory == source_before.memory);
    ++run;
  }
  EXPECT_GE(run, 45);  // nine counts by five layouts at least
}

// One small pool and both directions, for the clauses that need no large layout.
class SmallCopy : public ::testing::Test {
 protected:
  explicit SmallCopy(kda_dtype dtype = KDA_FP32) : shape{5, 2, 3, 4, dtype, 6, 2}, pool(shape) {
    plan = copy_plan(copy_desc(pool.view(), 8));
    EXPECT_TRUE(plan.ok()) << plan.message();
  }
  void expect_both(const std::vector<int64_t>& x, kda_dtype dtype, const std::vector<uint8_t>& flags = {}) {
    const Indices idx(x, dtype);
    const auto n = static_cast<int64_t>(x.size());
    Packed packed(shape, n);
    Packed wanted = packed;
    model_gather(pool, idx, flags, wanted);
    auto args = copy_args(pool.view(), idx.view(), packed.view(), flags.empty() ? kda_tensor{} : flags_view(flags));
    ASSERT_EQ(gather(plan, args), KDA_OK) << kda_last_error();
    EXPECT_TRUE(packed.memory == wanted.memory);
    Packed source(shape, n, 21);
    Pool wanted_pool = pool;
    model_scatter(wanted_pool, idx, source);
    args.packed = source.view();
    ASSERT_EQ(scatter(plan, args), KDA_OK) << kda_last_error();
    EXPECT_TRUE(pool.memory == wanted_pool.memory);
  }
  PoolShape shape;
  Pool pool;
  Plan plan;
};

TEST_F(SmallCopy, T02_C05_C07_C08_C09_C20_InvalidIndicesInEveryPosition) {
  for (int64_t bad : {int64_t{-1}, int64_t{5}, int64_t{6}, int64_t{INT32_MIN}, int64_t{INT32_MAX}, int64_t{1} << 31,
                      std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}) {
    for (size_t position = 0; position < 3; ++position) {
      std::vector<int64_t> x{4, 0, 2};
      x[position] = bad;
      SCOPED_TRACE(std::to_string(bad) + " at " + std::to_string(position));
      expect_both(x, KDA_INT64);
      expect_both(x, KDA_INT64, {1, 0, 1});
      expect_both(x, KDA_INT64, {0, 0, 0});
      if (bad == static_cast<int32_t>(bad)) expect_both(x, KDA_INT32, {0, 1, 1});
    }
  }
}

TEST_F(SmallCopy, F42_OnlyTheNamedSlotChangesAndTheLastOneIsNotMinusOne) {
  for (const std::vector<int64_t>& x : {std::vector<int64_t>{-1, 3}, {5, 3}, {INT32_MIN, 3}, {int64_t{1} << 31, 3}}) {
    expect_both(x, KDA_INT64);
  }
}

TEST_F(SmallCopy, F43_C08_SlotZeroIsAnOrdinaryRow) {
  expect_both({-1, 0, -1}, KDA_INT32);
  expect_both({-1, 0, -1}, KDA_INT64);
}

TEST_F(SmallCopy, T05_C11_DuplicateGatherRowsAreFullCopies) {
  const Indices idx({3, 3, 1, 3}, KDA_INT32);
  Packed packed(shape, 4);
  Packed wanted = packed;
  model_gather(pool, idx, {}, wanted);
  const auto args = copy_args(pool.view(), idx.view(), packed.view());
  ASSERT_EQ(gather(plan, args), KDA_OK);
  EXPECT_TRUE(packed.memory == wanted.memory);
}

TEST_F(SmallCopy, T05_C12_DuplicateScatterRowsSpoilOnlyThemselves) {
  const Indices idx({3, 1, 3, 0}, KDA_INT32);
  const Packed source(shape, 4);
  Pool wanted = pool;
  model_scatter(wanted, idx, source);
  const auto args = copy_args(pool.view(), idx.view(), source.view());
  ASSERT_EQ(scatter(plan, args), KDA_OK);
  const auto bytes = static_cast<size_t>(shape.payload() * shape.size());
  for (int64_t r : {0, 1, 2, 4}) EXPECT_EQ(std::memcmp(pool.row(r), wanted.row(r), bytes), 0) << r;
}

TEST_F(SmallCopy, T05_C12_CheckedModeNamesBothPositions) {
  auto desc = copy_desc(pool.view(), 8);
  desc.flags = KDA_PLAN_CHECKED;
  const Plan checked = copy_plan(desc);
  ASSERT_TRUE(checked.ok());
  const Pool before = pool;
  const Packed source(shape, 4);
  for (kda_dtype dtype : {KDA_INT32, KDA_INT64}) {
    const Indices twice({3, 1, 0, 1}, dtype, 9);
    auto args = copy_args(pool.view(), twice.view(), source.view());
    EXPECT_EQ(scatter(checked, args), KDA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(kda_last_error()).find("got 1 at positions 1 and 3"), std::string::npos)
        << kda_last_error();
    const Indices past({3, 5, -1, -1}, dtype, 2);  // two padding rows are no duplicate
    args.indices = past.view();
    EXPECT_EQ(scatter(checked, args), KDA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(kda_last_error()).find("indices[1]: wanted below rows = 5, got 5"), std::string::npos);
  }
  EXPECT_TRUE(pool.memory == before.memory);
  const Indices padded({3, -1, 0, -1}, KDA_INT32);
  const auto args = copy_args(pool.view(), padded.view(), source.view());
  EXPECT_EQ(scatter(checked, args), KDA_OK);
}

TEST_F(SmallCopy, T03_C06_F22_NaNOfRowsThatAreNotReadNeverShows) {
  std::memset(pool.row(1), 0xff, static_cast<size_t>(shape.payload() * shape.size()));  // NaN
  Packed packed(shape, 3);
  const std::vector<uint8_t> flags{1, 0, 1};
  const Indices idx({0, 1, -1}, KDA_INT32);
  const auto args = copy_args(pool.view(), idx.view(), packed.view(), flags_view(flags));
  ASSERT_EQ(gather(plan, args), KDA_OK);
  for (int64_t i = 1; i < 3; ++i) {
    for (int64_t b = 0; b < shape.payload() * shape.size(); ++b) ASSERT_EQ(packed.row(i)[b], 0);
  }
}

TEST_F(SmallCopy, T07_C18_EmptySelectionLaunchesNothingButIsValidated) {
  const Indices none({}, KDA_INT32);
  Packed packed(shape, 0);
  auto args = copy_args(pool.view(), none.view(), packed.view());
  EXPECT_EQ(gather(plan, args), KDA_OK);
  EXPECT_EQ(scatter(plan, args), KDA_OK);
  args.indices.data = args.packed.data = nullptr;  // what frameworks give for empty tensors
  EXPECT_EQ(gather(plan, args), KDA_OK);
  args.packed.dtype = KDA_BF16;
  EXPECT_EQ(gather(plan, args), KDA_INVALID_ARGUMENT);
  args.packed = packed.view();
  args.indices.dtype = KDA_FP32;
  EXPECT_EQ(gather(plan, args), KDA_INVALID_ARGUMENT);
}

TEST_F(SmallCopy, C10_ScatterIgnoresFlags) {
  const Indices idx({2, 4}, KDA_INT32);
  const Packed source(shape, 2);
  Pool wanted = pool;
  model_scatter(wanted, idx, source);
  const std::vector<uint8_t> flags{0, 0};
  const auto args = copy_args(pool.view(), idx.view(), source.view(), flags_view(flags));
  ASSERT_EQ(scatter(plan, args), KDA_OK);
  EXPECT_TRUE(pool.memory == wanted.memory);
}

TEST_F(SmallCopy, C19_F37_IndexAsATableColumn) {
  for (kda_dtype dtype : {KDA_INT32, KDA_INT64}) {
    const Indices column({4, 2, 3}, dtype, 9), dense({4, 2, 3}, dtype, 1);
    Packed a(shape, 3, 1), b(shape, 3, 1);
    auto args = copy_args(pool.view(), column.view(), a.view());
    ASSERT_EQ(gather(plan, args), KDA_OK);
    args = copy_args(pool.view(), dense.view(), b.view());
    ASSERT_EQ(gather(plan, args), KDA_OK);
    EXPECT_TRUE(a.memory == b.memory);
  }
}

TEST(StateCopy, T03_C17_EqualDtypesKeepEveryBit) {
  // All 65,536 patterns of a 16-bit float: NaN payloads, -0, denormals.
  for (kda_dtype dtype : {KDA_BF16, KDA_FP16}) {
    PoolShape s{2, 4, 128, 128, dtype};
    Pool pool(s);
    for (int64_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      std::memcpy(pool.row(1) + 2 * i, &bits, 2);
    }
    const Plan plan = copy_plan(copy_desc(pool.view(), 1));
    const Indices idx({1}, KDA_INT32);
    Packed packed(s, 1);
    const auto args = copy_args(pool.view(), idx.view(), packed.view());
    ASSERT_EQ(gather(plan, args), KDA_OK);
    EXPECT_EQ(std::memcmp(packed.row(0), pool.row(1), 131072), 0);
  }
}

TEST(StateCopy, T06_CastsWidenExactlyAndRoundToNearestEven) {
  const std::vector<float> specials = {0.f,
                                       -0.f,
                                       1.f,
                                       3.402823466e38f,
                                       -3.402823466e38f,
                                       1e-45f,
                                       -1e-45f,
                                       65504.f,
                                       65519.99f,
                                       65520.f,
                                       -65520.f,
                                       5.9604645e-8f,
                                       2.9802322e-8f,
                                       2.98023224e-8f * 1.0001f,
                                       6.1e-5f,
                                       1.00390625f,
                                       1.01171875f,
                                       1.00048828125f,
                                       1.00146484375f,
                                       3.38953139e38f,
                                       3.3961e38f,
                                       std::numeric_limits<float>::infinity(),
                                       -std::numeric_limits<float>::infinity(),
                                       std::numeric_limits<float>::quiet_NaN(),
                                       9.1e-41f,
                                       4.6e-41f};
  for (kda_dtype dtype : {KDA_BF16, KDA_FP16}) {
    PoolShape s{3, 2, 5, 37, dtype};
    s.gap = 1;
    s.packed = KDA_FP32;
    Pool pool(s);
    const Plan plan = copy_plan(copy_desc(pool.view(), 2, KDA_FP32));
    ASSERT_TRUE(plan.ok()) << plan.message();
    Packed source(s, 1);
    auto* values = reinterpret_cast<float*>(source.row(0));
    uint64_t state = 5;
    for (int64_t i = 0; i < s.payload(); ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const auto random = static_cast<uint32_t>(state >> 32);
      if (static_cast<size_t>(i) < specials.size()) values[i] = specials[static_cast<size_t>(i)];
      else std::memcpy(values + i, &random, 4);
    }
    const Pool before = pool;
    const Indices idx({2}, KDA_INT64);
    auto args = copy_args(pool.view(), idx.view(), source.view());
    ASSERT_EQ(scatter(plan, args), KDA_OK) << kda_last_error();
    for (int64_t i = 0; i < s.payload(); ++i) {
      const double got = load(pool.row(2) + 2 * i, dtype), wanted = round_to(dtype, values[i]);
      if (std::isnan(wanted)) EXPECT_TRUE(std::isnan(got)) << values[i];
      else
        EXPECT_TRUE(got == wanted && std::signbit(got) == std::signbit(wanted))
            << i << ": " << values[i] << " " << got << " " << wanted;
    }
    std::memcpy(pool.row(2), before.row(2), static_cast<size_t>(s.payload() * 2));
    EXPECT_TRUE(pool.memory == before.memory);  // nothing around the row
    // Widening: every pattern that the pool holds.
    for (int64_t i = 0; i < s.payload(); ++i) {
      const auto bits = static_cast<uint16_t>(i * 177);
      std::memcpy(pool.row(1) + 2 * i, &bits, 2);
    }
    Packed packed(s, 2);
    const Indices two({1, -1}, KDA_INT32);
    args = copy_args(pool.view(), two.view(), packed.view());
    ASSERT_EQ(gather(plan, args), KDA_OK);
    for (int64_t i = 0; i < s.payload(); ++i) {
      const double wanted = load(pool.row(1) + 2 * i, dtype), got = load(packed.row(0) + 4 * i, KDA_FP32);
      if (std::isnan(wanted)) EXPECT_TRUE(std::isnan(got));
      else EXPECT_TRUE(got == wanted && std::signbit(got) == std::signbit(wanted)) << i;
      EXPECT_EQ(load(packed.row(1) + 4 * i, KDA_FP32), 0.0);
    }
  }
}

TEST(StateCopy, F12_GatherAndScatterOfANarrowPoolRoundOnce) {
  PoolShape s{1, 1, 1, 2, KDA_BF16};
  s.packed = KDA_FP32;
  Pool pool(s);
  const Plan plan = copy_plan(copy_desc(pool.view(), 1, KDA_FP32));
  Packed source(s, 1);
  auto* x = reinterpret_cast<float*>(source.row(0));
  x[0] = 1.0001220703125f;  // back to 1.0
  x[1] = 1.005f;            // to 1.0078125, the nearest
  const Indices idx({0}, KDA_INT32);
  const auto args = copy_args(pool.view(), idx.view(), source.view());
  ASSERT_EQ(scatter(plan, args), KDA_OK);
  EXPECT_EQ(load(pool.row(0), KDA_BF16), 1.0);
  EXPECT_EQ(load(pool.row(0) + 2, KDA_BF16), 1.0078125);
}

// Address space without memory behind it: only touched pages exist.
class SparsePool {
 public:
  SparsePool(int64_t rows, int64_t hv, int64_t stride, kda_dtype dtype) {
    bytes_ = static_cast<size_t>(((rows - 1) * stride + hv * 128 * 128) * static_cast<int64_t>(dtype_size(dtype)));
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    view_ = make_tensor(data_, dtype, {rows, hv, 128, 128});
    view_.strides[0] = stride;
  }
  ~SparsePool() {
    if (data_ != MAP_FAILED) munmap(data_, bytes_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  float* row(int64_t r) const { return static_cast<float*>(data_) + r * view_.strides[0]; }
  kda_tensor view() const { return view_; }

 private:
  size_t bytes_;
  void* data_;
  kda_tensor view_{};
};

TEST(StateCopy, T04_C15_F24_RowProductsAreFormedIn64Bits) {
  KDA_HOST_MEMORY_ONLY();
  // First rows whose 32-bit element offset is negative: {HV, row}.
  const int64_t cases[][2] = {{12, 10923}, {24, 5462}, {32, 4096}, {64, 2048}, {96, 1366}};
  for (const auto& c : cases) {
    const int64_t hv = c[0], first_bad = c[1], payload = hv * 128 * 128;
    const SparsePool pool(2 * first_bad + 2, hv, payload, KDA_FP32);
    ASSERT_TRUE(pool.ok());
    const Plan plan = copy_plan(copy_desc(pool.view(), 4));
    ASSERT_TRUE(plan.ok()) << plan.message();
    PoolShape s{1, hv, 128, 128, KDA_FP32};
    const std::vector<int64_t> rows{first_bad - 1, first_bad, 2 * first_bad};
    Packed source(s, 3, 17);
    const Indices idx(rows, hv % 24 == 0 ? KDA_INT64 : KDA_INT32);
    auto args = copy_args(pool.view(), idx.view(), source.view());
    ASSERT_EQ(scatter(plan, args), KDA_OK) << kda_last_error();
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(std::memcmp(pool.row(rows[i]), source.row(static_cast<int64_t>(i)), static_cast<size_t>(payload * 4)),
                0)
          << hv << " " << rows[i];
      EXPECT_EQ(pool.row(rows[i])[payload], rows[i] + 1 == first_bad ? pool.row(first_bad)[0] : 0.f);
    }
    Packed back(s, 3, 18);
    args.packed = back.view();
    ASSERT_EQ(gather(plan, args), KDA_OK);
    EXPECT_EQ(std::memcmp(back.row(0), source.row(0), static_cast<size_t>(3 * payload * 4)), 0);
  }
}

TEST(StateCopy, T04_C15_ARowStrideBeyondFourGiB) {
  KDA_HOST_MEMORY_ONLY();
  const int64_t stride = (int64_t{1} << 30) + 512;  // 4 GiB and a bit, in fp32
  const SparsePool pool(6, 1, stride, KDA_FP32);
  ASSERT_TRUE(pool.ok());
  const Plan plan = copy_plan(copy_desc(pool.view(), 4));
  ASSERT_TRUE(plan.ok()) << plan.message();
  PoolShape s{1, 1, 128, 128, KDA_FP32};
  Packed source(s, 2, 3);
  const Indices idx({5, 2}, KDA_INT32);
  const auto args = copy_args(pool.view(), idx.view(), source.view());
  ASSERT_EQ(scatter(plan, args), KDA_OK);
  EXPECT_EQ(std::memcmp(pool.row(5), source.row(0), 65536), 0);
  EXPECT_EQ(std::memcmp(pool.row(2), source.row(1), 65536), 0);
  EXPECT_EQ(pool.row(0)[0], 0.f);
}

TEST(StateCopy, C14_F35_C13_PaddedPoolKeepsItsGapsAndLeadingElements) {
  for (kda_dtype dtype : {KDA_FP32, KDA_BF16}) {
    PoolShape s{5, 12, 128, 128, dtype};
    s.gap = 540672 - 196608;
    s.offset = 393216;
    Pool pool(s);
    const Plan plan = copy_plan(copy_desc(pool.view(), 2));
    ASSERT_TRUE(plan.ok());
    const Indices idx({3, 1}, KDA_INT32);
    const Packed source(s, 2);
    Pool wanted = pool;
    model_scatter(wanted, idx, source);
    const auto args = copy_args(pool.view(), idx.view(), source.view());
    ASSERT_EQ(scatter(plan, args), KDA_OK);
    EXPECT_TRUE(pool.memory == wanted.memory);
  }
}

TEST(StateCopy, N12_ThreadCountChangesNoBit) {
  KDA_HOST_MEMORY_ONLY();
  PoolShape s{40, 12, 128, 128, KDA_FP32};
  Pool pool(s);
  std::vector<int64_t> x;
  for (int64_t i = 0; i < 24; ++i) x.push_back(i * 7 % 41 - 1);
  const Indices idx(x, KDA_INT64);
  Packed one(s, 24, 1), many(s, 24, 1);
  for (auto [threads, out] : {std::pair{1, &one}, std::pair{3, &many}}) {
    const Plan plan = copy_plan(copy_desc(pool.view(), 24), cpu_context(threads));
    const auto args = copy_args(pool.view(), idx.view(), out->view());
    ASSERT_EQ(gather(plan, args), KDA_OK);
  }
  EXPECT_TRUE(one.memory == many.memory);
}

}  // namespace
}  // namespace kda::conformance::test
