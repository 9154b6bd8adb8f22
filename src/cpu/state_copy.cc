// State copies on the CPU: four variants a layout, their row movers chosen once by ISA (spec Y-17, Y-18).
//
// Work split: a call of less than kParallelBytes is one loop over its rows; a larger one is cut into slices of
// rows that the context's workers claim. Slices are disjoint for distinct rows, so no thread count changes a bit.
#include "cpu/state_copy.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <unistd.h>
#endif

#include "base/checked.h"
#include "cpu/state_copy_kernels.h"

namespace kda::cpu {
namespace {

constexpr int64_t kSliceBytes = 256 << 10;  // of the packed side; also keeps memcpy in its fast range
constexpr int64_t kParallelBytes = 512 << 10;
constexpr int64_t kDefaultCacheBytes = 32 << 20;

// What the variants find in CopyTable::private_.
struct Movers {
  RowMover gather = nullptr;
  RowMover scatter = nullptr;
  RowMover stream = nullptr;  // plain copies only
  int64_t pool_unit = 1;      // bytes that one unit of a mover covers on each side
  int64_t packed_unit = 1;
  int64_t units = 0;  // of a row
  int64_t cache_bytes = kDefaultCacheBytes;
};

int64_t cache_bytes() {
#if defined(__linux__) && defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return kDefaultCacheBytes;
}

// Row of the pool, or -1: the only place where an index becomes an address (spec C-7..C-9, C-15).
template <class Index>
int64_t pool_row(const CopyTable& table, const CopyCall& call, int64_t i) {
  const auto index = static_cast<int64_t>(static_cast<const Index*>(call.indices)[i * call.index_stride]);
  return index >= 0 && index < table.rows ? index : -1;
}

// Units [first, first + count) of row i.
template <class Index, bool kScatter>
void move_slice(const CopyTable& table, const CopyCall& call, const Movers& movers, RowMover mover, int64_t i,
                int64_t first, int64_t count) {
  char* packed = call.packed + i * call.packed_stride + first * movers.packed_unit;
  const int64_t row = pool_row<Index>(table, call, i);
  const bool live = row >= 0 && (call.flags == nullptr || call.flags[i] != 0);
  if (!live) {
    if (!kScatter) std::memset(packed, 0, static_cast<size_t>(count * movers.packed_unit));
    return;
  }
  char* pool = call.pool + row * table.pool_stride + first * movers.pool_unit;
  if (kScatter) mover(packed, pool, static_cast<size_t>(count));
  else mover(pool, packed, static_cast<size_t>(count));
}

template <class Index, bool kScatter>
Status run_variant(const CopyTable& table, const CopyCall& call, const Context& context, void*) {
  const auto& movers = *static_cast<const Movers*>(table.private_.get());
  // n is below 2^63 / packed_stride, so the product does not wrap.
  const int64_t total = call.n * table.packed_bytes;
  RowMover mover = kScatter ? movers.scatter : movers.gather;
  if (movers.stream != nullptr && total > movers.cache_bytes) mover = movers.stream;
  const int64_t units = movers.units;
  const int64_t per_slice = std::max<int64_t>(1, kSliceBytes / movers.packed_unit);
  const int64_t slices = ceil_div(units, per_slice);
  const auto slice = [&](int64_t task, int32_t) {
    const int64_t first = task % slices * per_slice;
    move_slice<Index, kScatter>(table, call, movers, mover, task / slices, first, std::min(per_slice, units - first));
  };
  if (total < kParallelBytes || context.parallel.num_threads <= 1) {
    for (int64_t task = 0; task < call.n * slices; ++task) slice(task, 0);
  } else {
    context.parallel.for_each(call.n * slices, slice);
  }
  return {};
}

void move_bytes(const char* src, char* dst, size_t count) { std::memcpy(dst, src, count); }

Movers choose_movers(const CopyTable& table, const Context& context) {
  const CopyKey& key = table.key;
  Movers m;
  m.units = table.pool_bytes;
  if (key.kind == CopyKind::bytes) {
    m.gather = m.scatter = &move_bytes;
    return m;
  }
  const RowMovers& rows = row_movers(context_isa(context.isa));
  if (key.packed_dtype == key.pool_dtype) {
    m.gather = m.scatter = rows.copy;
    m.stream = rows.stream;
    m.cache_bytes = cache_bytes();
    return m;
  }
  const bool bf = key.pool_dtype == KDA_BF16;
  m.gather = bf ? rows.widen_bf16 : rows.widen_fp16;
  m.scatter = bf ? rows.narrow_bf16 : rows.narrow_fp16;
  m.pool_unit = 2;
  m.packed_unit = 4;
  m.units = table.payload;
  return m;
}

class CpuCopyBackend final : public CopyBackend {
 public:
  kda_device_type device_type() const override { return KDA_CPU; }

  CopyDevice facts(const Context& context) const override { return {KDA_CPU, true, "cpu (" + context.isa + ")"}; }

  void describe(const Context& context, Snapshot& snapshot) const override {
    snapshot["device"] = "cpu";
    snapshot["device threads"] = std::to_string(context.parallel.num_threads);
    snapshot["device images"] = available_isa_names();
  }

  Status load(CopyTable& table, const Context& context) const override {
    table.private_ = std::make_shared<Movers>(choose_movers(table, context));
    table.variants[0][0] = &run_variant<int32_t, false>;
    table.variants[0][1] = &run_variant<int32_t, true>;
    table.variants[1][0] = &run_variant<int64_t, false>;
    table.variants[1][1] = &run_variant<int64_t, true>;
    context.parallel.run(context.parallel.num_threads, [](int32_t) {});  // the pool's threads exist from here on
    return {};
  }

  Status verify(const CopyTable& table, const Context&) const override {
    for (const auto& by_index : table.variants) {
      for (CopyVariant variant : by_index) {
        if (variant == nullptr) return internal_error("state_copy: a prepared variant is missing");
      }
    }
    return {};
  }

  void* allocate(size_t bytes, const Context&) const override {
    constexpr size_t kAlignment = 64;
    const size_t padded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    return std::aligned_alloc(kAlignment, padded);
  }
  void release(void* memory, const Context&) const override { std::free(memory); }
  Status fill(void* memory, int value, size_t bytes, const Context&) const override {
    std::memset(memory, value, bytes);
    return {};
  }
  Status synchronize(const Context&) const override { return {}; }
  Status read_back(void* host, const void* device, size_t bytes, const Context&, void*) const override {
    std::memcpy(host, device, bytes);
    return {};
  }
};

}  // namespace

const CopyBackend* copy_backend() {
  static const CpuCopyBackend backend;
  return &backend;
}

}  // namespace kda::cpu
