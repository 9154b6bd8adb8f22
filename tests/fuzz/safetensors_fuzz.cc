// Safetensors headers of any bytes: the first byte is the size of the data section in units of 8, the rest the JSON.
#include <string_view>

#include "base/checked.h"
#include "base/safetensors.h"
#include "fuzz_target.h"
#include "kda/kda.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kda;
  if (size == 0) return 0;
  const int64_t bytes = int64_t{data[0]} * 8;
  const auto header =
      parse_safetensors_header(std::string_view(reinterpret_cast<const char*>(data + 1), size - 1), bytes);
  if (!header.ok()) {
    must(!header.status().message().empty());
    return 0;
  }
  int64_t at = 0;  // no hole, no overlap
  for (const SafetensorsEntry& e : header.value().entries) {
    must(e.begin == at && e.end >= e.begin);
    at = e.end;
    for (const int64_t n : e.shape) must(n >= 0);
    const kda_tensor t = layout_of(e);
    if (t.dtype == KDA_DTYPE_NONE) continue;
    int64_t elements = 1;
    for (int32_t i = 0; i < t.rank; ++i) elements *= t.shape[i];
    must(elements * static_cast<int64_t>(kda_dtype_size(t.dtype)) == e.end - e.begin);
  }
  must(at <= bytes);
  return 0;
}
