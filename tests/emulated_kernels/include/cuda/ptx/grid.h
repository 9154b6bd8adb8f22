// Emulated: one grid at a time.
#pragma once

namespace kda::cuda::ptx {

inline void launch_dependents() {}
inline void wait_for_prerequisites() {}

}  // namespace kda::cuda::ptx
