// CRC32C with the optional CRC instructions of ARMv8. Compiled with -march=armv8-a+crc on aarch64.
#include "engine/crc32c_backend.h"

#if defined(__aarch64__)

#include <arm_acle.h>
#include <sys/auxv.h>

#include "engine/crc32c_interleaved.h"

namespace eckpt {
namespace {

// HWCAP_CRC32 of the kernel's asm/hwcap.h.
constexpr unsigned long kHasCrc32 = 1UL << 7;

struct Armv8 {
  static uint32_t Byte(uint32_t state, uint8_t byte) { return __crc32cb(state, byte); }
  static uint32_t Word(uint32_t state, uint64_t word) { return __crc32cd(state, word); }
  static void StreamLine(std::byte* target, const std::byte* source) {
    // Ordinary stores: these processors detect streams of full lines and skip reading the target.
    __builtin_memcpy(target, source, kLineBytes);
  }
};

constexpr Crc32cBackend kBackend{"armv8", FeedAll<Armv8>, CopyAll<Armv8>, CopyAndLook<Armv8>};

}  // namespace

const Crc32cBackend* Crc32cArmv8() {
  return (getauxval(AT_HWCAP) & kHasCrc32) != 0 ? &kBackend : nullptr;
}

}  // namespace eckpt

#else

namespace eckpt {
const Crc32cBackend* Crc32cArmv8() { return nullptr; }
}  // namespace eckpt

#endif
