#include "json_output.h"

#include <kda/kda.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <vector>

#include "serve/file.h"
#include "verb.h"

namespace kda::tools {

void JsonOutput::add_to(CLI::App& verb, bool keep) {
  keep_ = keep;
  verb.add_option("--json", path_,
                  keep ? "Write JSON to FILE, which must not exist; without FILE to standard output"
                       : "Write JSON to FILE; without FILE to standard output")
      ->type_name("[FILE]")
      ->expected(0, 1)
      ->default_str("-");
}

void JsonOutput::check() const {
  if (!wanted() || to_stdout()) return;
  std::error_code none;
  if (keep_ && std::filesystem::is_regular_file(path_, none)) {
    throw UsageError("--json: wanted a file that does not exist, got " + path_);
  }
  const serve::Status status = serve::check_outputs(std::vector<serve::OutputFile>{{"--json", path_, ""}}, "");
  if (!status.ok()) throw UsageError(status.message());
}

void JsonOutput::write(const Json& document) const {
  if (!wanted()) return;
  // Names from the command line may hold any bytes.
  const std::string text = document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  if (to_stdout()) {
    if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return;
    throw UsageError(std::string("standard output: could not be written: ") + std::strerror(errno));
  }
  check();
  const serve::Status status = serve::write_outputs(std::vector<serve::OutputFile>{{"--json", path_, text}});
  if (!status.ok()) throw UsageError(status.message());
}

Json build_json() { return {{"version", kda_version_string()}, {"source_hash", kda_source_hash()}}; }

}  // namespace kda::tools
