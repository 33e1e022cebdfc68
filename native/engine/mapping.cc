#include "engine/mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "engine/fault_notice.h"

namespace eckpt {

MappedMemory::MappedMemory(int fd, size_t size_bytes, bool writable)
    : size_bytes_(size_bytes), writable_(writable), owner_(getpid()) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  if (status.st_size < 0 || static_cast<size_t>(status.st_size) < size_bytes) {
    throw std::invalid_argument("map: the file is shorter than the mapping (expected " +
                                std::to_string(size_bytes) + " bytes, got " +
                                std::to_string(status.st_size) + ")");
  }
  if (size_bytes == 0) return;  // mmap refuses an empty range
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = mmap(nullptr, size_bytes, protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  // A worker that the process forks would keep the pages of a deleted file. Where the kernel knows
  // no such advice, the worker keeps them.
  madvise(data, size_bytes, MADV_DONTFORK);
  data_ = static_cast<std::byte*>(data);
  WatchForFaults(data_, size_bytes_);
  EnsureFaultNotice();
}

MappedMemory::~MappedMemory() {
  // In a forked child the range may be another's, and a thread that is not there may have held the
  // lock of the watch.
  if (data_ == nullptr || getpid() != owner_) return;
  UnwatchForFaults(data_);  // first: after the unmap the range may have another owner
  munmap(data_, size_bytes_);
}

void MappedMemory::CheckInside(ByteRange range) const {
  // In this form no sum can overflow.
  if (range.offset > size_bytes_ || range.nbytes > size_bytes_ - range.offset) {
    throw std::invalid_argument("range at offset " + std::to_string(range.offset) + " of " +
                                std::to_string(range.nbytes) + " bytes is outside the mapping of " +
                                std::to_string(size_bytes_) + " bytes");
  }
}

std::span<const std::byte> MappedMemory::Read(ByteRange range) const {
  CheckInside(range);
  return {data_ + range.offset, range.nbytes};
}

std::span<std::byte> MappedMemory::Write(ByteRange range) const {
  CheckInside(range);
  if (!writable_) throw std::invalid_argument("the mapping is read-only");
  return {data_ + range.offset, range.nbytes};
}

Mapping::Mapping(int fd, size_t size_bytes, bool writable, DeleteMemory delete_memory)
    : size_bytes_(size_bytes),
      writable_(writable),
      memory_(new const MappedMemory(fd, size_bytes, writable), delete_memory) {}

std::shared_ptr<const MappedMemory> Mapping::Hold() const {
  const std::lock_guard lock(mutex_);
  if (!memory_) throw std::invalid_argument("the mapping is closed");
  return memory_;
}

void Mapping::Close() {
  std::shared_ptr<const MappedMemory> dropped;  // unmapped after the lock is released
  const std::lock_guard lock(mutex_);
  dropped.swap(memory_);
}

}  // namespace eckpt
