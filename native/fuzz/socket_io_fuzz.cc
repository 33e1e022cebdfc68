// Transfers whose peer sends, stops, closes and leaves at any byte: each ends as documented, and
// the bytes that arrive are those that were sent, in their places.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/socket_io.h"
#include "fuzz/input.h"
#include "tests/socket_pair.h"

namespace eckpt::fuzz {
namespace {

using namespace std::chrono_literals;
using testing::SocketPair;
using Bytes = std::span<const std::byte>;

// A transfer that waits for it hangs: the fuzzer's limit for one input is shorter.
constexpr auto kAmple = 60s;
// Below what a socket buffers, so that a peer needs no thread to send it.
constexpr size_t kMostBuffered = 60'000;
// Above what one system call moves (256 KiB), and what a socket buffers.
constexpr size_t kMostBytes = 600'000;

enum class End { kDone, kDeadline, kGone, kSystemError };

// Returns how a transfer ended; any other exception passes through.
template <class Body>
End EndOf(Body body) {
  try {
    body();
    return End::kDone;
  } catch (const DeadlineExceeded&) {
    return End::kDeadline;
  } catch (const PeerGone&) {
    return End::kGone;
  } catch (const std::system_error&) {
    return End::kSystemError;
  }
}

// Divides bytes into ranges of any size; more than one call takes (64) where the input is long.
template <class Byte>
std::vector<std::span<Byte>> Cut(Input& input, std::span<Byte> all) {
  std::vector<std::span<Byte>> ranges;
  const size_t most = input.Flag() ? 20 : 5000;
  for (int i = 0; i < 200 && !input.done(); ++i) {
    const size_t nbytes = std::min(all.size(), input.AtMost(most));
    ranges.push_back(all.first(nbytes));
    all = all.subspan(nbytes);
    if (input.Byte() < 8) break;
  }
  ranges.push_back(all);
  return ranges;
}

// The next bytes in a socket, without a wait.
std::vector<std::byte> Buffered(int socket, size_t most) {
  std::vector<std::byte> bytes(most);
  const ssize_t count = recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
  bytes.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
  return bytes;
}

// What the peer has sent and then done, before anything is received.
class Peer {
 public:
  Peer(Input& input, SocketPair& sockets) : sent_(PoolPart(input, kMostBuffered)) {
    if (input.Flag()) sockets.SetNonBlocking();
    const ssize_t count = send(sockets[0], sent_.data(), sent_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    Expect(count == static_cast<ssize_t>(sent_.size()), "the socket buffers what the peer sends");
    closes_ = input.Flag();
    if (closes_) sockets.Close(0);
    has_time_ = closes_ || input.Flag();
  }

  Bytes sent() const { return sent_; }

  // Of a receiver of `total` bytes: ample where it needs no more than there is or ever will be.
  std::chrono::nanoseconds Timeout(size_t total) const {
    const bool ends = total <= sent_.size() || closes_;
    return !has_time_ ? 0ns : ends ? std::chrono::nanoseconds(kAmple) : 100us;
  }

  void CheckEnd(End end, size_t total) const {
    if (total == 0) return Expect(end == End::kDone, "nothing to receive");
    const End due = total <= sent_.size() ? End::kDone : closes_ ? End::kGone : End::kDeadline;
    // Without time, a transfer that takes several calls may end after any of them.
    Expect(end == due || (!has_time_ && end == End::kDeadline), "end of a receive");
  }

  // The stream after `taken` bytes is still in the socket.
  void CheckRest(const SocketPair& sockets, size_t taken) const {
    const auto rest = Buffered(sockets[1], sent_.size() + 1);
    const Bytes expected = sent_.subspan(taken);
    Expect(std::equal(rest.begin(), rest.end(), expected.begin(), expected.end()),
           "a receive takes its own bytes and no more");
  }

 private:
  Bytes sent_;
  bool closes_;
  bool has_time_;
};

void ReceiveFromStoppedPeer(Input& input) {
  SocketPair sockets;
  const Peer peer(input, sockets);
  const size_t total = input.Flag() ? peer.sent().size() : input.AtMost(kMostBuffered);
  std::vector<std::byte> target(total);
  const auto ranges = Cut(input, std::span(target));
  std::vector<uint32_t> crcs;
  const End end = EndOf([&] { crcs = ReceiveAll(sockets[1], ranges, peer.Timeout(total)); });
  peer.CheckEnd(end, total);
  if (end != End::kDone) return;
  Expect(std::equal(target.begin(), target.end(), peer.sent().begin()), "bytes as sent");
  Expect(crcs.size() == ranges.size(), "one CRC for each range");
  for (size_t i = 0; i < ranges.size(); ++i) Expect(crcs[i] == NaiveCrc32c(ranges[i]), "CRC");
  peer.CheckRest(sockets, total);
}

// Sends in a thread of its own, closes, and keeps how that ended.
class Sender {
 public:
  Sender(int fd, std::vector<Bytes> sources)
      : thread_([this, fd, sources = std::move(sources)] {
          end_ = EndOf([&] { SendAll(fd, sources, kAmple); });
          shutdown(fd, SHUT_WR);
        }) {}

