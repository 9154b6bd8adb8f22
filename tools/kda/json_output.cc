#include "json_output.h"

#include <kda/kda.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "verb.h"

namespace kda::tools {

JsonOutput::~JsonOutput() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  std::remove(path_.c_str());
}

void JsonOutput::add_to(CLI::App& verb, bool keep) {
  keep_ = keep;
  verb.add_option("--json", path_,
                  keep ? "Write JSON to FILE, which must not exist; without FILE to standard output"
                       : "Write JSON to FILE; without FILE to standard output")
      ->type_name("[FILE]")
      ->expected(0, 1)
      ->default_str("-");
}

void JsonOutput::open() {
  if (!wanted() || to_stdout()) return;
  file_ = std::fopen(path_.c_str(), keep_ ? "wx" : "w");
  if (file_ == nullptr) throw UsageError(path_ + ": cannot be written: " + std::strerror(errno));
}

void JsonOutput::write(const Json& document) {
  if (!wanted()) return;
  const std::string text = document.dump(2) + "\n";
  std::FILE* const f = to_stdout() ? stdout : file_;
  if (std::fwrite(text.data(), 1, text.size(), f) != text.size() || std::fflush(f) != 0) {
    throw std::runtime_error((to_stdout() ? std::string("standard output") : path_) +
                             ": cannot be written: " + std::strerror(errno));
  }
  if (file_ != nullptr) std::fclose(file_);
  file_ = nullptr;
}

Json build_json() { return {{"version", kda_version_string()}, {"source_hash", kda_source_hash()}}; }

}  // namespace kda::tools
