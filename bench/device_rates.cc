// What a device itself can do: the copies that floors are counted in (design section 7).
#include <kda/device.h>

#include "bench/workload.h"

namespace kda::bench {

std::vector<Variant> copy_rate_variants(const Setting& setting) {
  constexpr int64_t kRows = 128, kBuffers = 4;  // [32, 128, 128] fp32: 256 MiB read and as many written
  struct Memory {
    explicit Memory(const Setting& s) : arena(s) {}
    Arena arena;
    Plan plan;
    kda_tensor rows[kBuffers];
    kda_tensor indices{};
  };
  const auto m = std::make_shared<Memory>(setting);
  for (kda_tensor& t : m->rows) t = m->arena.random(KDA_FP32, {kRows, 32, 128, 128});
  std::vector<int64_t> all;
  for (int64_t i = 0; i < kRows; ++i) all.push_back(i);
  m->indices = m->arena.ints(all);
  auto d = make<kda_state_copy_desc>();
  d.pool = m->rows[0];
  d.max_selected = kRows;
  m->plan = Plan(setting.context, d);
  const double bytes = 2.0 * kRows * 32 * 128 * 128 * 4;
  const auto memcpy = [m](int64_t i, void* stream) {
    check(kda_memory_copy(m->arena.context(), m->rows[(i + 1) % kBuffers].data, m->rows[i % kBuffers].data,
                          size_t{kRows} * 32 * 128 * 128 * 4, stream));
  };
  // libkda's copy kernel over rows that lie side by side.
  const auto kernel = [m](int64_t i, void* stream) {
    auto a = make<kda_state_copy_args>();
    a.pool = m->rows[i % kBuffers];
    a.packed = m->rows[(i + 1) % kBuffers];
    a.indices = m->indices;
    m->plan.gather(a, stream);
  };
  return {{"copy rate: memcpy", memcpy, bytes, Unit::kByte, "", bytes},
          {"copy rate: kernel", kernel, bytes, Unit::kByte, "", bytes}};
}

}  // namespace kda::bench
