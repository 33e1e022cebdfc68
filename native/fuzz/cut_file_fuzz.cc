// A file that another process cuts, and makes longer again, below a mapping: an access by the
// processor is a SIGBUS that passes through our handler to the one before it, a system call fails
// with a typed error, and what the file still has is read as it was.
#include <setjmp.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>
#include <vector>

#include "engine/bulk.h"
#include "engine/crc32c.h"
#include "engine/mapping.h"
#include "engine/socket_io.h"
#include "fuzz/input.h"
#include "tests/socket_pair.h"
#include "tests/temporary_file.h"

namespace eckpt::fuzz {
namespace {

using namespace std::chrono_literals;
using testing::SocketPair;

constexpr size_t kPage = 4096;
constexpr size_t kMostBytes = 9 * kPage;
constexpr size_t kMostSent = 30'000;  // a socket buffers it

sigjmp_buf after_fault;
volatile sig_atomic_t faults_are_expected = 0;
volatile sig_atomic_t installed = 0;  // the handler that ours finds: 0 or 1

template <int kHandler>
void JumpBack(int, siginfo_t*, void*) {
  if (!faults_are_expected || installed != kHandler) abort();
  siglongjmp(after_fault, 1);
}

// Installs the other of the two handlers. The next mapping puts ours before it.
void InstallHandler() {
  installed = 1 - installed;
  struct sigaction action = {};
  action.sa_sigaction = installed == 0 ? JumpBack<0> : JumpBack<1>;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  if (sigaction(SIGBUS, &action, nullptr) != 0) {
    throw std::system_error(errno, std::generic_category(), "sigaction");
  }
}

// Returns whether `body`, which leaves nothing to destroy behind, met a SIGBUS.
template <class Body>
bool Faults(Body body) {
  if (sigsetjmp(after_fault, 1) != 0) {
    faults_are_expected = 0;
    return true;
  }
  faults_are_expected = 1;
  body();
  faults_are_expected = 0;
  return false;
}

// A mapped file, the bytes that it should have, and how many pages there are.
class CutFile {
 public:
  explicit CutFile(size_t size_bytes)
      : file_(size_bytes),
        mapping_(file_.fd(), size_bytes, true),
        memory_(mapping_.Hold()),
        model_(size_bytes),
        pages_end_(RoundUp(size_bytes)) {
    const auto bytes = memory_->Write({0, size_bytes});
    std::copy_n(Pool().begin(), size_bytes, bytes.begin());
    std::copy_n(Pool().begin(), size_bytes, model_.begin());
  }

  void SetSize(size_t nbytes) {
    if (ftruncate(file_.fd(), static_cast<off_t>(nbytes)) != 0) {
      throw std::system_error(errno, std::generic_category(), "ftruncate");
    }
    if (nbytes < model_.size()) {
      std::fill(model_.begin() + static_cast<ptrdiff_t>(nbytes), model_.end(), std::byte{0});
    }
    pages_end_ = RoundUp(nbytes);
    Adopt();  // what was stored behind the end in its page may be zeros now
  }

  ByteRange Range(Input& input) const {
    const size_t offset = input.AtMost(model_.size());
    return {offset, input.AtMost(model_.size() - offset)};
  }

  void Sum(ByteRange range) const {
    const auto bytes = memory_->Read(range);
    volatile uint32_t crc = 0;
    const bool faulted = Faults([&] { crc = Crc32c(bytes); });
    Expect(faulted == IsCut(range), "a CRC faults where the file has no page");
    if (!faulted) Expect(crc == NaiveCrc32c(Model(range)), "CRC of what the file still has");
  }

  void Copy(ByteRange range, size_t from) {
    const auto source = Pool().subspan(from, range.nbytes);
    const auto target = memory_->Write(range);
    volatile uint32_t crc = 0;
    const bool faulted = Faults([&] { crc = CopyWithCrc32c(target.data(), source); });
    Expect(faulted == IsCut(range), "a copy faults where the file has no page");
    if (!faulted) Expect(crc == NaiveCrc32c(source), "CRC of a copy into what there is");
    // Which part was stored before a fault is open.
    if (faulted) return Adopt();
    std::copy(source.begin(), source.end(), model_.begin() + static_cast<ptrdiff_t>(range.offset));
  }

