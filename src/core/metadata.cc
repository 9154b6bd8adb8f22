#include "core/metadata.h"

#include <cstring>

#include "base/checked.h"

namespace kda {
namespace {

Refusals metadata_refusals(const MetadataBackend& backend, const kda_metadata_desc& desc, const Context& context) {
  Refusals r;
  if (backend.device->type() != context.device.type) {
    r.add("device_type", device_name(backend.device->type()), device_name(context.device.type));
  }
  if (backend.device->type() == context.device.type) backend.device->check(context, r);
  if (backend.capable) backend.capable(desc, r);
  return r;
}

// The named backend, or the first one of the context's device that accepts.
Result<const MetadataBackend*> select_metadata(const Context& context, const MetadataRegistry& registry,
                                               const kda_metadata_desc& desc, std::vector<Refused>& refused) {
  if (desc.backend != nullptr) {
    auto named = registry.find(desc.backend);
    if (!named.ok()) return named;
    const Refusals r = metadata_refusals(*named.value(), desc, context);
    if (r.empty()) return named;
    refused.push_back({named.value()->name, r.text()});
    return unsupported("metadata: backend '", desc.backend, "': the named backend was refused",
                       list_refusals(refused));
  }
  for (size_t i = 0;; ++i) {
    const MetadataBackend* backend = registry.at(i);
    if (backend == nullptr) break;
    const Refusals r = metadata_refusals(*backend, desc, context);
    if (r.empty()) return backend;
    refused.push_back({backend->name, r.text()});
  }
  return unsupported("metadata: no backend for this context", list_refusals(refused));
}

std::unique_ptr<MetadataBuilder> make_builder(const MetadataBackend& backend, const kda_metadata_desc& desc) {
  if (desc.chunk_hook != nullptr) return make_hook_builder(*backend.device, desc.chunk_hook, desc.chunk_user);
  if (desc.hook != nullptr) return make_host_builder(*backend.device);  // "host": normalize_metadata knows no other
  return backend.make_builder(desc);
}

}  // namespace

Status normalize_metadata(kda_metadata_desc& d) {
  if (d.mode != KDA_METADATA_BY_ROLE && d.mode != KDA_METADATA_BY_DRAFTS) {
    return invalid_argument("mode: wanted KDA_METADATA_BY_ROLE or _BY_DRAFTS, got ", static_cast<int>(d.mode));
  }
  KDA_RETURN_IF_ERROR(check_bound("max_tokens", d.max_tokens));
  KDA_RETURN_IF_ERROR(check_bound("max_sequences", d.max_sequences));
  if (d.max_sequences >= INT32_MAX) {
    return invalid_argument("max_sequences: wanted below 2^31-1 (row lists are int32), got ", d.max_sequences);
  }
  if (d.width == 0) d.width = 1;
  if (d.width < 1) return invalid_argument("width: wanted 1 to ", KDA_MAX_VERIFY, ", got ", d.width);
  if (d.width > KDA_MAX_VERIFY) {
    return unsupported("width: wanted 1 to ", KDA_MAX_VERIFY, " (spec V-13), got ", d.width);
  }
  if (d.chunk == 0) d.chunk = KDA_PREFILL_GRID;
  if (d.chunk < 1) return invalid_argument("chunk: wanted >= 1, got ", d.chunk);
  if (d.null_slot < INT32_MIN || d.null_slot > INT32_MAX) {
    return invalid_argument("null_slot: wanted an int32 (slot tables are int32), got ", d.null_slot);
  }
  KDA_RETURN_IF_ERROR(check_plan_flags(d.flags));
  if (d.hook != nullptr && std::strcmp(d.hook, "host") != 0) {
    return invalid_argument("hook: wanted NULL or \"host\", got \"", d.hook, "\"");
  }
  return {};
}

Result<std::unique_ptr<MetadataPlan>> create_metadata_plan(const Context& context, const MetadataRegistry& registry,
                                                           const kda_metadata_desc* raw) {
  if (context.sealed.load() && !context.allow_late_plans) {
    return failed_precondition("metadata: plan creation after kda_context_seal (spec Y-16)");
  }
  KDA_RETURN_IF_ERROR(check_observer(context, "metadata"));
  auto plan = std::make_unique<MetadataPlan>();
  KDA_RETURN_IF_ERROR(read_struct(raw, plan->desc, "desc"));
  KDA_RETURN_IF_ERROR(normalize_metadata(plan->desc));
  const auto backend = select_metadata(context, registry, plan->desc, plan->refused);
  if (!backend.ok()) return backend.status();
  plan->builder = make_builder(*backend.value(), plan->desc);
  KDA_RETURN_IF_ERROR(backend.value()->device->prepare(plan->desc, context));
  backend.value()->device->book(plan->desc, plan->book);
  if (plan->book.overflowed()) return unsupported("metadata: size: wanted a workspace below 2^63 bytes, got more");
  plan->op = KDA_OP_METADATA;
  plan->context = &context;
  plan->backend = backend.value()->name;
  plan->isa = context.isa;
  plan->checked = checked_mode(plan->desc.flags);
  log_choice(KDA_OP_METADATA, plan->backend, BackendRequest::of_plan(plan->desc.backend), plan->refused);
  plan->desc.backend = plan->desc.hook = nullptr;
  return plan;
}

Status run_metadata(const kda_plan* base, const kda_metadata_args* raw, const kda_workspace& workspace,
                    void* stream) {
  if (base == nullptr || base->op != KDA_OP_METADATA) {
    return invalid_argument("plan: wanted a plan of operator metadata, got ",
                            base != nullptr ? operator_name(base->op) : "NULL");
  }
  const auto& plan = *static_cast<const MetadataPlan*>(base);
  KDA_RETURN_IF_ERROR(check_observer(*plan.context, "metadata"));
  kda_metadata_args args{};
  KDA_RETURN_IF_ERROR(read_struct(raw, args, "args"));
  KDA_RETURN_IF_ERROR(validate_metadata(plan.desc, args, plan.context->device));
  if (plan.builder->needs_host() && !present(args.host.query_start_loc)) {
    return invalid_argument("host.query_start_loc: wanted the host copy that the hook 'host' builds from, got none");
  }
  KDA_RETURN_IF_ERROR(check_workspace(plan, workspace));
  if (plan.checked) KDA_RETURN_IF_ERROR(plan.builder->device().check_values(plan.desc, args, stream));
  plan.context->announce("metadata");
  return plan.builder->build(plan.desc, args, plan.context->device, WorkspaceGrant(plan.book, workspace.data),
                             stream);
}

Status run_chunk_tables(const kda_plan* base, const kda_chunk_request* raw, void* stream) {
  if (base == nullptr || base->op != KDA_OP_METADATA) {
    return invalid_argument("plan: wanted a plan of operator metadata, got ",
                            base != nullptr ? operator_name(base->op) : "NULL");
  }
  const auto& plan = *static_cast<const MetadataPlan*>(base);
  KDA_RETURN_IF_ERROR(check_observer(*plan.context, "metadata"));
  kda_chunk_request request{};
  KDA_RETURN_IF_ERROR(read_struct(raw, request, "request"));
  request.chunk = plan.desc.chunk;
  request.device = plan.context->device;
  request.stream = stream;
  KDA_RETURN_IF_ERROR(check_view("cu_seqlens", request.cu_seqlens, request.device));
  KDA_RETURN_IF_ERROR(check_view("cu_seqlens_host", request.cu_seqlens_host, {KDA_CPU, 0}));
  KDA_RETURN_IF_ERROR(check_view("chunk_indices", request.chunk_indices, request.device));
  KDA_RETURN_IF_ERROR(check_view("chunk_offsets", request.chunk_offsets, request.device));
  if (plan.builder->needs_host() && !present(request.cu_seqlens_host)) {
    return invalid_argument("cu_seqlens_host: wanted the host copy that the hook 'host' builds from, got none");
  }
  KDA_RETURN_IF_ERROR(check_chunk_request(request));
  if (request.num_tokens > plan.desc.max_tokens) {
    return invalid_argument("num_tokens: wanted at most max_tokens = ", plan.desc.max_tokens, ", got ",
                            request.num_tokens);
  }
  if (request.num_sequences > plan.desc.max_sequences) {
    return invalid_argument("num_sequences: wanted at most max_sequences = ", plan.desc.max_sequences, ", got ",
                            request.num_sequences);
  }
  AliasCheck aliases;
  aliases.add("chunk_indices", request.chunk_indices, true);
  aliases.add("chunk_offsets", request.chunk_offsets, true);
  aliases.add("cu_seqlens", request.cu_seqlens, false);
  aliases.add("cu_seqlens_host", request.cu_seqlens_host, false);
  KDA_RETURN_IF_ERROR(aliases.result({}));
  plan.context->announce("metadata");
  return plan.builder->build_chunk_metadata(request);
}

Status explain_metadata(const Context& context, const MetadataRegistry& registry, const kda_metadata_desc* raw,
                        kda_explain_fn fn, void* user) {
  kda_metadata_desc desc{};
  KDA_RETURN_IF_ERROR(read_struct(raw, desc, "desc"));
  KDA_RETURN_IF_ERROR(normalize_metadata(desc));
  bool found = false;
  for (size_t i = 0;; ++i) {
    const MetadataBackend* backend = registry.at(i);
    if (backend == nullptr) return {};
    const Refusals r = metadata_refusals(*backend, desc, context);
    const bool chosen = r.empty() && !found;
    found = found || chosen;
    fn(user, backend->name.c_str(), r.text().c_str(), chosen);
  }
}

Status check_step_values(const kda_metadata_desc& desc, const kda_metadata_args& args) {
  KDA_RETURN_IF_ERROR(check_host_offsets("query_start_loc", args.step.query_start_loc, args.num_tokens));
  const int64_t n = args.step.query_start_loc.shape[0] - 1;
  if (present(args.step.num_active)) {
    const int64_t active = index_view(args.step.num_active)[0];
    if (active < 0 || active > n) return invalid_argument("num_active: wanted a value in [0, ", n, "], got ", active);
  }
  const IndexView accepted = index_view(args.accepted);
  Status status;
  if (!accepted) return status;
  StepReader(desc, args.step, args.num_tokens).for_each([&](int64_t row, const StepReader::Row& r) {
    if (!status.ok() || r.group != RowClass::spec) return;
    const int64_t value = accepted[row];
    if (value >= 1 && value <= desc.width) return;
    status = invalid_argument("accepted[", row, "]: wanted a value in [1, ", desc.width, "], got ", value);
  });
  return status;
}

Result<int64_t> block_column(int64_t tokens, int64_t block, int64_t width) {
  if (tokens < 1) return invalid_argument("tokens: wanted >= 1, got ", tokens);
  if (block < 1) return invalid_argument("block: wanted >= 1, got ", block);
  const int64_t column = (tokens - 1) / block;
  if (column >= width) {
    return invalid_argument("column: wanted below the table's width ", width, ", got ", column, " for ", tokens,
                            " tokens in blocks of ", block);
  }
  return column;
}

Result<int64_t> checkpoint_count(int64_t computed, int64_t n, int64_t interval) {
  if (computed < 0) return invalid_argument("computed: wanted >= 0, got ", computed);
  if (n < 0) return invalid_argument("n: wanted >= 0, got ", n);
  if (interval < 1) return invalid_argument("interval: wanted >= 1, got ", interval);
  const auto end = checked_add(computed, n);
  if (!end) return invalid_argument("n: wanted computed + n below 2^63, got ", n);
  return *end / interval - computed / interval;
}

}  // namespace kda
