// Two connected stream sockets, closed at the end.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace eckpt::testing {

class SocketPair {
 public:
  SocketPair() {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds_) != 0) {
      throw std::system_error(errno, std::generic_category(), "socketpair");
    }
  }
  ~SocketPair() {
    Close(0);
    Close(1);
  }
  SocketPair(const SocketPair&) = delete;
  SocketPair& operator=(const SocketPair&) = delete;

  int operator[](int end) const { return fds_[end]; }
  void Close(int end) {
    if (fds_[end] >= 0) close(fds_[end]);
    fds_[end] = -1;
  }
  void SetSmallBuffers() {
    const int nbytes = 4096;
    setsockopt(fds_[0], SOL_SOCKET, SO_SNDBUF, &nbytes, sizeof(nbytes));
    setsockopt(fds_[1], SOL_SOCKET, SO_RCVBUF, &nbytes, sizeof(nbytes));
  }
  void SetNonBlocking() {
    for (int fd : fds_) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  }

 private:
  int fds_[2];
};

}  // namespace eckpt::testing