  void Populate(ByteRange range, Pages pages) const {
    const auto bytes = memory_->Write(range);
    const bool is_refused = Refuses<std::system_error>([&] { Prefault(bytes, 1, pages); });
    Expect(is_refused == IsCut(range), "a prefault is refused where the file has no page");
  }

  void Send(ByteRange range) const {
    range.nbytes = std::min(range.nbytes, kMostSent);
    SocketPair sockets;
    const std::vector<std::span<const std::byte>> sources{memory_->Read(range)};
    const bool is_refused = Refuses<std::system_error>([&] { SendAll(sockets[0], sources, 60s); });
    Expect(is_refused == IsCut(range), "a send is refused where the file has no page");
    if (is_refused || range.nbytes == 0) return;
    std::vector<std::byte> read(range.nbytes);
    const ssize_t count = recv(sockets[1], read.data(), read.size(), MSG_WAITALL);
    Expect(count == static_cast<ssize_t>(read.size()), "what was sent arrives");
    const auto expected = Model(range);
    Expect(std::equal(read.begin(), read.end(), expected.begin(), expected.end()),
           "what is sent is what the file still has");
  }

  void Receive(ByteRange range, size_t from) {
    range.nbytes = std::min(range.nbytes, kMostSent);
    SocketPair sockets;
    const auto source = Pool().subspan(from, range.nbytes);
    Expect(send(sockets[0], source.data(), source.size(), MSG_DONTWAIT) ==
               static_cast<ssize_t>(source.size()),
           "the socket buffers what is sent");
    // After a part that could be stored the next call waits for bytes that the fault has taken.
    sockets.Close(0);
    const std::vector<std::span<std::byte>> targets{memory_->Write(range)};
    std::vector<uint32_t> crcs;
    bool is_refused = false;
    const auto receive = [&] { crcs = ReceiveAll(sockets[1], targets, 60s); };
    const bool is_gone =
        Refuses<PeerGone>([&] { is_refused = Refuses<std::system_error>(receive); });
    Expect((is_refused || is_gone) == IsCut(range), "a receive fails where the file has no page");
    if (is_refused || is_gone) return Adopt();
    Expect(crcs[0] == NaiveCrc32c(source), "CRC of what was received");
    std::copy(source.begin(), source.end(), model_.begin() + static_cast<ptrdiff_t>(range.offset));
  }

 private:
  static size_t RoundUp(size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }
  // Whether an access to the whole range meets a page that the file does not have.
  bool IsCut(ByteRange range) const {
    return range.nbytes != 0 && range.offset + range.nbytes > pages_end_;
  }
  std::span<const std::byte> Model(ByteRange range) const {
    return std::span(model_).subspan(range.offset, range.nbytes);
  }
  // Takes the bytes that there are as those that should be.
  void Adopt() {
    const auto there = memory_->Read({0, std::min(pages_end_, model_.size())});
    std::copy(there.begin(), there.end(), model_.begin());
  }

  const testing::TemporaryFile file_;
  const Mapping mapping_;
  const std::shared_ptr<const MappedMemory> memory_;
  std::vector<std::byte> model_;
  size_t pages_end_;
};

void Run(Input input) {
  InstallHandler();
  CutFile file(1 + input.AtMost(kMostBytes));
  for (int calls = 0; calls < 12 && !input.done(); ++calls) {
    const uint8_t kind = input.Byte() % 8;
    if (kind < 3) {
      file.SetSize(input.AtMost(kMostBytes + kPage));
      continue;
    }
    const ByteRange range = file.Range(input);
    if (kind == 3) file.Copy(range, input.Byte());
    if (kind == 4) file.Populate(range, input.Flag() ? Pages::kWritten : Pages::kReserved);
    if (kind == 5) file.Send(range);
    if (kind == 6) file.Receive(range, input.Byte());
    if (kind == 7) file.Sum(range);
  }
}

}  // namespace
}  // namespace eckpt::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  eckpt::fuzz::Run({data, nbytes});
  return 0;
}
