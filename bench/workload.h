// What is measured: an operator beside what the machine can do, as variants of one set of rounds, and the ratios that
// are reported.
#pragma once

#include <algorithm>
#include <kda/kda.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/machine.h"
#include "bench/rounds.h"

namespace kda::bench {

struct Ratio {
  std::string name, of;
  std::vector<std::string> over;  // the fastest of them in each round
};

struct Workload {
  std::string name;                                             // "prefill"
  std::vector<std::pair<std::string, std::string>> parameters;  // "heads" -> "8"
  std::string backend, isa;                                     // who runs
  std::vector<Variant> variants;
  std::vector<Ratio> ratios;
  int64_t tokens = 0;              // of one run of the first variant; 0: not counted
  std::vector<std::string> notes;  // what is not there
};

// What a workload may use.
struct Setting {
  const Context& context;
  Workers workers;  // the context's; of no use on another device
  std::string backend = "auto";
  kda_device device{KDA_CPU, 0};

  // What calls rotate over on a device: several times its caches.
  int64_t cold_bytes = int64_t{320} << 20;

  bool on_device() const { return device.type != KDA_CPU; }
  // Sets of arguments that calls go through in turn, of so many bytes each. The CPU is measured as a server's step
  // finds it, with the same tokens again.
  int64_t sets(int64_t bytes) const {
    return on_device() ? std::max<int64_t>(2, cold_bytes / std::max<int64_t>(1, bytes) + 1) : 1;
  }
};

// 256 MiB copied by the device's memcpy and by a kernel: the larger rate is what floors are counted in.
std::vector<Variant> copy_rate_variants(const Setting& setting);

struct PrefillShape {
  int64_t heads = 8, tokens = 2048, sequences = 1, key_dim = 128, value_dim = 128;
  kda_dtype io = KDA_FP32;
  kda_gate_family gate = KDA_GATE_SOFTPLUS;
  bool batch_invariant = false;
};
// Useful rate (7*K*V FLOP per token and value head) over the sgemm rate. The state starts from zero.
Workload prefill(const Setting& setting, const PrefillShape& shape);

struct DecodeShape {
  int64_t heads = 32, sequences = 32, width = 1, key_dim = 128, value_dim = 128;  // width: 1 + drafts
  kda_dtype io = KDA_BF16, state = KDA_FP32;
  bool step = false;     // decode_step: conv, attention and norm in one pass
  bool records = false;  // verify in recover mode, the window before committed in the same call (V-10b)
};
// Rate at which states are read and written over the rate of scaling as many bytes in place.
Workload decode(const Setting& setting, const DecodeShape& shape);

struct CopyShape {
  int64_t rows = 32, heads = 12;
  kda_dtype state = KDA_FP32, index = KDA_INT32;
  bool gapped = true;  // rows lie in pages that hold more (5,308,416 elements apart, as in a served model)
  bool flags = false;  // with has_initial_state
};
// What else does a copy's work, of the same call: dense rows beside a pool.
struct CopyRival {
  std::string label, detail;
  bool scatter;
  std::function<void(const kda_state_copy_args&, void* stream)> call;
};
// Gather and scatter of states over memcpy of the same bytes (state-copy.md U), and over rivals.
Workload copy(const Setting& setting, const CopyShape& shape, const std::vector<CopyRival>& rivals = {});

struct MetadataShape {
  int64_t sequences = 256, width = 1;
  int64_t prompt_every = 16;  // one row in so many prefills; 0: none does
  int64_t prompt_tokens = 0;  // 0: 64 to 319
};
// Step metadata, every table wanted: microseconds a build.
Workload metadata(const Setting& setting, const MetadataShape& shape);

struct ConvShape {
  int64_t heads = 12, tokens = 8192, sequences = 1;
  kda_dtype io = KDA_BF16;
  kda_conv_layout layout = KDA_CONV_SD;
  bool columns = false;  // one token a row from a window, instead of prefill
};
Workload conv(const Setting& setting, const ConvShape& shape);
struct NormShape {
  int64_t heads = 12, tokens = 8192;
  kda_dtype io = KDA_BF16;
};
// Bytes of inputs and output over memcpy of as many.
Workload gated_norm(const Setting& setting, const NormShape& shape);

struct SegmentShape {
  int64_t heads = 12, tokens = 65536, segments = 8;  // tokens: of one segment
  kda_gate_family gate = KDA_GATE_SOFTPLUS;
};
// One rank's share of a prompt that several ranks prefill (spec S-9): its map, and the merge of all maps.
Workload segments(const Setting& setting, const SegmentShape& shape);

// Tensors in the memory of a context's device that live as long as the arena.
class Arena {
 public:
  // The context outlives the arena.
  explicit Arena(const Setting& setting) : context_(setting.context.get()), device_(setting.device) {}

  // Zeros on the CPU; on a device memory as it comes, for results.
  kda_tensor room(kda_dtype dtype, const std::vector<int64_t>& shape);
  kda_tensor zeros(kda_dtype dtype, const std::vector<int64_t>& shape);
  // Uniform in [-1, 1) times `scale`, reproducible. `decays`: minus the square of that.
  kda_tensor random(kda_dtype dtype, const std::vector<int64_t>& shape, double scale = 1, bool decays = false);
  kda_tensor ints(const std::vector<int64_t>& x, kda_dtype dtype = KDA_INT32);  // int32, int64 or bool
  kda_workspace workspace(const Plan& plan);
  // Between host and device memory; done when the call returns.
  void copy(void* to, const void* from, size_t bytes) const;
  const kda_context* context() const { return context_; }

 private:
  const kda_context* context_;
  kda_device device_;
  std::vector<std::shared_ptr<void>> memory_;
};

// The i-th part of `of` equal parts of dimension 0.
kda_tensor part(kda_tensor t, int64_t i, int64_t of);

}  // namespace kda::bench
