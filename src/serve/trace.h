// Serving traces: what arrived when, how long, and which prompt blocks are shared. Three public formats:
//   mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids (one per 512-token block)
//   azure      CSV: TIMESTAMP,ContextTokens,GeneratedTokens
//   burstgpt   CSV with a header that names Timestamp (s), Request tokens, Response tokens
// Every value is checked and nothing is guessed: a bad line is an error that names file, line, field and value.
#pragma once

#include <cstdint>
#include <istream>
#include <span>
#include <string>
#include <vector>

#include "serve/status.h"

namespace kda::serve {

// Tokens per hashed prompt block of the Mooncake format.
inline constexpr int64_t kBlockTokens = 512;
inline constexpr int64_t kMaxLength = 2147483647;

struct TraceRequest {
  int64_t index = 0;       // place among the valid lines of the file, from 0
  int64_t arrival_ns = 0;  // since the first arrival
  int64_t input_length = 0;
  int64_t output_length = 0;
  int64_t first_block = 0;  // into Trace::blocks
  int64_t num_blocks = 0;   // 0: the format has no hashes
};

struct Trace {
  std::string format;
  std::vector<TraceRequest> requests;  // stably sorted by arrival
  std::vector<uint64_t> blocks;
  int64_t skipped = 0;        // bad lines passed over (skip_bad)
  std::string first_skipped;  // why the first one was bad

  std::span<const uint64_t> blocks_of(const TraceRequest& r) const {
    return {blocks.data() + r.first_block, static_cast<size_t>(r.num_blocks)};
  }
};

struct TraceOptions {
  std::string format = "auto";  // auto, mooncake, azure, burstgpt
  int64_t limit = 0;            // 0 = all; else reading stops after so many valid lines
  bool skip_bad = false;
};

// `path` "-" is standard input. INVALID_ARGUMENT for anything that cannot be read as a trace of at least one
// request.
Result<Trace> read_trace(const std::string& path, const TraceOptions& options);
Result<Trace> read_trace(std::istream& in, const std::string& name, const TraceOptions& options);

}  // namespace kda::serve
