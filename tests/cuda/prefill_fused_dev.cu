// Development program of the fused prefill: correctness against the fp64 oracle, causality and determinism by bits.
// Usage: kda_gpu_prefill_check [all|fused|cut|balanced|staged|beside|small|race]; timing lives in
// prefill_fused_bench.cu.
#include "prefill_fused_dev.cuh"

namespace kda::cuda::prefill_fused::dev {

bool test(const Problem& c, double out_limit, double state_limit, bool verbose) {
  Device d;
  upload(c, d);
  const Expected x = expect(c, d);
  const Result r = run(c, d);
  const bool ok = compare(c, d, r, x, out_limit, state_limit);
  if (!ok && verbose) describe(c, d, r, x);
  failures += !ok;
  return ok;
}

Problem basic(const char* name, std::vector<int64_t> lengths, int heads, int value_heads) {
  Problem c;
  c.name = name;
  c.lengths = std::move(lengths);
  c.heads = heads;
  c.value_heads = value_heads;
  c.fill_default();
  c.a_log.assign(value_heads, 0.0f);
  return c;
}

Problem varlen(const char* name) {
  return basic(name, {0, 1, 15, 16, 17, 0, 31, 33, 63, 64, 65, 127, 129, 1000, 0}, 2, 4);
}

void set_family(Problem& c, Gate family) {
  c.family = family;
  if (family != Gate::kPlain) return;
  for (float& x : c.gate) x = -std::fabs(x);
}

void mixed() {
  test(varlen("varlen, all states"));
  Problem c = varlen("varlen, slots, flags");
  c.initial = Initial::kFlags;
  c.flags = {1, 0, 1, 1, 0, 0, 1, 1, 2, 0, 1, 1, 0, 1, 1};
  c.pool_slots = 20;
  c.slots = {3, 19, -1, 0, 7, 5, 20, 11, 12, 1 << 30, 2, 4, 6, 8, 9};
  c.pad_rows = 7;
  c.token_pad = 64;
  c.fill_default();
  for (size_t i = c.tokens() * 4 * 128; i < c.v.size(); ++i) c.v[i] = 0x7fc0, c.gate[i] = NAN;
  test(c);
  c.name = "varlen, ranges, null 0";
  c.use_ranges = true;
  c.null_slot = 0;
  test(c);
  for (Real pool : {Real::kBf16, Real::kF16}) {
    c = varlen(pool == Real::kBf16 ? "bf16 pool" : "fp16 pool");
    c.pool_type = pool;
    test(c, 2.0e-3, 2.0e-3);
  }
  c = varlen("softplus varlen");
  c.family = Gate::kSoftplus;
  c.fill_default(1.0);
  test(c);
  c = basic("F17 all decay", {1, 15, 17, 63, 65, 127, 129, 500, 1000, 1500});
  c.family = Gate::kPlain;
  c.gate_type = Real::kF32;
  for (auto& x : c.gate) x = -1.0f / 128;
  for (auto& x : c.k) x = 0;
  for (auto& x : c.v) x = 0;
  for (auto& x : c.state) x = 1.0f;
  test(c, 2.0e-3, 1e-5);
  c = basic("F14 transposed?", {1, 65});
  c.family = Gate::kPlain;
  c.gate_type = Real::kF32;
  std::fill(c.gate.begin(), c.gate.end(), 0.0f);
  std::fill(c.k.begin(), c.k.end(), 0);
  std::fill(c.v.begin(), c.v.end(), 0);
  std::fill(c.state.begin(), c.state.end(), 0.0f);
  for (int n = 0; n < 2; ++n)
    for (int v = 0; v < 128; ++v) c.state[n * 16384 + v * 128 + 5] = static_cast<float>(v + 1);
  test(c, 2.0e-3, 0.0);
  c = basic("F01 far softplus", {130}, 2, 2);
  c.family = Gate::kSoftplus;
  c.a_log = {std::log(201.0f), std::log(8.0f)};
  for (size_t i = 0; i < c.gate.size(); ++i) c.gate[i] = i % 128 % 3 == 0 ? 13.0f : -6.0f;
  for (auto& x : c.beta) x = 2.0f;
  for (size_t i = 0; i < c.state.size(); ++i) c.state[i] = static_cast<float>(uniform(6, i));
  test(c);
}

void distributions() {
  for (int id = 1; id <= 11; ++id) {
    Problem c;
    c.name = std::string("D").append(std::to_string(id));  // of + GCC 12 warns wrongly
    const bool degenerate = id >= 9;
    c.heads = c.value_heads = degenerate ? 1 : 2;
    const int64_t t = id == 9 ? 16384 : (degenerate ? 2048 : 1024);
    c.lengths = {t};
    c.fill_default();
    const int h = c.heads;
    if (id > 2) c.family = Gate::kPlain, c.gate_type = Real::kF32;
    auto each = [&](const std::function<double(size_t)>& g) {
      for (size_t i = 0; i < c.gate.size(); ++i) c.gate[i] = static_cast<float>(g(i));
    };
    if (id == 1) c.a_log = {0.0f, std::log(4.0f)};
    if (id == 2) {
      c.family = Gate::kSoftplus;
      c.a_log = {0.0f, std::log(16.0f)};
      c.fill_default(1.0);
      for (int i = 0; i < h * 128; ++i)
        c.dt_bias.push_back(static_cast<float>(std::log(std::expm1(std::pow(10.0, -2 + uniform(8, i))))));
    }
    if (id == 3) each([](size_t i) { return -std::pow(10.0, -4 + 2 * uniform(4, i)); });
    if (id == 4) each([](size_t i) { return -std::exp(-0.673535 + 8.536805 * uniform(4, i)); });
    if (id == 5) each([](size_t) { return -5.0; });
    if (id == 6) each([](size_t i) { return i % 2 == 0 ? 0.0 : -5.0; });
    if (id == 7) each([](size_t i) { return uniform(4, i) < -0.75 ? -2613.0 : -0.01; });
    if (id == 8) {
      for (size_t i = 0; i < c.v.size(); ++i)
        if (uniform(7, i) < -0.98) c.v[i] = bf16(100 * from_bf16(c.v[i]));
      each([&](size_t i) { return -std::exp(-0.673535 + 8.536805 * uniform(8, i % (h * 128))); });
    }
    if (degenerate) {
      c.beta_type = Real::kF32;
      for (auto& x : c.beta) x = id == 9 ? 8.0f : (id == 10 ? 7.0f : 1000.0f);
    }
    if (id == 9) {
      for (size_t i = 0; i < c.q.size(); ++i) c.k[i] = c.k[i % 128], c.q[i] = c.k[i];
      for (size_t i = 0; i < c.v.size(); ++i) c.v[i] = c.v[i % (16 * 128)];
      each([](size_t) { return -5.0 / (1.0 + std::exp(12.0)); });
      c.initial = Initial::kNone;
    }
    if (id >= 10) {
      const double spread = id == 10 ? 0.01 : 0.1;
      for (size_t i = 0; i < c.k.size(); ++i) c.k[i] = bf16(uniform(2, i % 128) + spread * uniform(9, i));
      each([&](size_t) { return id == 10 ? -1e-3 : -1e-4; });
    }
    test(c, degenerate ? 5e-3 : 2.0e-3, degenerate ? 5e-3 : 7e-4, false);
  }
}

void expect_bits(const char* name, bool equal) {
  std::printf("%-4s %s\n", equal ? "ok" : "FAIL", name);
  std::fflush(stdout);
  failures += !equal;
}

bool runs_agree(const Problem& c, Device& d, const Result& first, int runs) {
  bool same = true;
  for (int i = 0; i < runs; ++i) {
    const Result again = run(c, d);
    same = same && again.out == first.out && again.pool == first.pool;
  }
  return same;
}

namespace {

// Rows [0, rows) of every head equal?
bool same_rows(const Problem& c, const Result& a, const Result& b, int64_t rows) {
  return std::memcmp(a.out.data(), b.out.data(), rows * c.value_heads * 128 * 2) == 0;
}

}  // namespace

void bits() {
  for (int variant = 0; variant < 3; ++variant) {
    const int64_t t = variant == 0 ? 22 : (variant == 1 ? 45 : 150);
    Problem c = basic("H-9", {t}, 4, 4);
    c.a_log = {0.0f, std::log(4.0f), std::log(9.0f), std::log(16.0f)};
    if (variant == 2) c.family = Gate::kSoftplus;
    Device d;
    upload(c, d);
    const Result base = run(c, d);
    Problem changed = c;
    for (int i = 0; i < 4 * 128; ++i) changed.gate[(t - 1) * 4 * 128 + i] = 1000.0f;
    Device d2;
    upload(changed, d2);
    expect_bits("H-9: later gate", same_rows(c, base, run(changed, d2), t - 1));
    changed = c;
    for (int i = 0; i < 4 * 128; ++i)
      changed.k[(t - 1) * 4 * 128 + i] = 0x7fc0, changed.v[(t - 1) * 4 * 128 + i] = 0x7f80;
    Device d3;
    upload(changed, d3);
    expect_bits("H-9: later NaN key, Inf value", same_rows(c, base, run(changed, d3), t - 1));
    Problem longer = basic("H-9 longer", {t + 40}, 4, 4);
    longer.a_log = c.a_log, longer.family = c.family;
    std::copy(c.q.begin(), c.q.end(), longer.q.begin());
    Device d4;
    upload(longer, d4);
    expect_bits("H-9: appended tokens", same_rows(c, base, run(longer, d4), t));
  }
  // One NaN value: only its row, from its token on.
  Problem c = basic("NaN in v", {70, 40}, 1, 1);
  c.v[35 * 128 + 77] = 0x7fc0;
  test(c);
  c = basic("Inf in v", {70}, 1, 1);
  c.v[3 * 128 + 7] = 0x7f80;
  test(c);
  c = basic("NaN gate", {70, 40}, 1, 1);
  c.gate[35 * 128 + 77] = NAN;
  test(c);
  c = basic("v to bf16 max", {130}, 1, 2);
  for (size_t i = 0; i < c.v.size(); ++i)
    if (uniform(7, i) < -0.98) c.v[i] = bf16(uniform(11, i) * 3e38);
  test(c);
  c = basic("state 1e30", {130}, 1, 2);
  for (size_t i = 0; i < c.state.size(); ++i) c.state[i] *= i / 128 % 5 == 0 ? 1e31f : 1.0f;
  test(c);
  c = basic("U >> v", {200}, 1, 1);
  for (size_t i = 0; i < c.v.size(); ++i) c.v[i] = bf16(from_bf16(c.v[i]) * (i / 128 % 50 < 25 ? 1e-6 : 1e4));
  test(c);
  // Determinism.
  c = varlen("determinism");
  Device d;
  upload(c, d);
  const Result first = run(c, d);
  expect_bits(("N-12: " + std::to_string(kManyRuns) + " runs").c_str(), runs_agree(c, d, first, kManyRuns));
  // Every sequence alone gives the same bits (N-13).
  bool alone = true;
  for (size_t n = 0; n < c.lengths.size(); ++n) {
    Problem solo = c;
    solo.lengths = {c.lengths[n]};
    const int64_t at = d.begins[n], rows = c.lengths[n];
    auto cut = [&](auto& x, int64_t width) {
      x.erase(x.begin(), x.begin() + at * width);
      x.resize(rows * width);
    };
    cut(solo.q, 2 * 128), cut(solo.k, 2 * 128), cut(solo.v, 4 * 128), cut(solo.gate, 4 * 128), cut(solo.beta, 4);
    solo.state.erase(solo.state.begin(), solo.state.begin() + n * 4 * 16384);
    solo.state.resize(4 * 16384);
    if (rows == 0) continue;
    Device ds;
    upload(solo, ds);
    const Result r = run(solo, ds);
    alone = alone && std::memcmp(r.out.data(), first.out.data() + at * 4 * 128, rows * 4 * 128 * 2) == 0 &&
            std::memcmp(r.pool.data(), first.pool.data() + n * 4 * 65536, 4 * 65536) == 0;
  }
  expect_bits("N-13: alone or in the batch", alone);
}

namespace {

void small() {
  for (int64_t t : {1, 16, 32, 33, 64, 100}) test(basic(("bounded T=" + std::to_string(t)).c_str(), {t}));
  Problem c = basic("fresh T=70", {70});
  c.initial = Initial::kNone;
  test(c);
  c = basic("softplus T=96", {96});
  c.family = Gate::kSoftplus;
  test(c);
  c = basic("fp32 gate, fp32 beta T=96", {96});
  c.gate_type = c.beta_type = Real::kF32;
  test(c);
  for (const double bound : {-5.0, -5.198}) {  // factors of 2^-115 and 2^-120
    c = basic("gates at their bound", {100});
    c.lower_bound = bound;
    for (float& x : c.gate) x = 100.0f;
    test(c);
    c.name = "the same, small queries";
    for (uint16_t& x : c.q) x = bf16(1e-6 * from_bf16(x));
    test(c);
  }
  c = basic("rows as they are T=96", {96});
  c.normalize = 0;
  for (uint16_t& x : c.k) x = bf16(0.125 * from_bf16(x));
  test(c);
}

// Sequence n of a problem, cut to `rows` tokens, alone and with a packed state.
Problem cut_sequence(const Problem& c, const Device& d, int64_t n, int64_t rows) {
  Problem solo = c;
  solo.lengths = {rows};
  solo.pad_rows = 0;
  const int64_t at = d.begins[n], hv = c.value_heads;
  auto cut = [&](auto& x, int64_t width) {
    x.erase(x.begin(), x.begin() + at * width);
    x.resize(rows * width);
  };
  cut(solo.q, c.heads * 128), cut(solo.k, c.heads * 128), cut(solo.v, hv * 128), cut(solo.gate, hv * 128);
  cut(solo.beta, hv);
  solo.state.erase(solo.state.begin(), solo.state.begin() + n * hv * 16384);
  solo.state.resize(hv * 16384);
  return solo;
}

// K-5: a checkpoint has the bits of a call that ends there; asking for checkpoints changes nothing else.
void checkpoints() {
  Problem c = basic("checkpoints", {130, 384, 64, 40, 0}, 1, 2);
  const std::vector<std::vector<int64_t>> offsets = {
      {64, 128, 130}, {16, 40, 384}, {64, 0, 65}, {39, 41, -3}, {0, 1, 5}};
  for (const bool with_slots : {false, true}) {
    Device d;
    upload(c, d);
    const Result plain = run(c, d);
    const int64_t columns = 3, n = c.sequences(), floats = 2 * 16384;
    std::vector<int64_t> table;
    std::vector<int32_t> slots;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < columns; ++j)
        table.push_back(offsets[i][j]),
            slots.push_back(i == 1 && j == 1 ? -1 : static_cast<int32_t>(14 - 3 * i + j - 2));
    Buffer offset_buffer, slot_buffer, out(n * columns * floats * 4);
    offset_buffer.upload(table), slot_buffer.upload(slots);
    out.fill(0x55);
    Params& p = d.p;
    p.checkpoints = static_cast<int32_t>(columns);
    p.checkpoint_offsets = Table{offset_buffer.data(), columns, 1, 1};
    p.checkpoint_out = out.data();
    if (with_slots) {
      p.checkpoint_slots = Table{slot_buffer.data(), columns, 1, 0};
      p.checkpoint_slot_count = n * columns, p.checkpoint_stride = floats;
    } else {
      p.checkpoint_row_stride = columns * floats, p.checkpoint_stride = floats;
    }
    const Result with = run(c, d);
    bool same = with.out == plain.out && with.pool == plain.pool && out.guard_intact();
    const std::vector<float> got = out.download<float>();
    int stored = 0;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t offset = offsets[i][j];
        const int64_t row = with_slots ? slots[i * columns + j] : i * columns + j;
        const bool expected = offset > 0 && offset <= c.lengths[i] && row >= 0;
        if (row < 0) continue;
        const float* mine = got.data() + row * floats;
        if (!expected) {
          uint32_t bits;
          std::memcpy(&bits, mine, 4);
          same = same && bits == 0x55555555u;
          continue;
        }
        const Problem solo = cut_sequence(c, d, i, offset);
        Device ds;
        upload(solo, ds);
        const Result r = run(solo, ds);
        const bool equal = std::memcmp(r.pool.data(), mine, floats * 4) == 0;
        if (!equal) std::printf("  checkpoint (%ld, %ld) differs\n", i, j);
        same = same && equal;
        ++stored;
      }
    std::printf("  %d checkpoints stored\n", stored);
    expect_bits(with_slots ? "K-5: checkpoints by slot" : "K-5: packed checkpoints", same);
  }
}

}  // namespace

