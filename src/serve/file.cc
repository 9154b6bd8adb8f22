#include "serve/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace kda::serve {
namespace {

bool write_all(int file, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = ::write(file, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

Status write_special(const std::string& path, const std::string& text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  const bool fine = file >= 0 && write_all(file, text);
  const int fault = errno;
  if (file >= 0) ::close(file);
  return fine ? Status() : invalid_argument("{}: could not be written: {}", path, std::strerror(fault));
}

}  // namespace

Status check_writable(const std::string& path, const char* option) {
  namespace fs = std::filesystem;
  std::error_code fault;
  if (path.empty()) return invalid_argument("{}: wanted a file name, got \"\"", option);
  if (fs::is_directory(path, fault)) return invalid_argument("{}: wanted a file, got the directory {}", option, path);
  const fs::path parent = fs::path(path).parent_path();
  const std::string directory = parent.empty() ? "." : parent.string();
  if (!fs::is_directory(directory, fault) || ::access(directory.c_str(), W_OK | X_OK) != 0) {
    return invalid_argument("{}: wanted a file in a directory that exists and can be written, got {}", option, path);
  }
  return {};
}

Status write_file(const std::string& name, const std::string& text) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::string path = name;
  if (fs::exists(name, ignored)) {
    // A link keeps pointing to its file; a device or a pipe is written, not replaced.
    path = fs::canonical(name, ignored).string();
    if (!fs::is_regular_file(path, ignored)) return write_special(path, text);
  }
  const std::string temporary = fmt::format("{}.{}.tmp", path, ::getpid());
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool fine = file >= 0 && write_all(file, text);
  int fault = errno;
  if (file >= 0 && ::close(file) != 0 && fine) {
    fine = false;
    fault = errno;
  }
  if (fine && std::rename(temporary.c_str(), path.c_str()) != 0) {
    fine = false;
    fault = errno;
  }
  if (fine) return {};
  if (file >= 0) ::unlink(temporary.c_str());
  return invalid_argument("{}: could not be written: {}", path, std::strerror(fault));
}

}  // namespace kda::serve
