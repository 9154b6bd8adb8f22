// Calls of the convolution, and the suite that looks at them.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "harness.h"

namespace kda::conformance::test {

// One call: merged or in three parts, any mode.
struct ConvCall {
  ConvCall(kda_conv_mode mode, const std::vector<int64_t>& channels, const char* backend) {
    kda_conv_desc_init(&desc);
    desc.backend = backend;
    desc.mode = mode;
    desc.width = 4;
    desc.parts = static_cast<int32_t>(channels.size());
    for (size_t i = 0; i < channels.size(); ++i) desc.channels[i] = channels[i];
    desc.io_dtype = KDA_BF16;
    desc.layout = KDA_CONV_DS;
    desc.max_tokens = 4096;
    desc.max_sequences = 64;
  }

  kda_conv_desc desc;
  Tensor x[3], weight[3], bias[3], state[3], out[3];
  std::vector<int64_t> lengths;
  Tensor slots, write_slots, flags, accepted, record_count, record_rows, checkpoint_offsets, checkpoint_slots, active;
  Tensor out_rows;
  std::string message;

  // Window of a slot of part 0 as [channel][column].
  double window(int64_t slot, int64_t channel, int64_t column, int part = 0) const {
    return desc.layout == KDA_CONV_SD ? state[part].get({slot, column, channel})
                                      : state[part].get({slot, channel, column});
  }
  void set_window(int64_t slot, int64_t channel, const std::vector<double>& columns, int part = 0) {
    for (size_t c = 0; c < columns.size(); ++c) {
      const auto column = static_cast<int64_t>(c);
      if (desc.layout == KDA_CONV_SD) state[part].set({slot, column, channel}, columns[c]);
      else state[part].set({slot, channel, column}, columns[c]);
    }
  }
  void make_pool(int64_t count, int64_t columns, kda_dtype dtype) {
    desc.state_dtype = dtype;
    for (int i = 0; i < desc.parts; ++i) {
      const int64_t C = desc.channels[i];
      state[i] = canary_pool(dtype, desc.layout == KDA_CONV_SD ? Shape{count, columns, C} : Shape{count, C, columns},
                             C * columns + 3, 5);
    }
  }
  void make_outputs() {
    for (int i = 0; i < desc.parts; ++i) {
      out[i] = Tensor(desc.out_dtype ? desc.out_dtype : desc.io_dtype, {x[i].shape()[0], desc.channels[i]});
    }
  }
  kda_status run() {
    auto a = sized<kda_conv_args>();
    for (int i = 0; i < desc.parts; ++i) {
      a.x[i] = x[i];
      a.weight[i] = weight[i];
      a.bias[i] = bias[i];
      a.state[i] = state[i];
      a.out[i] = out[i];
    }
    std::vector<int64_t> cu = {0};
    for (int64_t n : lengths) cu.push_back(cu.back() + n);
    const Tensor offsets = Tensor::ints(cu);
    a.sequences.cu_seqlens = offsets;
    a.sequences.num_active = active;
    a.slots = slots;
    a.write_slots = write_slots;
    a.has_initial_state = flags;
    a.accepted = accepted;
    a.record_count = record_count;
    a.record_rows = record_rows;
    a.checkpoint_offsets = checkpoint_offsets;
    a.checkpoint_slots = checkpoint_slots;
    a.out_rows = out_rows;
    Plan plan = make_plan(desc);
    const kda_status status = plan.run(a);
    message = plan.message();
    return status;
  }
};

inline double silu(double x) { return x / (1 + std::exp(-x)); }

// [T, C] inputs that name their token: `value(t)` in every channel.
inline Tensor inputs(const std::vector<double>& tokens, int64_t channels, kda_dtype dtype = KDA_BF16) {
  std::vector<double> x;
  for (double t : tokens) x.insert(x.end(), static_cast<size_t>(channels), t);
  return Tensor::of(dtype, {static_cast<int64_t>(tokens.size()), channels}, x);
}
// Taps in every channel.
inline Tensor taps(const std::vector<double>& w, int64_t channels) {
  std::vector<double> x;
  for (int64_t c = 0; c < channels; ++c) x.insert(x.end(), w.begin(), w.end());
  return Tensor::of(KDA_FP32, {channels, static_cast<int64_t>(w.size())}, x);
}

class ConvTest : public BackendTest {
 protected:
  void SetUp() override {
    const ConvCall call(KDA_CONV_PREFILL, {8}, "auto");
    require(KDA_OP_CONV, &call.desc);
  }
  void expect_window(const ConvCall& call, int64_t slot, const std::vector<double>& wanted) {
    for (int part = 0; part < call.desc.parts; ++part) {
      for (int64_t c = 0; c < call.desc.channels[part]; ++c) {
        for (size_t i = 0; i < wanted.size(); ++i) {
          ASSERT_EQ(call.window(slot, c, static_cast<int64_t>(i), part), wanted[i])
              << "slot " << slot << " part " << part << " channel " << c << " column " << i;
        }
      }
    }
  }
};

}  // namespace kda::conformance::test
