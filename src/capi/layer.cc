// The KDA layer: the C face of src/layer.
#include "kda/layer.h"

#include <algorithm>

#include "base/checked.h"
#include "base/tensor.h"
#include "capi/guard.h"
#include "layer/checkpoint.h"
#include "layer/parameters.h"
#include "layer/plan.h"

struct kda_checkpoint {
  kda::layer::Checkpoint checkpoint;
};

namespace {

using kda::Result;
using kda::Status;
using kda::capi::check_pointer;
using kda::capi::guard;
namespace layer = kda::layer;

struct Options {
  layer::LoadOptions load;
  double lower_bound = 0;
};

Result<Options> read_options(const kda_layer_load_options* raw) {
  kda_layer_load_options o{};
  if (raw != nullptr) KDA_RETURN_IF_ERROR(kda::read_struct(raw, o, "options"));
  Options options;
  options.load.io = o.io_dtype == KDA_DTYPE_NONE ? KDA_BF16 : o.io_dtype;
  if (!kda::is_io_dtype(options.load.io)) {
    return kda::invalid_argument("options.io_dtype: wanted fp32, bf16 or fp16, got ",
                                 kda::dtype_name(options.load.io));
  }
  options.load.projection = o.projection;
  options.load.ranks = o.ranks == 0 ? 1 : o.ranks;
  options.load.rank = o.rank;
  options.lower_bound = o.lower_bound;
  return options;
}

// The caller's bound beside what the checkpoint says (spec L-4).
Status apply_bound(double bound, const layer::Config& config, kda_layer_spec& spec) {
  if (bound == 0) return {};
  if (config.lower_bound && *config.lower_bound != bound) {
    return kda::invalid_argument("options.lower_bound: wanted ", *config.lower_bound, " as ", config.path,
                                 " says, got ", bound);
  }
  if (!config.lower_bound && !config.path.empty()) {
    return kda::invalid_argument("options.lower_bound: wanted none, since ", config.path,
                                 " holds none: its gate is softplus (spec L-4); got ", bound);
  }
  spec.gate_family = KDA_GATE_BOUNDED;
  spec.lower_bound = bound;
  return layer::normalize(spec);
}

Result<layer::TensorMap> read_tensors(const kda_named_tensor* tensors, size_t count) {
  layer::TensorMap map;
  for (size_t i = 0; i < count; ++i) {
    const kda_named_tensor& t = tensors[i];
    if (t.name == nullptr) return kda::invalid_argument("tensors[", i, "].name: wanted a text, got NULL");
    KDA_RETURN_IF_ERROR(kda::check_view(t.name, t.tensor, {KDA_CPU, 0}));
    if (!kda::present(t.tensor) || !kda::inner_dense(t.tensor, t.tensor.rank)) {
      return kda::invalid_argument("tensor '", t.name, "': wanted a dense tensor, got ", kda::describe(t.tensor));
    }
    layer::TensorSource source{kda::str_cat("tensor '", t.name, "'"),
                               t.tensor.dtype,
                               {t.tensor.shape, t.tensor.shape + t.tensor.rank},
                               t.tensor.data};
    if (!map.emplace(t.name, std::move(source)).second) {
      return kda::invalid_argument("tensor '", t.name, "': wanted once, got twice");
    }
  }
  return map;
}

// A layer without short convolution is one of W = 2 without conv weights (spec L-11).
bool has_short_conv(const kda_layer_spec& spec, const layer::TensorMap& tensors) {
  const auto is_conv = [](const auto& entry) { return entry.first.find("conv1d") != std::string::npos; };
  return spec.conv_width != 2 || std::any_of(tensors.begin(), tensors.end(), is_conv);
}

Status find_parameter(const layer::TensorMap& tensors, const kda_layer_spec& spec, const std::string& origin,
                      bool short_conv, const char* name, kda_tensor* out) {
  auto all = layer::resolve(tensors, spec, origin, short_conv);
  if (!all.ok()) return all.status();
  auto found = layer::parameter(all.value(), spec, name);
  if (!found.ok()) return found.status();
  *out = found.value();
  return {};
}

Status create_weights(const kda_context* context, const kda_layer_spec& spec, const layer::TensorMap& tensors,
                      bool short_conv, const Options& options, const std::string& origin, kda_layer_weights** out) {
  auto all = layer::resolve(tensors, spec, origin, short_conv);
  if (!all.ok()) return all.status();
  auto weights = layer::Weights::create(*context, spec, all.value(), options.load, origin);
  if (!weights.ok()) return weights.status();
  *out = new kda_layer_weights{std::move(weights.value())};
  return {};
}

}  // namespace