// R-41 and the forms of P-12: an output list, int64 offsets, begin and length.
void output_list() {
  Problem c = basic("out_rows", {50, 33}, 1, 1);
  Device d;
  upload(c, d);
  const Result plain = run(c, d);
  std::vector<int32_t> rows;
  for (int i = 0; i < 83; ++i) rows.push_back(i == 7 ? 500 : 82 - i);  // row 7 is skipped
  Buffer list;
  list.upload(rows);
  d.p.out_row_of = Indices{list.data(), 1, 0};
  d.p.out_row_count = 83;
  const Result listed = run(c, d);
  bool same = true;
  for (int i = 0; i < 83; ++i)
    for (int v = 0; v < 128; ++v)
      same = same && listed.out[(82 - i) * 128 + v] == (i == 7 ? 0x7f7f : plain.out[i * 128 + v]);
  expect_bits("R-41: output rows by list", same);
}

}  // namespace kda::cuda::prefill_fused::dev

using namespace kda::cuda::prefill_fused;
using namespace kda::cuda::prefill_fused::dev;

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  bool is_known = false;
  for (const char* name : {"all", "fused", "cut", "balanced", "staged", "beside", "small", "race"})
    is_known |= what == name;
  if (!is_known) {
    std::fprintf(stderr, "usage: %s [all|fused|cut|balanced|staged|beside|small|race]\n", argv[0]);
    return 2;
  }
  if (what == "race") {  // short enough for compute-sanitizer --tool racecheck
    test(basic("bounded T=200", {200}, 1, 1));
    Problem c = basic("softplus, two works", {70, 33}, 1, 1);
    c.family = Gate::kSoftplus;
    test(c);
    default_balanced = true, default_sm_count = 4;
    test(basic("shares", {300, 70}, 2, 2));
    default_balanced = false, default_sm_count = 0;
    default_staged = true;
    test(basic("staged", {200}, 1, 1));
    default_wave = 1, default_prepare_ctas = 4;
    test(basic("beside", {200, 70}, 1, 1));
    default_cut = {4, 1, 2};
    test(basic("cut", {1100}, 1, 1));
    return failures != 0;
  }
  const bool all = what == "all";
  if (all || what == "fused" || what == "small") small();
  if (all || what == "fused") {
    mixed();
    distributions();
    bits();
    checkpoints();
    output_list();
  }
  if (all || what == "cut") segments();
  if (all || what == "balanced") balanced();
  if (all || what == "staged") staged();
  if (all || what == "beside") beside();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
