// What only a program with kernels of its own can measure: state copies beside those of frameworks (state-copy.md
// U-3), what the launches of a graph cost when their kernels do nothing, and operators beside kernels that only move
// as many bytes. Everything else: kda bench.
//
//   kda_gpu_bench [--json FILE] [--filter copy|launch|traffic] [--rounds N] [--seed N]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>

#include "bench/device_report.h"
#include "bench/targets.h"
#include "bench_rivals.h"
#include "bench_traffic.h"
#include "kda/kda.hpp"

namespace kda::cuda_test {
namespace {

// A tensor of the public API as the rivals take it.
RivalCopy rival_of(const kda_state_copy_args& a) {
  const auto size = static_cast<int64_t>(kda_dtype_size(a.pool.dtype));
  return {static_cast<char*>(a.pool.data),
          static_cast<char*>(a.packed.data),
          a.pool.strides[0] * size,
          a.packed.strides[0] * size,
          a.pool.shape[0],
          a.indices.shape[0],
          a.indices.data,
          a.indices.dtype == KDA_INT64,
          static_cast<const uint8_t*>(a.has_initial_state.data),
          static_cast<int>(size)};
}

template <class F>
bench::CopyRival rival(const char* label, const char* detail, bool scatter, F copy) {
  return {label, detail, scatter, [copy](const kda_state_copy_args& a, void* stream) {
            copy(rival_of(a), static_cast<cudaStream_t>(stream));
          }};
}

const std::vector<bench::CopyRival>& rivals() {
  static const std::vector<bench::CopyRival> all = {
      rival("index_select", "and masked_fill", false, index_select), rival("index_put", "", true, index_put),
      rival("gather, unchecked", "", false, [](const RivalCopy& c, cudaStream_t s) { unchecked_copy(c, false, s); }),
      rival("scatter, unchecked", "", true, [](const RivalCopy& c, cudaStream_t s) { unchecked_copy(c, true, s); })};
  return all;
}

// Graphs of empty kernels, or of such that wait for one value of the grid before; with and without programmatic
// serialisation.
bench::Workload launches(const bench::Setting& setting) {
  const auto arena = std::make_shared<bench::Arena>(setting);
  auto* const value = static_cast<int*>(arena->zeros(KDA_INT32, {1}).data);
  bench::Workload w;
  w.name = "launch";
  for (const bool early : {false, true}) {
    for (const int reads : {0, 1}) {
      w.variants.push_back({std::string(reads ? "one value" : "nothing") + (early ? ", programmatic" : ""),
                            [arena, value, reads, early](int64_t, void* stream) {
                              launch_chained(value, reads, early, static_cast<cudaStream_t>(stream));
                            }});
    }
  }
  return w;
}

// What is held to a multiple of its floor, and the streams that its bytes are.
struct Moved {
  const char* target;
  int reads, writes;
  int64_t rows;  // of a pool; 0: streams without rows
  enum Where { kInPlace, kFromPool, kToPool } where = kInPlace;
};
constexpr Moved kMoved[] = {{"decode H=32 N=1 fp32", 1, 1, 1},
                            {"decode H=32 N=32 fp32", 1, 1, 32},
                            {"decode H=32 N=128 fp32", 1, 1, 128},
                            {"decode H=64 N=64 fp32", 1, 1, 64},
                            {"decode_step H=32 N=1 fp32", 1, 1, 1},
                            {"decode_step H=32 N=8 fp32", 1, 1, 8},
                            {"decode_step H=32 N=32 fp32", 1, 1, 32},
                            {"decode_step H=32 N=32 bf16", 1, 1, 32},
                            {"decode_step H=12 N=128 fp32", 1, 1, 128},
                            {"decode_step H=12 N=128 bf16", 1, 1, 128},
                            {"decode_step H=32 N=128 fp32", 1, 1, 128},
                            {"decode_step H=64 N=64 fp32", 1, 1, 64},
                            {"verify S=3 H=32 N=32 fp32", 1, 4, 32},
                            {"verify S=3 folded commit H=32 N=32 fp32", 1, 1, 32},
                            {"verify S=3 folded commit H=96 N=128 fp32", 1, 1, 128},
                            {"conv T=8192 H=12", 1, 1, 0, Moved::kFromPool},
                            {"gated norm T=8192 H=12", 2, 1, 0, Moved::kFromPool},
                            {"copy gather H=32 fp32 n=1", 1, 1, 1, Moved::kFromPool},
                            {"copy gather H=32 fp32 n=8", 1, 1, 8, Moved::kFromPool},
                            {"copy scatter H=32 fp32 n=8", 1, 1, 8, Moved::kToPool},
                            {"copy gather H=32 fp32 n=32", 1, 1, 32, Moved::kFromPool},
                            {"copy scatter H=32 fp32 n=32", 1, 1, 32, Moved::kToPool},
                            {"copy scatter H=32 fp32 n=128", 1, 1, 128, Moved::kToPool},
                            {"copy gather H=32 bf16 n=128", 1, 1, 128, Moved::kFromPool},
                            {"copy scatter H=32 bf16 n=128", 1, 1, 128, Moved::kToPool},
                            {"copy scatter H=32 bf16 n=256", 1, 1, 256, Moved::kToPool},
                            {"copy scatter H=12 fp32 paged n=128", 1, 1, 128, Moved::kToPool},
                            {"copy scatter H=12 fp32 paged n=256", 1, 1, 256, Moved::kToPool}};

// The target itself, and the same bytes moved in every form, on as many sets of memory as are cold.
bench::Workload beside_traffic(const bench::Setting& setting, const Moved& moved) {
  const std::vector<bench::Target> all = bench::targets();
  const auto target = std::find_if(all.begin(), all.end(), [&](const auto& x) { return x.name == moved.target; });
  if (target == all.end()) throw std::logic_error(std::string(moved.target) + ": no such target");
  bench::Workload w = target->make(setting);
  const bench::Variant judged = bench::judged(w, target->limit);
  Traffic t;
  t.reads = moved.reads, t.writes = moved.writes, t.in_place = moved.where == Moved::kInPlace && moved.rows > 0;
  t.rows_of_target = moved.where == Moved::kToPool;
  const int64_t rows = std::max<int64_t>(1, moved.rows), streams = t.reads + t.writes;
  const int64_t row_bytes = static_cast<int64_t>(judged.floor_bytes) / (streams * rows) / kTrafficUnit * kTrafficUnit;
  t.bytes = rows * row_bytes;
  if (moved.rows > 0) t.row_bytes = row_bytes;
  const int64_t sets = setting.sets(t.bytes * streams);
  const auto arena = std::make_shared<bench::Arena>(setting);
  const auto* const from = static_cast<char*>(arena->zeros(KDA_FP32, {sets, t.reads * t.bytes / 4}).data);
  auto* const to = static_cast<char*>(arena->zeros(KDA_FP32, {sets, t.writes * t.bytes / 4}).data);
  // A set's rows, in no order.
  std::vector<int64_t> order(static_cast<size_t>(rows));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  const auto* const table = static_cast<const int32_t*>(arena->ints(order).data);
  w.variants = {judged};
  w.ratios = {{"rate beside the fastest that only moves", judged.label, {}}};
  for (const TrafficForm& form : traffic_forms(t)) {
    const auto call = [arena, t, form, from, to, sets, table](int64_t i, void* stream) {
      Traffic now = t;
      now.from = from + i % sets * t.reads * t.bytes;
      now.to = to + i % sets * t.writes * t.bytes;
      now.rows = table;
      move_bytes(now, form, static_cast<cudaStream_t>(stream));
    };
    w.variants.push_back({form.label(), call, judged.work, judged.unit, moved.target, judged.floor_bytes});
    w.ratios.front().over.push_back(form.label());
  }
  return w;
}

struct Options {
  std::string json, filter;
  bench::RoundOptions rounds;
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const bool more = i + 1 < argc;
    if (more && std::strcmp(argv[i], "--json") == 0) o.json = argv[++i];
    else if (more && std::strcmp(argv[i], "--filter") == 0) o.filter = argv[++i];
    else if (more && std::strcmp(argv[i], "--rounds") == 0) o.rounds.rounds = std::max(1, std::atoi(argv[++i]));
    else if (more && std::strcmp(argv[i], "--seed") == 0) o.rounds.seed = std::strtoull(argv[++i], nullptr, 10);
    else {
      std::fprintf(stderr, "usage: %s [--json FILE] [--filter copy|launch|traffic] [--rounds N] [--seed N]\n",
                   argv[0]);
      std::exit(2);
    }
  }
  return o;
}

int run(const Options& o) {
  auto options = make<kda_context_options>();
  options.device = {KDA_CUDA, 0};
  const Context context(options);
  const bench::Setting setting{context, bench::Workers(context), "auto", options.device};
  const std::vector<bench::Variant> rates = bench::copy_rate_variants(setting);
  bench::Json json = {{"device", bench::device_text(options.device)},
                      {"source_hash", kda_source_hash()},
                      {"rounds", o.rounds.rounds},
                      {"seed", o.rounds.seed},
                      {"benches", bench::Json::array()}};
  const std::vector<bench::Mode> every(std::begin(bench::kModes), std::end(bench::kModes)),
      graphs = {bench::Mode::kGraph};
  const auto measure = [&](const char* name, const std::vector<bench::Mode>& modes,
                           const std::function<bench::Workload()>& make) {
    if (std::string(name).find(o.filter) == std::string::npos) return;
    const bench::Workload workload = make();
    std::vector<bench::Variant> variants = workload.variants;
    variants.insert(variants.end(), rates.begin(), rates.end());
    const bench::DeviceRounds rounds = bench::run_device_rounds(context.get(), variants, o.rounds, modes);
    bench::print_device(workload, rounds);
    json["benches"].push_back(bench::device_json(workload, rounds));
  };
  measure("launch", every, [&] { return launches(setting); });
  for (const Moved& moved : kMoved) measure("traffic", graphs, [&] { return beside_traffic(setting, moved); });
  for (const auto& [heads, state, gapped] :
       {std::tuple<int64_t, kda_dtype, bool>{32, KDA_FP32, false}, {32, KDA_BF16, false}, {12, KDA_FP32, true}}) {
    for (const int64_t rows : {1, 8, 32, 128, 256}) {
      for (const bool checked : {false, true}) {  // int64 indices, and flags
        const bench::CopyShape shape{rows, heads, state, checked ? KDA_INT64 : KDA_INT32, gapped, checked};
        measure("copy", every, [&] { return bench::copy(setting, shape, rivals()); });
      }
    }
  }
  if (o.json.empty()) return 0;
  std::ofstream file(o.json);
  file << json.dump(1) << '\n';
  return file.flush() ? 0 : (std::perror(o.json.c_str()), 1);
}

}  // namespace
}  // namespace kda::cuda_test

int main(int argc, char** argv) {
  try {
    return kda::cuda_test::run(kda::cuda_test::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
