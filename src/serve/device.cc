#include "serve/device.h"

namespace kda::serve {
namespace {

Result<ContextHandle> open_context(kda_device_type type, int threads) {
  kda_context_options options{};
  options.struct_size = sizeof options;
  options.device.type = type;
  options.num_threads = threads;
  kda_context* context = nullptr;
  KDA_SERVE_TRY(from_kda(kda_context_create(&options, &context)));
  return ContextHandle(context);
}

}  // namespace

Result<std::unique_ptr<Device>> Device::open(kda_device_type type, int threads) {
  auto host = open_context(KDA_CPU, threads);
  if (!host.ok()) return host.status();
  auto device = std::make_unique<Device>(host.value().get());
  device->owned_host_ = std::move(host.value());
  if (type == KDA_CPU) return device;
  auto context = open_context(type, 0);
  if (!context.ok()) return context.status();
  device->context_ = context.value().get();
  device->owned_device_ = std::move(context.value());
  KDA_SERVE_TRY(from_kda(kda_stream_create(device->context_, &device->stream_)));
  return device;
}

Device::~Device() {
  if (stream_ != nullptr) static_cast<void>(kda_stream_destroy(context_, stream_));
}

Status Device::allocate(int64_t bytes, DeviceBuffer& out, kda_memory_kind kind) const {
  // A view of nothing still has an address.
  const auto wanted = static_cast<size_t>(bytes > 0 ? bytes : 1);
  void* data = nullptr;
  KDA_SERVE_TRY(from_kda(kda_memory_allocate(context_, kind, wanted, &data)));
  out = DeviceBuffer(context_, kind, static_cast<char*>(data), wanted);
  return {};
}

Status Device::copy(void* to, const void* from, int64_t bytes) const {
  return from_kda(kda_memory_copy(context_, to, from, static_cast<size_t>(bytes), stream_));
}

Status Device::synchronize() const { return from_kda(kda_stream_synchronize(context_, stream_)); }

Status Device::upload(const void* from, int64_t bytes, DeviceBuffer& out) const {
  KDA_SERVE_TRY(allocate(bytes, out));
  KDA_SERVE_TRY(copy(out.data(), from, bytes));
  return synchronize();
}

}  // namespace kda::serve
