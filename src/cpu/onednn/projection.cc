// Projection backend "onednn": oneDNN's matmul on tiles of fixed shape (spec L-7, N-13).
//
// A primitive is made for one thread and one shape: kTiles rows of x by kBlock rows of W, fp32 result. Tasks call it
// tile by tile, so libkda's own threads do the work and a row is always computed by the same code, whatever else is
// in the batch; rows that fill up a tile are zero. That the row's place in a tile and the tile's height change no bit
// is not promised by oneDNN: it is tried when weights are packed, on random rows, and a tile height that fails is not
// used. bf16 weights meet bf16 rows in avx512_bf16 (exact products, fp32 sums); everything else is fp32. oneDNN
// allocates small objects of its own in a run.
#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <iterator>
#include <new>
#include <string>
#include <type_traits>

#include "base/checked.h"
#include "base/half.h"
#include "cpu/common.h"
#include "cpu/denormals.h"
#include "cpu/projection_call.h"
#include "cpu/projections.h"

namespace kda::cpu {
namespace {

constexpr int64_t kTiles[] = {64, 16, 4, 1};  // rows of x
constexpr int64_t kBlock = 64;                // rows of W
constexpr int64_t kTaskRows = 1024;
constexpr int64_t kGroupBytes = 512 << 10;  // of blocks that a task keeps in L2

// oneDNN is loaded when it is first asked for, so that libkda runs where it is not installed; its headers say what
// the functions look like.
struct Api {
  decltype(&::dnnl_engine_create) engine_create = nullptr;
  decltype(&::dnnl_get_effective_cpu_isa) get_effective_cpu_isa = nullptr;
  decltype(&::dnnl_matmul_desc_init) matmul_desc_init = nullptr;
  decltype(&::dnnl_memory_create) memory_create = nullptr;
  decltype(&::dnnl_memory_desc_get_size) memory_desc_get_size = nullptr;
  decltype(&::dnnl_memory_desc_init_by_tag) memory_desc_init_by_tag = nullptr;
  decltype(&::dnnl_memory_destroy) memory_destroy = nullptr;
  decltype(&::dnnl_memory_set_data_handle) memory_set_data_handle = nullptr;
  decltype(&::dnnl_primitive_attr_create) primitive_attr_create = nullptr;
  decltype(&::dnnl_primitive_attr_destroy) primitive_attr_destroy = nullptr;
  decltype(&::dnnl_primitive_attr_set_scratchpad_mode) primitive_attr_set_scratchpad_mode = nullptr;
  decltype(&::dnnl_primitive_create) primitive_create = nullptr;
  decltype(&::dnnl_primitive_desc_create) primitive_desc_create = nullptr;
  decltype(&::dnnl_primitive_desc_destroy) primitive_desc_destroy = nullptr;
  decltype(&::dnnl_primitive_desc_query_md) primitive_desc_query_md = nullptr;
  decltype(&::dnnl_primitive_destroy) primitive_destroy = nullptr;
  decltype(&::dnnl_primitive_execute) primitive_execute = nullptr;
  decltype(&::dnnl_reorder_primitive_desc_create) reorder_primitive_desc_create = nullptr;
  decltype(&::dnnl_stream_create) stream_create = nullptr;
  decltype(&::dnnl_stream_destroy) stream_destroy = nullptr;
  decltype(&::dnnl_stream_wait) stream_wait = nullptr;
  int (*omp_max_threads)() = nullptr;  // of the OpenMP that it brings along
  void (*omp_set_threads)(int) = nullptr;
  std::string missing;  // why it cannot be used
};

const Api& api() {
  static const Api loaded = [] {
    Api a;
    const std::string name = "libdnnl.so." + std::to_string(DNNL_VERSION_MAJOR);
    void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = dlerror();
      a.missing = why != nullptr ? why : name;
      return a;
    }
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      if (function == nullptr && a.missing.empty()) a.missing = name + " without " + symbol;
    };
    find(a.engine_create, "dnnl_engine_create");
    find(a.get_effective_cpu_isa, "dnnl_get_effective_cpu_isa");
    find(a.matmul_desc_init, "dnnl_matmul_desc_init");
    find(a.memory_create, "dnnl_memory_create");
    find(a.memory_desc_get_size, "dnnl_memory_desc_get_size");
    find(a.memory_desc_init_by_tag, "dnnl_memory_desc_init_by_tag");
    find(a.memory_destroy, "dnnl_memory_destroy");
    find(a.memory_set_data_handle, "dnnl_memory_set_data_handle");
    find(a.primitive_attr_create, "dnnl_primitive_attr_create");
    find(a.primitive_attr_destroy, "dnnl_primitive_attr_destroy");
    find(a.primitive_attr_set_scratchpad_mode, "dnnl_primitive_attr_set_scratchpad_mode");
    find(a.primitive_create, "dnnl_primitive_create");
    find(a.primitive_desc_create, "dnnl_primitive_desc_create");
    find(a.primitive_desc_destroy, "dnnl_primitive_desc_destroy");
    find(a.primitive_desc_query_md, "dnnl_primitive_desc_query_md");
    find(a.primitive_destroy, "dnnl_primitive_destroy");
    find(a.primitive_execute, "dnnl_primitive_execute");
    find(a.reorder_primitive_desc_create, "dnnl_reorder_primitive_desc_create");
    find(a.stream_create, "dnnl_stream_create");
    find(a.stream_destroy, "dnnl_stream_destroy");
    find(a.stream_wait, "dnnl_stream_wait");
    if constexpr (DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP) {
      find(a.omp_max_threads, "omp_get_max_threads");
      find(a.omp_set_threads, "omp_set_num_threads");
    }
    return a;
  }();
  return loaded;
}

