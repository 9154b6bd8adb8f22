// What the machine itself can do, for the same rounds: matrix products of libraries that others tuned, and plain
// loops over memory on as many threads.
#pragma once

#include <cstddef>
#include <functional>
#include <kda/kda.hpp>
#include <memory>
#include <string>
#include <vector>

#include "bench/rounds.h"

namespace kda::bench {

// The context's own threads, for loops that are compared with its runs: the same cores, woken in the same way.
class Workers {
 public:
  explicit Workers(const Context& context) : context_(context) {}
  int size() const { return context_.num_threads(); }
  // part(i) for i in [0, size), on all of them; returns when all are done.
  void run(const std::function<void(int)>& part) const;

 private:
  const Context& context_;
};

// sgemm of OpenBLAS and oneDNN with the machine's best instruction set, or AVX2 if that is the context's: a product
// on each of the workers. Each library is loaded at run time if it is installed: nothing here links them. What is not
// there is said in `missing`. Call before anything else loads them: the environment keeps them from starting threads.
std::vector<Variant> sgemm_variants(const Workers& workers, const std::string& isa,
                                    std::vector<std::string>& missing);

// Memory that was touched, on page borders.
std::shared_ptr<std::byte> pages(size_t bytes);

// x *= c over `bytes` in place: each byte read once and written once, as a decode must do with its states.
Variant scale_variant(const Workers& workers, size_t bytes);
// memcpy of `bytes`, read and written once; the rate counts both.
Variant copy_variant(const Workers& workers, size_t bytes);

}  // namespace kda::bench
