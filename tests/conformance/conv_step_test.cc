// Steps (columns and records mode) give the same bits however their tensors lie in memory: a backend may take
// channels in groups where they lie together and are aligned, and one by one elsewhere (W-1, W-3..W-5).
#include <algorithm>

#include "conv_fixture.h"

namespace kda::conformance::test {
namespace {

constexpr int64_t kSlots = 10, kColumns = 20;
const std::vector<int64_t> kLengths = {1, 6, 0, 16, 17, 3, 2, 0};

enum class Place { kAligned, kOddWindows, kOddRows };

// Shape, with gaps behind its outermost index and an offset; both odd.
Tensor odd_tensor(kda_dtype dtype, const Shape& shape, bool odd) {
  Shape strides = dense_strides(shape);
  if (odd) strides[0] += 3;
  return Tensor(dtype, shape, strides, odd ? 5 : 0);
}

}  // namespace

class ConvStepTest : public ConvTest {
 protected:
  // Rows of no token, of one, of as many as fit and of one more; dead slots, fresh rows and bad counts.
  ConvCall call_of(kda_conv_mode mode, kda_conv_layout layout, kda_dtype io, Place place) const {
    const std::vector<int64_t> channels = {132, 64, 8};
    ConvCall call(mode, channels, backend());
    call.desc.layout = layout;
    call.desc.io_dtype = call.desc.state_dtype = io;
    call.desc.verify_width = 16;
    call.lengths = kLengths;
    call.slots = Tensor::ints({2, 0, 5, 1, 3, -1, 4, 6});
    if (mode == KDA_CONV_COLUMNS) {
      call.desc.initial_state = KDA_INITIAL_FLAGS;
      call.write_slots = Tensor::ints({2, 8, 5, 1, 3, 9, 4, -1});
      call.flags = Tensor::flags({1, 1, 0, 1, 1, 0, 1, 1});
      call.accepted = Tensor::ints({1, 5, 1, 16, 1, 2, 17, 1});
    } else {
      call.desc.fold = 1;
      call.record_count = Tensor::ints({6, 3, 1, 4, 2, 16, 0, 0, 0, 0});
      call.accepted = Tensor::ints({1, 0, 16, 3, 2, 1, 5, 9});
    }
    int64_t T = 0;
    for (int64_t n : kLengths) T += n;
    std::vector<int64_t> to = iota(T);
    std::reverse(to.begin(), to.end());
    to[3] = -1, to[9] = T;  // rows that are dropped
    call.out_rows = Tensor::ints(to);
    for (int i = 0; i < 3; ++i) {
      const auto stream = static_cast<uint32_t>(i);
      const int64_t C = channels[static_cast<size_t>(i)];
      call.weight[i] = Tensor::of(KDA_FP32, {C, 4}, uniform_vector(10 + stream, C * 4));
      if (i == 1) call.bias[i] = Tensor::of(KDA_FP32, {C}, uniform_vector(20, C));
      call.x[i] = odd_tensor(io, {T, C}, place == Place::kOddRows);
      call.x[i].assign(uniform_vector(30 + stream, T * C));
      call.out[i] = odd_tensor(io, {T, C}, place == Place::kOddRows);
      call.out[i].fill(7);
      const Shape windows = layout == KDA_CONV_SD ? Shape{kSlots, kColumns, C} : Shape{kSlots, C, kColumns};
      call.state[i] = odd_tensor(io, windows, place != Place::kAligned);
      call.state[i].assign(uniform_vector(40 + stream, kSlots * kColumns * C));
    }
    return call;
  }
};
KDA_FOR_BACKENDS(ConvStepTest);

TEST_P(ConvStepTest, W05_BitsDoNotDependOnPlaces) {
  for (const kda_conv_mode mode : {KDA_CONV_COLUMNS, KDA_CONV_RECORDS}) {
    for (const kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) {
      for (const kda_dtype io : {KDA_BF16, KDA_FP16, KDA_FP32}) {
        ConvCall aligned = call_of(mode, layout, io, Place::kAligned);
        ASSERT_EQ(aligned.run(), KDA_OK) << aligned.message;
        for (const Place place : {Place::kOddWindows, Place::kOddRows}) {
          SCOPED_TRACE(testing::Message() << "mode " << mode << " layout " << layout << " io " << io << " place "
                                          << static_cast<int>(place));
          ConvCall odd = call_of(mode, layout, io, place);
          ASSERT_EQ(odd.run(), KDA_OK) << odd.message;
          for (int i = 0; i < 3; ++i) {
            EXPECT_EQ(first_difference(aligned.out[i], odd.out[i]), "");
            EXPECT_EQ(first_difference(aligned.state[i], odd.state[i]), "");
            EXPECT_EQ(odd.out[i].guard_report() + odd.state[i].guard_report(), "");
          }
        }
      }
    }
  }
}

}  // namespace kda::conformance::test
