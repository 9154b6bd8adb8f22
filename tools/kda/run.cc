// kda run: one operator, or one layer of a checkpoint, on a safetensors file: in -> out.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kda/kda.hpp>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "conformance/device.h"
#include "problem.h"
#include "run_operator.h"
#include "values.h"
#include "verb.h"

namespace kda::tools {
namespace {

struct Options {
  std::string op, in, out, device = "cpu";
  int threads = 0;
  LayerOptions layer;
  ProblemOptions problem;
};

// Tensors of a run, each in memory of its own.
class Memory {
 public:
  // Memory for a dense tensor, zeroed.
  void lend(kda_tensor& t) {
    size_t bytes = kda_dtype_size(t.dtype);
    for (int i = 0; i < t.rank; ++i) {
      if (t.shape[i] < 0 || __builtin_mul_overflow(bytes, static_cast<size_t>(t.shape[i]), &bytes))
        throw std::bad_alloc();
    }
    blocks_.emplace_back(std::aligned_alloc(256, (bytes + 511) / 256 * 256));
    if (!blocks_.back()) throw std::bad_alloc();
    std::memset(blocks_.back().get(), 0, bytes);
    t.data = blocks_.back().get();
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::vector<std::unique_ptr<void, Free>> blocks_;
};

// While it lives, runs in a context of another device than the CPU find their memory there.
class OnDevice {
 public:
  OnDevice(const Context& context, kda_device device) : memory_(context.get()) {
    if (device.type != KDA_CPU) conformance::set_device(context.get(), &memory_);
  }
  ~OnDevice() { conformance::set_device(nullptr, nullptr); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  conformance::ContextMemory memory_;
};

std::string names_of(const OperatorCall& call) {
  std::string names;
  for (const Binding& b : call.bindings()) {
    if (b.role != Role::kOut) names += (names.empty() ? "" : ", ") + b.name;
  }
  return names;
}

// Every tensor of the file goes where its name says.
void read_inputs(const Options& o, OperatorCall& call, Memory& memory) {
  const TensorFile file(o.in);
  for (size_t i = 0; i < file.size(); ++i) {
    const TensorFile::Entry entry = file.entry(i);
    const Binding* to = nullptr;
    for (const Binding& b : call.bindings()) {
      if (b.role != Role::kOut && b.name == entry.name) to = &b;
    }
    if (to == nullptr) {
      throw UsageError(fmt::format("{}: tensor '{}': wanted one of {}", o.in, entry.name, names_of(call)));
    }
    if (entry.layout.dtype == KDA_DTYPE_NONE) {
      throw UsageError(fmt::format("{}: tensor '{}': element type {} or its number of dimensions cannot be used",
                                   o.in, entry.name, entry.type));
    }
    *to->tensor = entry.layout;
    memory.lend(*to->tensor);
    file.read(i, *to->tensor);
  }
}

void write_outputs(const Options& o, const OperatorCall& call) {
  std::vector<kda_named_tensor> tensors;
  for (const Binding& b : call.bindings()) {
    if (b.role != Role::kIn && b.tensor->dtype != KDA_DTYPE_NONE) tensors.push_back({b.name.c_str(), *b.tensor});
  }
  check(kda_tensor_file_write(o.out.c_str(), tensors.data(), tensors.size()));
  fmt::print("{}: {} on {}\n", o.op, o.out, call.backend);
  for (const kda_named_tensor& t : tensors) {
    fmt::print("  {} {} [{}]\n", t.name, kda_dtype_name(t.tensor.dtype),
               fmt::join(t.tensor.shape, t.tensor.shape + t.tensor.rank, ", "));
  }
}

int run(const CLI::App& verb, Options& o) {
  o.problem.resolve();
  const bool layer = o.op == "layer";
  if (layer == o.layer.checkpoint.empty()) {
    throw UsageError(layer ? "--checkpoint: wanted the layer's weights, got none"
                           : "--checkpoint: wanted the operator layer beside it, got " + o.op);
  }
  std::unique_ptr<OperatorCall> call;
  if (layer) {
    call = layer_call(o.layer);
  } else {
    for (const Operator& op : operators()) {
      if (o.op == op.name) call = operator_call(op.op);
    }
  }
  Memory memory;
  read_inputs(o, *call, memory);
  auto options = make<kda_context_options>();
  options.num_threads = o.threads;
  if (o.device == "cuda") options.device = {KDA_CUDA, 0};
  const Context context(options);
  const OnDevice on_device(context, options.device);
  call->prepare(context, o.problem, verb);
  for (const Binding& b : call->bindings()) {
    if (b.role != Role::kIn && b.tensor->dtype != KDA_DTYPE_NONE && b.tensor->data == nullptr) memory.lend(*b.tensor);
  }
  call->run(context, o.problem);
  write_outputs(o, *call);
  return kDone;
}

}  // namespace

std::function<int()> add_run(CLI::App& app) {
  CLI::App* const verb =
      app.add_subcommand("run", "One operator, or one layer of a checkpoint, on a safetensors file");
  auto o = std::make_shared<Options>();
  std::vector<std::string> names = {"layer"};
  for (const Operator& op : operators()) names.push_back(op.name);
  verb->add_option("operator", o->op, "layer, prefill, decode, ...")->required()->check(CLI::IsMember(names));
  verb->add_option("--in", o->in, "Tensors by their names in kda/<operator>.h; unknown ones are refused")
      ->required()
      ->type_name("FILE");
  verb->add_option("--out", o->out, "What the operator writes: outputs, and pools as they are afterwards")
      ->required()
      ->type_name("FILE");
  verb->add_option("--device", o->device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  verb->add_option("--threads", o->threads, "Threads (default: all cores)")->check(whole(0, kMostThreads));
  for (CLI::Option* option : {
           verb->add_option("--checkpoint", o->layer.checkpoint, "safetensors folder, index or file of the layer")
               ->type_name("PATH"),
           verb->add_option("--layer", o->layer.layer, "Which of its KDA layers, from 0"),
           verb->add_option("--ranks", o->layer.ranks, "Tensor-parallel ranks"),
           verb->add_option("--rank", o->layer.rank, "The rank whose share runs"),
           verb->add_option("--projection", o->layer.projection, "auto, cublaslt, onednn, portable or reference"),
       }) {
    option->group("Layer");
  }
  o->problem.add_to(*verb);
  o->problem.add_form_to(*verb);
  return [o, verb] { return run(*verb, *o); };
}

}  // namespace kda::tools