// oneDNN's own parallel regions stay on the calling thread while one of these lives.
class OneThread {
 public:
  OneThread() : before_(api().omp_max_threads != nullptr ? api().omp_max_threads() : 0) { set(1); }
  ~OneThread() { set(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  static void set(int threads) {
    if (api().omp_set_threads != nullptr) api().omp_set_threads(threads);
  }
  int before_;
};

dnnl_engine_t engine() {
  static const dnnl_engine_t e = [] {
    dnnl_engine_t made = nullptr;
    if (!api().missing.empty()) return made;
    return api().engine_create(&made, dnnl_cpu, 0) == dnnl_success ? made : nullptr;
  }();
  return e;
}

bool has_bf16() {
  const auto isa = static_cast<unsigned>(api().get_effective_cpu_isa());
  const auto wanted = static_cast<unsigned>(dnnl_cpu_isa_avx512_core_bf16);
  return (isa & wanted) == wanted;
}

// One shape of tile.
struct Tile {
  int64_t rows = 0;
  dnnl_primitive_desc_t desc = nullptr;
  dnnl_primitive_t primitive = nullptr;
  dnnl_memory_desc_t x{}, w{}, y{}, scratch{};

  Tile() = default;
  Tile(const Tile&) = delete;
  ~Tile() {
    if (primitive != nullptr) api().primitive_destroy(primitive);
    if (desc != nullptr) api().primitive_desc_destroy(desc);
  }
  // `weights`: null = any form.
  bool create(int64_t tile_rows, int64_t cols, dnnl_data_type_t type, const dnnl_memory_desc_t* weights) {
    const OneThread one;
    rows = tile_rows;
    const dnnl_dims_t xs = {rows, cols}, ws = {cols, kBlock}, ys = {rows, kBlock};
    dnnl_memory_desc_t any{};
    api().memory_desc_init_by_tag(&x, 2, xs, type, dnnl_ab);
    api().memory_desc_init_by_tag(&y, 2, ys, dnnl_f32, dnnl_ab);
    api().memory_desc_init_by_tag(&any, 2, ws, type, dnnl_format_tag_any);
    dnnl_matmul_desc_t matmul{};
    if (api().matmul_desc_init(&matmul, &x, weights != nullptr ? weights : &any, nullptr, &y) != dnnl_success)
      return false;
    dnnl_primitive_attr_t attributes = nullptr;
    api().primitive_attr_create(&attributes);
    api().primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user);
    const bool made = api().primitive_desc_create(&desc, &matmul, attributes, engine(), nullptr) == dnnl_success &&
                      api().primitive_create(&primitive, desc) == dnnl_success;
    api().primitive_attr_destroy(attributes);
    if (!made) return false;
    w = *api().primitive_desc_query_md(desc, dnnl_query_weights_md, 0);
    scratch = *api().primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
    return true;
  }
};

// The arguments of one task's executions.
class Call {
 public:
  explicit Call(const Tile& tile) : tile_(tile) {
    api().stream_create(&stream_, engine(), dnnl_stream_default_flags);
    const dnnl_memory_desc_t* const descs[] = {&tile.x, &tile.w, &tile.y, &tile.scratch};
    const int names[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_SCRATCHPAD};
    for (size_t i = 0; i < 4; ++i) {
      api().memory_create(&memory_[i], descs[i], engine(), DNNL_MEMORY_NONE);
      args_[i] = {names[i], memory_[i]};
    }
  }
  ~Call() {
    for (dnnl_memory_t m : memory_) api().memory_destroy(m);
    api().stream_destroy(stream_);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bool run(const void* x, const void* w, float* y, void* scratch) {
    void* const data[] = {const_cast<void*>(x), const_cast<void*>(w), y, scratch};
    for (size_t i = 0; i < 4; ++i) api().memory_set_data_handle(memory_[i], data[i]);
    return api().primitive_execute(tile_.primitive, stream_, 4, args_) == dnnl_success;
  }

 private:
  const Tile& tile_;
  dnnl_stream_t stream_ = nullptr;
  dnnl_memory_t memory_[4] = {};
  dnnl_exec_arg_t args_[4] = {};
};

struct Part {
  int64_t rows = 0, first_block = 0;
  std::vector<float> bias;
};

struct AlignedFree {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Bytes = std::unique_ptr<std::byte[], AlignedFree>;
Bytes allocate(int64_t bytes) {
  return Bytes(static_cast<std::byte*>(
      ::operator new[](static_cast<size_t>(std::max<int64_t>(bytes, 64)), std::align_val_t{64}, std::nothrow)));
}

struct BlockMatrix final : PackedMatrix {
  std::array<Tile, std::size(kTiles)> tiles;
  int tile_count = 0;
  kda_dtype type = KDA_FP32;  // of x and W in the product
  int64_t cols = 0, blocks = 0, block_bytes = 0, scratch_bytes = 0;
  std::vector<Part> parts;
  std::vector<size_t> part_of;  // block -> part
  Bytes memory;

