// What the host half of conv and decode_step hands to the convolution kernels (plain data, no SIMD).
#pragma once

#include <cstdint>

#include "core/rows.h"
#include "cpu/common.h"
#include "cpu/conv_pool.h"
#include "cpu/isa.h"

namespace kda::cpu {

// Channels and tokens of one task: a tile's taps, its history and the rows in flight stay in L1 and L2.
constexpr int64_t kConvTile = 512;
constexpr int64_t kConvChunk = 64;
constexpr int64_t kMaxConvWidth = 8;

// What all parts of a convolution have in common.
struct ConvForm {
  int64_t width = 4;  // W
  kda_dtype io_dtype = KDA_BF16;
  bool activation = true;
  kda_conv_mode mode = KDA_CONV_PREFILL;
  bool final_window = false;  // columns mode that keeps the last W-1 inputs only (store = final)
  kda_conv_layout layout = KDA_CONV_SD;

  bool keeps_tail() const { return mode == KDA_CONV_PREFILL || final_window; }
};

// The tensors of one part; `bias` and `state` may be absent.
struct ConvPart {
  const kda_tensor& x;       // [T, channels]
  const kda_tensor& weight;  // [channels, W]
  const kda_tensor& bias;
  const kda_tensor& state;
};

// Scratch memory of one worker.
struct ConvScratch {
  float* taps;     // [W + 1, kConvTile]: tap j of every channel, then the bias
  float* history;  // [2 (W - 1), kConvTile]: the context and the first inputs after it
  static constexpr int64_t kFloats = (kMaxConvWidth + 1 + 2 * (kMaxConvWidth - 1)) * kConvTile;
  explicit ConvScratch(float* base) : taps(base), history(base + (kMaxConvWidth + 1) * kConvTile) {}
};

struct ConvCall {
  ConvForm form;
  const kda_conv_desc* desc;
  const kda_conv_args* args;
  const ConvRow* rows;  // [N]
};

struct ConvFunctions {
  // Taps of channels [c0, c0 + n) of a part into scratch.
  void (*load_taps)(const ConvCall& call, int part, int64_t c0, int64_t n, float* scratch);
  // Tokens [t0, t0 + kConvChunk) of row `seq` over channels [c0, c0 + n); the first chunk also moves the windows.
  void (*run)(const ConvCall& call, int part, int64_t c0, int64_t n, int64_t seq, int64_t t0, float* scratch);
};
const ConvFunctions& conv_functions(Isa isa);

}  // namespace kda::cpu
