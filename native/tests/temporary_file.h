// A file in memory, freed with its last descriptor and mapping.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <system_error>

namespace eckpt::testing {

class TemporaryFile {
 public:
  explicit TemporaryFile(size_t size_bytes) : fd_(memfd_create("eckpt_test", MFD_CLOEXEC)) {
    if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(size_bytes)) != 0) {
      throw std::system_error(errno, std::generic_category(), "temporary file");
    }
  }
  ~TemporaryFile() { close(fd_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  int fd() const { return fd_; }

 private:
  const int fd_;
};

}  // namespace eckpt::testing