extern "C" {

kda_status kda_model_spec(const char* name, kda_layer_spec* spec, int32_t* kda_layers) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("name", name));
    KDA_RETURN_IF_ERROR(check_pointer("spec", spec));
    auto found = layer::model_spec(name, kda_layers);
    if (!found.ok()) return found.status();
    *spec = found.value();
    return {};
  });
}

kda_status kda_layer_spec_share(const kda_layer_spec* whole, int32_t ranks, int32_t rank, kda_layer_spec* out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("whole", whole));
    KDA_RETURN_IF_ERROR(check_pointer("share", out));
    auto mine = layer::share(*whole, ranks, rank);
    if (!mine.ok()) return mine.status();
    *out = mine.value();
    return {};
  });
}

kda_status kda_checkpoint_open(const char* path, kda_checkpoint** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("path", path));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto opened = layer::Checkpoint::open(path);
    if (!opened.ok()) return opened.status();
    *out = new kda_checkpoint{std::move(opened.value())};
    return {};
  });
}

void kda_checkpoint_close(kda_checkpoint* checkpoint) { delete checkpoint; }

kda_status kda_checkpoint_layer(const kda_checkpoint* checkpoint, size_t i, int64_t* number, kda_layer_spec* spec) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("checkpoint", checkpoint));
    auto found = checkpoint->checkpoint.layer(i);
    if (!found.ok()) return found.status();
    if (number) *number = found.value()->number;
    if (spec) *spec = found.value()->spec;
    return {};
  });
}

kda_status kda_checkpoint_parameter(const kda_checkpoint* checkpoint, size_t i, const char* name, kda_tensor* out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("checkpoint", checkpoint));
    KDA_RETURN_IF_ERROR(check_pointer("name", name));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto found = checkpoint->checkpoint.layer(i);
    if (!found.ok()) return found.status();
    const layer::Checkpoint::Layer& l = *found.value();
    return find_parameter(l.tensors, l.spec, l.origin, checkpoint->checkpoint.config().short_conv, name, out);
  });
}

kda_status kda_layer_weights_load(kda_context* context, const kda_checkpoint* checkpoint, size_t i,
                                  const kda_layer_load_options* options, kda_layer_weights** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    KDA_RETURN_IF_ERROR(check_pointer("checkpoint", checkpoint));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto found = checkpoint->checkpoint.layer(i);
    if (!found.ok()) return found.status();
    auto o = read_options(options);
    if (!o.ok()) return o.status();
    const layer::Checkpoint::Layer& l = *found.value();
    kda_layer_spec spec = l.spec;
    KDA_RETURN_IF_ERROR(apply_bound(o.value().lower_bound, checkpoint->checkpoint.config(), spec));
    return create_weights(context, spec, l.tensors, checkpoint->checkpoint.config().short_conv, o.value(), l.origin,
                          out);
  });
}

