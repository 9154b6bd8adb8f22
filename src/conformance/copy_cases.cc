// State copies (state-copy.md C-1..C-22) against a plain loop, bit for bit: gather and scatter, both kinds, casts,
// strides, indices of either width with bad values among them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "conformance/api.h"
#include "conformance/attention.h"
#include "conformance/cases.h"
#include "conformance/device.h"
#include "conformance/random.h"
#include "conformance/rounding.h"

namespace kda::conformance {
namespace {

struct Payload {
  const char* name;
  int64_t HV, V, K;
};
const std::vector<Payload> kPayloads = {{"12x128x128", 12, 128, 128},
                                        {"32x128x128", 32, 128, 128},
                                        {"3x7x5", 3, 7, 5},
                                        {"1x1x1", 1, 1, 1},
                                        {"2x60x60", 2, 60, 60}};
constexpr int64_t kCounts[] = {0, 1, 3, 8, 33};
constexpr kda_dtype kPools[] = {KDA_FP32, KDA_BF16, KDA_FP16, KDA_INT8, KDA_FP64};

struct Choice {
  Payload payload;
  int64_t n;
  kda_dtype pool;
  bool cast, bytes, gapped, packed_gap, wide_index, strided_index, flags, scatter;

  kda_dtype packed() const { return cast ? KDA_FP32 : pool; }
};

std::vector<Axis> axes() {
  return {{"payload", names_of(kPayloads)},
          {"n", {"0", "1", "3", "8", "33"}},
          {"pool", {"fp32", "bf16", "fp16", "int8", "fp64"}},
          {"packed", {"same", "fp32"}},
          {"kind", {"auto", "bytes"}},
          {"rows", {"dense", "gapped"}},
          {"packed_rows", {"dense", "gapped"}},
          {"index", {"int32", "int64"}},
          {"index_stride", {"1", "3"}},
          {"flags", {"none", "mixed"}},
          {"copy", {"gather", "scatter"}}};
}

bool allowed(const std::vector<int>& c) {
  if (c[3] == 1 && c[4] == 1) return false;  // bytes do not cast (Y-3)
  return !(c[3] == 1 && c[2] >= 0 && kPools[c[2]] != KDA_BF16 && kPools[c[2]] != KDA_FP16);
}

Choice choice_of(const std::vector<int>& c) {
  const auto on = [&](size_t axis) { return c[axis] == 1; };
  return {kPayloads[static_cast<size_t>(c[0])],
          kCounts[c[1]],
          kPools[c[2]],
          on(3),
          on(4),
          on(5),
          on(6),
          on(7),
          on(8),
          on(9),
          on(10)};
}

// A gather may name a row twice (C-11), a scatter may not (C-12); every third index is no row at all.
std::vector<int64_t> indices_of(const Choice& c, int64_t rows) {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < c.n; ++i) {
    int64_t index = rows - 1 - i;
    if (!c.scatter && i % 5 == 4) index = rows - 1;
    const int64_t bad[] = {-1, rows, c.wide_index ? INT64_MIN : INT32_MIN, c.wide_index ? INT64_MAX : INT32_MAX};
    if (i % 3 == 2) index = bad[i / 3 % 4];
    indices.push_back(index);
  }
  return indices;
}

Tensor index_vector(const Choice& c, const std::vector<int64_t>& indices) {
  const kda_dtype dtype = c.wide_index ? KDA_INT64 : KDA_INT32;
  const Tensor dense = Tensor::ints(indices, dtype);
  if (!c.strided_index) return dense;
  Tensor t(dtype, dense.shape(), {3}, 1);
  for (int64_t i = 0; i < c.n; ++i) {
    std::copy_n(element(dense, i), kda_dtype_size(dtype), element(t, i));
  }
  return t;
}

Tensor payload_rows(kda_dtype dtype, int64_t rows, const Payload& p, bool gapped, uint32_t stream) {
  const int64_t size = p.HV * p.V * p.K;
  Tensor t(dtype, {rows, p.HV, p.V, p.K}, {size + (gapped ? 24 : 0), p.V * p.K, p.K, 1}, gapped ? 5 : 0);
  std::vector<double> x = uniform_vector(stream, t.size());
  if (dtype == KDA_INT8) {
    for (double& v : x) v = std::floor(100 * v);
  }
  t.assign(x);
  return t;
}

// C-1 and C-2 as they stand.
void plain_loop(const Choice& c, const std::vector<int64_t>& indices, const Tensor& flags, Tensor& pool,
                Tensor& packed) {
  const int64_t rows = pool.shape()[0];
  for (int64_t i = 0; i < c.n; ++i) {
    const int64_t index = indices[static_cast<size_t>(i)];
    const bool valid = index >= 0 && index < rows;
    const kda_tensor row = select(packed, 0, i);
    if (c.scatter) {
      if (valid) assign(select(pool, 0, index), values(row));
    } else if (valid && (!flags.present() || flags.get({i}) != 0)) {
      assign(row, values(select(pool, 0, index)));
    } else {
      fill(row, 0);
    }
  }
}

void run(const Choice& c, const Setting& setting, Report& report) {
  const int64_t rows = c.n + 4;
  const std::vector<int64_t> indices = indices_of(c, rows);
  const Tensor index = index_vector(c, indices);
  Tensor flags;
  if (c.flags) {
    std::vector<int64_t> f;
    for (int64_t i = 0; i < c.n; ++i) f.push_back(i % 2);
    flags = Tensor::flags(f);
  }
  Tensor pool = payload_rows(c.pool, rows, c.payload, c.gapped, 1);
  Tensor packed = c.scatter ? payload_rows(c.packed(), c.n, c.payload, c.packed_gap, 2)
                            : Tensor(c.packed(), {c.n, c.payload.HV, c.payload.V, c.payload.K});
  Tensor wanted_pool = pool, wanted_packed = packed;
  plain_loop(c, indices, flags, wanted_pool, wanted_packed);

  kda_state_copy_desc d = sized<kda_state_copy_desc>();
  // Kinds, not backends, are chosen here (Y-3); "fused" is a kind as well.
  d.backend = c.bytes ? "bytes" : setting.backend == "fused" ? "fused" : "auto";
  d.pool = pool;
  d.pool.device = setting.device;
  d.packed_dtype = c.packed();
  d.max_selected = std::max<int64_t>(c.n, 1);
  kda_plan* raw = nullptr;
  const kda_status status = kda_state_copy_plan_create(setting.context, &d, &raw);
  const std::unique_ptr<kda_plan, void (*)(kda_plan*)> plan(raw, kda_plan_destroy);
  if (!report.accept(status, status == KDA_OK ? "" : kda_last_error(), raw)) return;
  kda_state_copy_args args = sized<kda_state_copy_args>();
  args.pool = pool;
  args.indices = index;
  args.has_initial_state = flags;
  args.packed = packed;
  std::string message;
  const auto call = [&](const kda_state_copy_args& there, kda_workspace) {
    return c.scatter ? kda_state_scatter(raw, &there, nullptr) : kda_state_gather(raw, &there, nullptr);
  };
  const kda_status ran = run_in(setting.context, args, 0, call, message);
  if (!report.succeeded("run", ran, message)) return;
  if (setting.spoil && c.n > 0) setting.spoil("copied", c.scatter ? pool : packed);
  report.expect_none("packed", first_difference(packed, wanted_packed));
  report.expect_none("pool", first_difference(pool, wanted_pool));
  report.expect_none("packed: gaps", packed.guard_report());
  report.expect_none("pool: gaps", pool.guard_report());
}

}  // namespace

std::vector<Case> state_copy_cases() { return covering_cases(KDA_OP_STATE_COPY, axes(), allowed, choice_of, run, 4); }

}  // namespace kda::conformance
