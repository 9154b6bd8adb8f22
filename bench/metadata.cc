// Host time of kda_metadata_run on the CPU for steps of N rows, every table wanted: median and 5-95 % of shuffled
// rounds, each sample a batch of builds (spec M-18 names 5 us for N <= 4,096 as the target of the device build; the
// CPU build is serial and has no target of its own).
//
//   bench_metadata [--rounds 50] [--seed 1]
#include <kda/kda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kBatch = 16;  // builds per sample

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void check(kda_status status, const char* what) {
  if (status == KDA_OK) return;
  std::fprintf(stderr, "bench_metadata: %s: %s\n", what, kda_last_error());
  std::exit(1);
}

template <class T>
kda_tensor view(std::vector<T>& x, kda_dtype dtype, int64_t columns = 0) {
  kda_tensor t{};
  t.data = x.data();
  t.dtype = dtype;
  t.rank = columns > 0 ? 2 : 1;
  t.shape[0] = static_cast<int64_t>(x.size()) / (columns > 0 ? columns : 1);
  t.shape[1] = columns;
  t.strides[0] = columns > 0 ? columns : 1;
  t.strides[1] = 1;
  return t;
}

// A step: one row in 32 is a prompt of 256 tokens, the others verify 1 to 4 tokens.
class Step {
 public:
  Step(kda_context* context, int64_t n, std::mt19937_64& random) {
    cu_.push_back(0);
    for (int64_t i = 0; i < n; ++i) {
      const bool prompt = i % 32 == 7;
      cu_.push_back(cu_.back() + (prompt ? 256 : static_cast<int32_t>(1 + random() % 4)));
      prefilling_.push_back(prompt);
      computed_.push_back(prompt ? 0 : 1000);
      accepted_.push_back(static_cast<int32_t>(1 + random() % 4));
      for (int c = 0; c < 4; ++c) slots_.push_back(static_cast<int32_t>(random() % 5000));
    }
    const auto tokens = static_cast<int64_t>(cu_.back());
    kda_metadata_desc desc;
    kda_metadata_desc_init(&desc);
    desc.max_tokens = tokens;
    desc.max_sequences = n;
    desc.width = 4;
    check(kda_metadata_plan_create(context, &desc, &plan_), "plan");
    int64_t chunks = 0;
    check(kda_chunk_bound(tokens, n, KDA_PREFILL_GRID, &chunks), "bound");
    args_.struct_size = sizeof args_;
    args_.num_tokens = tokens;
    args_.step.query_start_loc = view(cu_, KDA_INT32);
    args_.step.computed = view(computed_, KDA_INT32);
    args_.step.prefilling = view(prefilling_, KDA_BOOL);
    args_.accepted = view(accepted_, KDA_INT32);
    args_.slot_table = view(slots_, KDA_INT32, 4);
    kda_step_tables& t = args_.tables;
    t.counts = ints(8);
    for (kda_tensor* rows :
         {&t.prefill_rows, &t.decode_rows, &t.spec_rows, &t.prefill_begin, &t.prefill_length, &t.decode_begin,
          &t.decode_length, &t.spec_begin, &t.spec_length, &t.prefill_slots, &t.decode_slots, &t.num_accepted}) {
      *rows = ints(n);
    }
    for (kda_tensor* offsets : {&t.non_spec_query_start_loc, &t.spec_query_start_loc, &t.prefill_query_start_loc})
      *offsets = ints(n + 1);
    for (kda_tensor* list : {&t.non_spec_token_indx, &t.spec_token_indx}) *list = ints(tokens);
    t.spec_slots = ints(4 * n, 4);
    t.chunk_indices = ints(2 * chunks, 2);
    initial_.resize(static_cast<size_t>(n));
    mask_.resize(initial_.size());
    chunk_offsets_.resize(static_cast<size_t>(n) + 1);
    t.has_initial_state = view(initial_, KDA_BOOL);
    t.spec_sequence_masks = view(mask_, KDA_BOOL);
    t.chunk_offsets = view(chunk_offsets_, KDA_INT64);
  }
  ~Step() { kda_plan_destroy(plan_); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  double seconds() const {  // per build
    const double start = now();
    for (int i = 0; i < kBatch; ++i) check(kda_metadata_run(plan_, &args_, {}, nullptr), "run");
    return (now() - start) / kBatch;
  }

 private:
  kda_tensor ints(int64_t count, int64_t columns = 0) {
    tables_.emplace_back(static_cast<size_t>(count));
    return view(tables_.back(), KDA_INT32, columns);
  }
  std::vector<int32_t> cu_, computed_, accepted_, slots_;
  std::vector<uint8_t> prefilling_, initial_, mask_;
  std::vector<int64_t> chunk_offsets_;
  std::vector<std::vector<int32_t>> tables_;
  kda_plan* plan_ = nullptr;
  kda_metadata_args args_{};
};

}  // namespace

int main(int argc, char** argv) {
  int rounds = 50;
  uint64_t seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--rounds") rounds = std::atoi(argv[i + 1]);
    if (std::string(argv[i]) == "--seed") seed = std::strtoull(argv[i + 1], nullptr, 10);
  }
  kda_context* context = nullptr;
  check(kda_context_create(nullptr, &context), "context");
  {
    std::mt19937_64 random(seed);
    const int64_t sizes[] = {1, 32, 256, 1024, 4096};
    std::vector<std::unique_ptr<Step>> steps;
    for (int64_t n : sizes) steps.push_back(std::make_unique<Step>(context, n, random));
    std::vector<std::vector<double>> samples(steps.size());
    for (int round = 0; round < rounds; ++round) {
      std::vector<size_t> order{0, 1, 2, 3, 4};
      std::shuffle(order.begin(), order.end(), random);
      for (size_t i : order) samples[i].push_back(steps[i]->seconds());
    }
    for (size_t i = 0; i < steps.size(); ++i) {
      auto& x = samples[i];
      std::sort(x.begin(), x.end());
      std::printf("N %5lld: %8.2f us (%.2f-%.2f)\n", static_cast<long long>(sizes[i]), x[x.size() / 2] * 1e6,
                  x[x.size() / 20] * 1e6, x[x.size() - 1 - x.size() / 20] * 1e6);
    }
  }
  kda_context_destroy(context);
  return 0;
}
