// chunk_indices[r] = (sequence, chunk within it), chunk_offsets[i] = chunks before sequence i (M-14..M-19)
//
// Grid       a few blocks, each with a contiguous share of the sequences and of the padding. Blocks exchange nothing:
//            each sums up all lengths once (they are small and in the L2) to know what lies before its share.
// Lengths    len_i = clamp(cu[i+1]) - clamp(cu[i]), 0 if negative; cut so that all together are at most T, that is
//            min(T, P + len) - min(T, P) with the running sum P. Where the sum of all is at most T nothing is cut,
//            and no running sum is needed: the usual case. (M-19)
// Precision  64-bit sums throughout.
#pragma once

#include "cuda/kernels/metadata/block.cuh"

namespace kda::cuda {

__device__ __forceinline__ int64_t clamped_length(const IndexRef& cu, int64_t i, int64_t tokens) {
  const RawIndex a = cu.raw(i), b = cu.raw(i + 1);
  const int64_t begin = min(max(a.value(), int64_t{0}), tokens), end = min(max(b.value(), int64_t{0}), tokens);
  return max(end - begin, int64_t{0});
}
__device__ __forceinline__ int64_t cut_length(int64_t length, int64_t before, int64_t tokens) {
  return min(tokens, before + length) - min(tokens, before);
}
__device__ __forceinline__ int64_t chunks_of(int64_t length, int64_t chunk) { return (length + chunk - 1) / chunk; }

struct ChunkTotals {
  int64_t before = 0, all = 0;  // chunks before this block's first sequence, and of all
  int64_t tokens_before = 0;    // lengths before it; known where lengths are cut
  bool cut = false;
};

// Rows of this block.
struct Share {
  int64_t first, last;
  __device__ __forceinline__ explicit Share(int64_t n) {
    const int64_t each = (n + gridDim.x - 1) / gridDim.x;
    first = min(n, each * blockIdx.x);
    last = min(n, first + each);
  }
};

struct ChunkShared {
  uint64_t part[kMetadataWarps][3];
  uint64_t scan[kMetadataWarps][1];
  int64_t prefix[kMetadataThreads];  // chunks of the tile before each of its sequences
  int64_t first;
};

__device__ __forceinline__ ChunkTotals count_all_chunks(const ChunkParams& p, const Share& share, ChunkShared& s) {
  ChunkTotals t;
  uint64_t sums[3] = {};  // lengths, chunks, chunks before the share
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < p.n; i += kMetadataThreads) {
    const int64_t length = clamped_length(p.cu, i, p.tokens);
    const auto chunks = static_cast<uint64_t>(chunks_of(length, p.chunks.chunk));
    sums[0] += static_cast<uint64_t>(length);
    sums[1] += chunks;
    if (i < share.first) sums[2] += chunks;
  }
  block_sums(sums, s.part);
  t.cut = sums[0] > static_cast<uint64_t>(p.tokens);
  if (t.cut) {  // bad offsets: once more, in order
    uint64_t running = 0;
    sums[1] = sums[2] = 0;
#pragma unroll 1
    for (int64_t tile = 0; tile < p.n; tile += kMetadataThreads) {
      const int64_t i = tile + threadIdx.x;
      uint64_t x[1] = {i < p.n ? static_cast<uint64_t>(clamped_length(p.cu, i, p.tokens)) : 0}, before[1], all[1];
      block_running_sums(x, before, all, s.scan);
      const auto at = static_cast<int64_t>(running + before[0]);
      const auto chunks =
          static_cast<uint64_t>(chunks_of(cut_length(static_cast<int64_t>(x[0]), at, p.tokens), p.chunks.chunk));
      sums[1] += chunks;
      if (i < share.first) sums[2] += chunks;
      if (i == share.first) s.first = at;
      running += all[0];
    }
    sums[0] = 0;
    block_sums(sums, s.part);
    t.tokens_before = s.first;
  }
  t.all = static_cast<int64_t>(sums[1]);
  t.before = static_cast<int64_t>(sums[2]);
  return t;
}

// Offsets behind the last sequence repeat the total, rows behind the last chunk are (-1, -1).
__device__ __forceinline__ void pad_chunk_tables(const ChunkTableRef& t, int64_t sequences, int64_t chunks,
                                                 int32_t wide) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x, at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (int64_t i = sequences + at; i < t.entries; i += stride) t.offsets[i] = chunks;
#pragma unroll 1
  for (int64_t r = chunks + at; r < t.rows; r += stride) put_pair(t.indices, r, -1, -1, wide);
}

__global__ void __launch_bounds__(kMetadataThreads) build_chunks_kernel(const __grid_constant__ ChunkParams p) {
  __shared__ ChunkShared s;
  touch_parameters(p);
  wait_for_previous_grid();
  const Share share(p.n);
  const ChunkTotals totals = count_all_chunks(p, share, s);
  int64_t chunks_before = totals.before, tokens_before = totals.tokens_before;
#pragma unroll 1
  for (int64_t tile = share.first; tile < share.last; tile += kMetadataThreads) {
    const int64_t i = tile + threadIdx.x;
    int64_t length = i < share.last ? clamped_length(p.cu, i, p.tokens) : 0;
    if (totals.cut) {
      uint64_t x[1] = {static_cast<uint64_t>(length)}, before[1], all[1];
      block_running_sums(x, before, all, s.scan);
      length = cut_length(length, tokens_before + static_cast<int64_t>(before[0]), p.tokens);
      tokens_before += static_cast<int64_t>(all[0]);
    }
    uint64_t x[1] = {static_cast<uint64_t>(chunks_of(length, p.chunks.chunk))}, before[1], all[1];
    block_running_sums(x, before, all, s.scan);
    s.prefix[threadIdx.x] = static_cast<int64_t>(before[0]);
    if (i < share.last) p.chunks.offsets[i] = chunks_before + static_cast<int64_t>(before[0]);
    __syncthreads();
    const auto rows = static_cast<int32_t>(min(share.last - tile, int64_t{kMetadataThreads}));
#pragma unroll 1
    for (int64_t c = threadIdx.x; c < static_cast<int64_t>(all[0]); c += kMetadataThreads) {
      const int32_t r = owner_of(s.prefix, rows, c);
      const int64_t row = chunks_before + c;
      if (row < p.chunks.rows) put_pair(p.chunks.indices, row, tile + r, c - s.prefix[r], p.wide);
    }
    chunks_before += static_cast<int64_t>(all[0]);
    __syncthreads();
  }
  pad_chunk_tables(p.chunks, p.n, totals.all, p.wide);
}

__global__ void __launch_bounds__(kMetadataThreads)
    write_chunk_piece_kernel(const __grid_constant__ ChunkPieceParams p) {
  wait_for_previous_grid();
  const int64_t stride = int64_t{gridDim.x} * blockDim.x, at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (int64_t i = at; i < p.count; i += stride) p.chunks.offsets[p.first + i] = p.offset[i];
#pragma unroll 1
  for (int64_t row = p.offset[0] + at; row < p.offset[p.count]; row += stride) {
    const int32_t r = owner_of(p.offset, p.count, row);
    if (row < p.chunks.rows) put_pair(p.chunks.indices, row, p.first + r, row - p.offset[r], p.wide);
  }
  if (p.last) pad_chunk_tables(p.chunks, p.first + p.count, p.offset[p.count], p.wide);
}

}  // namespace kda::cuda
