#include "glue/arguments.h"

#include <climits>
#include <cmath>
#include <limits>
#include <string>

namespace eckpt {
namespace {

// Longer waits are a mistake, and within this bound no sum of times overflows.
constexpr double kMaxTimeout_s = 1e6;

[[noreturn]] void ThrowValueError(const std::string& message) {
  throw nb::value_error(message.c_str());
}

}  // namespace

uint64_t ParseUnsigned(nb::handle value, uint64_t limit, const char* what) {
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) throw nb::python_error();
  const unsigned long long parsed = PyLong_AsUnsignedLongLong(index.ptr());
  const bool failed = parsed == std::numeric_limits<unsigned long long>::max() && PyErr_Occurred();
  if (failed) PyErr_Clear();  // OverflowError: negative, or more than 64 bits
  if (failed || parsed > limit) {
    ThrowValueError(std::string(what) + " must be in [0, " + std::to_string(limit) + "], got " +
                    nb::str(index).c_str());
  }
  return parsed;
}

int ParseThreads(nb::handle value) {
  return static_cast<int>(ParseUnsigned(value, INT_MAX, "threads"));
}

std::chrono::nanoseconds ParseTimeout(double timeout_s) {
  if (!std::isfinite(timeout_s) || timeout_s < 0 || timeout_s > kMaxTimeout_s) {
    ThrowValueError("timeout_s must be in [0, 1e6], got " + std::to_string(timeout_s));
  }
  return std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9));
}

std::pair<nb::object, nb::object> ParsePair(nb::handle pair) {
  const size_t length = nb::len(pair);
  if (length != 2) ThrowValueError("expected pairs, got " + std::to_string(length) + " elements");
  return {pair[0], pair[1]};
}

std::vector<ByteRange> ParseRanges(nb::sequence ranges) {
  std::vector<ByteRange> parsed;
  parsed.reserve(nb::len(ranges));
  for (nb::handle item : ranges) {
    const auto [offset, nbytes] = ParsePair(item);
    parsed.push_back(
        {ParseUnsigned(offset, SIZE_MAX, "offset"), ParseUnsigned(nbytes, SIZE_MAX, "nbytes")});
  }
  return parsed;
}

std::vector<ValuePattern> ParsePatterns(nb::sequence patterns, size_t count) {
  if (nb::len(patterns) != count) {
    ThrowValueError("expected " + std::to_string(count) + " patterns");
  }
  std::vector<ValuePattern> parsed;
  parsed.reserve(count);
  for (nb::handle item : patterns) {
    if (nb::len(item) != 3) ThrowValueError("a pattern has width, mask and match");
    parsed.push_back({ParseUnsigned(item[0], SIZE_MAX, "width"),
                      ParseUnsigned(item[1], UINT64_MAX, "mask"),
                      ParseUnsigned(item[2], UINT64_MAX, "match")});
  }
  return parsed;
}

HeldBuffers::~HeldBuffers() {
  for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
}

std::span<const std::byte> HeldBuffers::Hold(nb::handle object) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_SIMPLE) != 0) {
    // For the same fault some exporters raise BufferError, some ValueError.
    nb::python_error failure;
    if (failure.matches(PyExc_BufferError)) ThrowValueError(failure.what());
    throw failure;
  }
  buffers_.push_back(buffer);
  return {static_cast<const std::byte*>(buffer.buf), static_cast<size_t>(buffer.len)};
}

}  // namespace eckpt
