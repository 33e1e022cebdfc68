// CRC32C (Castagnoli; RFC 3720, section 12.1) with the fastest implementation of this processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/values.h"

namespace eckpt {

// Returns the CRC32C of `data` appended to bytes whose CRC32C is `value`; 0 is that of no bytes.
uint32_t Crc32c(std::span<const std::byte> data, uint32_t value = 0);

// Copies `source` to `target`, past the caches if the processor can, and returns the CRC32C of the
// bytes. The ranges must not overlap, and no thread may write the source meanwhile.
uint32_t CopyWithCrc32c(std::byte* target, std::span<const std::byte> source);

struct Copied {
  uint32_t crc32c;
  uint64_t matches;
};

// As CopyWithCrc32c; also counts the values of `source` that fit `pattern`, at no cost where the
// target is aligned to their width and none fits.
Copied CopyAndCount(std::byte* target, std::span<const std::byte> source,
                    const ValuePattern& pattern);

// Returns the name of the implementation in use: "sse4.2", "armv8" or "portable".
const char* Crc32cImplementation();

}  // namespace eckpt