  int64_t bytes() const override { return blocks * block_bytes; }
  const std::byte* block(int64_t i) const { return memory.get() + i * block_bytes; }
  int64_t element() const { return static_cast<int64_t>(dtype_size(type)); }
};

// Worker scratch: a tile of x, a tile of y, oneDNN's scratchpad.
struct Layout {
  int64_t y, scratchpad, total;
  Layout(int64_t cols, int64_t scratch) {
    y = round_up(kTiles[0] * cols * 4, 64);
    scratchpad = y + kTiles[0] * kBlock * 4;
    total = round_up(scratchpad + scratch, 256);
  }
};
// More than oneDNN asks for at these shapes; a matrix that needs more is refused when it is packed.
int64_t scratch_bound(int64_t cols) { return (kTiles[0] + kBlock) * round_up(cols, 64) * 4 + (64 << 10); }

Status make_tiles(BlockMatrix& m) {
  const dnnl_data_type_t type = m.type == KDA_BF16 ? dnnl_bf16 : dnnl_f32;
  for (const int64_t rows : kTiles) {
    Tile& tile = m.tiles[static_cast<size_t>(m.tile_count)];
    if (!tile.create(rows, m.cols, type, m.tile_count > 0 ? &m.tiles[0].w : nullptr)) continue;
    m.scratch_bytes = std::max(m.scratch_bytes, static_cast<int64_t>(api().memory_desc_get_size(&tile.scratch)));
    ++m.tile_count;
  }
  if (m.tile_count == 0)
    return unsupported("onednn: no matmul for ", dtype_name(m.type), " and ", m.cols, " columns");
  m.block_bytes = round_up(static_cast<int64_t>(api().memory_desc_get_size(&m.tiles[0].w)), 64);
  if (m.scratch_bytes <= scratch_bound(m.cols)) return {};
  return unsupported("onednn: scratchpad: wanted at most ", scratch_bound(m.cols), " bytes, got ", m.scratch_bytes);
}

// Rows [first, first + kBlock) of W as oneDNN wants them; zero past the last.
bool pack_block(const BlockMatrix& m, const MatrixView& w, int64_t first, std::byte* to) {
  const OneThread one;
  const Bytes dense = allocate(kBlock * m.cols * m.element());
  if (!dense) return false;
  std::memset(dense.get(), 0, static_cast<size_t>(kBlock * m.cols * m.element()));
  for (int64_t r = 0; r < std::min(kBlock, w.rows - first); ++r) {
    const auto* row =
        static_cast<const char*>(w.data) + (first + r) * w.stride * static_cast<int64_t>(dtype_size(w.dtype));
    std::byte* const at = dense.get() + r * m.cols * m.element();
    if (w.dtype == m.type) {
      std::memcpy(at, row, static_cast<size_t>(m.cols * m.element()));
    } else {
      for (int64_t k = 0; k < m.cols; ++k)
        reinterpret_cast<float*>(at)[k] = to_float(unaligned<bf16>(row, k));
    }
  }
  dnnl_memory_desc_t from{};
  const dnnl_dims_t dims = {m.cols, kBlock};
  api().memory_desc_init_by_tag(&from, 2, dims, m.type == KDA_BF16 ? dnnl_bf16 : dnnl_f32, dnnl_ba);
  dnnl_primitive_desc_t desc = nullptr;
  dnnl_primitive_t reorder = nullptr;
  dnnl_memory_t source = nullptr, target = nullptr;
  dnnl_stream_t stream = nullptr;
  bool ok =
      api().reorder_primitive_desc_create(&desc, &from, engine(), &m.tiles[0].w, engine(), nullptr) == dnnl_success &&
      api().primitive_create(&reorder, desc) == dnnl_success &&
      api().memory_create(&source, &from, engine(), dense.get()) == dnnl_success &&
      api().memory_create(&target, &m.tiles[0].w, engine(), to) == dnnl_success &&
      api().stream_create(&stream, engine(), dnnl_stream_default_flags) == dnnl_success;
  if (ok) {
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, source}, {DNNL_ARG_TO, target}};
    ok = api().primitive_execute(reorder, stream, 2, args) == dnnl_success &&
         api().stream_wait(stream) == dnnl_success;
  }
  if (stream != nullptr) api().stream_destroy(stream);
  if (target != nullptr) api().memory_destroy(target);
  if (source != nullptr) api().memory_destroy(source);
  if (reorder != nullptr) api().primitive_destroy(reorder);
  if (desc != nullptr) api().primitive_desc_destroy(desc);
  return ok;
}

// Whether a row's result is the same in every place of every tile: random rows, each at all places at once. Tiles
// that fail are dropped; false if the first does.
bool rows_agree(BlockMatrix& m) {
  const OneThread one;
  const Layout layout(m.cols, m.scratch_bytes);
  const Bytes memory = allocate(layout.total);
  if (!memory) return false;
  auto* y = reinterpret_cast<float*>(memory.get() + layout.y);
  std::array<float, kBlock> wanted{};
  for (int t = 0; t < m.tile_count; ++t) {
    const Tile& tile = m.tiles[static_cast<size_t>(t)];
    Call call(tile);
    bool same = true;
    for (uint32_t sample = 0; sample < 3 && same; ++sample) {
      uint32_t bits = 12345 + sample;
      for (int64_t k = 0; k < m.cols; ++k) {
        bits = bits * 1664525u + 1013904223u;
        const float value = static_cast<float>(static_cast<int32_t>(bits >> 8) - (1 << 23)) * 0x1p-23f;
        for (int64_t r = 0; r < tile.rows; ++r) {
          if (m.type == KDA_BF16) reinterpret_cast<bf16*>(memory.get())[r * m.cols + k] = to_bf16(value);
          else reinterpret_cast<float*>(memory.get())[r * m.cols + k] = value;
        }
      }
      same = call.run(memory.get(), m.block(0), y, memory.get() + layout.scratchpad);
      for (int64_t r = 1; r < tile.rows && same; ++r) same = std::memcmp(y, y + r * kBlock, kBlock * 4) == 0;
      if (sample > 0 || !same) continue;
      if (t == 0) std::memcpy(wanted.data(), y, sizeof wanted);
      same = std::memcmp(wanted.data(), y, sizeof wanted) == 0;
    }
    if (same) continue;
    m.tile_count = t;
    return t > 0;
  }
  return true;
}

class OneDnnProjection final : public ProjectionBackend {
 public:
  std::string_view name() const override { return "onednn"; }
  kda_device_type device() const override { return KDA_CPU; }
  void check(kda_dtype, const Context& context, Refusals& refusals) const override {
    if (engine() == nullptr) {
      refusals.add("library", "oneDNN's library", api().missing.empty() ? "one without a CPU engine" : api().missing);
    }
#if DNNL_CPU_THREADING_RUNTIME != DNNL_RUNTIME_OMP && DNNL_CPU_THREADING_RUNTIME != DNNL_RUNTIME_SEQ
    refusals.add("threads", "oneDNN built for OpenMP or one thread", "another runtime");
#endif
    // It chooses its own instructions; a context that was told to use fewer shall not get more.
    if (context.isa != "avx512") refusals.add("isa", "avx512", context.isa);
  }

