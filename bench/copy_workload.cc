// State copies (state-copy.md U-1..U-10, what a program of the public API can do of it: its baseline is a memcpy a
// row).
#include <kda/device.h>

#include <cstring>
#include <stdexcept>

#include "bench/workload.h"

namespace kda::bench {
namespace {

constexpr int64_t kDim = 128;
// Elements from row to row in the pools of a served model, and before the first (U-5).
constexpr int64_t kPage = 5308416, kBefore = 393216;

struct Memory {
  explicit Memory(const Setting& setting) : arena(setting) {}
  Arena arena;
  Plan plan;
  kda_tensor pool{}, flags{};
  // Of several calls: rows rotate, so that they never lie in a cache.
  std::vector<std::vector<int64_t>> rows;
  std::vector<kda_tensor> indices, packed;
  int64_t row_bytes = 0, stride_bytes = 0;

  char* row(int64_t r) const { return static_cast<char*>(pool.data) + r * stride_bytes; }
  const kda_tensor& packed_of(int64_t i) const { return packed[static_cast<size_t>(i) % packed.size()]; }
  const std::vector<int64_t>& rows_of(int64_t i) const { return rows[static_cast<size_t>(i) % rows.size()]; }

  kda_state_copy_args args_of(int64_t i, bool scatter) const {
    auto a = make<kda_state_copy_args>();
    a.pool = pool;
    a.indices = indices[static_cast<size_t>(i) % indices.size()];
    a.packed = packed_of(i);
    if (!scatter) a.has_initial_state = flags;
    return a;
  }
  void run(int64_t i, bool scatter, void* stream) const {
    scatter ? plan.scatter(args_of(i, scatter), stream) : plan.gather(args_of(i, scatter), stream);
  }
  // A copy for each row, as a framework without a plan does it; on the CPU rows spread over the threads.
  void loop(int64_t i, bool scatter, void* stream, const Workers* workers) const {
    const std::vector<int64_t>& x = rows_of(i);
    auto* const base = static_cast<char*>(packed_of(i).data);
    const auto count = static_cast<int64_t>(x.size());
    const auto bytes = static_cast<size_t>(row_bytes);
    const auto from = [&](int64_t r) { return scatter ? base + r * row_bytes : row(x[static_cast<size_t>(r)]); };
    const auto to = [&](int64_t r) { return scatter ? row(x[static_cast<size_t>(r)]) : base + r * row_bytes; };
    if (workers == nullptr) {
      for (int64_t r = 0; r < count; ++r) check(kda_memory_copy(arena.context(), to(r), from(r), bytes, stream));
      return;
    }
    workers->run([&](int part) {
      for (int64_t r = part; r < count; r += workers->size()) std::memcpy(to(r), from(r), bytes);
    });
  }
};

// Distinct rows [first, first + count) in an order that jumps.
std::vector<int64_t> spread(int64_t first, int64_t count) {
  std::vector<int64_t> x;
  for (int64_t i = 0; i < count; ++i) x.push_back(first + (count % 7 != 0 ? (i * 7 + 3) % count : count - 1 - i));
  return x;
}

void make_pool(const CopyShape& s, const Setting& setting, Memory& m) {
  const int64_t payload = s.heads * kDim * kDim, stride = s.gapped ? std::max(kPage, payload) : payload;
  const auto size = static_cast<int64_t>(kda_dtype_size(s.state));
  m.row_bytes = payload * size, m.stride_bytes = stride * size;
  // As many rows as exceed the caches; on the CPU at most about a gibibyte of pool.
  const int64_t wanted = std::max<int64_t>(2 * s.rows, setting.cold_bytes / m.row_bytes + s.rows);
  const int64_t most = setting.on_device() ? wanted : (int64_t{1} << 30) / m.stride_bytes;
  const int64_t rows = std::max(s.rows, std::min(wanted, most));
  kda_tensor pool = m.arena.random(s.state, {rows, stride});
  pool.rank = 4;
  const int64_t shape[] = {rows, s.heads, kDim, kDim}, strides[] = {stride, kDim * kDim, kDim, 1};
  std::copy_n(shape, 4, pool.shape);
  std::copy_n(strides, 4, pool.strides);
  if (payload + kBefore <= stride) pool.data = static_cast<char*>(pool.data) + kBefore * size;
  m.pool = pool;
  for (int64_t first = 0; first + s.rows <= rows; first += s.rows) {
    m.rows.push_back(spread(first, s.rows));
    m.indices.push_back(m.arena.ints(m.rows.back(), s.index));
  }
  for (int64_t i = setting.sets(s.rows * m.row_bytes); i > 0; --i)
    m.packed.push_back(m.arena.zeros(s.state, {s.rows, s.heads, kDim, kDim}));
  if (s.flags) m.flags = m.arena.ints(std::vector<int64_t>(static_cast<size_t>(s.rows), 1), KDA_BOOL);
}

// Right before fast (U-7): rows by the plan and one by one, with an index that is no row and a flag that is off.
void verify(const CopyShape& s, const Memory& m, Arena& arena) {
  auto a = make<kda_state_copy_args>();
  std::vector<int64_t> x = m.rows.back(), on(x.size(), 1);
  if (s.rows > 1) x[0] = -1;
  if (s.rows > 2) on.back() = 0;
  a.pool = m.pool;
  a.indices = arena.ints(x, s.index);
  a.packed = m.packed[0];
  if (s.flags) a.has_initial_state = arena.ints(on, KDA_BOOL);
  m.plan.gather(a);
  std::vector<char> got(static_cast<size_t>(m.row_bytes)), wanted(got.size());
  const auto same = [&](int64_t i, const char* what) {
    const bool dead = x[static_cast<size_t>(i)] < 0 || (s.flags && on[static_cast<size_t>(i)] == 0);
    arena.copy(got.data(), static_cast<char*>(a.packed.data) + i * m.row_bytes, got.size());
    if (dead) std::fill(wanted.begin(), wanted.end(), 0);
    else arena.copy(wanted.data(), m.row(x[static_cast<size_t>(i)]), wanted.size());
    if (got != wanted) throw std::runtime_error(std::string("copy: ") + what + " differ from a plain loop's");
  };
  for (int64_t i = 0; i < s.rows; ++i) same(i, "the gathered rows");
  // Scattered to other rows, all but the first.
  std::fill(on.begin(), on.end(), 1);
  x = m.rows.front();
  if (s.rows > 1) x[0] = -1;
  a.indices = arena.ints(x, s.index);
  a.has_initial_state = {};
  m.plan.scatter(a);
  for (int64_t i = s.rows > 1 ? 1 : 0; i < s.rows; ++i) same(i, "the scattered rows");
}

}  // namespace

Workload copy(const Setting& setting, const CopyShape& s, const std::vector<CopyRival>& rivals) {
  const auto m = std::make_shared<Memory>(setting);
  make_pool(s, setting, *m);
  auto d = make<kda_state_copy_desc>();
  d.pool = m->pool;
  d.max_selected = s.rows;
  m->plan = Plan(setting.context, d);
  verify(s, *m, m->arena);

  Workload w;
  w.name = "copy";
  w.parameters = {{"rows", std::to_string(s.rows)},   {"heads", std::to_string(s.heads)},
                  {"state", kda_dtype_name(s.state)}, {"row_stride", std::to_string(m->pool.strides[0])},
                  {"index", kda_dtype_name(s.index)}, {"flags", s.flags ? "on" : "off"}};
  w.backend = m->plan.backend();
  w.isa = m->plan.isa();
  const double bytes = 2.0 * static_cast<double>(s.rows * m->row_bytes);
  const Workers workers = setting.workers;
  const bool on_device = setting.on_device();
  const auto operation = [&](const char* label, bool scatter) {
    return Variant{label,
                   [m, scatter](int64_t i, void* stream) { m->run(i, scatter, stream); },
                   bytes,
                   Unit::kByte,
                   w.backend + " " + w.isa,
                   bytes};
  };
  const auto baseline = [&](const char* label, bool scatter) {
    return Variant{label,
                   [m, workers, scatter, on_device](int64_t i, void* stream) {
                     m->loop(i, scatter, stream, on_device ? nullptr : &workers);
                   },
                   bytes,
                   Unit::kByte,
                   "memcpy per row",
                   bytes};
  };
  w.variants = {operation("gather", false), operation("gather again", false), baseline("gather by loop", false),
                operation("scatter", true), baseline("scatter by loop", true)};
  if (on_device) {
    // As many bytes between two dense buffers (U-8).
    const auto dense = [m](int64_t i, void* stream) {
      check(kda_memory_copy(m->arena.context(), m->packed_of(i + 1).data, m->packed_of(i).data,
                            static_cast<size_t>(m->packed[0].shape[0] * m->row_bytes), stream));
    };
    w.variants.push_back({"memcpy", dense, bytes, Unit::kByte, "", bytes});
  } else {
    w.variants.push_back(copy_variant(workers, static_cast<size_t>(bytes / 2)));
  }
  w.ratios = {{"gather / loop", "gather", {"gather by loop"}},
              {"scatter / loop", "scatter", {"scatter by loop"}},
              {"gather / memcpy", "gather", {"memcpy"}},
              {"scatter / memcpy", "scatter", {"memcpy"}},
              {"gather / gather again (A/A)", "gather", {"gather again"}}};
  for (const CopyRival& rival : rivals) {
    const auto call = [m, rival](int64_t i, void* stream) { rival.call(m->args_of(i, rival.scatter), stream); };
    const char* const ours = rival.scatter ? "scatter" : "gather";
    w.variants.push_back({rival.label, call, bytes, Unit::kByte, rival.detail, bytes});
    w.ratios.push_back({std::string(ours) + " / " + rival.label, ours, {rival.label}});
  }
  return w;
}

}  // namespace kda::bench
