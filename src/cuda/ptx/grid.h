// Programmatic dependent launch.
#pragma once

namespace kda::cuda::ptx {

// Lets the next grid on the stream start its blocks; what this one writes is visible to it only after its own wait.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Until the grid before this one has finished and its writes are visible.
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A global address, worked out before any wait that comes behind this in the program.
template <class T>
__device__ __forceinline__ void have(T*& p) {
  asm volatile("" : "+l"(p));
  __builtin_assume(__isGlobal(p));
}

}  // namespace kda::cuda::ptx
