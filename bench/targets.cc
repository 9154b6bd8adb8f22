#include "bench/targets.h"

#include <fmt/format.h>

namespace kda::bench {
namespace {

using Targets = std::vector<Target>;

struct Row {
  int64_t heads, sequences;
  double fp32, half;  // floors; 0: not held to any
  double us = 0;      // of fp32, in place of floors
};

void add_decode(Targets& all, const char* name, const Row& row, DecodeShape shape) {
  shape.heads = row.heads, shape.sequences = row.sequences;
  for (const kda_dtype state : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    const Limit limit = state != KDA_FP32 ? Limit{row.half, 0, ""} : Limit{row.fp32, row.us, ""};
    if (limit.none()) continue;
    shape.state = state;
    all.push_back({fmt::format("{} H={} N={} {}", name, row.heads, row.sequences, kda_dtype_name(state)),
                   [shape](const Setting& s) { return decode(s, shape); }, limit});
  }
}

void add_decodes(Targets& all) {
  constexpr Row kDecode[] = {{32, 1, 0, 0, 2.5},    {12, 1, 0, 0, 2.5},   {32, 32, 1.10, 1.20}, {12, 128, 1.10, 1.20},
                             {32, 128, 1.04, 1.10}, {64, 64, 1.04, 1.10}, {96, 256, 1.04, 1.10}};
  constexpr Row kVerify[] = {{32, 32, 1.08, 1.20}, {96, 128, 1.08, 1.20}};
  constexpr Row kFolded[] = {{32, 32, 0, 0, 45}, {96, 128, 0, 0, 460}};
  constexpr Row kStep[] = {{12, 1, 0, 0, 3.2},    {32, 1, 0, 0, 3.2},    {32, 8, 1.25, 0},     {32, 32, 1.06, 1.15},
                           {12, 128, 1.06, 1.15}, {32, 128, 1.06, 1.15}, {64, 64, 1.06, 1.15}, {96, 256, 1.06, 1.15}};
  for (const Row& row : kDecode) add_decode(all, "decode", row, {});
  DecodeShape shape;
  shape.step = true;
  for (const Row& row : kStep) add_decode(all, "decode_step", row, shape);
  shape.step = false, shape.width = 4;
  for (const Row& row : kVerify) add_decode(all, "verify S=3", row, shape);
  shape.records = true;
  for (const Row& row : kFolded) add_decode(all, "verify S=3 folded commit", row, shape);
}

// 97 % of the copy rate from 256 MB on, 94 % from 128 MB, below 2 us and 1.1 times the bytes (state-copy.md U-9).
Limit copy_limit(double bytes, const char* variant) {
  if (bytes >= 256e6) return {1 / 0.97, 0, variant};
  if (bytes >= 128e6) return {1 / 0.94, 0, variant};
  return {1.1, 2, variant};
}

void add_copies(Targets& all) {
  struct Pool {
    int64_t heads;
    kda_dtype dtype;
    bool gapped;
  };
  for (const Pool& pool : {Pool{32, KDA_FP32, false}, Pool{32, KDA_BF16, false}, Pool{12, KDA_FP32, true}}) {
    for (const int64_t rows : {1, 8, 32, 128, 256}) {
      for (const bool checked : {false, true}) {  // int64 indices and flags
        if (checked && rows != 8 && rows != 128) continue;
        const CopyShape shape{rows, pool.heads, pool.dtype, checked ? KDA_INT64 : KDA_INT32, pool.gapped, checked};
        const double bytes = 2.0 * static_cast<double>(rows * pool.heads * 128 * 128) *
                             static_cast<double>(kda_dtype_size(pool.dtype));
        for (const char* what : {"gather", "scatter"}) {
          all.push_back({fmt::format("copy {} H={} {}{} n={}{}", what, pool.heads, kda_dtype_name(pool.dtype),
                                     pool.gapped ? " paged" : "", rows, checked ? " int64 flags" : ""),
                         [shape](const Setting& s) { return copy(s, shape); }, copy_limit(bytes, what)});
        }
      }
    }
  }
}

void add_tokens(Targets& all) {
  for (const int64_t heads : {12, 32, 96}) {
    ConvShape conv_shape;
    conv_shape.heads = heads;
    conv_shape.layout = KDA_CONV_DS;
    all.push_back({fmt::format("conv T=8192 H={}", heads),
                   [conv_shape](const Setting& s) { return conv(s, conv_shape); },
                   {1.12, 0, ""}});
  }
  for (const int64_t heads : {12, 32, 96}) {
    const NormShape norm_shape{heads};
    all.push_back({fmt::format("gated norm T=8192 H={}", heads),
                   [norm_shape](const Setting& s) { return gated_norm(s, norm_shape); },
                   {1.05, 0, ""}});
  }
}

void add_metadata(Targets& all) {
  for (const int64_t rows : {1, 32, 1024, 4096}) {
    for (const bool prompts : {false, true}) {
      const MetadataShape shape{rows, 1, prompts ? 64 : 0, std::min<int64_t>(4096, 16384 / rows + 64)};
      all.push_back({fmt::format("metadata N={}{}", rows, prompts ? " with prompts" : ""),
                     [shape](const Setting& s) { return metadata(s, shape); },
                     {0, 5, ""}});
    }
  }
}

}  // namespace

std::vector<Target> targets(const std::string& filter) {
  Targets all, wanted;
  add_decodes(all);
  add_tokens(all);
  add_copies(all);
  add_metadata(all);
  for (Target& t : all) {
    if (t.name.find(filter) != std::string::npos) wanted.push_back(std::move(t));
  }
  return wanted;
}

}  // namespace kda::bench
