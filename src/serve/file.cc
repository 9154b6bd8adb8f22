#include "serve/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

namespace kda::serve {
namespace {

namespace fs = std::filesystem;

bool write_all(int file, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = ::write(file, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

// Devices and pipes are written, not replaced; so is what /dev/stdout and its like stand for.
bool is_special(const std::string& path) {
  std::error_code none;
  const fs::file_status status = fs::status(path, none);
  return fs::exists(status) && (!fs::is_regular_file(status) || path.compare(0, 5, "/dev/") == 0);
}

// Where a regular file will lie: a link keeps pointing to its file.
std::string target_of(const std::string& path) {
  std::error_code fault;
  const fs::path target = fs::canonical(path, fault);
  return fault ? path : target.string();
}

std::string temporary_of(const std::string& target) { return fmt::format("{}.{}.tmp", target, ::getpid()); }

Status refuse(const OutputFile& file, const std::string& why) {
  return invalid_argument("{}: wanted a file that can be written, got {}: {}", file.option, file.path, why);
}

// Opens, writes (all of `text`) and closes; 0 or the errno of what failed.
int write_to(const std::string& path, int flags, const std::string& text) {
  const int file = ::open(path.c_str(), flags | O_WRONLY | O_CLOEXEC, 0666);
  if (file < 0) return errno;
  int fault = write_all(file, text) ? 0 : errno;
  if (::close(file) != 0 && fault == 0) fault = errno;
  return fault;
}

Status check_output(const OutputFile& file) {
  std::error_code none;
  if (file.path.empty()) return invalid_argument("{}: wanted a file name, got \"\"", file.option);
  if (fs::is_directory(file.path, none)) {
    return invalid_argument("{}: wanted a file, got the directory {}", file.option, file.path);
  }
  if (fs::exists(file.path, none) && ::access(file.path.c_str(), W_OK) != 0)
    return refuse(file, std::strerror(errno));
  if (is_special(file.path)) return {};
  // Only trying it tells: rights, quotas, read-only and odd file systems, names that are too long.
  const std::string temporary = temporary_of(target_of(file.path));
  const int fault = write_to(temporary, O_CREAT | O_EXCL, "");
  if (fault != 0) return refuse(file, std::strerror(fault));
  ::unlink(temporary.c_str());
  return {};
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code fault;
  if (fs::equivalent(a, b, fault) && !fault) return true;
  // Of names of no file yet, relative ones too.
  return fs::weakly_canonical(fs::absolute(a), fault) == fs::weakly_canonical(fs::absolute(b), fault) && !fault;
}

}  // namespace

Status check_outputs(std::span<const OutputFile> files, const std::string& input) {
  for (size_t i = 0; i < files.size(); ++i) {
    KDA_SERVE_TRY(check_output(files[i]));
    if (is_special(files[i].path)) continue;
    if (!input.empty() && same_file(files[i].path, input)) {
      return invalid_argument("{}: wanted another file than the input, got {}", files[i].option, files[i].path);
    }
    for (size_t j = 0; j < i; ++j) {
      if (!same_file(files[i].path, files[j].path)) continue;
      return invalid_argument("{}: wanted another file than that of {}, got {}", files[i].option, files[j].option,
                              files[i].path);
    }
  }
  return {};
}

Status write_outputs(std::span<const OutputFile> files) {
  for (const OutputFile& file : files) {
    if (!is_special(file.path)) continue;
    const int fault = write_to(file.path, O_APPEND, file.text);
    if (fault != 0) return refuse(file, std::strerror(fault));
  }
  struct Written {
    std::string temporary, target;
  };
  std::vector<Written> written;
  Status status;
  for (const OutputFile& file : files) {
    if (!status.ok()) break;
    if (is_special(file.path)) continue;
    const std::string target = target_of(file.path);
    written.push_back({temporary_of(target), target});
    const int fault = write_to(written.back().temporary, O_CREAT | O_TRUNC, file.text);
    if (fault != 0) status = refuse(file, std::strerror(fault));
  }
  for (const Written& w : written) {
    if (status.ok() && std::rename(w.temporary.c_str(), w.target.c_str()) != 0) {
      status = invalid_argument("{}: could not be written: {}", w.target, std::strerror(errno));
    }
    if (!status.ok()) ::unlink(w.temporary.c_str());
  }
  return status;
}

}  // namespace kda::serve
