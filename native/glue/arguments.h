// Conversion of Python arguments to engine values. A number out of range is a ValueError, never a
// wrapped number.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "engine/mapping.h"
#include "engine/values.h"

namespace eckpt {

namespace nb = nanobind;

// An integer in [0, limit]; `what` names it in the ValueError.
uint64_t ParseUnsigned(nb::handle value, uint64_t limit, const char* what);

// Within int; ParallelFor checks the range itself.
int ParseThreads(nb::handle value);

// Seconds: finite and not negative.
std::chrono::nanoseconds ParseTimeout(double timeout_s);

// (offset, nbytes) pairs.
std::vector<ByteRange> ParseRanges(nb::sequence ranges);

// `count` times (width, mask, match); ValueError for another number of them.
std::vector<ValuePattern> ParsePatterns(nb::sequence patterns, size_t count);

// C-contiguous buffers, held until this is destroyed (with the GIL).
class HeldBuffers {
 public:
  HeldBuffers() = default;
  ~HeldBuffers();
  HeldBuffers(const HeldBuffers&) = delete;
  HeldBuffers& operator=(const HeldBuffers&) = delete;

  // TypeError for an object that is no buffer, ValueError for one that is not C-contiguous.
  std::span<const std::byte> Hold(nb::handle object);

 private:
  std::deque<Py_buffer> buffers_;  // a Py_buffer must not move
};

// The two elements of a pair; ValueError for another length.
std::pair<nb::object, nb::object> ParsePair(nb::handle pair);

}  // namespace eckpt