  End Join() {
    thread_.join();
    return end_;
  }

 private:
  End end_ = End::kDone;
  std::jthread thread_;  // last: it uses what is before it
};

// Both ends at work, with other ranges at each; one may want fewer bytes, and leaves then.
void TransferBetweenThreads(Input& input) {
  SocketPair sockets;
  if (input.Flag()) sockets.SetSmallBuffers();
  if (input.Flag()) sockets.SetNonBlocking();
  const size_t most = input.Byte() < 16 ? kMostBytes : 9000;
  const Bytes sent = PoolPart(input, most);
  std::vector<std::byte> target(input.Byte() < 200 ? sent.size() : input.AtMost(most));
  input.Flag();  // of no meaning: what the corpus has behind it keeps its place
  const auto targets = Cut(input, std::span(target));
  Sender sender(sockets[0], Cut(input, sent));
  std::vector<uint32_t> crcs;
  const End end = EndOf([&] { crcs = ReceiveAll(sockets[1], targets, kAmple); });
  sockets.Close(1);
  const End end_of_send = sender.Join();
  const bool is_whole = target.size() <= sent.size();
  Expect(end == (is_whole ? End::kDone : End::kGone), "end of a receive beside a send");
  // What the socket has buffered counts as sent, so the end of a sender that was left is open.
  Expect(end_of_send == End::kDone || (end_of_send == End::kGone && target.size() < sent.size()),
         "end of a send");
  if (!is_whole) return;
  Expect(std::equal(target.begin(), target.end(), sent.begin()), "bytes as sent by a thread");
  for (size_t i = 0; i < targets.size(); ++i) {
    Expect(crcs[i] == NaiveCrc32c(targets[i]), "CRC of what a thread sent");
  }
}

// Without a receiver: a send ends at its deadline, or at once when the peer is gone.
void SendToStoppedPeer(Input& input) {
  SocketPair sockets;
  sockets.SetSmallBuffers();
  const bool is_gone = input.Flag();
  if (is_gone) sockets.Close(1);
  const Bytes bytes = PoolPart(input, input.Byte() < 128 ? 1000 : kMostBytes);
  const auto sources = Cut(input, bytes);
  const End end = EndOf([&] { SendAll(sockets[0], sources, is_gone ? kAmple : 0s); });
  if (bytes.empty()) return Expect(end == End::kDone, "nothing to send");
  if (is_gone) return Expect(end == End::kGone, "a peer that is gone");
  Expect(end == End::kDone || end == End::kDeadline, "end of a send that nobody takes");
  if (end == End::kDeadline) return;
  const auto read = Buffered(sockets[1], bytes.size() + 1);
  // A receive may give fewer bytes than there are.
  Expect(!read.empty() && read.size() <= bytes.size() &&
             std::equal(read.begin(), read.end(), bytes.begin()),
         "what was sent is in the socket");
}

void Run(Input input) {
  switch (input.Byte() % 4) {
    case 0:
    case 1:
      return ReceiveFromStoppedPeer(input);
    case 2:
      return TransferBetweenThreads(input);
    default:
      return SendToStoppedPeer(input);
  }
}

}  // namespace
}  // namespace eckpt::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  eckpt::fuzz::Run({data, nbytes});
  return 0;
}