  Result<std::unique_ptr<PackedMatrix>> pack(const Context& context, kda_dtype io,
                                             std::span<const ProjectionPart> parts, int64_t) const override {
    auto m = std::make_unique<BlockMatrix>();
    m->cols = parts.front().weight.cols;
    const bool narrow =
        std::all_of(parts.begin(), parts.end(), [](const auto& p) { return p.weight.dtype == KDA_BF16; });
    m->type = narrow && io == KDA_BF16 && has_bf16() ? KDA_BF16 : KDA_FP32;
    KDA_RETURN_IF_ERROR(make_tiles(*m));
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t rows = parts[i].weight.rows, count = ceil_div(rows, kBlock);
      Part part{rows, m->blocks, {}};
      if (parts[i].bias != nullptr) part.bias.assign(parts[i].bias, parts[i].bias + rows);
      m->parts.push_back(std::move(part));
      m->part_of.insert(m->part_of.end(), static_cast<size_t>(count), i);
      m->blocks += count;
    }
    m->memory = allocate(m->bytes());
    if (!m->memory) return Status(KDA_OUT_OF_MEMORY, str_cat("packed weights: ", m->bytes(), " bytes"));
    std::atomic<bool> packed{true};
    context.parallel.for_each(m->blocks, [&](int64_t block, int32_t) {
      const size_t i = m->part_of[static_cast<size_t>(block)];
      const int64_t first = (block - m->parts[i].first_block) * kBlock;
      if (!pack_block(*m, parts[i].weight, first, m->memory.get() + block * m->block_bytes)) packed = false;
    });
    if (!packed) return internal_error("onednn: the weights could not be brought into its form");
    if (!rows_agree(*m)) return unsupported("onednn: a row's bits depend on its place in a tile (spec N-13)");
    return std::unique_ptr<PackedMatrix>(std::move(m));
  }

