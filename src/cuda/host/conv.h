// What the conv and decode_step plans share.
#pragma once

#include <memory>

#include "core/backend.h"
#include "cuda/kernels/conv/params.h"

namespace kda::cuda {

// Inputs, taps and window of a part's channels from `first` on.
ConvChannels to_channels(const kda_tensor& x, const kda_tensor& weight, const kda_tensor& bias,
                         const kda_tensor& pool, kda_conv_layout layout, int64_t width, int64_t first);

// A conv kernel for decode_step's chain. `final_window`: columns mode keeps the last W-1 inputs only (store = final).
Result<std::unique_ptr<Kernel<Conv>>> make_conv(const kda_conv_desc& desc, const Context& context, bool final_window);

}  // namespace kda::cuda
