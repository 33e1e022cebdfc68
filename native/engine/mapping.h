// A file mapped into memory, shared by all its readers and writers.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>

namespace eckpt {

// An (offset, length) inside a mapping.
struct ByteRange {
  size_t offset;
  size_t nbytes;
};

// The mapped memory; its last owner unmaps it. A forked child does not have the memory: an access
// there ends the child.
class MappedMemory {
 public:
  // Maps the first `size_bytes` of `fd`. std::invalid_argument when the file is shorter,
  // std::system_error when fstat or mmap fails. The descriptor is not kept.
  MappedMemory(int fd, size_t size_bytes, bool writable);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  size_t size_bytes() const { return size_bytes_; }
  bool writable() const { return writable_; }

  // std::invalid_argument when the range is not inside the mapping.
  std::span<const std::byte> Read(ByteRange range) const;
  // Also std::invalid_argument when the mapping is read-only.
  std::span<std::byte> Write(ByteRange range) const;

 private:
  void CheckInside(ByteRange range) const;

  std::byte* data_ = nullptr;
  size_t size_bytes_;
  bool writable_;
  const pid_t owner_;  // the process that mapped it
};

// Deletes the memory for its last owner, in the thread that drops it.
using DeleteMemory = void (*)(const MappedMemory*);

// A handle that can be closed while the memory is still in use. All methods are thread-safe.
class Mapping {
 public:
  Mapping(
      int fd, size_t size_bytes, bool writable,
      DeleteMemory delete_memory = [](const MappedMemory* memory) { delete memory; });

  size_t size_bytes() const { return size_bytes_; }
  bool writable() const { return writable_; }

  // Returns the memory, mapped while the result lives; std::invalid_argument after Close.
  std::shared_ptr<const MappedMemory> Hold() const;

  // Makes later calls of Hold fail. Idempotent.
  void Close();

 private:
  const size_t size_bytes_;
  const bool writable_;
  mutable std::mutex mutex_;
  std::shared_ptr<const MappedMemory> memory_;
};

}  // namespace eckpt
