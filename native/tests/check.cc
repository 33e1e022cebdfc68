#include "tests/check.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

namespace eckpt::testing {
namespace {

struct Test {
  const char* name;
  void (*body)();
};

std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

int failures = 0;

}  // namespace

bool Register(const char* name, void (*body)()) {
  Tests().push_back({name, body});
  return true;
}

void Fail(const std::string& what, Where where) {
  ++failures;
  std::printf("%s:%d: %s\n", where.file, where.line, what.c_str());
}

}  // namespace eckpt::testing

// Runs every test, or the named ones. Exit status 1 when one failed or none ran.
int main(int argc, char** argv) {
  using namespace eckpt::testing;
  constexpr unsigned kDeadline_s = 110;
  alarm(kDeadline_s);  // SIGALRM ends a test that hangs
  int ran = 0;
  for (const Test& test : Tests()) {
    if (argc > 1 && std::strcmp(argv[1], test.name) != 0) continue;
    const int before = failures;
    try {
      test.body();
    } catch (const std::exception& error) {
      Fail(std::string("unexpected exception: ") + error.what(), ECKPT_HERE);
    }
    ++ran;
    std::printf("%s %s\n", failures == before ? "ok    " : "FAILED", test.name);
  }
  std::printf("%d tests, %d failures\n", ran, failures);
  return failures == 0 && ran > 0 ? 0 : 1;
}
