#include "engine/fault_notice.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string_view>
#include <utility>

namespace eckpt {
namespace {

// A signal handler may use lock-free atomics and write(2), and little else.
static_assert(std::atomic<uintptr_t>::is_always_lock_free);
static_assert(std::atomic<bool>::is_always_lock_free);

struct Range {
  std::atomic<uintptr_t> begin{0};  // 0: free, set last and cleared first
  std::atomic<uintptr_t> end{0};
};

constexpr size_t kMostRanges = 1024;
std::array<Range, kMostRanges> ranges;
std::mutex table_mutex;  // held to change the table; the handler only reads it

std::mutex install_mutex;
// The previous handler, in two copies: the handler reads the one at `current` while the other is
// written.
std::array<struct sigaction, 2> previous;
std::atomic<int> current{0};
struct sigaction first;  // the handler before ours when it was installed first
bool has_first = false;
std::atomic<bool> told{false};
std::atomic<bool> passed_on{false};

// The signal that this thread passes on to another handler. The model of the storage: any other may
// allocate memory at the first use in a thread.
struct Passing {
  const siginfo_t* info = nullptr;
  const void* frame = nullptr;
  int calls = 0;
};
__attribute__((tls_model("initial-exec"))) thread_local constinit Passing passing;

constexpr std::string_view kCut =
    "emergency_ckpt: SIGBUS in a mapped slot of the ramdisk: its file was made shorter, or lost "
    "pages, while it was in use. Nobody but this user and root can do that; see what removes or "
    "truncates files in local_dir.\n";
constexpr std::string_view kBroken =
    "emergency_ckpt: SIGBUS in a mapped slot of the ramdisk: the machine's memory there has "
    "failed.\n";

bool IsWatched(uintptr_t address) {
  for (const Range& range : ranges) {
    const uintptr_t begin = range.begin.load(std::memory_order_acquire);
    if (begin != 0 && begin <= address && address < range.end.load(std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

void Write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    if (written < 0 && errno != EINTR) return;
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
}

// Raises the signal with its default action: at once, or when the faulting access is repeated.
void TakeDefault(int number, const siginfo_t* info) {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(number, &action, nullptr);
  if (info->si_code <= 0) raise(number);
}

// Returns how many calls of ours for this signal have not ended: a handler that was installed later
// may call ours as the one that it found. A handler may also leave by a jump, so the frame is
// compared: that of a call from inside is below.
int CallsBefore(const siginfo_t* info, const void* frame) {
  const bool is_inside = info == passing.info && std::less<>{}(frame, passing.frame);
  passing = {info, frame, is_inside ? passing.calls + 1 : 0};
  return passing.calls;
}

// Returns the handler whose turn it is: the previous one, then the one before all that came later,
// then none.
struct sigaction HandlerAfter(int calls) {
  if (calls == 0) return previous[current.load(std::memory_order_acquire)];
  if (calls == 1) return first;
  struct sigaction none = {};
  none.sa_handler = SIG_DFL;
  return none;
}

void OnFault(int number, siginfo_t* info, void* context) {
  const int error = errno;
  // Positive: from the kernel, at an address; else a process sent it.
  const bool is_fault = info->si_code > 0;
  if (is_fault && IsWatched(reinterpret_cast<uintptr_t>(info->si_addr)) && !told.exchange(true)) {
    Write(info->si_code == BUS_MCEERR_AR || info->si_code == BUS_MCEERR_AO ? kBroken : kCut);
  }
  const struct sigaction before = HandlerAfter(CallsBefore(info, __builtin_frame_address(0)));
  // The previous handler may restore ours and send the signal again, as faulthandler does when it
  // was enabled later.
  const bool comes_again = !is_fault && passed_on.load();
  const bool is_ignored = !(before.sa_flags & SA_SIGINFO) && before.sa_handler == SIG_IGN;
  if (is_ignored && !is_fault) {
    // With the previous handler's flags.
  } else if (comes_again || is_ignored ||
             (!(before.sa_flags & SA_SIGINFO) && before.sa_handler == SIG_DFL)) {
    TakeDefault(number, info);
  } else {
    passed_on.store(is_fault);
    if (before.sa_flags & SA_SIGINFO) {
      before.sa_sigaction(number, info, context);
    } else {
      before.sa_handler(number);
    }
  }
  errno = error;
}

bool IsOurs(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == OnFault;
}

}  // namespace

void EnsureFaultNotice() {
  const std::lock_guard lock(install_mutex);
  struct sigaction now;
  if (sigaction(SIGBUS, nullptr, &now) != 0 || IsOurs(now)) return;
  if (!std::exchange(has_first, true)) first = now;  // set before any signal reaches ours
  const int other = 1 - current.load();
  previous[other] = now;
  current.store(other, std::memory_order_release);
  struct sigaction action = {};
  action.sa_sigaction = OnFault;
  // On the thread's signal stack, if it has one: the fault may be on the normal stack.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  action.sa_mask = now.sa_mask;
  sigaction(SIGBUS, &action, nullptr);
}

void WatchForFaults(const void* begin, size_t nbytes) {
  const std::lock_guard lock(table_mutex);
  for (Range& range : ranges) {
    if (range.begin.load(std::memory_order_relaxed) != 0) continue;
    const auto address = reinterpret_cast<uintptr_t>(begin);
    range.end.store(address + nbytes, std::memory_order_relaxed);
    range.begin.store(address, std::memory_order_release);
    return;
  }
}

void UnwatchForFaults(const void* begin) {
  const std::lock_guard lock(table_mutex);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  for (Range& range : ranges) {
    if (range.begin.load(std::memory_order_relaxed) == address) {
      range.begin.store(0, std::memory_order_release);
      return;
    }
  }
}

}  // namespace eckpt
