// Trace readers on any bytes: the first byte picks format and options, the rest is the file.
#include <algorithm>
#include <sstream>

#include "fuzz_target.h"
#include "serve/trace.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kda::serve;
  if (size == 0) return 0;
  static constexpr const char* kFormats[] = {"auto", "mooncake", "azure", "burstgpt"};
  TraceOptions options;
  options.format = kFormats[data[0] & 3];
  options.skip_bad = (data[0] & 4) != 0;
  options.limit = data[0] >> 4;
  std::istringstream in(std::string(reinterpret_cast<const char*>(data + 1), size - 1));
  const auto trace = read_trace(in, "input", options);
  if (!trace.ok()) {
    must(!trace.status().message().empty());
    return 0;
  }
  const Trace& t = trace.value();
  must(!t.requests.empty());
  must(t.requests.front().arrival_ns == 0);
  must(options.limit == 0 || static_cast<int64_t>(t.requests.size()) <= options.limit);
  int64_t arrival = 0;
  for (const TraceRequest& r : t.requests) {
    must(r.arrival_ns >= arrival);
    arrival = r.arrival_ns;
    must(r.input_length >= 1 && r.input_length <= kMaxLength);
    must(r.output_length >= 0 && r.output_length <= kMaxLength);
    must(r.num_blocks == 0 || r.num_blocks == (r.input_length + kBlockTokens - 1) / kBlockTokens);
    must(r.first_block >= 0 && r.first_block + r.num_blocks <= static_cast<int64_t>(t.blocks.size()));
  }
  return 0;
}
