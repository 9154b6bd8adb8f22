// Merging maps of K = 128 into 16 state rows of a block: St := St M + B, one map after the other.
//
// 256 threads; a thread has two columns of four rows. Maps come ahead, by bulk copies into a ring: they do not depend
// on what is merged, so a step costs its arithmetic alone. fp32, one chain of fused multiply-adds from B in the order
// of the channels.
#pragma once

#include <cstdint>

#include "cuda/kernels/segments/params.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mbarrier.h"

namespace kda::cuda {

constexpr int kMapThreads = kMapRows / 4 * kMapDim / 2;

struct MapShared {
  static constexpr uint32_t kMapBytes = kMapDim * kMapDim * 4;
  static constexpr uint32_t kRing = 3;
  static constexpr uint32_t kMaps = 0;
  static constexpr uint32_t kRows = kMaps + kRing * kMapBytes;           // [input column][row] fp32
  static constexpr uint32_t kBarriers = kRows + kMapDim * kMapRows * 4;  // full[ring]
  static constexpr uint32_t kBytes = kBarriers + 8 * kRing;
};

// This thread's two columns of four rows.
struct MapTile {
  float2 row[4];
};
__device__ __forceinline__ MapTile load_tile(const float* from) {
  MapTile tile;
#pragma unroll
  for (int r = 0; r < 4; ++r) tile.row[r] = *reinterpret_cast<const float2*>(from + r * kMapDim);
  return tile;
}
__device__ __forceinline__ void store_tile(const MapTile& tile, float* to) {
#pragma unroll
  for (int r = 0; r < 4; ++r) *reinterpret_cast<float2*>(to + r * kMapDim) = tile.row[r];
}

// sum += rows * map; `rows` and `map`: this thread's four rows and two columns in shared memory. Operands are read a
// batch ahead of their products.
constexpr int kMapBatch = 8;
struct MapOperands {
  float2 map[kMapBatch];
  float4 rows[kMapBatch];
};
__device__ __forceinline__ void load_operands(MapOperands& x, uint32_t rows, uint32_t map) {
#pragma unroll
  for (int k = 0; k < kMapBatch; ++k) {
    x.map[k] = ptx::load_shared_f2(map + k * kMapDim * 4);
    x.rows[k] = ptx::load_shared_f4(rows + k * kMapRows * 4);
  }
}
__device__ __forceinline__ void add_products(MapTile& sum, const MapOperands& x) {
#pragma unroll
  for (int k = 0; k < kMapBatch; ++k) {
    const float a[4] = {x.rows[k].x, x.rows[k].y, x.rows[k].z, x.rows[k].w};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      sum.row[r].x = fmaf(a[r], x.map[k].x, sum.row[r].x);
      sum.row[r].y = fmaf(a[r], x.map[k].y, sum.row[r].y);
    }
  }
}
__device__ __forceinline__ void add_product(MapTile& sum, uint32_t rows, uint32_t map) {
  constexpr uint32_t kRowStep = kMapBatch * kMapRows * 4, kMapStep = kMapBatch * kMapDim * 4;
  MapOperands now, next;
  load_operands(now, rows, map);
#pragma unroll 2
  for (int batch = 0; batch < kMapDim / kMapBatch - 2; batch += 2) {
    load_operands(next, rows += kRowStep, map += kMapStep);
    add_products(sum, now);
    load_operands(now, rows += kRowStep, map += kMapStep);
    add_products(sum, next);
  }
  load_operands(next, rows + kRowStep, map + kMapStep);
  add_products(sum, now);
  add_products(sum, next);
}

// The ring, and this thread's place in the block's rows. Maps are fetched and merged in the same order.
struct MapRing {
  uint32_t shared;
  int column, row;  // the first of the thread's
  uint32_t slot = 0, parity = 0;

  __device__ explicit MapRing(uint32_t memory)
      : shared(memory),
        column(2 * (static_cast<int>(threadIdx.x) % (kMapDim / 2))),
        row(4 * (static_cast<int>(threadIdx.x) / (kMapDim / 2))) {}

  // All threads; a block barrier must follow.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x != 0) return;
    for (uint32_t i = 0; i < MapShared::kRing; ++i) ptx::mbarrier_init(shared + MapShared::kBarriers + i * 8, 1);
    ptx::fence_mbarrier_init();
  }
  // One thread: map `number` of all that are merged, at most kRing ahead of the next. At a multiple of 16 bytes.
  __device__ __forceinline__ void fetch(uint32_t number, const float* map) const {
    const uint32_t place = number % MapShared::kRing, full = shared + MapShared::kBarriers + place * 8;
    ptx::mbarrier_arrive_expect(full, MapShared::kMapBytes);
    ptx::bulk_load(shared + MapShared::kMaps + place * MapShared::kMapBytes, map, MapShared::kMapBytes, full);
  }
  // sum += tile * the next map, whose place in the ring is free then. All threads.
  __device__ __forceinline__ void merge(MapTile& sum, const MapTile& tile) {
    const uint32_t rows = shared + MapShared::kRows + row * 4;
    ptx::store_shared(rows + column * kMapRows * 4,
                      float4{tile.row[0].x, tile.row[1].x, tile.row[2].x, tile.row[3].x});
    ptx::store_shared(rows + (column + 1) * kMapRows * 4,
                      float4{tile.row[0].y, tile.row[1].y, tile.row[2].y, tile.row[3].y});
    __syncthreads();
    ptx::mbarrier_wait(shared + MapShared::kBarriers + slot * 8, parity);
    add_product(sum, rows, shared + MapShared::kMaps + slot * MapShared::kMapBytes + column * 4);
    __syncthreads();  // rows and map are read no more
    slot = slot + 1 == MapShared::kRing ? 0 : slot + 1;
    parity ^= slot == 0 ? 1 : 0;
  }
};

}  // namespace kda::cuda
