// What the host half of decode_step hands to its kernel.
#pragma once

#include <algorithm>

#include "base/checked.h"
#include "cpu/conv_call.h"
#include "cpu/decode_call.h"

namespace kda::cpu {

struct DecodeStepCall {
  DecodeCall decode;  // args: those of decode_step.decode, without q, k, v
  ConvForm conv;
  const kda_decode_step_desc* desc;
  const kda_decode_step_args* args;
  const ConvRow* conv_rows;  // [N]
};

// Scratch memory of one worker.
struct DecodeStepScratch {
  static constexpr int64_t kValueTiles = 2;  // V <= 1024

  float* head;                   // a HeadScratch
  float* conv[2 + kValueTiles];  // a ConvScratch each: q, k, tiles of v
  float* post;                   // [kTokenGroup, padded(max(K, V))] one part's outputs, in io dtype
  float* norm_weight;            // [padded(V)]
  int64_t post_stride;           // floats a token
  int64_t total;                 // floats in all

  DecodeStepScratch(const kda_decode_step_desc& d, float* base) : total(0) {
    const kda_attention_spec& a = d.decode.attention;
    const auto take = [&](int64_t n) {
      float* p = base == nullptr ? nullptr : base + total;
      total += padded(n);
      return p;
    };
    post_stride = padded(std::max(a.key_dim, a.value_dim));
    head = take(HeadScratch(d.decode, nullptr).total);
    for (int64_t i = 0; i < 2 + kValueTiles; ++i) {
      conv[i] = take(i < 2 + ceil_div(a.value_dim, kConvTile) ? ConvScratch::kFloats : 0);
    }
    post = take(kTokenGroup * post_stride);
    norm_weight = take(a.value_dim);
  }
};

struct DecodeStepFunctions {
  // Query heads [h0, h1) of row n and the value heads that use them.
  void (*run)(const DecodeStepCall& call, int64_t n, int64_t h0, int64_t h1, float* scratch);
};
const DecodeStepFunctions& decode_step_functions(Isa isa);

}  // namespace kda::cpu
