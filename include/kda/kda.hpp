// libkda, C++ layer: owning handles over the C ABI, kda::Error, tensor helpers. Header only; needs C++17.
//
// Every function throws kda::Error on failure and otherwise does what the C function of the same name does
// (shapes, units, threads and clauses are documented there). Handles are movable and own what they hold.
#ifndef KDA_KDA_HPP_
#define KDA_KDA_HPP_

#include <kda/kda.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kda {
inline namespace abi_0_1 {

// A failed call: the status code and the message that names argument, wanted and got.
class Error : public std::runtime_error {
 public:
  Error(kda_status status, const std::string& message)
      : std::runtime_error(std::string(kda_status_name(status)) + ": " + message), status_(status) {}
  kda_status status() const noexcept { return status_; }

 private:
  kda_status status_;
};

inline void check(kda_status status) {
  if (status != KDA_OK) throw Error(status, kda_last_error());
}

// A zeroed struct with struct_size set and the defaults that are not zero.
template <class Struct>
Struct make() {
  Struct s{};
  s.struct_size = sizeof(Struct);
  return s;
}
template <>
inline kda_prefill_desc make() {
  kda_prefill_desc d;
  kda_prefill_desc_init(&d);
  return d;
}
template <>
inline kda_decode_desc make() {
  kda_decode_desc d;
  kda_decode_desc_init(&d);
  return d;
}
template <>
inline kda_commit_desc make() {
  kda_commit_desc d;
  kda_commit_desc_init(&d);
  return d;
}
template <>
inline kda_conv_desc make() {
  kda_conv_desc d;
  kda_conv_desc_init(&d);
  return d;
}
template <>
inline kda_decode_step_desc make() {
  kda_decode_step_desc d;
  kda_decode_step_desc_init(&d);
  return d;
}

template <>
inline kda_layer_desc make() {
  kda_layer_desc d;
  kda_layer_desc_init(&d);
  return d;
}
template <>
inline kda_metadata_desc make() {
  kda_metadata_desc d;
  kda_metadata_desc_init(&d);
  return d;
}
template <>
inline kda_state_pool_desc make() {
  kda_state_pool_desc d;
  kda_state_pool_desc_init(&d);
  return d;
}

// A dense row-major view of `data`; strides in elements.
inline kda_tensor tensor(const void* data, kda_dtype dtype, std::initializer_list<int64_t> shape,
                         kda_device device = {KDA_CPU, 0}) {
  if (shape.size() > KDA_MAX_RANK) {
    throw Error(KDA_INVALID_ARGUMENT, "shape: wanted at most " + std::to_string(KDA_MAX_RANK) + " dimensions, got " +
                                          std::to_string(shape.size()));
  }
  kda_tensor t{};
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.device = device;
  for (int64_t s : shape) t.shape[t.rank++] = s;
  check(kda_tensor_make_dense(&t));
  return t;
}
// A view with its own strides (in elements).
inline kda_tensor strided(const void* data, kda_dtype dtype, std::initializer_list<int64_t> shape,
                          std::initializer_list<int64_t> strides, kda_device device = {KDA_CPU, 0}) {
  if (shape.size() != strides.size()) {
    throw Error(KDA_INVALID_ARGUMENT, "strides: wanted one for each of " + std::to_string(shape.size()) +
                                          " dimensions, got " + std::to_string(strides.size()));
  }
  kda_tensor t = tensor(data, dtype, shape, device);
  int i = 0;
  for (int64_t s : strides) t.strides[i++] = s;
  return t;
}

class Context {
 public:
  Context() : Context(nullptr) {}
  explicit Context(const kda_context_options& options) : Context(&options) {}
  // CPU context with a number of threads (0 = all).
  explicit Context(int32_t threads) {
    auto o = make<kda_context_options>();
    o.num_threads = threads;
    create(&o);
  }
  void seal() { check(kda_context_seal(get())); }
  std::string isa() const { return kda_context_isa(get()); }
  int32_t num_threads() const { return kda_context_num_threads(get()); }
  kda_context* get() const noexcept { return handle_.get(); }

 private:
  explicit Context(const kda_context_options* options) { create(options); }
  void create(const kda_context_options* options) {
    kda_context* c = nullptr;
    check(kda_context_create(options, &c));
    handle_.reset(c);
  }
  struct Free {
    void operator()(kda_context* c) const noexcept { kda_context_destroy(c); }
  };
  std::unique_ptr<kda_context, Free> handle_;
};

// Aligned memory for one run at a time.
class Workspace {
 public:
  Workspace() = default;
  // Host memory: of CPU plans.
  explicit Workspace(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    const size_t rounded = (bytes + KDA_WORKSPACE_ALIGNMENT - 1) / KDA_WORKSPACE_ALIGNMENT * KDA_WORKSPACE_ALIGNMENT;
    data_.reset(std::aligned_alloc(KDA_WORKSPACE_ALIGNMENT, rounded));
    if (!data_) throw std::bad_alloc();
  }
  // Memory of the context's device. The context outlives it.
  Workspace(const Context& context, size_t bytes) : data_(nullptr, Free(context.get())), bytes_(bytes) {
    void* memory = nullptr;
    check(kda_memory_allocate(context.get(), KDA_MEMORY_DEVICE, bytes, &memory));
    data_.reset(memory);
  }
  kda_workspace get() const noexcept { return {data_.get(), bytes_}; }
  size_t bytes() const noexcept { return bytes_; }

 private:
  struct Free {
    Free() noexcept : context(nullptr) {}
    explicit Free(const kda_context* c) noexcept : context(c) {}
    const kda_context* context;
    void operator()(void* p) const noexcept {
      if (context == nullptr) std::free(p);
      else static_cast<void>(kda_memory_free(context, KDA_MEMORY_DEVICE, p));
    }
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

struct Refusal {
  std::string candidate, reasons;
};

// A plan of any operator. run() is overloaded by the argument struct.
class Plan {
 public:
  Plan() = default;
  explicit Plan(kda_plan* plan) noexcept : handle_(plan) {}
  Plan(const Context& c, const kda_prefill_desc& d) { create(kda_prefill_plan_create, c, d); }
  Plan(const Context& c, const kda_decode_desc& d) { create(kda_decode_plan_create, c, d); }
  Plan(const Context& c, const kda_commit_desc& d) { create(kda_commit_plan_create, c, d); }
  Plan(const Context& c, const kda_decode_step_desc& d) { create(kda_decode_step_plan_create, c, d); }
  Plan(const Context& c, const kda_conv_desc& d) { create(kda_conv_plan_create, c, d); }
  Plan(const Context& c, const kda_gated_norm_desc& d) { create(kda_gated_norm_plan_create, c, d); }
  Plan(const Context& c, const kda_residual_norm_desc& d) { create(kda_residual_norm_plan_create, c, d); }
  Plan(const Context& c, const kda_segment_merge_desc& d) { create(kda_segment_merge_plan_create, c, d); }
  Plan(const Context& c, const kda_metadata_desc& d) { create(kda_metadata_plan_create, c, d); }
  Plan(const Context& c, const kda_layer_desc& d) { create(kda_layer_plan_create, c, d); }
  Plan(const Context& c, const kda_state_copy_desc& d) { create(kda_state_copy_plan_create, c, d); }
  // segment_summary shares prefill's description, so it has a name of its own.
  static Plan segment_summary(const Context& c, const kda_prefill_desc& d) {
    Plan p;
    p.create(kda_segment_summary_plan_create, c, d);
    return p;
  }

  void run(const kda_prefill_args& a, kda_workspace w, void* s = nullptr) const { check(kda_prefill_run(get(), &a, w, s)); }
  void run(const kda_decode_args& a, kda_workspace w, void* s = nullptr) const { check(kda_decode_run(get(), &a, w, s)); }
  void run(const kda_commit_args& a, kda_workspace w, void* s = nullptr) const { check(kda_commit_run(get(), &a, w, s)); }
  void run(const kda_decode_step_args& a, kda_workspace w, void* s = nullptr) const {
    check(kda_decode_step_run(get(), &a, w, s));
  }
  void run(const kda_conv_args& a, kda_workspace w, void* s = nullptr) const { check(kda_conv_run(get(), &a, w, s)); }
  void run(const kda_gated_norm_args& a, kda_workspace w, void* s = nullptr) const {
    check(kda_gated_norm_run(get(), &a, w, s));
  }
  void run(const kda_residual_norm_args& a, kda_workspace w, void* s = nullptr) const {
    check(kda_residual_norm_run(get(), &a, w, s));
  }
  void run(const kda_segment_summary_args& a, kda_workspace w, void* s = nullptr) const {
    check(kda_segment_summary_run(get(), &a, w, s));
  }
  void run(const kda_segment_merge_args& a, kda_workspace w, void* s = nullptr) const {
    check(kda_segment_merge_run(get(), &a, w, s));
  }
  void run(const kda_metadata_args& a, kda_workspace w, void* s = nullptr) const {
    check(kda_metadata_run(get(), &a, w, s));
  }
  void run(const kda_layer_args& a, kda_workspace w, void* s = nullptr) const { check(kda_layer_run(get(), &a, w, s)); }
  void gather(const kda_state_copy_args& a, void* s = nullptr) const { check(kda_state_gather(get(), &a, s)); }
  void scatter(const kda_state_copy_args& a, void* s = nullptr) const { check(kda_state_scatter(get(), &a, s)); }

  size_t workspace_size() const {
    size_t bytes = 0;
    check(kda_plan_workspace_size(get(), &bytes));
    return bytes;
  }
  Workspace make_workspace() const { return Workspace(workspace_size()); }  // of a CPU plan
  Workspace make_workspace(const Context& c) const { return Workspace(c, workspace_size()); }  // on the context's device
  std::string backend() const { return kda_plan_backend(get()); }
  std::string isa() const { return kda_plan_isa(get()); }
  // Candidates passed over before the chosen one.
  std::vector<Refusal> refusals() const {
    std::vector<Refusal> list;
    const char *candidate, *reasons;
    for (size_t i = 0; kda_plan_refusal(get(), i, &candidate, &reasons) == KDA_OK; ++i) list.push_back({candidate, reasons});
    return list;
  }
  kda_plan* get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

 private:
  template <class Create, class Desc>
  void create(Create* function, const Context& c, const Desc& d) {
    kda_plan* p = nullptr;
    check(function(c.get(), &d, &p));
    handle_.reset(p);
  }
  struct Free {
    void operator()(kda_plan* p) const noexcept { kda_plan_destroy(p); }
  };
  std::unique_ptr<kda_plan, Free> handle_;
};

// Pages of recurrent states and conv windows.
class StatePool {
 public:
  StatePool(const Context& c, const kda_state_pool_desc& d) {
    kda_state_pool* p = nullptr;
    check(kda_state_pool_create(c.get(), &d, &p));
    handle_.reset(p);
  }
  kda_tensor state(int32_t layer) const { return view(kda_state_pool_state, layer); }
  kda_tensor conv(int32_t layer) const { return view(kda_state_pool_conv, layer); }
  std::vector<int64_t> allocate(int64_t count) {
    std::vector<int64_t> pages(static_cast<size_t>(count < 0 ? 0 : count));
    check(kda_state_pool_allocate(get(), count, pages.data()));
    return pages;
  }
  void free(const std::vector<int64_t>& pages) {
    check(kda_state_pool_free(get(), static_cast<int64_t>(pages.size()), pages.data()));
  }
  int64_t available() const noexcept { return kda_state_pool_available(get()); }
  int64_t position(int64_t page) const {
    int64_t p = 0;
    check(kda_state_pool_position(get(), page, &p));
    return p;
  }
  void set_position(int64_t page, int64_t position) { check(kda_state_pool_set_position(get(), page, position)); }
  void fold(const kda_state_columns& from, int64_t destination) {
    check(kda_state_pool_fold(get(), &from, destination));
  }
  std::vector<std::byte> export_payload(const kda_state_columns& from) const {
    std::vector<std::byte> payload(kda_state_pool_payload_size(get()));
    check(kda_state_pool_export(get(), &from, payload.data(), payload.size()));
    return payload;
  }
  // expected_position -1: any.
  void import_payload(int64_t page, const std::vector<std::byte>& payload, int64_t expected_position = -1) {
    check(kda_state_pool_import(get(), page, payload.data(), payload.size(), expected_position));
  }
  kda_state_pool* get() const noexcept { return handle_.get(); }

 private:
  kda_tensor view(kda_status (*function)(const kda_state_pool*, int32_t, kda_tensor*), int32_t layer) const {
    kda_tensor t{};
    check(function(get(), layer, &t));
    return t;
  }
  struct Free {
    void operator()(kda_state_pool* p) const noexcept { kda_state_pool_destroy(p); }
  };
  std::unique_ptr<kda_state_pool, Free> handle_;
};

// The state copies of one worker's layers and their life cycle.
class CopySet {
 public:
  explicit CopySet(const Context& c, const kda_copy_set_options* options = nullptr) {
    kda_copy_set* s = nullptr;
    check(kda_copy_set_create(c.get(), options, &s));
    handle_.reset(s);
  }
  void prepare(const std::vector<kda_copy_binding>& bindings, int64_t max_selected) {
    check(kda_copy_set_prepare(get(), bindings.data(), bindings.size(), max_selected));
  }
  void seal() { check(kda_copy_set_seal(get())); }
  void publish() { check(kda_copy_set_publish(get())); }
  void reset() { check(kda_copy_set_reset(get())); }
  kda_copy_set_state state() const noexcept { return kda_copy_set_get_state(get()); }
  int64_t ready() const noexcept { return kda_copy_set_ready(get()); }
  std::string last_error() const { return kda_copy_set_last_error(get()); }
  void gather(const std::string& layer, const kda_state_copy_args& a, void* s = nullptr) const {
    check(kda_copy_set_gather(get(), layer.c_str(), &a, s));
  }
  void scatter(const std::string& layer, const kda_state_copy_args& a, void* s = nullptr) const {
    check(kda_copy_set_scatter(get(), layer.c_str(), &a, s));
  }
  kda_copy_set* get() const noexcept { return handle_.get(); }

 private:
  struct Free {
    void operator()(kda_copy_set* s) const noexcept { kda_copy_set_destroy(s); }
  };
  std::unique_ptr<kda_copy_set, Free> handle_;
};

// An opened checkpoint: which layers are KDA, and what they look like.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& path) {
    kda_checkpoint* c = nullptr;
    check(kda_checkpoint_open(path.c_str(), &c));
    handle_.reset(c);
  }
  struct Layer {
    int64_t number;
    kda_layer_spec spec;
  };
  std::vector<Layer> layers() const {
    std::vector<Layer> list;
    Layer l{};
    while (kda_checkpoint_layer(get(), list.size(), &l.number, &l.spec) == KDA_OK) list.push_back(l);
    return list;
  }
  // "q_proj.weight", "A_log", ...; owned by the checkpoint.
  kda_tensor parameter(size_t i, const std::string& name) const {
    kda_tensor t{};
    check(kda_checkpoint_parameter(get(), i, name.c_str(), &t));
    return t;
  }
  kda_checkpoint* get() const noexcept { return handle_.get(); }

 private:
  struct Free {
    void operator()(kda_checkpoint* c) const noexcept { kda_checkpoint_close(c); }
  };
  std::unique_ptr<kda_checkpoint, Free> handle_;
};

// One layer's packed weights.
class LayerWeights {
 public:
  LayerWeights(const Context& c, const Checkpoint& checkpoint, size_t i, const kda_layer_load_options& options) {
    kda_layer_weights* w = nullptr;
    check(kda_layer_weights_load(c.get(), checkpoint.get(), i, &options, &w));
    handle_.reset(w);
  }
  LayerWeights(const Context& c, const kda_layer_spec& spec, const std::vector<kda_named_tensor>& tensors,
               const kda_layer_load_options& options) {
    kda_layer_weights* w = nullptr;
    check(kda_layer_weights_create(c.get(), &spec, tensors.data(), tensors.size(), &options, &w));
    handle_.reset(w);
  }
  kda_layer_spec spec() const {
    kda_layer_spec s{};
    check(kda_layer_weights_spec(get(), &s));
    return s;
  }
  size_t bytes() const {
    size_t n = 0;
    check(kda_layer_weights_size(get(), &n));
    return n;
  }
  // "A_log", "dt_bias", "conv", "norm"; owned by the weights.
  kda_tensor parameter(const std::string& name) const {
    kda_tensor t{};
    check(kda_layer_weights_parameter(get(), name.c_str(), &t));
    return t;
  }
  kda_layer_weights* get() const noexcept { return handle_.get(); }

 private:
  struct Free {
    void operator()(kda_layer_weights* w) const noexcept { kda_layer_weights_destroy(w); }
  };
  std::unique_ptr<kda_layer_weights, Free> handle_;
};

// A safetensors file.
class TensorFile {
 public:
  explicit TensorFile(const std::string& path) {
    kda_tensor_file* f = nullptr;
    check(kda_tensor_file_open(path.c_str(), &f));
    handle_.reset(f);
  }
  size_t size() const noexcept { return kda_tensor_file_count(get()); }
  struct Entry {
    std::string name, type;
    kda_tensor layout;  // data is null; absent if it cannot be read
    int64_t bytes;
  };
  Entry entry(size_t i) const {
    const char *name, *type;
    Entry e{};
    check(kda_tensor_file_entry(get(), i, &name, &type, &e.layout, &e.bytes));
    e.name = name;
    e.type = type;
    return e;
  }
  // Index of a name; throws NOT_FOUND.
  size_t find(const std::string& name) const {
    size_t i = 0;
    check(kda_tensor_file_find(get(), name.c_str(), &i));
    return i;
  }
  void read(size_t i, const kda_tensor& destination) const { check(kda_tensor_file_read(get(), i, &destination)); }
  std::vector<std::pair<std::string, std::string>> metadata() const {
    std::vector<std::pair<std::string, std::string>> list;
    const char *key, *value;
    for (size_t i = 0; kda_tensor_file_metadata(get(), i, &key, &value) == KDA_OK; ++i) list.emplace_back(key, value);
    return list;
  }
  kda_tensor_file* get() const noexcept { return handle_.get(); }

 private:
  struct Free {
    void operator()(kda_tensor_file* f) const noexcept { kda_tensor_file_close(f); }
  };
  std::unique_ptr<kda_tensor_file, Free> handle_;
};

}  // namespace abi_0_1
}  // namespace kda

#endif  // KDA_KDA_HPP_
