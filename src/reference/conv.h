// The oracle's convolution, as a piece of decode_step too.
#pragma once

#include "core/backend.h"

namespace kda::reference {

// How a window is left in columns mode: W-3 (the next step chooses its offset), or, for decode rows that store only
// their final state (V-3), with the last W-1 inputs in columns 0..W-2.
enum class WindowEnd { kPerToken, kFinal };

std::unique_ptr<Kernel<Conv>> make_conv(const kda_conv_desc& desc, const Context& context, WindowEnd end);

}  // namespace kda::reference
