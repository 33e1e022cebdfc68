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
  // There is no single-word non-temporal store; full lines need no read of the target here anyway.
  static void Stream(std::byte* target, uint64_t word) {
    __builtin_memcpy(target, &word, sizeof(word));
  }
};

uint32_t Feed(uint32_t state, const std::byte* source, size_t nbytes) {
  return Crc32cLoop<Armv8, false>{nullptr, source, nbytes, state}.Run();
}

uint32_t Copy(uint32_t state, std::byte* target, const std::byte* source, size_t nbytes) {
  state = Crc32cLoop<Armv8, true>{target, source, nbytes, state}.Run();
  __atomic_thread_fence(__ATOMIC_RELEASE);
  return state;
}

constexpr Crc32cBackend kBackend{"armv8", Feed, Copy};

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
