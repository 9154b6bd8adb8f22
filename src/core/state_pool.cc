#include "core/state_pool.h"

#include "base/checked.h"
#include "base/tensor.h"

namespace kda {
namespace {

constexpr int64_t kFree = -1;
constexpr int64_t kPartAlignment = 64;

bool is_pool_dtype(kda_dtype dtype) { return dtype == KDA_FP32 || dtype == KDA_BF16 || dtype == KDA_FP16; }

Status want(bool fine, const char* field, const char* wanted, int64_t got) {
  return fine ? Status() : invalid_argument("state pool ", field, ": wanted ", wanted, ", got ", got);
}

}  // namespace

Status StatePool::normalize(kda_state_pool_desc& desc) {
  if (desc.state_dtype == KDA_DTYPE_NONE) desc.state_dtype = KDA_FP32;
  KDA_RETURN_IF_ERROR(want(desc.num_layers >= 1, "num_layers", ">= 1", desc.num_layers));
  KDA_RETURN_IF_ERROR(want(desc.num_value_heads >= 1, "num_value_heads", ">= 1", desc.num_value_heads));
  KDA_RETURN_IF_ERROR(want(desc.first_value_head >= 0, "first_value_head", ">= 0", desc.first_value_head));
  KDA_RETURN_IF_ERROR(want(desc.key_dim >= 1, "key_dim", ">= 1", desc.key_dim));
  KDA_RETURN_IF_ERROR(want(desc.value_dim >= 1, "value_dim", ">= 1", desc.value_dim));
  KDA_RETURN_IF_ERROR(want(desc.pages >= 1, "pages", ">= 1", desc.pages));
  if (!is_pool_dtype(desc.state_dtype)) {
    return invalid_argument("state pool state_dtype: wanted fp32, bf16 or fp16, got ", dtype_name(desc.state_dtype));
  }
  KDA_RETURN_IF_ERROR(want(desc.conv_channels >= 0, "conv_channels", ">= 0", desc.conv_channels));
  if (desc.conv_channels == 0) {
    desc.conv_width = 0;
    desc.conv_columns = 0;
    desc.conv_dtype = KDA_DTYPE_NONE;
    desc.conv_layout = kda_conv_layout{};
    return {};
  }
  if (desc.conv_dtype == KDA_DTYPE_NONE) desc.conv_dtype = KDA_FP32;
  if (desc.conv_layout == kda_conv_layout{}) desc.conv_layout = KDA_CONV_SD;
  if (desc.conv_columns == 0) desc.conv_columns = desc.conv_width - 1;
  if (!is_pool_dtype(desc.conv_dtype)) {
    return invalid_argument("state pool conv_dtype: wanted fp32, bf16 or fp16, got ", dtype_name(desc.conv_dtype));
  }
  KDA_RETURN_IF_ERROR(want(desc.conv_width >= 2 && desc.conv_width <= 8, "conv_width", "2..8", desc.conv_width));
  KDA_RETURN_IF_ERROR(
      want(desc.conv_columns >= desc.conv_width - 1, "conv_columns", ">= conv_width - 1", desc.conv_columns));
  KDA_RETURN_IF_ERROR(want(desc.conv_layout == KDA_CONV_SD || desc.conv_layout == KDA_CONV_DS, "conv_layout",
                           "KDA_CONV_SD (1) or KDA_CONV_DS (2)", desc.conv_layout));
  return {};
}

Result<StatePoolLayout> StatePool::layout_of(const kda_state_pool_desc& desc) {
  const auto state_size = static_cast<int64_t>(dtype_size(desc.state_dtype));
  const auto conv_size = static_cast<int64_t>(dtype_size(desc.conv_dtype));
  const auto state = checked_product({desc.num_value_heads, desc.value_dim, desc.key_dim, state_size});
  const auto conv = checked_product({desc.conv_channels, desc.conv_columns, conv_size});
  // A bound with room for padding, so that the rounded sums below cannot wrap.
  const auto layer = state && conv ? checked_add(*state, *conv) : std::nullopt;
  const auto padded = layer ? checked_add(*layer, 2 * kPartAlignment) : std::nullopt;
  if (!padded || !checked_product({*padded, desc.num_layers, desc.pages})) {
    return invalid_argument("state pool size: wanted a product of layers, pages and page bytes below 2^63, got ",
                            desc.num_layers, " layers of ", desc.pages, " pages");
  }
  StatePoolLayout layout;
  layout.state_bytes = *state;
  layout.conv_bytes = *conv;
  layout.conv_offset = round_up(*state, kPartAlignment);
  layout.layer_bytes = layout.conv_offset + round_up(*conv, kPartAlignment);
  layout.page_bytes = layout.layer_bytes * desc.num_layers;
  layout.total_bytes = layout.page_bytes * desc.pages;
  layout.window_bytes = desc.conv_channels * (desc.conv_channels > 0 ? desc.conv_width - 1 : 0) * conv_size;
  return layout;
}

StatePool::~StatePool() {
  // Nothing can be done about a device that refuses; what it holds goes with the process.
  (void)runtime_.release(KDA_MEMORY_DEVICE, owned_).ok();
  (void)runtime_.release(KDA_MEMORY_DEVICE, window_).ok();
  (void)runtime_.destroy_stream(stream_).ok();
}

Status StatePool::take_memory() {
  const int64_t wanted = layout_.total_bytes;
  if (desc_.memory != nullptr) {
    if (desc_.memory_bytes < static_cast<size_t>(wanted)) {
      return invalid_argument("state pool memory: wanted ", wanted, " bytes, got ", desc_.memory_bytes);
    }
    if (reinterpret_cast<uintptr_t>(desc_.memory) % KDA_WORKSPACE_ALIGNMENT != 0) {
      return invalid_argument("state pool memory: wanted an address aligned to ", KDA_WORKSPACE_ALIGNMENT,
                              " bytes, got ", desc_.memory);
    }
    memory_ = static_cast<char*>(desc_.memory);
    return {};
  }
  // Never written here: a page of host memory costs real memory only once it is used.
  auto memory = runtime_.allocate(KDA_MEMORY_DEVICE, static_cast<size_t>(wanted));
  if (!memory.ok()) return Status(memory.status().code(), str_cat("state pool: ", memory.status().message()));
  owned_ = memory.value();
  memory_ = static_cast<char*>(owned_);
  return {};
}

Result<std::unique_ptr<StatePool>> StatePool::create(const Context& context, const kda_state_pool_desc& desc) {
  auto layout = layout_of(desc);
  if (!layout.ok()) return layout.status();
  std::unique_ptr<StatePool> pool(new StatePool(desc, layout.value(), context));
  // The pages' memory first: its refusal of an absurd size comes before lists of that size are made.
  KDA_RETURN_IF_ERROR(pool->take_memory());
  auto window = pool->runtime_.allocate(KDA_MEMORY_DEVICE, static_cast<size_t>(layout.value().window_bytes));
  if (!window.ok()) return window.status();
  pool->window_ = static_cast<char*>(window.value());
  auto stream = pool->runtime_.create_stream();
  if (!stream.ok()) return stream.status();
  pool->stream_ = stream.value();
  const auto pages = static_cast<size_t>(desc.pages);
  pool->positions_.assign(pages, kFree);
  pool->free_.reserve(pages);
  for (int64_t page = desc.pages - 1; page >= 0; --page) {
    if (page != desc.null_slot) pool->free_.push_back(page);
  }
  return pool;
}

kda_tensor StatePool::state_view(int32_t layer) const {
  kda_tensor t = make_tensor(layer_of(0, layer), desc_.state_dtype,
                             {desc_.pages, desc_.num_value_heads, desc_.value_dim, desc_.key_dim}, device_);
  t.strides[0] = layout_.page_bytes / static_cast<int64_t>(dtype_size(desc_.state_dtype));
  return t;
}

kda_tensor StatePool::conv_view(int32_t layer) const {
  const bool sd = desc_.conv_layout == KDA_CONV_SD;
  kda_tensor t = make_tensor(
      layer_of(0, layer) + layout_.conv_offset, desc_.conv_dtype,
      {desc_.pages, sd ? desc_.conv_columns : desc_.conv_channels, sd ? desc_.conv_channels : desc_.conv_columns},
      device_);
  t.strides[0] = layout_.page_bytes / static_cast<int64_t>(dtype_size(desc_.conv_dtype));
  return t;
}

Status StatePool::allocate(int64_t count, int64_t* pages) {
  if (count < 0 || (count > 0 && pages == nullptr)) {
    return invalid_argument("pages: wanted a count >= 0 and room for them, got ", count);
  }
  if (count > available()) {
    return Status(KDA_OUT_OF_MEMORY, str_cat("state pool: wanted ", count, " free pages, got ", available()));
  }
  for (int64_t i = 0; i < count; ++i) {
    pages[i] = free_.back();
    free_.pop_back();
    positions_[static_cast<size_t>(pages[i])] = 0;
  }
  return {};
}

Status StatePool::check_owned(const char* what, int64_t page) const {
  if (page < 0 || page >= desc_.pages) {
    return invalid_argument(what, ": wanted a page in [0, ", desc_.pages, "), got ", page);
  }
  if (page == desc_.null_slot) return invalid_argument(what, ": wanted an allocated page, got the null slot ", page);
  const int64_t position = positions_[static_cast<size_t>(page)];
  if (position == kFree) return invalid_argument(what, ": wanted an allocated page, got ", page, ", which is free");
  if (position < 0) return invalid_argument(what, ": wanted each page once, got ", page, " twice");
  return {};
}

Status StatePool::free(int64_t count, const int64_t* pages) {
  if (count < 0 || (count > 0 && pages == nullptr)) {
    return invalid_argument("pages: wanted a count >= 0 and that many pages, got ", count);
  }
  const auto flip = [&](int64_t i) { positions_[static_cast<size_t>(pages[i])] ^= INT64_MIN; };
  for (int64_t i = 0; i < count; ++i) {
    Status status = check_owned("pages", pages[i]);
    if (status.ok()) {
      flip(i);  // marked, so that a page named twice is seen
      continue;
    }
    while (--i >= 0) flip(i);
    return status;
  }
  for (int64_t i = 0; i < count; ++i) positions_[static_cast<size_t>(pages[i])] = kFree;
  free_.insert(free_.end(), pages, pages + count);
  return {};
}

Status StatePool::set_position(int64_t page, int64_t position) {
  KDA_RETURN_IF_ERROR(check_owned("page", page));
  if (position < 0) return invalid_argument("position: wanted >= 0, got ", position);
  positions_[static_cast<size_t>(page)] = position;
  return {};
}

Result<int64_t> StatePool::position(int64_t page) const {
  KDA_RETURN_IF_ERROR(check_owned("page", page));
  return positions_[static_cast<size_t>(page)];
}

}  // namespace kda
