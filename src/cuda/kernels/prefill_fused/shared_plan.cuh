// The whole shared-memory plan of the fused prefill, and the ring arithmetic both roles agree on.
//
// stage (4 of them): what one 32-token item needs as wgmma operands, 39 KB
//   keys     K~  [32 tokens, 128 k]  fp16, two 64-column halves, 128-byte swizzle
//   queries  Q~  the same            update_high, update_low: K^ = hi + lo, the same layout
//   solve    T'  [32 i, hi 32 j | lo 32 j] fp16, 128-byte swizzle      scores  M [32 i, 32 j] fp16, 64-byte swizzle
//   decay    e^Gamma(-1, L) [128] fp32, see decay_place      wild     a flag
// values: per consumer warp a ring of 4 tiles [32 tokens, 16 v] bf16; a tile that was read holds the output tile
// scratch: per producer warp its gate prefix sums [32 tokens, 32 k] fp32; later partial scores, then T's diagonal
// blocks and, in the first solving warp's, T_32
#pragma once

#include <cstdint>

#include "cuda/kernels/prefill_fused/params.h"
#include "cuda/ptx/mbarrier.h"

namespace kda::cuda::prefill_fused {

constexpr int kChunk = 32;       // tokens of an item
constexpr int kDim = 128;        // K = V
constexpr int kRowsPerCta = 64;  // value rows
constexpr int kClusterSize = 2;  // CTAs of a cluster: together all value rows of one head
constexpr int kStages = 4;       // = preparing warpgroups of a cluster: item i is prepared by, and lies in, i % 4
constexpr int kConsumerThreads = 128;
constexpr int kProducerGroups = 2;  // warpgroups a CTA
constexpr int kThreads = kConsumerThreads + kProducerGroups * 128;

struct Stage {
  static constexpr uint32_t kKeys = 0;
  static constexpr uint32_t kQueries = 8192;
  static constexpr uint32_t kUpdateHigh = 16384;
  static constexpr uint32_t kUpdateLow = 24576;
  static constexpr uint32_t kSolve = 32768;
  static constexpr uint32_t kScores = 36864;
  static constexpr uint32_t kDecay = 38912;
  static constexpr uint32_t kWild = 39424;    // uint32: not 0 where U may be large although R is not
  static constexpr uint32_t kBytes = 39440;   // what travels to the other CTA
  static constexpr uint32_t kStride = 39936;  // keeps every stage on 1024 bytes
  static constexpr uint32_t kHalf = 4096;     // columns 64..127 of a [32, 128] operand
};

// At the start of every kernel's shared memory: what all CTAs read of the sequences at their start.
struct Tables {
  static constexpr uint32_t kOrder = 0;  // sequences, longest first; as they are where lengths are equal by layout
  static constexpr int kMaxOrdered = 512;
  static constexpr uint32_t kTable = kOrder + 2 * kMaxOrdered;  // SequenceEntry of every sequence
  static constexpr int kMaxTabled = static_cast<int>(kMostTabledSequences);
  static constexpr uint32_t kBytes = kTable + 32 * kMaxTabled;
};
static_assert(Tables::kBytes % 1024 == 0);  // stages follow

constexpr uint32_t kValueBytes = 16384;    // 4 warps x 4 tiles x 1 KB
constexpr uint32_t kScratchBytes = 16384;  // of a producer group
constexpr uint32_t kGroupBytes = 6912;     // GroupArea
constexpr uint32_t kUnitBytes = 128;       // UnitArea
constexpr uint32_t kOpenWorkBytes = 128;   // OpenWork, of a consumer warp
constexpr uint32_t kShareBytes = 48;       // Share

// The fused kernel. What a producer group has lies together, from a multiple of 1024 on: one register holds the place
// and the thread's index.
struct Shared {
  static constexpr uint32_t kStage = Tables::kBytes;
  static constexpr uint32_t kValues = kStage + kStages * Stage::kStride;
  static constexpr uint32_t kGroups = kValues + kValueBytes;
  static constexpr uint32_t kArea = kScratchBytes;  // of a group, behind its scratch: GroupArea
  static constexpr uint32_t kGroupStride = 23 * 1024;
  static constexpr uint32_t kBarriers = kGroups + kProducerGroups * kGroupStride;  // full[4], empty[4]
  static constexpr uint32_t kShare = kBarriers + 64;
  static constexpr uint32_t kOpenWorks = kShare + kShareBytes;
  static constexpr uint32_t kParams = kOpenWorks + 4 * kOpenWorkBytes;  // the kernel's again, see shared_params
  static constexpr uint32_t kBytes = kParams + (sizeof(Params) + 15) / 16 * 16;
};
static_assert(Shared::kGroups % 1024 == 0 && Shared::kArea + kGroupBytes <= Shared::kGroupStride);
static_assert(Shared::kBytes <= 232448);

// The staged form's first kernel: producer groups, each on items of its own.
// What is asked for is taken from the L1 cache, where loads in flight have their lines: above 195 KB it keeps 28 KB.
template <int kGroups, bool kRowsWait>
struct PrepareShared {
  // From which byte on a group holds its stage here: with four groups only what the solve makes.
  static constexpr uint32_t kHeldFrom = kGroups == 4 ? Stage::kSolve : 0;
  static constexpr uint32_t kFirst = Tables::kBytes;
  // Of a group: its part of the stage first.
  static constexpr uint32_t kScratch = Stage::kStride - kHeldFrom;
  static constexpr uint32_t kArea = kScratch + kScratchBytes;  // GroupArea
  static constexpr uint32_t kUnit = kArea + kGroupBytes;       // UnitArea
  static constexpr uint32_t kRows = kUnit + kUnitBytes;        // RowsAhead
  static constexpr uint32_t kRowsBytes = kRowsWait ? 24576 : 0;
  static constexpr uint32_t kStride = (kRows + kRowsBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kBytes = kFirst + kGroups * kStride;
};
static_assert(PrepareShared<4, true>::kBytes <= 232448 && PrepareShared<3, false>::kBytes <= 196 * 1024 - 1024);

// Its second: consumer warpgroups and a ring of stages.
template <int kGroups>
struct ChainShared {
  static constexpr uint32_t kStages = kGroups == 1 ? 5 : 4;
  static constexpr uint32_t kStage = Tables::kBytes;
  static constexpr uint32_t kValues = kStage + kStages * Stage::kStride;
  static constexpr uint32_t kBarriers = kValues + kGroups * kValueBytes;  // full[], empty[]
  static constexpr uint32_t kTileBarriers = kBarriers + 16 * kStages;     // of each warp: values[4], outputs[4]
  static constexpr uint32_t kCounts = kTileBarriers + 256 * kGroups;      // of each warp: outputs in tile [4]
  static constexpr uint32_t kOpenWorks = kCounts + 64 * kGroups;
  static constexpr uint32_t kBytes = kOpenWorks + 4 * kGroups * kOpenWorkBytes;
};
static_assert(ChainShared<1>::kBytes <= 232448 && ChainShared<2>::kBytes <= 232448);

// Per producer warpgroup.
struct GroupArea {
  // [|q|^2, |k|^2, q.k][32 tokens][4 warps] fp32
  static constexpr uint32_t kSums = 0;
  static constexpr uint32_t kBeta = 1536;  // [32] fp32
  // N_ij = beta_i A_ij: [32][36] fp32; before that, of each warp, norm factors and 2^B of its channels.
  static constexpr uint32_t kSystem = 1664;
  static constexpr uint32_t kNorms = kSystem;          // [4 warps][32 tokens]{q, k} fp32
  static constexpr uint32_t kTotals = kSystem + 1024;  // [4 warps] ChannelTotals
  static constexpr int kPitch = 36;
  static constexpr uint32_t kSource = 6272;    // the open work: see Source in prepare_rows.cuh; around the next two
  static constexpr uint32_t kNextWork = 6336;  // int64
  static constexpr uint32_t kPosition = 6344;  // item of the open work, its items * 2 + the stage's parity: uint32
  static constexpr uint32_t kBias = 6400;      // [128] fp32
};

// Powers of the block totals of a warp's 32 channels, [32 k] fp32 each.
struct ChannelTotals {
  static constexpr uint32_t kBefore = 0;    // 2^B0: block 0 before a row of block 1
  static constexpr uint32_t kAfter = 128;   // anchored: 2^(B0 + B1), from block 0's start to the chunk's end;
  static constexpr uint32_t kAfter1 = 256;  // 2^B1
  static constexpr uint32_t kBytes = 384;
};

// In a warp's scratch, once the partial scores are summed: the diagonal blocks of T.
struct SolveArea {
  static constexpr uint32_t kRows = 0;        // T_bb: [4 b][8 i][12 j] fp32
  static constexpr uint32_t kColumns = 1664;  // and transposed
  static constexpr uint32_t kLast = 3328;     // T_32, by rows: left to the first of the solving warps by the other
  static constexpr uint32_t kRowBytes = 48;
  static constexpr uint32_t kBlockBytes = 416;  // 8 rows and 32 bytes: four blocks' stores hit different banks
};

extern __shared__ __align__(1024) unsigned char s_memory[];

// The parameters for functions that are not inlined: of a reference to the kernel's own these read every field from
// global memory (500 cycles each on an H200, docs/kernels/prefill.md).
__device__ __forceinline__ const Params& shared_params() {
  return *reinterpret_cast<const Params*>(s_memory + Shared::kParams);
}

// Byte of the 16-byte column `column16` of row `row` in an operand of 128-byte rows with 128-byte swizzle.
__host__ __device__ constexpr uint32_t swizzle_128(uint32_t row, uint32_t column16) {
  return row * 128 + ((column16 ^ (row & 7)) << 4);
}
// Where a channel's decay stands in a stage: what a lane of an accumulator needs of 16 channels lies together.
__host__ __device__ constexpr uint32_t decay_place(uint32_t channel) {
  return (channel & ~15u) + ((channel >> 1) & 3) * 4 + ((channel >> 3) & 1) * 2 + (channel & 1);
}
// swizzle_128 for 64-byte rows with 64-byte swizzle.
__host__ __device__ constexpr uint32_t swizzle_64(uint32_t row, uint32_t column16) {
  return row * 64 + ((column16 ^ ((row >> 1) & 3)) << 4);
}
// Gate prefix sums of a producer warp: 16-byte column c of token row t.
__host__ __device__ constexpr uint32_t prefix_offset(uint32_t token, uint32_t column16) {
  return token * 128 + ((column16 ^ ((token >> 2) & 1)) << 4);
}
// Value and output tiles of a consumer warp: 8-value half `half` of token row t.
__host__ __device__ constexpr uint32_t tile_offset(uint32_t token, uint32_t half) {
  return token * 32 + ((half ^ ((token >> 2) & 1)) << 4);
}

}  // namespace kda::cuda::prefill_fused
