// Flush-to-zero and denormals-are-zero inside CPU kernels: decayed states produce denormals by the million.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace kda::cpu {

// One per worker, around its share of a run. The mode bits are restored; exception flags stay (spec N-14).
class FlushDenormals {
 public:
#if defined(__x86_64__) || defined(_M_X64)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kBits); }
  ~FlushDenormals() { _mm_setcsr((_mm_getcsr() & ~kBits) | (saved_ & kBits)); }

 private:
  static constexpr uint32_t kBits = 0x8040;  // FTZ, DAZ
  uint32_t saved_;
#elif defined(__aarch64__)
  FlushDenormals() : saved_(read()) { write(saved_ | kBits); }
  ~FlushDenormals() { write((read() & ~kBits) | (saved_ & kBits)); }

 private:
  static constexpr uint64_t kBits = uint64_t{1} << 24;  // FZ
  static uint64_t read() {
    uint64_t value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(uint64_t value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
  uint64_t saved_;
#else
  FlushDenormals() {}
#endif
 public:
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

}  // namespace kda::cpu
