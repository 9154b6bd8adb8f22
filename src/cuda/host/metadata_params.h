// From a step's tensors to the kernels' plain structs. No CUDA header is needed: this part is in every build, so that
// the kernels can be tried on the host.
#pragma once

#include "cuda/kernels/metadata/params.h"
#include "kda/metadata.h"

namespace kda::cuda {

// `chunks`: with the chunk tables.
MetadataParams metadata_params(const kda_metadata_desc& desc, const kda_metadata_args& args, bool chunks);
ChunkParams chunk_params(const kda_chunk_request& request);
ChunkDivisor chunk_divisor(int64_t chunk);
ChunkTableRef chunk_tables_of(const kda_chunk_request& request);
// A block for so many rows or list entries; more blocks would only read the step once more each.
int64_t metadata_blocks(int64_t rows, int64_t entries);
// Sets the rows of each block.
void share_rows(MetadataParams& p, int64_t blocks);

}  // namespace kda::cuda
