// The state copy's kernel on the host: every direction, cast, index width and lane, few blocks and many, against
// plain loops (spec C-1..C-17).
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "cuda/kernels/state_copy/kernel.cuh"

namespace kda::emulated {
namespace {

using namespace cuda;
using ptx::from_bf16;
using ptx::from_f16;
using ptx::to_bf16;
using ptx::to_f16;

thread_local __align__(16) unsigned char s_unused[emulation::kSharedBytes];

struct Problem {
  int64_t lanes = 100, n = 3, rows = 5;
  int32_t lane = 16;
  bool flags = false;
  bool guesses = false;
  bool late = false;  // indices and flags are only written when the kernel has made its guess
  int warps = 1;
};

template <class C>
void run(const StateCopyParams& p, int64_t rows, int warps, const std::function<void()>& before) {
  const int64_t bytes = p.lanes * p.lane * (C::kCast == CopyCast::kNone ? 1 : 2), of_block = kCopySlice * warps;
  const int64_t blocks = (bytes + of_block - 1) / of_block;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t block = 0; block < blocks; ++block) {
      before();
      emulation::run_cluster(
          1, 32 * warps, static_cast<unsigned>(block), static_cast<unsigned>(blocks),
          [&] {
            gridDim.y = static_cast<unsigned>(p.n), blockDim.x = static_cast<unsigned>(32 * warps);
            blockIdx.y = static_cast<unsigned>(i);
            state_copy_kernel<C>(p);
          },
          [] { return s_unused; });
    }
  }
}

template <class Index, CopyDirectionTag kDirection, CopyCast kCast>
void check(const Problem& c) {
  constexpr bool kScatter = kDirection == CopyDirectionTag::kScatter;
  const int64_t pool_bytes = c.lanes * c.lane, factor = kCast == CopyCast::kNone ? 1 : 2;
  const int64_t pool_stride = pool_bytes + 32, packed_stride = pool_bytes * factor + 16;
  std::mt19937 random(7);
  std::vector<uint8_t> pool(static_cast<size_t>(c.rows * pool_stride + 64)),
      packed(static_cast<size_t>(c.n * packed_stride + 64));
  for (auto* bytes : {&pool, &packed}) {
    for (auto& b : *bytes) b = static_cast<uint8_t>(random() % 120);  // no NaN in any float format
  }
  std::vector<Index> index;
  std::vector<uint8_t> flags;
  std::vector<int64_t> order(static_cast<size_t>(c.rows));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::shuffle(order.begin(), order.end(), random);
  for (int64_t i = 0; i < c.n; ++i) {
    const bool valid = i % 4 != 2 && i < c.rows;
    index.push_back(static_cast<Index>(valid ? order[static_cast<size_t>(i)] : i % 8 == 2 ? -1 : c.rows));
    flags.push_back(i % 3 != 1);
  }
  StateCopyParams p;
  p.pool = reinterpret_cast<char*>(pool.data());
  p.packed = reinterpret_cast<char*>(packed.data());
  p.pool_stride = pool_stride;
  p.packed_stride = packed_stride;
  p.rows = c.rows;
  p.n = c.n;
  p.indices = index.data();
  p.flags = c.flags && !kScatter ? flags.data() : nullptr;
  p.lanes = c.lanes;
  p.lane = c.lane;
  p.guesses = c.guesses;
  auto wanted_pool = pool;
  auto wanted_packed = packed;
  for (int64_t i = 0; i < c.n; ++i) {
    const auto row = static_cast<int64_t>(index[static_cast<size_t>(i)]);
    const bool live = row >= 0 && row < c.rows && (p.flags == nullptr || flags[static_cast<size_t>(i)] != 0);
    uint8_t* to_packed = &wanted_packed[static_cast<size_t>(i * packed_stride)];
    if (!live) {
      if (!kScatter) std::memset(to_packed, 0, static_cast<size_t>(pool_bytes * factor));
      continue;
    }
    uint8_t* in_pool = &wanted_pool[static_cast<size_t>(row * pool_stride)];
    if (kCast == CopyCast::kNone) {
      if (kScatter) std::memcpy(in_pool, to_packed, static_cast<size_t>(pool_bytes));
      else std::memcpy(to_packed, in_pool, static_cast<size_t>(pool_bytes));
      continue;
    }
    for (int64_t e = 0; e < pool_bytes / 2; ++e) {
      uint16_t narrow;
      float wide;
      std::memcpy(&narrow, in_pool + 2 * e, 2);
      std::memcpy(&wide, to_packed + 4 * e, 4);
      if (kScatter) narrow = static_cast<uint16_t>(kCast == CopyCast::kBf16 ? to_bf16(wide) : to_f16(wide));
      else wide = kCast == CopyCast::kBf16 ? from_bf16(narrow) : from_f16(narrow);
      if (kScatter) std::memcpy(in_pool + 2 * e, &narrow, 2);
      else std::memcpy(to_packed + 4 * e, &wide, 4);
    }
  }
  const auto written_index = index;
  const auto written_flags = flags;
  if (c.late) emulation::set_grid_before([&] { index = written_index, flags = written_flags; });
  run<StateCopyConfig<Index, kDirection, kCast>>(p, c.n, c.warps, [&] {
    if (!c.late) return;
    std::rotate(index.begin(), index.begin() + 1, index.end());
    std::rotate(flags.begin(), flags.begin() + 1, flags.end());
  });
  emulation::set_grid_before({});
  EXPECT_TRUE(pool == wanted_pool) << c.lane << " " << c.n << " " << kScatter;
  EXPECT_TRUE(packed == wanted_packed) << c.lane << " " << c.n << " " << kScatter;
}

template <CopyCast kCast>
void check_all(const Problem& c) {
  check<int32_t, CopyDirectionTag::kGather, kCast>(c);
  check<int64_t, CopyDirectionTag::kGather, kCast>(c);
  check<int32_t, CopyDirectionTag::kScatter, kCast>(c);
  check<int64_t, CopyDirectionTag::kScatter, kCast>(c);
}

TEST(StateCopyKernel, C01_C02_C05_C13_EveryLaneGathersAndScatters) {
  for (const int32_t lane : {16, 8, 4, 2, 1}) check_all<CopyCast::kNone>({1100, 3, 4, lane, lane % 8 == 0});
}

TEST(StateCopyKernel, C16_EveryLaneOfACast) {
  for (const int32_t lane : {8, 4, 2}) check_all<CopyCast::kBf16>({300, 3, 4, lane, true});
  check_all<CopyCast::kFp16>({300, 3, 4, 8, false});
}

TEST(StateCopyKernel, C05_C13_SeveralWarpsABlock) {
  for (const int32_t lane : {16, 4})
    check_all<CopyCast::kNone>({2100, 9, 10, lane, true, false, false, kCopyMiddleWarps});
  check_all<CopyCast::kBf16>({2100, 3, 4, 8, true, false, false, kCopyMiddleWarps});
}

TEST(StateCopyKernel, C05_C13_Y27_AGuessedRowDoesNotCount) {
  for (const bool late : {false, true}) {
    for (const bool flags : {false, true}) check_all<CopyCast::kNone>({300, 9, 10, 16, flags, true, late});
  }
}

}  // namespace
}  // namespace kda::emulated
