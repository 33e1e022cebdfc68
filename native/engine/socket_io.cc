#include "engine/socket_io.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <system_error>

#include "engine/crc32c.h"

namespace eckpt {
namespace {

using Clock = std::chrono::steady_clock;

// Bytes per system call: enough to make its cost small, and few enough that received bytes are
// still in the cache when their CRC is computed.
constexpr size_t kCallBytes = size_t{256} << 10;
constexpr size_t kCallRanges = 64;

class DuplicatedFd {
 public:
  explicit DuplicatedFd(int fd) : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "duplicate socket");
  }
  ~DuplicatedFd() { close(fd_); }
  DuplicatedFd(const DuplicatedFd&) = delete;
  DuplicatedFd& operator=(const DuplicatedFd&) = delete;

  int get() const { return fd_; }

 private:
  const int fd_;
};

// The position of a transfer in its list of ranges.
template <class Byte>
class Cursor {
 public:
  explicit Cursor(std::span<const std::span<Byte>> ranges) : ranges_(ranges) { SkipDone(); }

  bool done() const { return index_ == ranges_.size(); }
  size_t remaining() const {
    size_t total = 0;
    for (size_t i = index_; i < ranges_.size(); ++i) total += ranges_[i].size();
    return total - taken_;
  }

  // Fills in the next bytes, at most kCallBytes in kCallRanges parts; returns the number of parts.
  size_t Fill(std::array<iovec, kCallRanges>& parts) const {
    size_t count = 0, room = kCallBytes, taken = taken_;
    for (size_t i = index_; i < ranges_.size() && count < parts.size() && room != 0; ++i) {
      const auto rest = ranges_[i].subspan(taken);
      taken = 0;
      if (rest.empty()) continue;
      const size_t nbytes = std::min(rest.size(), room);
      // iovec has no const form; sendmsg does not write.
      parts[count++] = {const_cast<std::remove_const_t<Byte>*>(rest.data()), nbytes};
      room -= nbytes;
    }
    return count;
  }

  // Moves past `nbytes` bytes; visit(range index, bytes passed in it) for each part of them.
  template <class Visit>
  void Advance(size_t nbytes, Visit visit) {
    while (nbytes != 0) {
      const size_t step = std::min(nbytes, ranges_[index_].size() - taken_);
      visit(index_, ranges_[index_].subspan(taken_, step));
      taken_ += step;
      nbytes -= step;
      SkipDone();
    }
  }

 private:
  void SkipDone() {
    while (index_ < ranges_.size() && taken_ == ranges_[index_].size()) {
      ++index_;
      taken_ = 0;
    }
  }

  std::span<const std::span<Byte>> ranges_;
  size_t index_ = 0;
  size_t taken_ = 0;
};

bool MeansPeerGone(int error) {
  switch (error) {
    case EPIPE:
    case ECONNRESET:
    case ECONNABORTED:
    case ECONNREFUSED:
    case ENOTCONN:
    case ETIMEDOUT:  // the kernel ended the connection
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENETDOWN:
      return true;
    default:
      return false;
  }
}

[[noreturn]] void ThrowSocketError(int error, const char* operation) {
  const std::system_error failure(error, std::generic_category(), operation);
  if (MeansPeerGone(error)) throw PeerGone(failure.what());
  throw failure;
}

// One transfer: the socket, its name in errors, and its deadline.
class Transfer {
 public:
  Transfer(int fd, const char* operation, std::chrono::nanoseconds timeout)
      : fd_(fd), operation_(operation), deadline_(Clock::now() + timeout) {}

  // Moves bytes with `call` (sendmsg or recvmsg on a message) until the cursor is done.
  template <class Byte, class Call, class Visit>
  void Run(Cursor<Byte> cursor, short readiness, Call call, Visit visit) {
    std::array<iovec, kCallRanges> parts;
    while (!cursor.done()) {
      msghdr message{};
      message.msg_iov = parts.data();
      message.msg_iovlen = cursor.Fill(parts);
      const ssize_t moved = call(fd_.get(), &message);
      const int error = errno;
      if (moved > 0) {
        cursor.Advance(static_cast<size_t>(moved), visit);
      } else if (moved == 0) {
        throw PeerGone(std::string(operation_) + ": the peer closed the connection with " +
                       std::to_string(cursor.remaining()) + " bytes missing");
      } else if (error == EAGAIN || error == EWOULDBLOCK) {
        WaitReady(readiness, cursor.remaining());
      } else if (error != EINTR) {
        ThrowSocketError(error, operation_);
      }
      // Also after each success, so that a peer that sends single bytes cannot block the call.
      if (!cursor.done() && Clock::now() >= deadline_) ThrowDeadline(cursor.remaining());
    }
  }

 private:
  [[noreturn]] void ThrowDeadline(size_t remaining) const {
    throw DeadlineExceeded(std::string(operation_) + ": deadline passed with " +
                           std::to_string(remaining) + " bytes missing");
  }

  // Returns when the socket is ready or has failed (the next call has the error), or after a
  // signal.
  void WaitReady(short readiness, size_t remaining) const {
    const auto left = deadline_ - Clock::now();
    if (left <= Clock::duration::zero()) ThrowDeadline(remaining);
    // Rounded up, else the last fraction of a millisecond would spin. poll takes an int.
    const auto left_ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    const int timeout_ms = static_cast<int>(std::min<int64_t>(left_ms, 60'000));
    pollfd watched{fd_.get(), readiness, 0};
    if (poll(&watched, 1, timeout_ms) < 0 && errno != EINTR) {
      throw std::system_error(errno, std::generic_category(), operation_);
    }
  }

  const DuplicatedFd fd_;
  const char* const operation_;
  const Clock::time_point deadline_;
};

}  // namespace

void SendAll(int fd, std::span<const std::span<const std::byte>> ranges,
             std::chrono::nanoseconds timeout) {
  Transfer(fd, "send", timeout)
      .Run(
          Cursor<const std::byte>(ranges), POLLOUT,
          [](int socket, const msghdr* message) {
            return sendmsg(socket, message, MSG_DONTWAIT | MSG_NOSIGNAL);
          },
          [](size_t, std::span<const std::byte>) {});
}

std::vector<uint32_t> ReceiveAll(int fd, std::span<const std::span<std::byte>> ranges,
                                 std::chrono::nanoseconds timeout) {
  std::vector<uint32_t> crcs(ranges.size(), 0);
  Transfer(fd, "receive", timeout)
      .Run(
          Cursor<std::byte>(ranges), POLLIN,
          [](int socket, msghdr* message) { return recvmsg(socket, message, MSG_DONTWAIT); },
          [&crcs](size_t range, std::span<const std::byte> bytes) {
            crcs[range] = Crc32c(bytes, crcs[range]);
          });
  return crcs;
}

}  // namespace eckpt
