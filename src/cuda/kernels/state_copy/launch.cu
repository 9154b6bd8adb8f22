#include "cuda/kernels/state_copy/kernel.cuh"

namespace kda::cuda {
namespace {

template <CopyDirectionTag kDirection, CopyCast kCast>
KernelInfo info(bool wide_index) {
  constexpr const char* kName =
      kDirection == CopyDirectionTag::kGather ? "state_gather_kernel" : "state_scatter_kernel";
  const void* function =
      wide_index ? reinterpret_cast<const void*>(state_copy_kernel<StateCopyConfig<int64_t, kDirection, kCast>>)
                 : reinterpret_cast<const void*>(state_copy_kernel<StateCopyConfig<int32_t, kDirection, kCast>>);
  return {function, kName, 32};
}

template <CopyDirectionTag kDirection>
KernelInfo info(CopyCast cast, bool wide_index) {
  switch (cast) {
    case CopyCast::kBf16: return info<kDirection, CopyCast::kBf16>(wide_index);
    case CopyCast::kFp16: return info<kDirection, CopyCast::kFp16>(wide_index);
    default: return info<kDirection, CopyCast::kNone>(wide_index);
  }
}

}  // namespace

KernelInfo state_copy_kernel_info(CopyDirectionTag direction, CopyCast cast, bool wide_index) {
  return direction == CopyDirectionTag::kGather ? info<CopyDirectionTag::kGather>(cast, wide_index)
                                                : info<CopyDirectionTag::kScatter>(cast, wide_index);
}

}  // namespace kda::cuda
