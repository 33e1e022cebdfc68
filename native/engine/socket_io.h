// Bulk bytes over a connected stream socket, with a deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "engine/mapping.h"

namespace eckpt {

// Not everything was transferred by the deadline.
class DeadlineExceeded : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The connection is closed, reset or unreachable.
class PeerGone : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// All functions
// - work on blocking and non-blocking sockets, and resume after EINTR and short counts;
// - keep a duplicate of `fd` while they run: closing it meanwhile cannot send the bytes elsewhere
//   (to end a call early, shut the socket down);
// - throw DeadlineExceeded, PeerGone, or std::system_error for any other fault. How many bytes were
//   transferred before an exception is unknown: the connection is of no more use.

// Sends the ranges in order, as one stream.
void SendAll(int fd, std::span<const std::span<const std::byte>> ranges,
             std::chrono::nanoseconds timeout);

// Fills the ranges in order; the CRC32C of each. PeerGone also when the stream ends before.
std::vector<uint32_t> ReceiveAll(int fd, std::span<const std::span<std::byte>> ranges,
                                 std::chrono::nanoseconds timeout);

// As ReceiveAll, into ranges of the open file `file`, which may be sparse: each page is made as it
// is written, without being cleared or mapped first. No room is a std::system_error (ENOSPC).
std::vector<uint32_t> ReceiveToFile(int fd, int file, std::span<const ByteRange> ranges,
                                    std::chrono::nanoseconds timeout);

}  // namespace eckpt
