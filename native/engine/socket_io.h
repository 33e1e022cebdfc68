// Bulk transfer over a connected stream socket, with a deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

namespace eckpt {

// The deadline came before the end of the transfer.
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
// - keep a duplicate of `fd` while they run, so that a close meanwhile cannot redirect the bytes
//   (to end a call early, shut the socket down);
// - throw DeadlineExceeded, PeerGone, or std::system_error for any other fault. After an exception
//   the number of transferred bytes is unknown, so the connection must be closed.

// Sends the ranges in order, as one stream.
void SendAll(int fd, std::span<const std::span<const std::byte>> ranges,
             std::chrono::nanoseconds timeout);

// Fills the ranges in order and returns the CRC32C of each. PeerGone also when the stream ends
// early.
std::vector<uint32_t> ReceiveAll(int fd, std::span<const std::span<std::byte>> ranges,
                                 std::chrono::nanoseconds timeout);

}  // namespace eckpt
