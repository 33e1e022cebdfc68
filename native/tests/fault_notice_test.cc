#include "engine/fault_notice.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "engine/mapping.h"
#include "tests/check.h"
#include "tests/temporary_file.h"

namespace eckpt {
namespace {

using testing::TemporaryFile;

constexpr size_t kPage = 4096;
constexpr int kHandled = 42;

struct End {
  int status;
  std::string said;
  bool is_death_by(int number) const { return WIFSIGNALED(status) && WTERMSIG(status) == number; }
  bool has(const char* text) const { return said.find(text) != std::string::npos; }
};

// Runs `body` in a child without a handler of SIGBUS; returns its stderr and its end.
End InChild(const std::function<void()>& body) {
  std::array<int, 2> ends;
  if (pipe(ends.data()) != 0) return {};
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    signal(SIGBUS, SIG_DFL);
    body();
    _exit(0);
  }
  close(ends[1]);
  End end{};
  std::array<char, 512> buffer;
  for (ssize_t n; (n = read(ends[0], buffer.data(), buffer.size())) > 0;) {
    end.said.append(buffer.data(), static_cast<size_t>(n));
  }
  close(ends[0]);
  waitpid(child, &end.status, 0);
  return end;
}

void TouchCutFile() {
  const TemporaryFile file(2 * kPage);
  const Mapping mapping(file.fd(), 2 * kPage, true);
  const auto memory = mapping.Hold();
  if (ftruncate(file.fd(), 0) != 0) _exit(1);
  const volatile std::byte* bytes = memory->Read({0, 2 * kPage}).data();
  static_cast<void>(bytes[kPage]);
}

void HandlerOfTheTest(int, siginfo_t* info, void*) { _exit(info->si_addr ? kHandled : 1); }

void Handle(void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
}

TEST(fault_in_a_cut_mapping_says_so_and_kills) {
  const End end = InChild(TouchCutFile);
  CHECK(end.is_death_by(SIGBUS));
  CHECK(end.has("emergency_ckpt: SIGBUS in a mapped slot"));
  CHECK(end.said.find('\n') == end.said.size() - 1);
}

TEST(fault_elsewhere_kills_without_a_word) {
  const End end = InChild([] {
    EnsureFaultNotice();
    const TemporaryFile file(0);
    void* data = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, file.fd(), 0);
    static_cast<void>(*static_cast<volatile char*>(data));
  });
  CHECK(end.is_death_by(SIGBUS));
  CHECK_EQ(size_t{0}, end.said.size());
}

TEST(fault_after_unmapping_is_not_ours) {
  const End end = InChild([] {
    const void* data = nullptr;
    {
      const TemporaryFile file(kPage);
      const Mapping mapping(file.fd(), kPage, true);
      data = mapping.Hold()->Read({0, kPage}).data();
    }
    const TemporaryFile file(0);
    void* place = const_cast<void*>(data);
    if (mmap(place, kPage, PROT_READ, MAP_SHARED | MAP_FIXED, file.fd(), 0) != place) _exit(1);
    static_cast<void>(*static_cast<const volatile char*>(data));
  });
  CHECK(end.is_death_by(SIGBUS));
  CHECK_EQ(size_t{0}, end.said.size());
}

TEST(handler_before_ours_has_its_turn_with_the_address) {
  const End end = InChild([] {
    Handle(HandlerOfTheTest);
    TouchCutFile();
  });
  CHECK(WIFEXITED(end.status) && WEXITSTATUS(end.status) == kHandled);
  CHECK(end.has("SIGBUS in a mapped slot"));
}

// Like Python's faulthandler, restores the previous handler and sends the signal again.
struct sigaction before_later_one;
void SendAgain(int number, siginfo_t*, void*) {
  sigaction(SIGBUS, &before_later_one, nullptr);
  raise(number);
}

TEST(handler_installed_later_is_behind_ours_at_the_next_mapping) {
  const End end = InChild([] {
    const TemporaryFile file(kPage);
    const Mapping first(file.fd(), kPage, true);
    sigaction(SIGBUS, nullptr, &before_later_one);
    Handle(SendAgain);
    TouchCutFile();
  });
  CHECK(end.is_death_by(SIGBUS));
  CHECK(end.has("SIGBUS in a mapped slot"));
}

// Calls the handler that it found, as HotSpot's chaining of signals does.
void CallFormer(int number, siginfo_t* info, void* context) {
  before_later_one.sa_sigaction(number, info, context);
}

TEST(handler_installed_later_may_call_ours) {
  const auto install_later = [] {
    const TemporaryFile file(kPage);
    const Mapping first(file.fd(), kPage, true);
    sigaction(SIGBUS, nullptr, &before_later_one);
    Handle(CallFormer);
  };
  const End alone = InChild([&] {
    install_later();
    TouchCutFile();
  });
  CHECK(alone.is_death_by(SIGBUS));
  CHECK(alone.has("SIGBUS in a mapped slot"));
  const End after_another = InChild([&] {
    Handle(HandlerOfTheTest);
    install_later();
    TouchCutFile();
  });
  CHECK(WIFEXITED(after_another.status) && WEXITSTATUS(after_another.status) == kHandled);
}

TEST(handler_that_calls_ours_may_be_the_one_before_ours) {
  const End end = InChild([] {
    Handle(CallFormer);
    const TemporaryFile file(kPage);
    const Mapping first(file.fd(), kPage, true);
    sigaction(SIGBUS, nullptr, &before_later_one);
    Handle(CallFormer);
    TouchCutFile();
  });
  CHECK(end.is_death_by(SIGBUS));
}

sigjmp_buf before_fault;
void Leave(int, siginfo_t*, void*) { siglongjmp(before_fault, 1); }

TEST(handler_before_ours_may_leave_by_a_jump_each_time) {
  const End end = InChild([] {
    Handle(Leave);
    const TemporaryFile file(kPage);
    const Mapping mapping(file.fd(), kPage, true);
    const auto memory = mapping.Hold();
    if (ftruncate(file.fd(), 0) != 0) _exit(1);
    const volatile std::byte* bytes = memory->Read({0, kPage}).data();
    static int faults = 0;
    while (faults < 3) {
      if (sigsetjmp(before_fault, 1) == 0) static_cast<void>(bytes[0]);
      ++faults;
    }
    _exit(kHandled);
  });
  CHECK(WIFEXITED(end.status) && WEXITSTATUS(end.status) == kHandled);
}

TEST(signal_that_was_sent_ends_the_process_without_a_word) {
  const End end = InChild([] {
    EnsureFaultNotice();
    raise(SIGBUS);
  });
  CHECK(end.is_death_by(SIGBUS));
  CHECK_EQ(size_t{0}, end.said.size());
}

TEST(signal_that_was_ignored_is_still) {
  const End end = InChild([] {
    signal(SIGBUS, SIG_IGN);
    EnsureFaultNotice();
    raise(SIGBUS);
  });
  CHECK(WIFEXITED(end.status) && WEXITSTATUS(end.status) == 0);
}

TEST(more_ranges_than_fit_are_no_error) {
  std::vector<char> memory(3000);
  std::vector<std::jthread> threads;
  for (size_t part = 0; part < 3; ++part) {
    threads.emplace_back([&memory, part] {
      for (size_t i = 0; i < 1000; ++i) WatchForFaults(&memory[1000 * part + i], 1);
      for (size_t i = 0; i < 1000; ++i) UnwatchForFaults(&memory[1000 * part + i]);
    });
  }
}

}  // namespace
}  // namespace eckpt
