// A packed weight of the cuBLASLt projections, in device memory.
#pragma once

#include <span>

#include "core/device_block.h"
#include "core/projection.h"

namespace kda::cuda {

// [width, cols] dense. Its dtype is the io dtype if that holds every element exactly and no bias is to be added to an
// unrounded sum; fp32 else. Rows between the parts are zero.
struct CublasLtMatrix final : PackedMatrix {
  DeviceBlock memory, bias;  // bias: fp32 [width], or empty
  kda_dtype dtype = KDA_DTYPE_NONE;
  int64_t width = 0, cols = 0;
  int64_t bytes() const override { return memory.bytes() + bias.bytes(); }
};

Result<std::unique_ptr<PackedMatrix>> pack_cublaslt(const Context& context, kda_dtype io,
                                                    std::span<const ProjectionPart> parts, int64_t width);

}  // namespace kda::cuda
