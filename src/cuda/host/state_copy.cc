// State copies on CUDA: the four variants of a layout are kernels that preparation has loaded and run once (spec
// Y-17..Y-23). A call is one launch.
#include <cstring>

#include "base/checked.h"
#include "core/state_copy_backend.h"
#include "cuda/host/backend.h"
#include "cuda/host/gates.h"
#include "cuda/host/launch.h"
#include "cuda/kernels/state_copy/params.h"

namespace kda::cuda {
namespace {

// What the variants find in CopyTable::private_.
struct CopyKernels {
  KernelInfo kernels[2][2];  // [int64 indices][scatter]
  CopyCast cast = CopyCast::kNone;
  int32_t packed_per_pool = 1;  // bytes of a packed lane for a byte of a pool lane
};

CopyCast cast_of(const CopyKey& key) {
  if (key.packed_dtype == key.pool_dtype) return CopyCast::kNone;
  return key.pool_dtype == KDA_BF16 ? CopyCast::kBf16 : CopyCast::kFp16;
}

// The plan's lane, or the widest one that the packed rows of this call are aligned to. Each divides the one above.
int32_t call_lane(const CopyTable& table, const CopyKernels& k, const CopyCall& call) {
  int32_t lane = table.lane;
  if (k.cast != CopyCast::kNone && lane > kCopyCastLane) lane = kCopyCastLane;
  const uint64_t packed =
      reinterpret_cast<uintptr_t>(call.packed) | (call.n > 1 ? static_cast<uint64_t>(call.packed_stride) : 0);
  while (packed % static_cast<uint64_t>(lane * k.packed_per_pool) != 0) lane /= 2;
  return lane;
}

template <bool kWide, bool kScatter>
Status run_variant(const CopyTable& table, const CopyCall& call, const Context& context, void* stream) {
  const auto& k = *static_cast<const CopyKernels*>(table.private_.get());
  StateCopyParams p;
  p.pool = call.pool;
  p.packed = call.packed;
  p.pool_stride = table.pool_stride;
  p.packed_stride = call.packed_stride;
  p.rows = table.rows;
  p.n = call.n;
  p.indices = call.indices;
  p.index_stride = call.index_stride;
  p.flags = call.flags;
  p.lane = call_lane(table, k, call);
  p.lanes = table.pool_bytes / p.lane;
  const DeviceGuard guard(context.device.index);
  KDA_RETURN_IF_ERROR(guard.status());
  const int64_t row_slices = ceil_div(table.pool_bytes * k.packed_per_pool, kCopySlice), slices = row_slices * call.n;
  p.guesses = slices <= kCopyGuessedSlices && p.lane == 16;
  const bool is_middle = slices > kCopyGuessedSlices && slices <= kCopyMiddleSlices;
  KernelInfo kernel = k.kernels[kWide][kScatter];
  if (is_middle) kernel.threads *= kCopyMiddleWarps;
  LaunchShape shape{ceil_div(row_slices, int64_t{kernel.threads / 32}), call.n};
  shape.shared_bytes = is_middle ? 0 : kCopyIdleShared;
  return launch(kernel, shape, p, stream);
}

class CudaCopyBackend final : public CopyBackend {
 public:
  kda_device_type device_type() const override { return KDA_CUDA; }

  CopyDevice facts(const Context& context) const override {
    const DeviceFacts& f = context.facts;
    return {KDA_CUDA, has_device_image(f), str_cat(f.name, " (compute capability ", f.major, ".", f.minor, ")")};
  }

  void describe(const Context&, Snapshot& snapshot) const override {
    snapshot["device"] = "cuda";
    snapshot["device images"] = device_images();
  }

  Status load(CopyTable& table, const Context& context) const override {
    const DeviceGuard guard(context.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    auto k = std::make_shared<CopyKernels>();
    k->cast = cast_of(table.key);
    const bool casts = k->cast != CopyCast::kNone;
    k->packed_per_pool = casts ? 2 : 1;
    if (ceil_div(table.pool_bytes * k->packed_per_pool, kCopySlice) > kMaxBlocks) {
      return unsupported("state_copy: size: wanted rows of at most ", kMaxBlocks * kCopySlice / k->packed_per_pool,
                         " bytes, got ", table.pool_bytes);
    }
    for (const bool wide : {false, true}) {
      for (const bool scatter : {false, true}) {
        KernelInfo& kernel = k->kernels[wide][scatter];
        kernel =
            state_copy_kernel_info(scatter ? CopyDirectionTag::kScatter : CopyDirectionTag::kGather, k->cast, wide);
        KDA_RETURN_IF_ERROR(prepare_kernel(kernel.function, kernel.name, kCopyIdleShared));
      }
    }
    // The packed side of a cast holds floats; plain copies take any address.
    table.packed_alignment = casts ? 4 : 1;
    table.private_ = std::move(k);
    table.variants[0][0] = &run_variant<false, false>;
    table.variants[0][1] = &run_variant<false, true>;
    table.variants[1][0] = &run_variant<true, false>;
    table.variants[1][1] = &run_variant<true, true>;
    return {};
  }

  Status verify(const CopyTable& table, const Context& context) const override {
    const DeviceGuard guard(context.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    const auto& k = *static_cast<const CopyKernels*>(table.private_.get());
    for (const auto& by_index : k.kernels) {
      for (const KernelInfo& kernel : by_index) KDA_RETURN_IF_ERROR(prepare_kernel(kernel.function, kernel.name));
    }
    return {};
  }

  void* allocate(size_t bytes, const Context& context) const override {
    const DeviceGuard guard(context.device.index);
    void* memory = nullptr;
    if (!guard.status().ok() || cudaMalloc(&memory, bytes) != cudaSuccess) {
      (void)cudaGetLastError();
      return nullptr;
    }
    return memory;
  }
  void release(void* memory, const Context& context) const override {
    const DeviceGuard guard(context.device.index);
    (void)cudaFree(memory);
  }
  Status fill(void* memory, int value, size_t bytes, const Context& context) const override {
    const DeviceGuard guard(context.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    return to_status(cudaMemset(memory, value, bytes), "state_copy: scratch");
  }
  Status synchronize(const Context& context) const override {
    const DeviceGuard guard(context.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    return to_status(cudaDeviceSynchronize(), "state_copy: preparation");
  }
  Status read_back(void* host, const void* device, size_t bytes, const Context& context,
                   void* stream) const override {
    return device_runtime(context.device.index).read(host, device, bytes, stream);
  }
};

}  // namespace

const CopyBackend* copy_backend() {
  static const CudaCopyBackend backend;
  return &backend;
}

}  // namespace kda::cuda
