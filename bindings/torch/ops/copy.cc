// state_gather, state_scatter: by layer name, through the copy set that the calling thread has entered (spec Q-5).
#include <stdexcept>

#include "attention.h"

namespace {
thread_local kda_copy_set* active_set = nullptr;
}

// Makes `set` the calling thread's (NULL: none) and returns the one before. For libkda.torch.serving.
extern "C" __attribute__((visibility("default"))) kda_copy_set* libkda_torch_enter(kda_copy_set* set) {
  kda_copy_set* const before = active_set;
  active_set = set;
  return before;
}

namespace kda::torch_ops {
namespace {

const kda_copy_set* serving(std::string_view layer) {
  if (active_set == nullptr) {
    throw std::runtime_error(
        "FAILED_PRECONDITION: layer '" + std::string(layer) +
        "': wanted an active layer context (with libkda.torch.serving(...)), got none on this thread");
  }
  return active_set;
}

}  // namespace

void state_gather(StableIValue* stack, uint64_t arguments, uint64_t) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_state_copy_args>();
  args.pool = a.tensor("pool");
  args.indices = a.tensor("indices");
  args.has_initial_state = a.optional_tensor("has_initial_state");
  const std::string layer(a.text());
  a.finish();
  const kda_copy_set* set = serving(layer);
  if (args.pool.rank != 4) bad_argument("pool: wanted [slots, HV, V, K], got rank " + std::to_string(args.pool.rank));
  if (args.indices.rank != 1) bad_argument("indices: wanted [n], got rank " + std::to_string(args.indices.rank));
  const int64_t shape[] = {args.indices.shape[0], args.pool.shape[1], args.pool.shape[2], args.pool.shape[3]};
  const torch::stable::Tensor packed(empty(shape, 4, args.pool.dtype, args.pool.device));
  args.packed = view(packed.get());
  check(kda_copy_set_gather(set, layer.c_str(), &args, current_stream(args.pool.device)));
  stack[0] = torch::stable::detail::from(packed);
}

void state_scatter(StableIValue* stack, uint64_t arguments, uint64_t) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_state_copy_args>();
  args.pool = a.tensor("pool");
  args.indices = a.tensor("indices");
  args.packed = a.tensor("packed");
  const std::string layer(a.text());
  a.finish();
  check(kda_copy_set_scatter(serving(layer), layer.c_str(), &args, current_stream(args.pool.device)));
}

}  // namespace kda::torch_ops
