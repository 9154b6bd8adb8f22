// Row movers of the state copies on every instruction set of this machine (spec C-16, C-17, G-2, T-6, Y-18).
#include "cpu/state_copy_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/half.h"
#include "kda/kda.h"

namespace kda::cpu {
namespace {

constexpr size_t kGuard = 96;

// Source and destination at odd addresses, destination guarded.
struct Buffers {
  Buffers(size_t from, size_t to, size_t shift, uint64_t seed)
      : source(from + shift + 8), target(to + shift + 2 * kGuard, 0xC3), in(shift), out(kGuard + shift), size(to) {
    std::mt19937_64 random(seed);
    for (auto& b : source) b = static_cast<unsigned char>(random());
  }
  char* src() { return reinterpret_cast<char*>(source.data()) + in; }
  char* dst() { return reinterpret_cast<char*>(target.data()) + out; }
  bool guards_intact() const {
    for (size_t i = 0; i < target.size(); ++i) {
      if ((i < out || i >= out + size) && target[i] != 0xC3) return false;
    }
    return true;
  }
  std::vector<unsigned char> source, target;
  size_t in, out, size;
};

class RowMoverTest : public ::testing::TestWithParam<Isa> {};

TEST_P(RowMoverTest, C17_CopiesKeepEveryByteAtAnyAddressAndLength) {
  const RowMovers& movers = row_movers(GetParam());
  for (RowMover mover : {movers.copy, movers.stream}) {
    for (size_t shift : {0, 1, 3, 8, 63}) {
      for (size_t count : {0, 1, 2, 31, 63, 64, 65, 127, 255, 256, 300, 511, 1024, 4097}) {
        Buffers b(count, count, shift, count);
        mover(b.src(), b.dst(), count);
        ASSERT_EQ(std::memcmp(b.src(), b.dst(), count), 0) << count << " " << shift;
        ASSERT_TRUE(b.guards_intact()) << count << " " << shift;
      }
    }
  }
}

// NaN by kind, everything else by bits; a widened signalling NaN may come out quiet.
void expect_widened(float got, float wanted) {
  if (std::isnan(wanted)) {
    ASSERT_TRUE(std::isnan(got) && std::signbit(got) == std::signbit(wanted));
  } else {
    ASSERT_EQ(std::memcmp(&got, &wanted, 4), 0) << got << " " << wanted;
  }
}

template <class Half>
void check_widen(RowMover mover) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> out(all.size());
  mover(reinterpret_cast<const char*>(all.data()), reinterpret_cast<char*>(out.data()), all.size());
  for (size_t i = 0; i < all.size(); ++i) expect_widened(out[i], to_float(Half{all[i]}));
  for (size_t count = 0; count < 70; ++count) {
    Buffers b(2 * count, 4 * count, count % 5, count);
    mover(b.src(), b.dst(), count);
    ASSERT_TRUE(b.guards_intact()) << count;
  }
}

TEST_P(RowMoverTest, T06_C16_WideningIsExactForAllPatterns) {
  check_widen<bf16>(row_movers(GetParam()).widen_bf16);
  check_widen<fp16>(row_movers(GetParam()).widen_fp16);
}

template <class Half>
void check_narrow(RowMover mover) {
  std::vector<float> in;
  std::mt19937 random(4);
  // Every 16-bit pattern of the upper half with the lower halves that decide a rounding.
  for (uint32_t high = 0; high < 65536; ++high) {
    for (uint32_t low :
         {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, static_cast<uint32_t>(random() & 0xffff)}) {
      const uint32_t bits = high << 16 | low;
      float x;
      std::memcpy(&x, &bits, 4);
      in.push_back(x);
    }
  }
  // Ties and neighbours of fp16, denormals included.
  for (int e = -26; e <= 16; ++e) {
    for (int m = 0; m < 64; ++m) {
      const float x = std::ldexp(1.0f + static_cast<float>(m) / 64.0f + 0x1p-11f, e);
      for (float y : {x, std::nextafter(x, 0.0f), std::nextafter(x, 1e9f)}) in.push_back(y), in.push_back(-y);
    }
  }
  std::vector<uint16_t> out(in.size());
  mover(reinterpret_cast<const char*>(in.data()), reinterpret_cast<char*>(out.data()), in.size());
  for (size_t i = 0; i < in.size(); ++i) {
    const Half wanted = from_float<Half>(in[i]);
    if (std::isnan(in[i])) {
      ASSERT_TRUE(std::isnan(to_float(Half{out[i]}))) << in[i];
    } else {
      ASSERT_EQ(out[i], wanted.bits) << in[i];
    }
  }
  for (size_t count = 0; count < 70; ++count) {
    Buffers b(4 * count, 2 * count, count % 3, count);
    mover(b.src(), b.dst(), count);
    ASSERT_TRUE(b.guards_intact()) << count;
  }
}

TEST_P(RowMoverTest, T06_G02_NarrowingRoundsToNearestEven) {
  check_narrow<bf16>(row_movers(GetParam()).narrow_bf16);
  check_narrow<fp16>(row_movers(GetParam()).narrow_fp16);
}

INSTANTIATE_TEST_SUITE_P(Isas, RowMoverTest, ::testing::ValuesIn(available_isas()),
                         [](const auto& isa) { return std::string(isa_name(isa.param)); });

TEST(StateCopyIsa, Y18_AForcedIsaIsHonouredAndAnAbsentOneIsUnsupported) {
  const char* before = std::getenv("KDA_FORCE_ISA");
  const std::string saved = before != nullptr ? before : "";
  setenv("KDA_FORCE_ISA", "portable", 1);
  kda_context* context = nullptr;
  ASSERT_EQ(kda_context_create(nullptr, &context), KDA_OK);
  float memory[64] = {};
  kda_state_copy_desc desc{};
  desc.struct_size = sizeof desc;
  desc.pool.data = memory;
  desc.pool.dtype = KDA_FP32;
  desc.pool.rank = 4;
  for (int i = 0; i < 4; ++i) desc.pool.shape[i] = 2, desc.pool.strides[i] = 8 >> i;
  desc.max_selected = 2;
  kda_plan* plan = nullptr;
  ASSERT_EQ(kda_state_copy_plan_create(context, &desc, &plan), KDA_OK) << kda_last_error();
  EXPECT_STREQ(kda_plan_isa(plan), "portable");
  kda_plan_destroy(plan);
  kda_context_destroy(context);
  setenv("KDA_FORCE_ISA", "sse9", 1);
  EXPECT_EQ(kda_context_create(nullptr, &context), KDA_UNSUPPORTED);
  if (before != nullptr) setenv("KDA_FORCE_ISA", saved.c_str(), 1);
  else unsetenv("KDA_FORCE_ISA");
}

}  // namespace
}  // namespace kda::cpu
