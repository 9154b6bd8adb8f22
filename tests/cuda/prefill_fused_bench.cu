// Times the fused prefill over the shapes of the targets table: CUDA graphs of >= 20 calls on rotating buffers,
// rounds in shuffled order beside two copy controls, raw samples to a JSON file. Usage: kda_gpu_prefill_bench
// [--rounds R] [--filter SUBSTRING] [--gates bench,init,softplus]
// [--forms auto,fused,balanced,staged,beside,stages,cut] [--cuts S:O:R,...] [--json FILE]; `auto`: as plans choose;
// `balanced`: fused, works shared out by time; `beside`: the staged form's preparation beside its chains of two SMs
// each, and, as `beside1`, of one; `stages`: the staged form's first kernel alone, `stagesN`: on N SMs; `waveN`:
// beside chains of N works at a time, the preparation on the SMs that these leave; `cut`: by every cut of the list, S
// segments with an opening of O and runs of R (`S:O:R:P`: P SMs prepare); `--forms all`: all but the two with N, and
// some cuts of long sequences.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernels/prefill_fused/choose.h"
#include "cuda/kernels/prefill_fused/launch.h"
#include "prefill_fused_problem.cuh"

using namespace kda::cuda::prefill_fused;
using kda::cuda::prefill_fused::dev::check;

namespace {

struct TableRow {
  const char* name;
  std::vector<int64_t> lengths;
  int heads;
  double floor_us, target_us;
};

std::vector<int64_t> times(int n, int64_t t) { return std::vector<int64_t>(n, t); }

const std::vector<int64_t> kMixed = {1300, 547, 2048, 963, 271, 3063};

std::vector<TableRow> shapes() {
  return {{"1x8192", times(1, 8192), 96, 255, 480},
          {"1x8192", times(1, 8192), 64, 170, 310},
          {"1x8192", times(1, 8192), 32, 85, 190},
          {"1x8192", times(1, 8192), 16, 42, 130},
          {"1x8192", times(1, 8192), 12, 32, 108},
          {"mixed", kMixed, 64, 180, 360},
          {"mixed", kMixed, 12, 34, 110},
          {"8x1024", times(8, 1024), 96, 277, 500},
          {"8x1024", times(8, 1024), 64, 184, 340},
          {"8x1024", times(8, 1024), 32, 92, 180},
          {"8x2048", times(8, 2048), 32, 176, 330},
          {"8x2048", times(8, 2048), 16, 88, 180},
          {"8x2048", times(8, 2048), 12, 66, 150},
          {"1x16384", times(1, 16384), 32, 169, 350},
          {"1x16384", times(1, 16384), 16, 84, 240},
          {"1x16384", times(1, 16384), 12, 63, 195},
          {"1x65536", times(1, 65536), 12, 252, 700},
          {"32x256", times(32, 256), 32, 117, 210},
          {"32x256", times(32, 256), 12, 44, 88},
          {"128x64", times(128, 64), 32, 218, 340},
          {"128x64", times(128, 64), 12, 82, 130},
          {"1x512", times(1, 512), 32, 6.3, 22},
          {"1x512", times(1, 512), 12, 2.4, 18},
          {"4x100", times(4, 100), 32, 8.3, 20},
          {"4x100", times(4, 100), 12, 3.1, 15}};
}

__device__ float normal(uint64_t i) {
  uint64_t z = i * 0x9E3779B97F4A7C15ull + 0x1234567;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  const float u = (static_cast<uint32_t>(z) + 0.5f) * 0x1p-32f, w = static_cast<uint32_t>(z >> 32) * 0x1p-32f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * w);
}

__global__ void fill_bf16(uint16_t* x, int64_t n, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll)
    x[i] = __bfloat16_as_ushort(__float2bfloat16_rn(scale * normal(i + seed)));
}
__global__ void fill_f32(float* x, int64_t n, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) x[i] = scale * normal(i + seed);
}
__global__ void copy_kernel(const uint4* in, uint4* out, int64_t n) {
  for (int64_t i = blockIdx.x * 1024ll + threadIdx.x; i < n; i += gridDim.x * 1024ll) out[i] = in[i];
}

