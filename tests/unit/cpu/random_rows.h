// Random rows of decode and conv calls, good and bad values mixed, for tests that compare two backends.
#pragma once

#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "conformance/api.h"
#include "conformance/random.h"
#include "conformance/tensor.h"

namespace kda::conformance::test {

struct RowShape {
  int64_t slots = 9;       // of the pools
  int64_t reserved = 0;    // of them, that rows leave alone
  int32_t width = 1;       // 1 + S
  int64_t max_length = 3;  // of a row
  bool flags = false;      // initial = flags
  bool table = false;      // slots [N, width]
  bool write = false;      // write_slots
  bool counts = false;     // record counts, accepted as tokens to commit
  bool out_rows = false;
};

// The index tensors of one call over T token rows.
struct RandomRows {
  int64_t N = 0, T = 0, null_slot = -1;
  Tensor cu, begin, length, active, slots, write_slots, accepted, flags, count, record_rows, out_rows;

  explicit RandomRows(const RowShape& s) {
    N = *rc::gen::inRange<int64_t>(0, 5);
    make_lengths(s);
    make_slots(s);
    const auto draw = [&](int64_t low, int64_t high, int64_t n) {
      std::vector<int64_t> x(static_cast<size_t>(n));
      for (auto& value : x) value = *rc::gen::inRange(low, high);
      return x;
    };
    if (*rc::gen::inRange(0, 3) > 0 || s.counts) accepted = Tensor::ints(draw(-1, s.width + 3, N));
    if (s.flags) flags = Tensor::flags(draw(0, 2, N));
    if (*rc::gen::inRange(0, 4) == 0) active = Tensor::ints({*rc::gen::inRange<int64_t>(-1, N + 2)});
    if (s.counts) {
      count = Tensor::ints(draw(-1, s.width + 2, s.slots + 2));
      if (*rc::gen::inRange(0, 2)) record_rows = Tensor::ints(shuffled(s.slots + 3, N), KDA_INT64);
    }
    if (s.out_rows && begin.present() + cu.present() > 0) out_rows = Tensor::ints(shuffled(T + 3, T));
  }

  kda_sequences sequences() const { return {cu, begin, length, active}; }
  // Rows of the output: more than tokens when they are placed by out_rows.
  int64_t out_count() const { return out_rows.present() ? T + 2 : T; }

 private:
  // `n` distinct numbers below `limit`.
  static std::vector<int64_t> shuffled(int64_t limit, int64_t n) {
    std::vector<int64_t> all;
    for (int64_t i = 0; i < limit; ++i) all.push_back(i);
    const uint64_t seed = *rc::gen::arbitrary<uint64_t>();
    for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[splitmix64(seed + i) % i]);
    all.resize(static_cast<size_t>(n));
    return all;
  }

  void make_lengths(const RowShape& s) {
    std::vector<int64_t> first, lengths;
    const bool ranges = *rc::gen::inRange(0, 2) != 0;
    for (int64_t n = 0; n < N; ++n) {
      if (ranges) T += *rc::gen::inRange<int64_t>(0, 3);  // rows of no sequence
      first.push_back(T);
      lengths.push_back(*rc::gen::inRange<int64_t>(0, s.max_length + 1));
      T += lengths.back();
    }
    first.push_back(T);
    T += *rc::gen::inRange<int64_t>(0, 3);
    if (ranges) {
      if (N > 0 && *rc::gen::inRange(0, 3) == 0) lengths.back() += 7;  // past the last row: clamped (P-13)
      if (N > 0 && *rc::gen::inRange(0, 4) == 0) lengths.front() = std::min<int64_t>(lengths.front(), -2);
      first.pop_back();
      begin = Tensor::ints(first, KDA_INT64);
      length = Tensor::ints(lengths);
    } else {
      if (*rc::gen::inRange(0, 3) == 0) first.back() += 5;
      cu = Tensor::ints(first, *rc::gen::element(KDA_INT32, KDA_INT64));
    }
  }

  // Live slots are distinct over the whole call, read and write alike; some entries are dead.
  void make_slots(const RowShape& s) {
    const int64_t columns = s.table ? s.width : 1, wanted = N * columns * 2;
    const auto free_slots = shuffled(std::max(s.slots - s.reserved, wanted), wanted);
    size_t next = 0;
    const auto draw = [&] {
      std::vector<int64_t> x;
      for (int64_t i = 0; i < N * columns; ++i) {
        const int64_t slot = free_slots[next++];
        const bool dead = *rc::gen::inRange(0, 5) == 0;
        x.push_back(dead ? *rc::gen::element<int64_t>(-1, -7, INT32_MIN, s.slots, s.slots + 40, INT32_MAX) : slot);
      }
      return x;
    };
    const auto tensor = [&](const std::vector<int64_t>& x) {
      const kda_dtype dtype = *rc::gen::element(KDA_INT32, KDA_INT64);
      Tensor t(dtype, s.table ? Shape{N, columns} : Shape{N}, s.table ? Shape{columns + 2, 1} : Shape{3});
      t.assign({x.begin(), x.end()});
      return t;
    };
    slots = tensor(draw());
    if (s.write) write_slots = tensor(draw());
    null_slot = *rc::gen::element<int64_t>(-1, 0, 3);
  }
};

}  // namespace kda::conformance::test