  Result<std::unique_ptr<PreparedProjection>> prepare(const Context& context, const ProjectionShape& shape,
                                                      const ProjectionOptions& options) const override {
    return plain_projection(*this, context, shape, options);
  }
  int64_t workspace_bytes(const Context& context, kda_dtype, int64_t, int64_t cols) const {
    return context.parallel.num_threads * Layout(cols, scratch_bound(cols)).total;
  }

  Status run(const Context& context, const ProjectionCall& call) const {
    const auto& m = static_cast<const BlockMatrix&>(*call.weights);
    const int64_t tokens = call.x.shape[0], ranges = ceil_div(tokens, kTaskRows);
    const int64_t group = std::clamp<int64_t>(kGroupBytes / std::max<int64_t>(1, m.block_bytes), 1, 8);
    const int64_t groups = ceil_div(m.blocks, group);
    const Layout layout(m.cols, scratch_bound(m.cols));
    std::atomic<bool> done{true};
    context.parallel.for_each(groups * ranges, [&](int64_t task, int32_t worker) {
      const FlushDenormals flush;
      const OneThread one;
      const int64_t b0 = task / ranges * group, b1 = std::min(m.blocks, b0 + group);
      const int64_t r0 = task % ranges * kTaskRows, r1 = std::min(tokens, r0 + kTaskRows);
      auto* scratch = static_cast<std::byte*>(call.workspace) + worker * layout.total;
      // High tiles as long as they are full; what is left goes into the lowest that holds it.
      int64_t r = r0;
      for (int t = 0; t < m.tile_count && r < r1; ++t) {
        const Tile& tile = m.tiles[static_cast<size_t>(t)];
        const bool last = t + 1 == m.tile_count;
        const auto fits = [&](int64_t left) {
          const bool lowest = last || (t > 0 && m.tiles[static_cast<size_t>(t) + 1].rows < left);
          return left > 0 && (left >= tile.rows || lowest);
        };
        if (!fits(r1 - r)) continue;
        Call run(tile);
        for (; fits(r1 - r); r += tile.rows) {
          const int64_t rows = std::min(tile.rows, r1 - r);
          if (!run_tile(context, m, call, run, layout, r, rows, tile.rows, b0, b1, scratch)) done = false;
        }
      }
    });
    return done ? Status() : internal_error("onednn: a matmul failed");
  }

