// Copies of a request out of, into and inside a state pool (spec V-11, K-11).
#include <cstring>

#include "base/tensor.h"
#include "core/state_pool.h"

namespace kda {
namespace {

constexpr char kMagic[8] = {'K', 'D', 'A', 'S', 'T', 'A', 'T', 'E'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kValueMajor = 1;  // [HV, V, K], K fastest; the only layout that is written

// Little endian, fields in this order and without gaps; the payload's data follow at once: for each layer the
// window (W-1 columns, dense, in the pool's conv layout), then the state.
struct PayloadHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint64_t total_bytes;
  uint32_t state_layout;
  uint32_t state_dtype;
  uint32_t conv_layout;
  uint32_t conv_dtype;
  uint32_t num_layers;
  uint32_t conv_width;
  int64_t first_value_head;
  int64_t num_value_heads;
  int64_t value_dim;
  int64_t key_dim;
  int64_t conv_channels;
  int64_t position;
};
static_assert(sizeof(PayloadHeader) == 96, "no padding");

template <class T>
Status same(const char* field, T wanted, T got) {
  if (wanted == got) return {};
  return invalid_argument("payload ", field, ": wanted ", wanted, ", got ", got);
}

Status same_dtype(const char* field, uint32_t wanted, uint32_t got) {
  if (wanted == got) return {};
  return invalid_argument("payload ", field, ": wanted ", dtype_name(static_cast<kda_dtype>(wanted)), ", got ",
                          dtype_name(static_cast<kda_dtype>(got)), " (", got, ")");
}

PayloadHeader header_of(const kda_state_pool_desc& desc, int64_t total_bytes, int64_t position) {
  PayloadHeader h{};
  std::memcpy(h.magic, kMagic, sizeof kMagic);
  h.version = kVersion;
  h.header_bytes = sizeof(PayloadHeader);
  h.total_bytes = static_cast<uint64_t>(total_bytes);
  h.state_layout = kValueMajor;
  h.state_dtype = static_cast<uint32_t>(desc.state_dtype);
  h.conv_layout = static_cast<uint32_t>(desc.conv_layout);
  h.conv_dtype = static_cast<uint32_t>(desc.conv_dtype);
  h.num_layers = static_cast<uint32_t>(desc.num_layers);
  h.conv_width = static_cast<uint32_t>(desc.conv_width);
  h.first_value_head = desc.first_value_head;
  h.num_value_heads = desc.num_value_heads;
  h.value_dim = desc.value_dim;
  h.key_dim = desc.key_dim;
  h.conv_channels = desc.conv_channels;
  h.position = position;
  return h;
}

Status compare(const PayloadHeader& wanted, const PayloadHeader& got) {
  KDA_RETURN_IF_ERROR(same("version", wanted.version, got.version));
  KDA_RETURN_IF_ERROR(same("header_bytes", wanted.header_bytes, got.header_bytes));
  KDA_RETURN_IF_ERROR(same("state layout", wanted.state_layout, got.state_layout));
  KDA_RETURN_IF_ERROR(same_dtype("state dtype", wanted.state_dtype, got.state_dtype));
  KDA_RETURN_IF_ERROR(same("layers", wanted.num_layers, got.num_layers));
  KDA_RETURN_IF_ERROR(same("first value head", wanted.first_value_head, got.first_value_head));
  KDA_RETURN_IF_ERROR(same("value heads", wanted.num_value_heads, got.num_value_heads));
  KDA_RETURN_IF_ERROR(same("V", wanted.value_dim, got.value_dim));
  KDA_RETURN_IF_ERROR(same("K", wanted.key_dim, got.key_dim));
  KDA_RETURN_IF_ERROR(same("conv channels", wanted.conv_channels, got.conv_channels));
  KDA_RETURN_IF_ERROR(same("conv width", wanted.conv_width, got.conv_width));
  KDA_RETURN_IF_ERROR(same("conv layout", wanted.conv_layout, got.conv_layout));
  KDA_RETURN_IF_ERROR(same_dtype("conv dtype", wanted.conv_dtype, got.conv_dtype));
  KDA_RETURN_IF_ERROR(same("total_bytes", wanted.total_bytes, got.total_bytes));
  return {};
}

}  // namespace

Status StatePool::check_columns(const kda_state_columns& from) const {
  if (from.pages == nullptr || from.width < 1 || from.accepted < 1 || from.accepted > from.width) {
    return invalid_argument("columns: wanted pages and accepted in 1..width, got accepted ", from.accepted,
                            ", width ", from.width);
  }
  if (desc_.conv_channels > 0 && int64_t{from.accepted} - 1 + desc_.conv_width - 1 > desc_.conv_columns) {
    return invalid_argument("columns.accepted: wanted a window inside the pool's ", desc_.conv_columns,
                            " columns, got accepted ", from.accepted, " with conv width ", desc_.conv_width);
  }
  for (int32_t i = 0; i < from.width; ++i) KDA_RETURN_IF_ERROR(check_owned("columns.pages", from.pages[i]));
  return {};
}

Status StatePool::read_window(const char* window, int32_t offset, char* dense) const {
  const auto element = static_cast<int64_t>(dtype_size(desc_.conv_dtype));
  if (desc_.conv_layout == KDA_CONV_SD) {
    return copy(dense, window + offset * desc_.conv_channels * element, layout_.window_bytes);
  }
  const int64_t row = (desc_.conv_width - 1) * element;
  return runtime_.copy_rows(dense, window + offset * element,
                            {row, desc_.conv_channels, row, desc_.conv_columns * element}, stream_);
}

Status StatePool::write_window(const char* dense, char* window) const {
  if (desc_.conv_layout == KDA_CONV_SD) return copy(window, dense, layout_.window_bytes);
  const auto element = static_cast<int64_t>(dtype_size(desc_.conv_dtype));
  const int64_t row = (desc_.conv_width - 1) * element;
  return runtime_.copy_rows(window, dense, {row, desc_.conv_channels, desc_.conv_columns * element, row}, stream_);
}

Status StatePool::fold(const kda_state_columns& from, int64_t destination) {
  KDA_RETURN_IF_ERROR(check_columns(from));
  KDA_RETURN_IF_ERROR(check_owned("destination", destination));
  const int32_t offset = from.accepted - 1;
  const int64_t source = from.pages[offset];
  const bool whole = offset == 0 && source != destination;  // all layers at once: the page as it is
  if (whole) KDA_RETURN_IF_ERROR(copy(layer_of(destination, 0), layer_of(source, 0), layout_.page_bytes));
  for (int32_t layer = 0; !whole && layer < desc_.num_layers; ++layer) {
    char* to = layer_of(destination, layer);
    if (source != destination) KDA_RETURN_IF_ERROR(copy(to, layer_of(source, layer), layout_.state_bytes));
    if (desc_.conv_channels > 0 && (from.pages[0] != destination || offset != 0)) {
      // Both may be the same window.
      KDA_RETURN_IF_ERROR(read_window(layer_of(from.pages[0], layer) + layout_.conv_offset, offset, window_));
      KDA_RETURN_IF_ERROR(write_window(window_, to + layout_.conv_offset));
    }
  }
  KDA_RETURN_IF_ERROR(runtime_.synchronize(stream_));
  positions_[static_cast<size_t>(destination)] = positions_[static_cast<size_t>(from.pages[0])];
  return {};
}

int64_t StatePool::payload_bytes() const {
  return static_cast<int64_t>(sizeof(PayloadHeader)) +
         desc_.num_layers * (layout_.window_bytes + layout_.state_bytes);
}

Status StatePool::export_payload(const kda_state_columns& from, void* payload, size_t bytes) const {
  KDA_RETURN_IF_ERROR(check_columns(from));
  if (payload == nullptr || bytes < static_cast<size_t>(payload_bytes())) {
    return invalid_argument("payload: wanted room for ", payload_bytes(), " bytes, got ", payload ? bytes : 0);
  }
  const PayloadHeader header = header_of(desc_, payload_bytes(), positions_[static_cast<size_t>(from.pages[0])]);
  std::memcpy(payload, &header, sizeof header);
  char* out = static_cast<char*>(payload) + sizeof header;
  const int32_t offset = from.accepted - 1;
  for (int32_t layer = 0; layer < desc_.num_layers; ++layer) {
    if (desc_.conv_channels > 0) {
      KDA_RETURN_IF_ERROR(read_window(layer_of(from.pages[0], layer) + layout_.conv_offset, offset, out));
    }
    out += layout_.window_bytes;
    KDA_RETURN_IF_ERROR(copy(out, layer_of(from.pages[offset], layer), layout_.state_bytes));
    out += layout_.state_bytes;
  }
  return runtime_.synchronize(stream_);
}

Status StatePool::import_payload(int64_t page, const void* payload, size_t bytes, int64_t expected_position) {
  KDA_RETURN_IF_ERROR(check_owned("page", page));
  PayloadHeader got{};
  if (payload == nullptr || bytes < sizeof got) {
    return invalid_argument("payload: wanted at least the ", sizeof got, " bytes of a header, got ",
                            payload ? bytes : 0);
  }
  std::memcpy(&got, payload, sizeof got);
  if (std::memcmp(got.magic, kMagic, sizeof kMagic) != 0) {
    return invalid_argument("payload magic: wanted KDASTATE, got other bytes");
  }
  KDA_RETURN_IF_ERROR(compare(header_of(desc_, payload_bytes(), 0), got));
  if (bytes < got.total_bytes) return invalid_argument("payload: wanted ", got.total_bytes, " bytes, got ", bytes);
  if (got.position < 0) return invalid_argument("payload position: wanted >= 0, got ", got.position);
  if (expected_position >= 0) KDA_RETURN_IF_ERROR(same("position", expected_position, got.position));
  const char* in = static_cast<const char*>(payload) + sizeof got;
  for (int32_t layer = 0; layer < desc_.num_layers; ++layer) {
    char* to = layer_of(page, layer);
    if (desc_.conv_channels > 0) KDA_RETURN_IF_ERROR(write_window(in, to + layout_.conv_offset));
    in += layout_.window_bytes;
    KDA_RETURN_IF_ERROR(copy(to, in, layout_.state_bytes));
    in += layout_.state_bytes;
  }
  KDA_RETURN_IF_ERROR(runtime_.synchronize(stream_));
  positions_[static_cast<size_t>(page)] = got.position;
  return {};
}

}  // namespace kda
