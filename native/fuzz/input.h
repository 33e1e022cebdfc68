// The values that a fuzz target takes from its input, one after the other, and its oracle.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <span>
#include <vector>

#include "engine/mapping.h"
#include "tests/random_bytes.h"

namespace eckpt::fuzz {

// Ends the process with the text when `is_true` is false; a fuzzer keeps the input then.
inline void Expect(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "expectation failed: %s\n", what);
  std::abort();
}

// Returns true when `body` throws an Exception, false when it throws nothing. Another exception
// passes through, and so ends the process.
template <class Exception, class Body>
bool Refuses(Body body) {
  try {
    body();
  } catch (const Exception&) {
    return true;
  }
  return false;
}

// The bytes of an input as numbers; after its end all are zero.
class Input {
 public:
  Input(const uint8_t* data, size_t nbytes) : rest_(data, nbytes) {}

  bool done() const { return rest_.empty(); }

  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const uint8_t byte = rest_.front();
    rest_ = rest_.subspan(1);
    return byte;
  }
  bool Flag() { return Byte() & 1; }
  uint64_t Word(int nbytes) {
    uint64_t word = 0;
    for (int i = 0; i < nbytes; ++i) word = word << 8 | Byte();
    return word;
  }

  // In [0, limit], where limit is less than 2^32.
  size_t AtMost(size_t limit) {
    return Word(limit < 256 ? 1 : limit < 65536 ? 2 : 4) % (limit + 1);
  }

  // Any number, often near one where sums overflow or a range of `size` bytes ends.
  uint64_t Hostile(uint64_t size) {
    const uint8_t kind = Byte();
    const uint64_t distance = kind & 0x80 ? -uint64_t{Byte()} : uint64_t{Byte()};
    switch (kind % 8) {
      case 0:
        return size + distance;
      case 1:
        return distance;
      case 2:
        return std::numeric_limits<uint64_t>::max() - size + distance;
      case 3:
        return (uint64_t{1} << 63) + distance;
      case 4:
        return (uint64_t{1} << 32) + distance;
      case 5:
        return Word(8);
      default:
        return size == 0 ? 0 : Word(4) % size;
    }
  }

 private:
  std::span<const uint8_t> rest_;
};

// The same random bytes for all inputs; an input chooses among them by position.
inline std::span<const std::byte> Pool() {
  static const std::vector<std::byte> pool = testing::RandomBytes(size_t{3} << 19, 17);
  return pool;
}

// A part of the pool, of at most `limit` bytes.
inline std::span<const std::byte> PoolPart(Input& input, size_t limit) {
  const size_t nbytes = input.AtMost(limit);
  return Pool().subspan(input.Byte(), nbytes);
}

// CRC32C one byte at a time, from the definition, independent of the engine.
inline uint32_t NaiveCrc32c(std::span<const std::byte> bytes, uint32_t value = 0) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t state = byte;
      for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ (state & 1 ? 0x82f63b78u : 0);
      made[byte] = state;
    }
    return made;
  }();
  uint32_t state = ~value;
  for (const std::byte byte : bytes) {
    state = table[(state ^ static_cast<uint32_t>(byte)) & 0xff] ^ state >> 8;
  }
  return ~state;
}

// Whether [offset, offset + nbytes) lies in [0, size), of numbers whose sum may overflow.
inline bool IsInside(ByteRange range, size_t size) {
  size_t end;
  return !__builtin_add_overflow(range.offset, range.nbytes, &end) && end <= size;
}

}  // namespace eckpt::fuzz
