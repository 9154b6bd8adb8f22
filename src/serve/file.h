// Output files: written under another name in the same directory, then renamed, so that a failed or interrupted
// run leaves no partial file and an older one intact.
#pragma once

#include <string>

#include "serve/status.h"

namespace kda::serve {

// Before any work: that `path` can be created. INVALID_ARGUMENT names it.
Status check_writable(const std::string& path, const char* option);
Status write_file(const std::string& path, const std::string& text);

}  // namespace kda::serve
