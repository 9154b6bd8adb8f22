// `--json [FILE]` of the verbs: one JSON document to a file or, without a name, to standard output.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

namespace kda::tools {

using Json = nlohmann::ordered_json;

class JsonOutput {
 public:
  JsonOutput() = default;
  JsonOutput(const JsonOutput&) = delete;
  JsonOutput& operator=(const JsonOutput&) = delete;
  ~JsonOutput();  // a file that was opened and not written is removed
  // Adds the option. With `keep` an existing file is an error (raw samples are never overwritten).
  void add_to(CLI::App& verb, bool keep = false);
  bool wanted() const { return !path_.empty(); }
  // True if the document goes to standard output, so that nothing else may.
  bool to_stdout() const { return path_ == "-"; }
  // Throws UsageError if the file cannot be made: before the work, not after it.
  void open();
  // Throws std::runtime_error if it cannot be written.
  void write(const Json& document);

 private:
  std::string path_;
  bool keep_ = false;
  std::FILE* file_ = nullptr;
};

// Version, source hash, ISA and threads: the head of every document.
Json build_json();

}  // namespace kda::tools