kda_status kda_layer_weights_create(kda_context* context, const kda_layer_spec* spec, const kda_named_tensor* tensors,
                                    size_t count, const kda_layer_load_options* options, kda_layer_weights** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    KDA_RETURN_IF_ERROR(check_pointer("spec", spec));
    KDA_RETURN_IF_ERROR(check_pointer("tensors", tensors));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto o = read_options(options);
    if (!o.ok()) return o.status();
    kda_layer_spec whole = *spec;
    KDA_RETURN_IF_ERROR(layer::normalize(whole));
    auto map = read_tensors(tensors, count);
    if (!map.ok()) return map.status();
    return create_weights(context, whole, map.value(), has_short_conv(whole, map.value()), o.value(), "tensors", out);
  });
}

kda_status kda_layer_parameter(const kda_layer_spec* spec, const kda_named_tensor* tensors, size_t count,
                               const char* name, kda_tensor* out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("spec", spec));
    KDA_RETURN_IF_ERROR(check_pointer("tensors", tensors));
    KDA_RETURN_IF_ERROR(check_pointer("name", name));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    kda_layer_spec whole = *spec;
    KDA_RETURN_IF_ERROR(layer::normalize(whole));
    auto map = read_tensors(tensors, count);
    if (!map.ok()) return map.status();
    return find_parameter(map.value(), whole, "tensors", has_short_conv(whole, map.value()), name, out);
  });
}

void kda_layer_weights_destroy(kda_layer_weights* weights) { delete weights; }

kda_status kda_layer_weights_spec(const kda_layer_weights* weights, kda_layer_spec* spec) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("weights", weights));
    KDA_RETURN_IF_ERROR(check_pointer("spec", spec));
    *spec = weights->weights->spec();
    return {};
  });
}

kda_status kda_layer_weights_size(const kda_layer_weights* weights, size_t* bytes) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("weights", weights));
    KDA_RETURN_IF_ERROR(check_pointer("bytes", bytes));
    *bytes = static_cast<size_t>(weights->weights->bytes());
    return {};
  });
}

kda_status kda_layer_weights_parameter(const kda_layer_weights* weights, const char* name, kda_tensor* out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("weights", weights));
    KDA_RETURN_IF_ERROR(check_pointer("name", name));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto found = weights->weights->parameter(name);
    if (!found.ok()) return found.status();
    *out = found.value();
    return {};
  });
}

void kda_layer_desc_init(kda_layer_desc* desc) {
  if (desc == nullptr) return;
  *desc = kda_layer_desc{};
  desc->struct_size = sizeof *desc;
  desc->null_slot = -1;
}

kda_status kda_layer_plan_create(kda_context* context, const kda_layer_desc* desc, kda_plan** out) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    KDA_RETURN_IF_ERROR(check_pointer("out", out));
    auto plan = layer::LayerPlan::create(*context, desc);
    if (!plan.ok()) return plan.status();
    *out = plan.value().release();
    return {};
  });
}

kda_status kda_layer_plan_part(const kda_plan* plan, size_t i, const kda_plan** part) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("part", part));
    if (plan == nullptr || plan->op != KDA_OP_LAYER) return kda::invalid_argument("plan: wanted a layer's plan");
    const kda_plan* const found = static_cast<const layer::LayerPlan*>(plan)->part(i);
    if (found == nullptr) return kda::not_found("part: wanted below 4, got ", i);
    *part = found;
    return {};
  });
}

kda_status kda_layer_run(const kda_plan* plan, const kda_layer_args* args, kda_workspace workspace, void* stream) {
  return guard([&]() -> Status {
    if (plan == nullptr || plan->op != KDA_OP_LAYER) return kda::invalid_argument("plan: wanted a layer's plan");
    return static_cast<const layer::LayerPlan*>(plan)->run(args, workspace, stream);
  });
}

kda_status kda_mask_sequences(const kda_tensor* mask, int64_t* begin, int64_t* length) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("mask", mask));
    KDA_RETURN_IF_ERROR(check_pointer("begin", begin));
    KDA_RETURN_IF_ERROR(check_pointer("length", length));
    return layer::mask_sequences(*mask, begin, length);
  });
}

}  // extern "C"
