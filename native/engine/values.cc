#include "engine/values.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace eckpt {
namespace {

template <class Value>
uint64_t Count(std::span<const std::byte> data, const ValuePattern& pattern) {
  const auto mask = static_cast<Value>(pattern.mask), match = static_cast<Value>(pattern.match);
  uint64_t count = 0;
  for (size_t at = 0; at + sizeof(Value) <= data.size(); at += sizeof(Value)) {
    Value value;
    std::memcpy(&value, data.data() + at, sizeof(value));
    count += static_cast<Value>(value & mask) == match;
  }
  return count;
}

}  // namespace

uint64_t CountMatches(std::span<const std::byte> data, const ValuePattern& pattern) {
  switch (pattern.width) {
    case 0:
      return 0;
    case 1:
      return Count<uint8_t>(data, pattern);
    case 2:
      return Count<uint16_t>(data, pattern);
    case 4:
      return Count<uint32_t>(data, pattern);
    case 8:
      return Count<uint64_t>(data, pattern);
  }
  throw std::invalid_argument("the width of values must be 0, 1, 2, 4 or 8, got " +
                              std::to_string(pattern.width));
}

}  // namespace eckpt
