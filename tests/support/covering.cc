#include "support/covering.h"

#include <cstddef>

namespace kda::test {
namespace {

class Pairs {
 public:
  explicit Pairs(const std::vector<int>& sizes) : sizes_(sizes) {
    size_t first = 0;
    for (int s : sizes) {
      first_.push_back(first);
      first += static_cast<size_t>(s);
    }
    values_ = first;
    open_.assign(values_ * values_, false);
    for (size_t p = 0; p < sizes.size(); ++p) {
      for (size_t q = 0; q < sizes.size(); ++q) {
        if (p == q) continue;
        for (int a = 0; a < sizes[p]; ++a) {
          for (int b = 0; b < sizes[q]; ++b) open_[at(p, a, q, b)] = true;
        }
      }
    }
  }

  bool open(size_t p, int a, size_t q, int b) const { return open_[at(p, a, q, b)]; }
  void close(size_t p, int a, size_t q, int b) { open_[at(p, a, q, b)] = open_[at(q, b, p, a)] = false; }
  // Open pairs of value a with anything.
  int count(size_t p, int a) const {
    int n = 0;
    for (size_t v = 0; v < values_; ++v) n += open_[(first_[p] + static_cast<size_t>(a)) * values_ + v];
    return n;
  }

 private:
  size_t at(size_t p, int a, size_t q, int b) const {
    return (first_[p] + static_cast<size_t>(a)) * values_ + first_[q] + static_cast<size_t>(b);
  }
  std::vector<int> sizes_;
  std::vector<size_t> first_;
  size_t values_ = 0;
  std::vector<bool> open_;
};

}  // namespace

std::vector<std::vector<int>> covering_pairs(const std::vector<int>& sizes) {
  Pairs pairs(sizes);
  std::vector<std::vector<int>> cases;
  for (;;) {
    // Start from the value with the most open pairs, then add the value that closes the most with what is there.
    size_t start = 0;
    int start_value = 0, most = 0;
    for (size_t p = 0; p < sizes.size(); ++p) {
      for (int a = 0; a < sizes[p]; ++a) {
        if (const int n = pairs.count(p, a); n > most) most = n, start = p, start_value = a;
      }
    }
    if (most == 0) return cases;
    std::vector<int> chosen(sizes.size(), -1);
    chosen[start] = start_value;
    for (size_t step = 1; step < sizes.size(); ++step) {
      const size_t p = (start + step) % sizes.size();
      int best = 0, best_gain = -1, best_left = -1;
      for (int a = 0; a < sizes[p]; ++a) {
        int gain = 0;
        for (size_t q = 0; q < sizes.size(); ++q) gain += chosen[q] >= 0 && pairs.open(p, a, q, chosen[q]);
        const int left = pairs.count(p, a);
        if (gain > best_gain || (gain == best_gain && left > best_left)) best = a, best_gain = gain, best_left = left;
      }
      chosen[p] = best;
    }
    for (size_t p = 0; p < sizes.size(); ++p) {
      for (size_t q = p + 1; q < sizes.size(); ++q) pairs.close(p, chosen[p], q, chosen[q]);
    }
    cases.push_back(chosen);
  }
}

}  // namespace kda::test
