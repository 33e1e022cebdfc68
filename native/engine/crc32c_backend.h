// The implementations of CRC32C, chosen at run time so that one binary runs on every processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/values.h"

namespace eckpt {

// The functions work on the raw register, without the inversion before and after. They accept any
// alignment and any length, also zero.
struct Crc32cBackend {
  const char* name;  // "sse4.2", "armv8" or "portable"

  // Returns the register after `nbytes` bytes.
  uint32_t (*feed)(uint32_t state, const std::byte* source, size_t nbytes);

  // Copies past the caches if the processor can, and feeds the same bytes. The ranges must not
  // overlap, and no thread may write the source meanwhile, because it is read twice. As after any
  // store, the copy is visible to every thread that synchronizes with this one afterwards.
  uint32_t (*copy)(uint32_t state, std::byte* target, const std::byte* source, size_t nbytes);

  // As `copy`; also returns in `seen` whether a value of `pattern`, which has a width, is among
  // those that begin at `source`. The address of `target` is a multiple of the width.
  uint32_t (*copy_and_look)(uint32_t state, std::byte* target, const std::byte* source,
                            size_t nbytes, const ValuePattern& pattern, bool& seen);
};

// Returns the implementations that this processor can run, fastest first, the portable one last.
std::span<const Crc32cBackend> UsableCrc32cBackends();

// Each returns its file's implementation, or null when it was compiled for another architecture or
// the processor lacks the instructions.
const Crc32cBackend* Crc32cSse42();
const Crc32cBackend* Crc32cArmv8();
const Crc32cBackend* Crc32cPortable();

}  // namespace eckpt
