// CRC32C with tables only, eight bytes per step ("slicing by 8", Kounavis and Berry, 2005).
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "engine/crc32c_backend.h"
#include "engine/crc32c_combine.h"

namespace eckpt {
namespace {

static_assert(std::endian::native == std::endian::little, "the tables are for little-endian words");

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) {
      state = (state & 1) ? (state >> 1) ^ kCrc32cPolynomial : state >> 1;
    }
    tables[0][byte] = state;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[k - 1][byte];
      tables[k][byte] = (previous >> 8) ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

uint32_t Feed(uint32_t state, const std::byte* source, size_t nbytes) {
  for (; nbytes >= 8; source += 8, nbytes -= 8) {
    uint64_t word;
    std::memcpy(&word, source, 8);
    word ^= state;
    state = 0;
    for (size_t k = 0; k < 8; ++k) state ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; nbytes != 0; ++source, --nbytes) {
    state = (state >> 8) ^ kTables[0][(state ^ static_cast<uint32_t>(*source)) & 0xff];
  }
  return state;
}

// Copies a block that fits the first cache, then reads it back from there: the fed bytes are those
// that were stored.
uint32_t Copy(uint32_t state, std::byte* target, const std::byte* source, size_t nbytes) {
  constexpr size_t kBlockBytes = 16 * 1024;
  while (nbytes != 0) {
    const size_t block = std::min(nbytes, kBlockBytes);
    std::memcpy(target, source, block);
    state = Feed(state, target, block);
    target += block;
    source += block;
    nbytes -= block;
  }
  return state;
}

uint32_t CopyAndLook(uint32_t state, std::byte* target, const std::byte* source, size_t nbytes,
                     const ValuePattern& pattern, bool& seen) {
  state = Copy(state, target, source, nbytes);
  seen = CountMatches({source, nbytes}, pattern) != 0;
  return state;
}

constexpr Crc32cBackend kBackend{"portable", Feed, Copy, CopyAndLook};

}  // namespace

const Crc32cBackend* Crc32cPortable() { return &kBackend; }

}  // namespace eckpt
