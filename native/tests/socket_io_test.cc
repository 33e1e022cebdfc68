#include "engine/socket_io.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>

#include "engine/crc32c.h"
#include "tests/check.h"
#include "tests/random_bytes.h"
#include "tests/socket_pair.h"

namespace eckpt {
namespace {

using namespace std::chrono_literals;
using testing::RandomBytes;
using testing::SocketPair;

// Longer than any test needs, and short enough to end a test that hangs.
constexpr auto kAmple = 60s;

template <class Byte>
std::vector<std::span<Byte>> Cut(std::span<Byte> all, const std::vector<size_t>& sizes) {
  std::vector<std::span<Byte>> parts;
  for (size_t nbytes : sizes) {
    parts.push_back(all.first(nbytes));
    all = all.subspan(nbytes);
  }
  return parts;
}

// Sends and receives with different ranges: a stream does not keep them.
void CheckTransfer(SocketPair& sockets, const std::vector<size_t>& sent,
                   const std::vector<size_t>& received) {
  size_t total = 0;
  for (size_t nbytes : sent) total += nbytes;
  const auto data = RandomBytes(total, 11);
  std::vector<std::byte> target(total);
  const auto targets = Cut(std::span(target), received);
  std::jthread sender(
      [&] { SendAll(sockets[0], Cut(std::span<const std::byte>(data), sent), kAmple); });
  const auto crcs = ReceiveAll(sockets[1], targets, kAmple);
  CHECK_EQ(data, target);
  std::vector<uint32_t> expected;
  for (const auto part : Cut(std::span<const std::byte>(data), received)) {
    expected.push_back(Crc32c(part));
  }
  CHECK_EQ(expected, crcs);
}

TEST(ranges_arrive_with_their_crcs) {
  SocketPair sockets;
  CheckTransfer(sockets, {1'000'000, 0, 7, 2'000'000}, {0, 3, 2'999'000, 1004, 0});
}

TEST(short_counts_are_resumed) {
  SocketPair sockets;
  sockets.SetSmallBuffers();
  CheckTransfer(sockets, {300'000}, {100'000, 200'000});
}

TEST(non_blocking_sockets_work) {
  SocketPair sockets;
  sockets.SetNonBlocking();
  CheckTransfer(sockets, {500'000, 500'000}, {1'000'000});
}

TEST(thousands_of_small_ranges) {
  SocketPair sockets;
  CheckTransfer(sockets, std::vector<size_t>(5000, 8), std::vector<size_t>(2500, 16));
}

TEST(nothing_to_transfer_touches_no_socket) {
  SocketPair sockets;
  sockets.Close(1);
  std::byte byte{};
  SendAll(sockets[0], {}, 0s);
  CHECK(ReceiveAll(sockets[0], {}, 0s).empty());
  const std::vector<std::span<std::byte>> empty{std::span(&byte, 0)};
  CHECK_EQ(std::vector<uint32_t>{0}, ReceiveAll(sockets[0], empty, 0s));
}

TEST(the_deadline_ends_both_directions) {
  SocketPair sockets;
  std::vector<std::byte> data(1 << 22);
  const std::vector<std::span<std::byte>> ranges{data};
  const std::vector<std::span<const std::byte>> sources{data};
  CHECK_THROWS(DeadlineExceeded, ReceiveAll(sockets[1], ranges, 20ms));
  CHECK_THROWS(DeadlineExceeded, ReceiveAll(sockets[1], ranges, 0s));
  CHECK_THROWS(DeadlineExceeded, SendAll(sockets[0], sources, 20ms));  // no thread reads
}

TEST(a_peer_that_trickles_cannot_stretch_the_deadline) {
  SocketPair sockets;
  std::atomic<bool> stop = false;
  std::jthread trickler([&] {
    const char byte = 1;
    while (!stop) {
      if (send(sockets[0], &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) std::this_thread::yield();
    }
  });
  std::vector<std::byte> data(size_t{1} << 24);  // more than can arrive with one byte per call
  const std::vector<std::span<std::byte>> ranges{data};
  CHECK_THROWS(DeadlineExceeded, ReceiveAll(sockets[1], ranges, 50ms));
  stop = true;
}

TEST(a_peer_that_is_gone_is_named_so) {
  std::vector<std::byte> data(1 << 20);
  const std::vector<std::span<std::byte>> ranges{data};
  const std::vector<std::span<const std::byte>> sources{data};
  {
    SocketPair sockets;
    const char few[10] = {};
    CHECK_EQ(ssize_t{10}, send(sockets[0], few, 10, 0));
    sockets.Close(0);
    CHECK_THROWS(PeerGone, ReceiveAll(sockets[1], ranges, kAmple));
  }
  {
    SocketPair sockets;
    sockets.Close(1);
    CHECK_THROWS(PeerGone, SendAll(sockets[0], sources, kAmple));  // without SIGPIPE
  }
}

TEST(what_is_no_socket_is_a_system_error) {
  std::vector<std::byte> data(1);
  const std::vector<std::span<std::byte>> ranges{data};
  int pipe_fds[2];
  CHECK_EQ(0, pipe(pipe_fds));
  CHECK_THROWS(std::system_error, ReceiveAll(pipe_fds[0], ranges, kAmple));
  CHECK_THROWS(std::system_error, ReceiveAll(-1, ranges, kAmple));
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

TEST(closing_the_descriptor_meanwhile_does_not_redirect_the_call) {
  SocketPair sockets;
  auto data = RandomBytes(1000, 12);
  std::vector<std::byte> target(1000);
  const std::vector<std::span<std::byte>> targets{target};
  std::atomic<bool> first_arrived = false;
  const int other = dup(sockets[1]);
  std::jthread receiver([&, fd = sockets[1]] {
    ReceiveAll(fd, targets, kAmple);
    first_arrived = true;
  });
  // The receiver runs once it has taken one byte. Then its descriptor is closed.
  CHECK_EQ(ssize_t{1}, send(sockets[0], data.data(), 1, 0));
  char peeked;
  while (recv(other, &peeked, 1, MSG_PEEK | MSG_DONTWAIT) == 1) std::this_thread::yield();
  close(other);
  sockets.Close(1);
  CHECK_EQ(ssize_t{999}, send(sockets[0], data.data() + 1, 999, MSG_NOSIGNAL));
  receiver.join();
  CHECK(first_arrived.load());
  CHECK_EQ(data, target);
}

TEST(signals_do_not_end_a_transfer) {
  struct sigaction action{};
  static std::atomic<int> signals;
  signals = 0;
  action.sa_handler = [](int) { ++signals; };  // no SA_RESTART: system calls return EINTR
  struct sigaction before;
  sigaction(SIGUSR1, &action, &before);
  SocketPair sockets;
  const auto data = RandomBytes(200'000, 13);
  std::vector<std::byte> target(data.size());
  const std::vector<std::span<std::byte>> targets{target};
  std::atomic<bool> started = false;
  std::atomic<bool> done = false;
  std::jthread receiver([&] {
    // ThreadSanitizer makes a thread's signal state in its first blocking call, and loses a signal
    // that arrives then. So that call is made before the first signal.
    poll(nullptr, 0, 0);
    started = true;
    ReceiveAll(sockets[1], targets, kAmple);
    done = true;
  });
  while (!started) std::this_thread::yield();
  for (int i = 0; i < 50; ++i) {
    pthread_kill(receiver.native_handle(), SIGUSR1);
    while (signals <= i) std::this_thread::yield();
  }
  const std::vector<std::span<const std::byte>> sources{data};
  SendAll(sockets[0], sources, kAmple);
  receiver.join();
  sigaction(SIGUSR1, &before, nullptr);
  CHECK(done.load());
  CHECK_EQ(data, target);
}

}  // namespace
}  // namespace eckpt
