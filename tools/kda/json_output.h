// `--json [FILE]` of the verbs: one JSON document to a file or, without a name, to standard output.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>

namespace kda::tools {

using Json = nlohmann::ordered_json;

class JsonOutput {
 public:
  // Adds the option. With `keep` an existing file is an error (raw samples are never overwritten).
  void add_to(CLI::App& verb, bool keep = false);
  bool wanted() const { return !path_.empty(); }
  // True if the document goes to standard output, so that nothing else may.
  bool to_stdout() const { return path_ == "-"; }
  // Throws UsageError if the file cannot be made: before the work, not after it. Makes none yet.
  void check() const;
  // The file appears whole or not at all. Throws UsageError if it cannot be written.
  void write(const Json& document) const;

 private:
  std::string path_;
  bool keep_ = false;
};

// Version and source hash: the head of every document.
Json build_json();

}  // namespace kda::tools
