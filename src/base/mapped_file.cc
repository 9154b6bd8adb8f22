#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace kda {

Result<MappedFile> MappedFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return not_found(path, ": cannot be opened: ", std::strerror(errno));
  struct stat info {};
  MappedFile file;
  Status status;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    status = not_found(path, ": wanted a regular file");
  } else if (info.st_size > 0) {
    const auto size = static_cast<size_t>(info.st_size);
    void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      status = Status(KDA_OUT_OF_MEMORY, str_cat(path, ": cannot be mapped: ", std::strerror(errno)));
    } else {
      file.data_ = static_cast<const std::byte*>(data);
      file.size_ = size;
    }
  }
  ::close(fd);
  if (!status.ok()) return status;
  return file;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace kda
