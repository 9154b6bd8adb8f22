// config.json of any bytes (spec L-3, L-4, L-5): what is taken can be used as it stands, what is not is named.
#include <cmath>
#include <string>

#include "fuzz_target.h"
#include "layer/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kda;
  const std::string path = "config.json";
  const auto config = layer::parse_config(std::string(reinterpret_cast<const char*>(data), size), path);
  if (!config.ok()) {
    must(config.status().code() == KDA_INVALID_ARGUMENT);
    must(config.status().message().starts_with(path));
    must(config.status().message().size() < 1000);  // never the value itself, however long
    return 0;
  }
  const layer::Config& c = config.value();
  for (const auto& number : {c.hidden, c.heads, c.value_heads, c.key_dim, c.value_dim, c.conv_width}) {
    must(!number || (*number >= 1 && *number < int64_t{1} << 31));
  }
  must(!c.lower_bound || (std::isfinite(*c.lower_bound) && *c.lower_bound < 0));
  if (c.kda_layers) {
    for (const int64_t n : *c.kda_layers) must(n >= 0);
  }
  return 0;
}
