// Hand-over payloads of any bytes (spec K-11): taken whole, or refused with the page left as it was.
#include <kda/kda.h>

#include <cstring>
#include <vector>

#include "fuzz_target.h"

namespace {

struct Pool {
  kda_context* context = nullptr;
  kda_state_pool* pool = nullptr;
  std::vector<char> memory;
  int64_t page = -1;

  Pool() {
    kda_context_options o{};
    o.struct_size = sizeof o;
    o.num_threads = 1;
    must(kda_context_create(&o, &context) == KDA_OK);
    kda_state_pool_desc d;
    kda_state_pool_desc_init(&d);
    d.num_layers = 2;
    d.num_value_heads = 1;
    d.key_dim = 3;
    d.value_dim = 2;
    d.conv_channels = 4;
    d.conv_width = 3;
    d.conv_dtype = KDA_BF16;
    d.pages = 2;
    must(kda_state_pool_create(context, &d, &pool) == KDA_OK);
    must(kda_state_pool_allocate(pool, 1, &page) == KDA_OK);
  }
  ~Pool() {
    kda_state_pool_destroy(pool);
    kda_context_destroy(context);
  }
  // Both layers' states and windows.
  std::vector<char> contents() const {
    std::vector<char> all;
    for (int32_t layer = 0; layer < 2; ++layer) {
      kda_tensor t{};
      for (const auto view : {kda_state_pool_state, kda_state_pool_conv}) {
        must(view(pool, layer, &t) == KDA_OK);
        const auto bytes = static_cast<int64_t>(kda_dtype_size(t.dtype));
        const char* begin = static_cast<const char*>(t.data) + page * t.strides[0] * bytes;
        int64_t elements = 1;
        for (int32_t i = 1; i < t.rank; ++i) elements *= t.shape[i];
        all.insert(all.end(), begin, begin + elements * bytes);
      }
    }
    return all;
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Pool p;
  must(kda_state_pool_set_position(p.pool, p.page, 7) == KDA_OK);
  const std::vector<char> before = p.contents();
  if (kda_state_pool_import(p.pool, p.page, data, size, -1) != KDA_OK) {
    must(std::strlen(kda_last_error()) > 0);
    must(p.contents() == before);
    int64_t position = 0;
    must(kda_state_pool_position(p.pool, p.page, &position) == KDA_OK && position == 7);
    return 0;
  }
  // What was taken comes out again, bit for bit.
  std::vector<uint8_t> again(kda_state_pool_payload_size(p.pool));
  must(size >= again.size());
  const kda_state_columns from = {&p.page, 1, 1};
  must(kda_state_pool_export(p.pool, &from, again.data(), again.size()) == KDA_OK);
  must(std::memcmp(again.data(), data, again.size()) == 0);
  return 0;
}
