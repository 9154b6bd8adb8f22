// Output files: written under another name in the same directory, then renamed, so that a failed or interrupted
// run leaves no partial file and an older one intact.
#pragma once

#include <span>
#include <string>

#include "serve/status.h"

namespace kda::serve {

struct OutputFile {
  const char* option;  // that names it
  std::string path;
  std::string text;
};

// Before any work: that every path can be created or replaced, and that no two options name one file, nor the file
// `input` ("" for none). INVALID_ARGUMENT names option and path.
Status check_outputs(std::span<const OutputFile> files, const std::string& input);
// Writes all of them, or none if one cannot be written (a full disk, say). Devices and pipes are appended to instead;
// what went there stays.
Status write_outputs(std::span<const OutputFile> files);

}  // namespace kda::serve
