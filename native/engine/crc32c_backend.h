// One implementation of CRC32C, chosen at run time so that one binary runs on every processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace eckpt {

// The functions work on the raw register: without the inversion before and after. They accept any
// alignment and any length, zero too.
struct Crc32cBackend {
  const char* name;  // "sse4.2", "armv8" or "portable"

  // The register after feeding `nbytes` bytes.
  uint32_t (*feed)(uint32_t state, const std::byte* source, size_t nbytes);

  // Copies past the caches where the processor can, and feeds the same bytes. The ranges must not
  // overlap and nobody may write the source meanwhile: it is read twice. As after any store, the
  // copy is visible to every thread that synchronizes with this one afterwards.
  uint32_t (*copy)(uint32_t state, std::byte* target, const std::byte* source, size_t nbytes);
};

// The implementations that this processor can run, fastest first; the portable one is the last.
std::span<const Crc32cBackend> UsableCrc32cBackends();

// What each source file offers; null where it was compiled for another architecture, or where the
// processor lacks the instructions.
const Crc32cBackend* Crc32cSse42();
const Crc32cBackend* Crc32cArmv8();
const Crc32cBackend* Crc32cPortable();

}  // namespace eckpt
