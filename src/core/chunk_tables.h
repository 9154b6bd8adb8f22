// Chunk tables on the host (spec M-14..M-20): their bound, and the build that the CPU backend and the `host` hook
// share. The CUDA build follows the same text.
#pragma once

#include <optional>

#include "base/status.h"
#include "base/tensor.h"
#include "kda/metadata.h"

namespace kda {

// M-16: attained for every T, N, C. Nothing if an argument is out of range.
std::optional<int64_t> chunk_bound(int64_t tokens, int64_t sequences, int64_t chunk);

// Lengths of sequences under bad offsets (spec M-19, P-13): values are clamped to [0, T], a decreasing pair gives
// 0, and what overlapping pairs would count beyond T tokens in all is cut off, so that no table overflows.
class LengthReader {
 public:
  LengthReader(const IndexView& cu, int64_t tokens) : cu_(cu), tokens_(tokens) {}

  struct Span {
    int64_t begin = 0;
    int64_t length = 0;
  };
  // To be called for n = 0, 1, 2, ... in order.
  Span next(int64_t n) {
    const int64_t begin = clamp(cu_[n]), end = clamp(cu_[n + 1]);
    const int64_t length = end > begin ? end - begin : 0;
    const int64_t left = tokens_ - total_;
    const int64_t kept = length < left ? length : left;
    total_ += kept;
    return {begin, kept};
  }

 private:
  int64_t clamp(int64_t x) const { return x < 0 ? 0 : (x > tokens_ ? tokens_ : x); }

  IndexView cu_;
  int64_t tokens_;
  int64_t total_ = 0;
};

// Number of chunks of n sequences.
int64_t count_chunks(const IndexView& cu, int64_t n, int64_t tokens, int64_t chunk);

// Offsets of the host: start at 0, do not decrease, end at `tokens` or less (spec P-13).
Status check_host_offsets(const char* name, const kda_tensor& cu, int64_t tokens);

// Shapes, dtypes, sizes of a request; the values of cu_seqlens_host.
Status check_chunk_request(const kda_chunk_request& request);

// Fills both tables from `cu`; rows past the last chunk become (-1, -1), offsets past N repeat the last one.
void fill_chunk_tables(const kda_chunk_request& request, const kda_tensor& cu);

}  // namespace kda
