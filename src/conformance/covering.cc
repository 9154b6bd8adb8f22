#include "conformance/covering.h"

#include <cstddef>

namespace kda::conformance {
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

// The value of parameter p that closes the most pairs with what is chosen; -1 if none is allowed.
int best_value(const Pairs& pairs, const std::vector<int>& sizes, const Allowed& allowed, std::vector<int>& chosen,
               size_t p) {
  int best = -1, best_gain = -1, best_left = -1;
  for (int a = 0; a < sizes[p]; ++a) {
    int gain = 0;
    for (size_t q = 0; q < sizes.size(); ++q) gain += q != p && chosen[q] >= 0 && pairs.open(p, a, q, chosen[q]);
    const int left = pairs.count(p, a);
    if (gain < best_gain || (gain == best_gain && left <= best_left)) continue;
    chosen[p] = a;
    const bool fits = !allowed || allowed(chosen);
    chosen[p] = -1;
    if (fits) best = a, best_gain = gain, best_left = left;
  }
  return best;
}

// Completes a case that begins with the open pair (p, a), (q, b); false if the rest cannot be chosen.
bool complete(const Pairs& pairs, const std::vector<int>& sizes, const Allowed& allowed, std::vector<int>& chosen,
              size_t start) {
  if (allowed && !allowed(chosen)) return false;
  for (size_t step = 1; step < sizes.size(); ++step) {
    const size_t p = (start + step) % sizes.size();
    if (chosen[p] >= 0) continue;
    chosen[p] = best_value(pairs, sizes, allowed, chosen, p);
    if (chosen[p] < 0) return false;
  }
  return true;
}

}  // namespace

std::vector<std::vector<int>> covering_pairs(const std::vector<int>& sizes, const Allowed& allowed) {
  Pairs pairs(sizes);
  std::vector<std::vector<int>> cases;
  for (;;) {
    // Start from the value with the most open pairs, and one of these pairs: each round closes at least that one.
    size_t p = 0, q = 0;
    int a = 0, b = 0, most = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (int v = 0; v < sizes[i]; ++v) {
        if (const int n = pairs.count(i, v); n > most) most = n, p = i, a = v;
      }
    }
    if (most == 0) return cases;
    bool found = false;
    for (size_t step = 1; step < sizes.size() && !found; ++step) {
      q = (p + step) % sizes.size();
      for (b = 0; b < sizes[q]; ++b) {
        if ((found = pairs.open(p, a, q, b))) break;
      }
    }
    std::vector<int> chosen(sizes.size(), -1);
    chosen[p] = a;
    chosen[q] = b;
    if (!complete(pairs, sizes, allowed, chosen, p)) {
      pairs.close(p, a, q, b);
      continue;
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (size_t j = i + 1; j < sizes.size(); ++j) pairs.close(i, chosen[i], j, chosen[j]);
    }
    cases.push_back(chosen);
  }
}

}  // namespace kda::conformance
