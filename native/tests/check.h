// A small test harness: TEST defines and registers, CHECK reports and continues, check.cc has main.
#pragma once

#include <string>

namespace eckpt::testing {

struct Where {
  const char* file;
  int line;
};

// Called before main by TEST.
bool Register(const char* name, void (*body)());

// Counts a failure of the running test and prints its place.
void Fail(const std::string& what, Where where);

template <class Exception, class Body>
void CheckThrows(Body body, const char* text, Where where) {
  try {
    body();
  } catch (const Exception&) {
    return;
  }
  Fail(std::string("did not throw: ") + text, where);
}

}  // namespace eckpt::testing

#define ECKPT_HERE (::eckpt::testing::Where{__FILE__, __LINE__})

#define TEST(name)                                                                                 \
  static void name();                                                                              \
  [[maybe_unused]] static const bool name##_registered = ::eckpt::testing::Register(#name, &name); \
  static void name()

#define CHECK(condition) ((condition) ? void() : ::eckpt::testing::Fail(#condition, ECKPT_HERE))

#define CHECK_EQ(expected, actual) \
  ((expected) == (actual)          \
       ? void()                    \
       : ::eckpt::testing::Fail("not equal: " #expected " == " #actual, ECKPT_HERE))

#define CHECK_THROWS(exception, ...) \
  ::eckpt::testing::CheckThrows<exception>([&] { __VA_ARGS__; }, #__VA_ARGS__, ECKPT_HERE)