constexpr int64_t kTokenHeads = 96ll * 8192;  // = 12 * 65536
constexpr int64_t kStates = 128ll * 32;

struct Buffers {
  uint16_t *q, *k, *v, *gate, *beta, *out;
  float *state_in, *state_out, *a_log, *dt_bias;
};

struct Variant {
  std::string name;
  TableRow shape;
  std::string gates, form;
  int calls = 20;
  Form choice;
  double expected = 0;  // by the cost model
  cudaGraphExec_t graph = nullptr;
  std::vector<double> samples;
};

void bench_parameters(const std::string& gates, Buffers& b) {
  std::mt19937 random(7);
  std::vector<float> a_log(96), dt_bias(96 * 128);
  std::uniform_real_distribution<float> unit(0, 1);
  std::normal_distribution<float> gauss;
  for (auto& x : a_log) x = gates == "bench" ? 2 * unit(random) - 1 : std::log(1 + 15 * unit(random));
  for (auto& x : dt_bias) {
    const float dt = std::exp(std::log(1e-3f) + unit(random) * std::log(100.0f));
    x = gates == "bench" ? 0.5f * gauss(random) : std::log(std::expm1(dt));
  }
  check(cudaMemcpy(b.a_log, a_log.data(), a_log.size() * 4, cudaMemcpyHostToDevice), "a_log");
  check(cudaMemcpy(b.dt_bias, dt_bias.data(), dt_bias.size() * 4, cudaMemcpyHostToDevice), "dt_bias");
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts(1);
  for (const char c : list) {
    if (c == ',') parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

using Choices = std::vector<std::pair<std::string, Form>>;

void add_beside(Choices& all, const CallFacts& facts) {
  for (const int chain_sms : {2, 1}) {
    const Form form = beside_form(facts, chain_sms);
    if (form.wave > 0) all.emplace_back(chain_sms == 2 ? "beside" : "beside1", form);
  }
}

// The N of `stagesN` or `waveN`: at least two SMs are left to the others.
int number_behind(const std::string& form, const std::string& name, int sm_count) {
  const int number = std::atoi(form.c_str() + name.size());
  if (number >= 1 && number <= sm_count - 2) return number;
  std::fprintf(stderr, "--forms: %s: expected a number from 1 to %d behind `%s`\n", form.c_str(), sm_count - 2,
               name.c_str());
  std::exit(2);
}

// Every cut of the list, by the number of preparing SMs that is expected to be best, or the one that the list says.
void add_cuts(Choices& all, const CallFacts& facts, const std::string& cuts) {
  for (const std::string& text : split(cuts)) {
    Cut cut;
    int ctas = 0;
    const int fields = std::sscanf(text.c_str(), "%d:%d:%d:%d", &cut.segments, &cut.opening, &cut.run, &ctas);
    if (fields < 3 || cut.opening < 1 || cut.opening >= cut.segments || cut.run < 1 ||
        (fields == 4 && (ctas < 2 || ctas > facts.sm_count))) {
      std::fprintf(stderr, "--cuts: expected S:O:R or S:O:R:P with 1 <= O < S, 1 <= R, 2 <= P <= SMs, got %s\n",
                   text.c_str());
      std::exit(2);
    }
    Form form = cut_form(facts, cut);
    if (fields == 4) form.prepare_ctas = ctas;
    all.emplace_back("cut", form);
  }
}

// The forms of a call that are to be measured, by name.
Choices choices(const CallFacts& facts, const std::string& forms, const std::string& cuts) {
  Choices all;
  const bool may_balance = facts.sequences * facts.value_heads > fused_clusters(facts.sm_count);
  for (const std::string& form : split(forms == "all" ? "auto,fused,balanced,staged,stages,beside,cut" : forms)) {
    if (form == "auto") all.emplace_back(form, choose_form(facts));
    else if (form == "fused") all.emplace_back(form, Form{});
    else if (form == "balanced") {
      if (may_balance) all.emplace_back(form, Form{{}, false, 0, 0, true});
    } else if (form == "staged" || form == "stages") all.emplace_back(form, Form{{}, true});
    else if (form.rfind("stages", 0) == 0)
      all.emplace_back(form, Form{{}, true, 1, number_behind(form, "stages", facts.sm_count)});
    else if (form == "beside") add_beside(all, facts);
    else if (form.rfind("wave", 0) == 0) {
      const int wave = number_behind(form, "wave", facts.sm_count);
      all.emplace_back(form, Form{{}, true, wave, facts.sm_count - wave});
    } else if (form == "cut") {
      if (facts.sequences == 1 && facts.tokens > 4096 && facts.value_heads <= 32) add_cuts(all, facts, cuts);
    } else {
      std::fprintf(stderr, "--forms: expected one of the forms that the usage names, got %s\n", form.c_str());
      std::exit(2);
    }
  }
  return all;
}

// Memory that all variants share.
void* shared_space(int64_t bytes) {
  static void* space = nullptr;
  static int64_t size = 0;
  if (bytes > size) {  // graphs hold the old one
    check(cudaMalloc(&space, bytes), "space");
    size = bytes;
  }
  return space;
}

cudaGraphExec_t capture(const Variant& variant, const Buffers& b, int64_t n, int64_t tokens, const int32_t* offsets,
                        int sm_count, cudaStream_t stream) {
  const int64_t h = variant.shape.heads;
  const Gate family = variant.gates == "softplus" ? Gate::kSoftplus : Gate::kBounded;
  const int64_t sets = std::max<int64_t>(1, std::min(kTokenHeads / (tokens * h), kStates / (n * h)));
  Params p;
  p.q_rows = p.k_rows = p.v_rows = p.gate_rows = p.out_rows = Rows{0, h * 128, 128};
  p.beta_rows = Rows{0, h, 1};
  p.a_log = b.a_log, p.dt_bias = b.dt_bias, p.lower_bound = -5.0f, p.scale = 1.0f / std::sqrt(128.0f);
  p.cu_seqlens = Indices{offsets, 1, 0};
  p.sequences = n, p.tokens = tokens, p.heads = p.value_heads = static_cast<int32_t>(h);
  p.initial = Initial::kAll;
  p.state_in_stride = p.state_out_stride = h * 16384, p.state_in_slots = p.state_out_slots = n;
  p.cut = variant.choice.cut;
  p.wave = variant.choice.wave, p.prepare_ctas = variant.choice.prepare_ctas;
  const int64_t cut_bytes = prefill_fused_workspace(n, p.value_heads, p.cut);
  const int64_t stage_bytes = staged_workspace(staged_positions(p), p.value_heads);
  char* space = static_cast<char*>(shared_space(cut_bytes + stage_bytes + balance_workspace(sm_count)));
  if (variant.choice.is_balanced) p.balance_space = reinterpret_cast<float*>(space);
  if (p.cut.segments > 1) p.segment_space = reinterpret_cast<float*>(space);
  if (variant.choice.is_staged) p.stages = space + cut_bytes;
  p.stage_positions = staged_positions(p);
  cudaGraph_t graph;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int call = 0; call < variant.calls; ++call) {
    const int64_t at = (call % sets) * tokens * h, state_at = (call % sets) * n * h * 16384;
    p.q = b.q + at * 128, p.k = b.k + at * 128, p.v = b.v + at * 128, p.gate = b.gate + at * 128;
    p.beta = b.beta + at, p.out = b.out + at * 128;
    p.state_in = b.state_in + state_at, p.state_out = b.state_out + state_at;
    check(variant.form.rfind("stages", 0) == 0 ? launch_stages(p, family, Real::kBf16, sm_count, stream)
                                               : launch_prefill_fused(p, family, Real::kBf16, sm_count, stream),
          "launch");
  }
  check(cudaStreamEndCapture(stream, &graph), "end capture");
  cudaGraphExec_t executable;
  check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  return executable;
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = 11;
  std::string only, json, gate_list = "bench", cut = "7:3:3,8:4:3,7:2:2,8:3:2,9:4:4", form_list = "auto";
  if (argc % 2 == 0) {
    std::fprintf(stderr,
                 "usage: %s [--rounds R] [--filter TEXT] [--gates LIST] [--forms LIST] [--cuts LIST] [--json FILE]\n",
                 argv[0]);
    return 2;
  }
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--rounds")) rounds = std::atoi(argv[i + 1]);
    if (!std::strcmp(argv[i], "--filter")) only = argv[i + 1];
    if (!std::strcmp(argv[i], "--json")) json = argv[i + 1];
    if (!std::strcmp(argv[i], "--cuts")) cut = argv[i + 1];
    if (!std::strcmp(argv[i], "--gates")) gate_list = argv[i + 1];
    if (!std::strcmp(argv[i], "--forms")) form_list = argv[i + 1];
  }
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "properties");
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  Buffers b;
  auto allocate = [](auto*& x, int64_t n) { check(cudaMalloc(&x, n * sizeof(*x)), "malloc"); };
  for (uint16_t** x : {&b.q, &b.k, &b.v, &b.gate, &b.out}) allocate(*x, kTokenHeads * 128);
  allocate(b.beta, kTokenHeads);
  allocate(b.state_in, kStates * 16384), allocate(b.state_out, kStates * 16384);
  allocate(b.a_log, 96), allocate(b.dt_bias, 96 * 128);
  uint64_t seed = 0;
  for (uint16_t* x : {b.q, b.k, b.v, b.gate})
    fill_bf16<<<1024, 256>>>(x, kTokenHeads * 128, 1.0f, seed += 1ull << 40);
  fill_bf16<<<1024, 256>>>(b.beta, kTokenHeads, 1.0f, seed += 1ull << 40);
  fill_f32<<<1024, 256>>>(b.state_in, kStates * 16384, 0.1f, seed += 1ull << 40);
  check(cudaDeviceSynchronize(), "fill");

  std::vector<Variant> variants;
  for (const std::string gates : {"bench", "init", "softplus"}) {
    if (gate_list.find(gates) == std::string::npos) continue;
    Buffers set = b;
    allocate(set.a_log, 96), allocate(set.dt_bias, 96 * 128);
    bench_parameters(gates, set);
    const Gate family = gates == "softplus" ? Gate::kSoftplus : Gate::kBounded;
    check(prepare_prefill_fused(family, Real::kBf16, diagonal_for(family, -5.0f, true)), "prepare");
    for (const TableRow& shape : shapes()) {
      const std::string name = std::string(shape.name) + " H=" + std::to_string(shape.heads);
      if (!only.empty() && name.find(only) == std::string::npos) continue;
      const int64_t tokens = std::accumulate(shape.lengths.begin(), shape.lengths.end(), int64_t{0});
      const int64_t n = static_cast<int64_t>(shape.lengths.size());
      std::vector<int32_t> cu(1, 0);
      for (int64_t x : shape.lengths) cu.push_back(cu.back() + static_cast<int32_t>(x));
      int32_t* device_cu;
      allocate(device_cu, n + 1);
      check(cudaMemcpy(device_cu, cu.data(), (n + 1) * 4, cudaMemcpyHostToDevice), "cu");
      const CallFacts facts{
          n, shape.heads, tokens, device.multiProcessorCount, true, true, diagonal_for(family, -5.0f, true)};
      for (const auto& [form, choice] : choices(facts, form_list, cut)) {
        Variant variant;
        variant.shape = shape, variant.gates = gates, variant.name = name, variant.form = form;
        variant.choice = choice, variant.expected = expected_microseconds(facts, choice);
        variant.graph = capture(variant, set, n, tokens, device_cu, device.multiProcessorCount, stream);
        variants.push_back(variant);
      }
    }
  }
  const int64_t copy_bytes = kTokenHeads * 128 * 2;
  for (const bool kernel : {true, false}) {
    Variant variant;
    variant.name = kernel ? "copy kernel" : "cudaMemcpyAsync";
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int call = 0; call < variant.calls; ++call) {
      uint16_t* from = call % 2 ? b.q : b.k;
      uint16_t* to = call % 2 ? reinterpret_cast<uint16_t*>(b.state_out) : b.out;
      if (kernel)
        copy_kernel<<<132 * 2, 1024, 0, stream>>>(reinterpret_cast<uint4*>(from), reinterpret_cast<uint4*>(to),
                                                  copy_bytes / 16);
      else check(cudaMemcpyAsync(to, from, copy_bytes, cudaMemcpyDeviceToDevice, stream), "memcpy");
    }
    check(cudaStreamEndCapture(stream, &graph), "end capture");
    check(cudaGraphInstantiate(&variant.graph, graph, 0), "instantiate");
    variants.push_back(variant);
  }
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "event"), check(cudaEventCreate(&stop), "event");
  std::mt19937 random(1);
  std::vector<size_t> order(variants.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (int round = -1; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i : order) {
      check(cudaEventRecord(start, stream), "record");
      check(cudaGraphLaunch(variants[i].graph, stream), "replay");
      check(cudaEventRecord(stop, stream), "record");
      check(cudaEventSynchronize(stop), variants[i].name.c_str());
      float ms;
      check(cudaEventElapsedTime(&ms, start, stop), "elapsed");
      if (round >= 0) variants[i].samples.push_back(ms * 1000.0 / variants[i].calls);
    }
  }
  auto median = [](std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
  };
  const double copy_us = std::min(median(variants[variants.size() - 2].samples), median(variants.back().samples));
  const double copy_rate = 2.0 * copy_bytes / copy_us * 1e-6;
  std::printf("%s, %d SMs; copy rate %.3f TB/s (kernel %.1f us, memcpy %.1f us)\n", device.name,
              device.multiProcessorCount, copy_rate, median(variants[variants.size() - 2].samples),
              median(variants.back().samples));
  for (const Variant& v : variants) {
    if (v.gates.empty()) continue;
    const double us = median(v.samples), floor = v.shape.floor_us * 4.0 / copy_rate;
    std::printf(
        "%-16s %-8s %-8s %s S=%d:%d:%d wave %-3d preparing %-3d expected %6.1f: %8.1f us (min %.1f max %.1f)  floor "
        "%.0f "
        "= x%.2f  target %.0f = "
        "x%.2f\n",
        v.name.c_str(), v.gates.c_str(), v.form.c_str(),
        v.choice.is_staged ? "staged  " : (v.choice.is_balanced ? "balanced" : "fused   "), v.choice.cut.segments,
        v.choice.cut.opening, v.choice.cut.run, v.choice.wave, v.choice.prepare_ctas, v.expected, us,
        *std::min_element(v.samples.begin(), v.samples.end()), *std::max_element(v.samples.begin(), v.samples.end()),
        floor, us / floor, v.shape.target_us, us / v.shape.target_us);
  }
  if (!json.empty()) {
    std::ofstream file(json);
    file << "{\"device\": \"" << device.name << "\", \"copy_tb_per_s\": " << copy_rate << ", \"variants\": [\n";
    for (size_t i = 0; i < variants.size(); ++i) {
      file << (i ? ",\n" : "") << "{\"name\": \"" << variants[i].name << "\", \"form\": \"" << variants[i].form
           << "\", \"staged\": " << (variants[i].choice.is_staged ? "true" : "false")
           << ", \"expected_us\": " << variants[i].expected << ", \"segments\": " << variants[i].choice.cut.segments
           << ", \"opening\": " << variants[i].choice.cut.opening << ", \"run\": " << variants[i].choice.cut.run
           << ", \"balanced\": " << (variants[i].choice.is_balanced ? "true" : "false")
           << ", \"wave\": " << variants[i].choice.wave << ", \"prepare_ctas\": " << variants[i].choice.prepare_ctas
           << ", \"gates\": \"" << variants[i].gates << "\", \"us\": [";
      for (size_t s = 0; s < variants[i].samples.size(); ++s) file << (s ? ", " : "") << variants[i].samples[s];
      file << "]}";
    }
    file << "]}\n";
  }
  return 0;
}
