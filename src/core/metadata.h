// Metadata plans (spec M-1..M-29): description, host checks, the run.
#pragma once

#include <memory>

#include "core/metadata_registry.h"
#include "core/plan.h"
#include "kda/metadata.h"

namespace kda {

struct MetadataPlan : kda_plan {
  kda_metadata_desc desc{};  // normalised; keeps no pointer of the caller's
  std::unique_ptr<MetadataBuilder> builder;
};

// Defaults and limits of a description.
Status normalize_metadata(kda_metadata_desc& desc);

// kda_metadata_plan_create.
Result<std::unique_ptr<MetadataPlan>> create_metadata_plan(const Context& context, const MetadataRegistry& registry,
                                                           const kda_metadata_desc* desc);
// kda_metadata_run and kda_metadata_chunk_tables.
Status run_metadata(const kda_plan* plan, const kda_metadata_args* args, const kda_workspace& workspace,
                    void* stream);
Status run_chunk_tables(const kda_plan* plan, const kda_chunk_request* request, void* stream);

// Host checks of one run (spec G-6): shapes, dtypes, capacity, host values.
Status validate_metadata(const kda_metadata_desc& desc, const kda_metadata_args& args, const kda_device& device);

// kda_explain for KDA_OP_METADATA: every registered backend.
Status explain_metadata(const Context& context, const MetadataRegistry& registry, const kda_metadata_desc* desc,
                        kda_explain_fn fn, void* user);

// Checked mode for arrays that the host can read: offsets, num_active, accepted counts of spec rows.
Status check_step_values(const kda_metadata_desc& desc, const kda_metadata_args& args);

// M-9 and K-6.
Result<int64_t> block_column(int64_t tokens, int64_t block, int64_t width);
Result<int64_t> checkpoint_count(int64_t computed, int64_t n, int64_t interval);

}  // namespace kda
