// Row movers of the CPU state copies, per ISA. Any address, any length.
#pragma once

#include <cstddef>

#include "cpu/isa.h"

namespace kda::cpu {

// Moves `count` units from src to dst: bytes for plain copies, elements for casts.
using RowMover = void (*)(const char* src, char* dst, size_t count);

struct RowMovers {
  RowMover copy;        // through the cache
  RowMover stream;      // past the cache: for calls that move more than it holds
  RowMover widen_bf16;  // 2-byte -> fp32, exact
  RowMover widen_fp16;
  RowMover narrow_bf16;  // fp32 -> 2-byte, to nearest even, NaN stays NaN
  RowMover narrow_fp16;
};

const RowMovers& row_movers(Isa isa);

}  // namespace kda::cpu