 private:
  static bool run_tile(const Context& context, const BlockMatrix& m, const ProjectionCall& call, Call& run,
                       const Layout& layout, int64_t first, int64_t rows, int64_t height, int64_t b0, int64_t b1,
                       std::byte* scratch) {
    const ProjectionFunctions& functions = projection_functions(context_isa(context.isa));
    const auto size = static_cast<int64_t>(dtype_size(call.x.dtype));
    const char* x = static_cast<const char*>(call.x.data) + first * call.x.strides[0] * size;
    if (rows < height || call.x.dtype != m.type || call.x.strides[0] != m.cols) {
      load_rows(functions, m, call.x, x, rows, height, scratch);
      x = reinterpret_cast<const char*>(scratch);
    }
    auto* y = reinterpret_cast<float*>(scratch + layout.y);
    for (int64_t block = b0; block < b1; ++block) {
      if (!run.run(x, m.block(block), y, scratch + layout.scratchpad)) return false;
      const size_t i = m.part_of[static_cast<size_t>(block)];
      const Part& part = m.parts[i];
      const kda_tensor& out = call.outputs[i];
      for (int64_t column = (block - part.first_block) * kBlock, c = 0; c < kBlock && column + c < part.rows;
           c += kProjectionPanel) {
        const int64_t n = std::min(kProjectionPanel, part.rows - column - c);
        const float* bias = part.bias.empty() ? nullptr : part.bias.data() + column + c;
        for (int64_t r = 0; r < rows; ++r) {
          char* to = static_cast<char*>(out.data) +
                     ((first + r) * out.strides[0] + column + c) * static_cast<int64_t>(dtype_size(out.dtype));
          functions.store(out.dtype, y + r * kBlock + c, bias, n, to);
        }
      }
    }
    return true;
  }

  // Rows of x in the product's type, zero ones behind them. Rows are written from the first: a widened row may spill
  // zeros up to the next multiple of kRowPad, into where the next one begins.
  static void load_rows(const ProjectionFunctions& functions, const BlockMatrix& m, const kda_tensor& from,
                        const char* x, int64_t rows, int64_t height, std::byte* to) {
    const int64_t stride = from.strides[0] * static_cast<int64_t>(dtype_size(from.dtype)), row = m.cols * m.element();
    for (int64_t r = 0; r < rows; ++r) {
      if (from.dtype == m.type) std::memcpy(to + r * row, x + r * stride, static_cast<size_t>(row));
      else functions.load(from.dtype, x + r * stride, m.cols, reinterpret_cast<float*>(to + r * row));
    }
    std::memset(to + rows * row, 0, static_cast<size_t>((height - rows) * row));
  }
};

}  // namespace

const ProjectionBackend* onednn_projection() {
  static const OneDnnProjection backend;
  return &backend;
}

}  // namespace kda::cpu
