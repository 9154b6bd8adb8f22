// The progress line: rewritten in place on a terminal, a plain line every few seconds elsewhere.
#pragma once

#include <cstdio>
#include <string>

#include "serve/engine.h"

namespace kda::serve {

class Progress {
 public:
  Progress(std::FILE* out, bool terminal);
  // Prints if it is time to.
  void update(const Engine& engine);
  // Ends the line on a terminal.
  void finish();
  static std::string text(const Engine& engine);

 private:
  static constexpr double kPlainInterval = 5;  // seconds
  std::FILE* out_;
  bool terminal_;
  double next_s_;
  bool open_ = false;
};

}  // namespace kda::serve
