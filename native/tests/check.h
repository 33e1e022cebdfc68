// A test harness in one page: TEST defines and registers, CHECK reports and goes on, check.cc has
// main.
#pragma once

#include <cstdio>
#include <functional>
#include <source_location>
#include <string>

namespace eckpt::testing {

// Called before main by TEST.
bool Register(const char* name, void (*body)());

// Counts a failure of the running test and prints where it is.
void Fail(const std::string& what, std::source_location where);

inline void Check(bool holds, const char* text,
                  std::source_location where = std::source_location::current()) {
  if (!holds) Fail(text, where);
}

template <class Expected, class Actual>
void CheckEqual(const Expected& expected, const Actual& actual, const char* text,
                std::source_location where = std::source_location::current()) {
  if (!(expected == actual)) Fail(std::string("not equal: ") + text, where);
}

template <class Exception, class Body>
void CheckThrows(Body body, const char* text,
                 std::source_location where = std::source_location::current()) {
  try {
    body();
  } catch (const Exception&) {
    return;
  }
  Fail(std::string("did not throw: ") + text, where);
}

}  // namespace eckpt::testing

#define TEST(name)                                                                                 \
  static void name();                                                                              \
  [[maybe_unused]] static const bool name##_registered = ::eckpt::testing::Register(#name, &name); \
  static void name()
#define CHECK(condition) ::eckpt::testing::Check((condition), #condition)
#define CHECK_EQ(expected, actual) \
  ::eckpt::testing::CheckEqual((expected), (actual), #expected " == " #actual)
#define CHECK_THROWS(exception, ...) \
  ::eckpt::testing::CheckThrows<exception>([&] { __VA_ARGS__; }, #__VA_ARGS__)
