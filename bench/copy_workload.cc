#include <cstring>
#include <stdexcept>

#include "bench/workload.h"

namespace kda::bench {
namespace {

constexpr int64_t kDim = 128, kPage = 5308416;  // elements from row to row in the pools of a served model (U-5)

struct Memory {
  Arena arena;
  std::shared_ptr<kda_plan> plan;
  kda_state_copy_args args = make<kda_state_copy_args>();
  std::vector<kda_tensor> indices;  // of several calls: rows rotate, so that they never lie in a cache
  size_t next = 0;
  kda_tensor other{};  // the baseline's packed rows

  const kda_tensor& turn() { return indices[next++ % indices.size()]; }
};

// A copy for each row, as a framework without a plan does it; rows spread over the threads.
void loop(Memory& m, const Workers& workers, bool scatter, const kda_tensor& indices, const kda_tensor& packed) {
  const kda_tensor& pool = m.args.pool;
  const auto size = static_cast<int64_t>(kda_dtype_size(pool.dtype));
  const int64_t n = indices.shape[0], payload = packed.strides[0] * size, stride = pool.strides[0] * size;
  const auto* const index = static_cast<const int32_t*>(indices.data);
  workers.run([&](int part) {
    for (int64_t i = part; i < n; i += workers.size()) {
      char* const row = static_cast<char*>(pool.data) + index[i] * stride;
      char* const other = static_cast<char*>(packed.data) + i * payload;
      std::memcpy(scatter ? row : other, scatter ? other : row, static_cast<size_t>(payload));
    }
  });
}

void fail_unless(kda_status status) { check(status); }

}  // namespace

Workload copy(const Setting& setting, const CopyShape& s) {
  const auto m = std::make_shared<Memory>();
  const int64_t payload = s.heads * kDim * kDim;
  const int64_t stride = s.gapped ? std::max(kPage, payload) : payload;
  const auto size = static_cast<int64_t>(kda_dtype_size(s.state));
  // As many rows as exceed the caches, but at most about a gibibyte of pool.
  const int64_t wanted = (int64_t{256} << 20) / (payload * size) + s.rows;
  const int64_t rows = std::max(s.rows, std::min(wanted, (int64_t{1} << 30) / (stride * size)));
  kda_tensor pool = m->arena.random(s.state, {rows * stride});
  pool.rank = 4;
  const int64_t shape[] = {rows, s.heads, kDim, kDim}, strides[] = {stride, kDim * kDim, kDim, 1};
  std::copy_n(shape, 4, pool.shape);
  std::copy_n(strides, 4, pool.strides);
  m->args.pool = pool;
  m->args.packed = m->arena.zeros(s.state, {s.rows, s.heads, kDim, kDim});
  m->other = m->arena.zeros(s.state, {s.rows, s.heads, kDim, kDim});
  for (int64_t first = 0; first + s.rows <= rows; first += s.rows) {
    std::vector<int64_t> x;
    for (int64_t i = 0; i < s.rows; ++i) x.push_back(first + (i * 7 + 3) % s.rows);  // distinct unless 7 divides n
    if (s.rows % 7 == 0) {
      for (int64_t i = 0; i < s.rows; ++i) x[static_cast<size_t>(i)] = first + s.rows - 1 - i;
    }
    m->indices.push_back(m->arena.ints(x));
  }
  auto d = make<kda_state_copy_desc>();
  d.pool = pool;
  d.max_selected = s.rows;
  kda_plan* plan = nullptr;
  check(kda_state_copy_plan_create(setting.context.get(), &d, &plan));
  m->plan.reset(plan, kda_plan_destroy);

  // Right before fast (U-7): the same rows by both ways.
  m->args.indices = m->indices.back();
  fail_unless(kda_state_gather(plan, &m->args, nullptr));
  loop(*m, setting.workers, false, m->indices.back(), m->other);
  if (std::memcmp(m->args.packed.data, m->other.data, static_cast<size_t>(s.rows * payload * size)) != 0) {
    throw std::runtime_error("copy: the gathered rows differ from a plain loop's");
  }

  Workload w;
  w.name = "copy";
  w.parameters = {{"rows", std::to_string(s.rows)},
                  {"heads", std::to_string(s.heads)},
                  {"state", kda_dtype_name(s.state)},
                  {"row_stride", std::to_string(stride)}};
  w.backend = kda_plan_backend(plan);
  w.isa = kda_plan_isa(plan);
  const double bytes = 2.0 * static_cast<double>(s.rows * payload * size);
  const Workers workers = setting.workers;
  const auto operation = [&](const char* label, bool scatter) {
    return Variant{label,
                   [m, scatter] {
                     m->args.indices = m->turn();
                     check(scatter ? kda_state_scatter(m->plan.get(), &m->args, nullptr)
                                   : kda_state_gather(m->plan.get(), &m->args, nullptr));
                   },
                   bytes, Unit::kByte, w.backend + " " + w.isa};
  };
  const auto baseline = [&](const char* label, bool scatter) {
    return Variant{label, [m, workers, scatter] { loop(*m, workers, scatter, m->turn(), m->other); }, bytes,
                   Unit::kByte, "memcpy per row"};
  };
  w.variants = {operation("gather", false), operation("gather again", false), baseline("gather by loop", false),
                operation("scatter", true), baseline("scatter by loop", true)};
  w.variants.push_back(copy_variant(workers, static_cast<size_t>(bytes / 2)));
  w.ratios = {{"gather / loop", "gather", {"gather by loop"}},
              {"scatter / loop", "scatter", {"scatter by loop"}},
              {"gather / memcpy", "gather", {"memcpy"}},
              {"scatter / memcpy", "scatter", {"memcpy"}},
              {"gather / gather again (A/A)", "gather", {"gather again"}}};
  return w;
}

}  // namespace kda::bench
