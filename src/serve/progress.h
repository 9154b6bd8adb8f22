// The progress line: rewritten in place on a terminal, a plain line every few seconds elsewhere.
#pragma once

#include <cstdio>
#include <string>

#include "serve/engine.h"
#include "serve/verify.h"

namespace kda::serve {

class Progress {
 public:
  Progress(std::FILE* out, bool terminal);
  // Prints if it is time to.
  void update(const Engine& engine);
  void update(const VerifyProgress& verification);
  // Ends the line on a terminal, and what is measured: the next one begins at 0 seconds.
  void finish();
  static std::string text(const Engine& engine);
  static std::string text(const VerifyProgress& verification);

 private:
  static constexpr double kPlainInterval = 5;  // seconds
  template <class Source>
  void print(double now, const Source& source);
  std::FILE* out_;
  bool terminal_;
  double next_s_;
  bool open_ = false;
};

}  // namespace kda::serve
