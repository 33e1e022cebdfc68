// Values of an array that are looked for while its bytes are copied. Pure; knows no element type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace eckpt {

// The values of `width` bytes, little-endian, with `value & mask == match`: those whose exponent is
// all ones, for instance, are NaN and infinity. `width` is 1, 2, 4 or 8; with 0 there are none.
struct ValuePattern {
  size_t width = 0;
  uint64_t mask = 0;
  uint64_t match = 0;
};

// Returns the number of values in `data` that fit. They begin at its start, at any alignment; the
// bytes of an incomplete last one are no value. std::invalid_argument for another width.
uint64_t CountMatches(std::span<const std::byte> data, const ValuePattern& pattern);

}  // namespace eckpt
