// Step metadata (spec metadata.md M-1..M-19): inputs of a step, the caller's tables, chunk tables alone.
#pragma once

#include "cuda/kernels/common/kernel_info.h"
#include "cuda/kernels/common/views.h"

namespace kda::cuda {

struct FlagRef {
  const uint8_t* data = nullptr;  // [N]; null: absent
  int64_t stride = 0;
};
struct Int32Ref {
  const int32_t* data = nullptr;  // [N]; null: absent
  int64_t stride = 0;
};

// Tables of one group of rows, of plan capacity; each may be null. "offset": int32 or int64, as cu.
struct GroupRef {
  int32_t* rows = nullptr;   // [Nmax]
  void* begin = nullptr;     // [Nmax] offset
  void* length = nullptr;    // [Nmax] offset
  void* offsets = nullptr;   // [Nmax+1] offset; none for decode
  int32_t* slots = nullptr;  // [Nmax, columns]
  int32_t columns = 1;
};
enum Group : int32_t { kDecodeGroup = 0, kPrefillGroup = 1, kSpecGroup = 2, kGroups = 3 };

// ceil(length / C) for lengths below 2^31 without a division: rows of more than one chunk would wait for it.
struct ChunkDivisor {
  uint32_t factor = 1u << 31;  // ceil(2^(31 + shift) / C), with C at most 2^shift
  int32_t shift = 0;
};

struct ChunkTableRef {
  void* indices = nullptr;     // [rows, 2], int32 or int64
  int64_t* offsets = nullptr;  // [entries]
  int64_t rows = 0, entries = 0;
  int64_t chunk = 64;  // C
};

// What the padding of a table starts behind, and what it repeats: sizes of the step, known to the device alone.
enum StepSize : int32_t {
  kDecodeRows,
  kDecodeTokens,
  kPrefillRows,
  kPrefillTokens,
  kSpecRows,
  kSpecTokens,
  kNonSpecRows,
  kNonSpecTokens,
  kChunks,
  kStepRows,
  kStepSizes
};

// The tail of one table: entries from size[start] * scale + skip on get a constant, or size[value] if that is given.
struct PadRef {
  void* data = nullptr;
  int64_t entries = 0;
  int32_t bytes = 4;  // of an entry
  int32_t start = 0;  // StepSize
  int32_t scale = 1, skip = 0;
  int32_t value = -1;  // StepSize; -1: `constant`
  int32_t constant = -1;
};
constexpr int32_t kMostPads = 26;

struct MetadataParams {
  // The step.
  const void* cu = nullptr;  // [N+1] int32 or int64
  int64_t cu_stride = 1;
  Int32Ref computed, drafts, accepted;  // [N]
  FlagRef has_state, prefilling;        // [N]
  IndexRef slots;                       // [N, width]
  const int32_t* num_active = nullptr;  // on the device
  int32_t active = 0;                   // without it
  int32_t n = 0;                        // N
  int32_t tokens = 0;                   // T
  int32_t width = 1;
  int32_t by_drafts = 0;
  int32_t vectors = 0;  // the inputs by row are whole, dense, aligned groups of four
  int32_t share = 0;    // rows of a block, a multiple of four
  // The tables.
  GroupRef groups[kGroups];
  void* non_spec_offsets = nullptr;    // [Nmax+1] offset
  int32_t* non_spec_tokens = nullptr;  // [Tmax]
  int32_t* spec_tokens = nullptr;      // [min(Tmax, Nmax * width)]
  uint8_t* has_initial = nullptr;      // [Nmax]
  int32_t* accepted_out = nullptr;     // [Nmax]
  uint8_t* spec_mask = nullptr;        // [Nmax]
  int32_t* counts = nullptr;           // [8]
  ChunkTableRef chunks;                // null: not asked for here
  ChunkDivisor divisor;                // of the plan's chunks
  int32_t pads = 0;
  PadRef pad[kMostPads];
};

// Chunk tables of any offsets.
struct ChunkParams {
  IndexRef cu;         // [N+1]
  int64_t n = 0;       // N
  int64_t tokens = 0;  // T
  int32_t wide = 0;
  ChunkTableRef chunks;
};

// Chunk tables whose offsets the host has computed: a run of sequences travels in the launch itself.
constexpr int32_t kHostPiece = 3900;
struct ChunkPieceParams {
  ChunkTableRef chunks;
  int64_t first = 0;  // sequence number of offset[0]
  int32_t count = 0;  // sequences
  int32_t last = 0;   // the piece that pads both tables
  int32_t wide = 0;
  int64_t offset[kHostPiece + 1];  // chunks before each sequence, and after the last
};

constexpr int32_t kMetadataThreads = 512;

KernelInfo metadata_kernel_info(bool wide);
KernelInfo chunk_kernel_info();
KernelInfo chunk_piece_kernel_info();

}  // namespace kda::cuda
