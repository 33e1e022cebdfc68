// CRC32C with the crc32 instruction of SSE4.2 and non-temporal stores. Compiled with -msse4.2 on
// x86-64.
#include "engine/crc32c_backend.h"

#if defined(__x86_64__)

#include <nmmintrin.h>

#include "engine/crc32c_interleaved.h"

namespace eckpt {
namespace {

struct Sse42 {
  static uint32_t Byte(uint32_t state, uint8_t byte) { return _mm_crc32_u8(state, byte); }
  static uint32_t Word(uint32_t state, uint64_t word) {
    return static_cast<uint32_t>(_mm_crc32_u64(state, word));
  }
  static void StreamLine(std::byte* target, const std::byte* source) {
#pragma GCC unroll 4
    for (size_t at = 0; at < kLineBytes; at += sizeof(__m128i)) {
      const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at));
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), part);
    }
  }
};

uint32_t Copy(uint32_t state, std::byte* target, const std::byte* source, size_t nbytes) {
  state = CopyAll<Sse42>(state, target, source, nbytes);
  _mm_sfence();  // non-temporal stores are weakly ordered
  return state;
}

uint32_t CopyLooking(uint32_t state, std::byte* target, const std::byte* source, size_t nbytes,
                     const ValuePattern& pattern, bool& seen) {
  state = CopyAndLook<Sse42>(state, target, source, nbytes, pattern, seen);
  _mm_sfence();
  return state;
}

constexpr Crc32cBackend kBackend{"sse4.2", FeedAll<Sse42>, Copy, CopyLooking};

}  // namespace

const Crc32cBackend* Crc32cSse42() {
  return __builtin_cpu_supports("sse4.2") ? &kBackend : nullptr;
}

}  // namespace eckpt

#else

namespace eckpt {
const Crc32cBackend* Crc32cSse42() { return nullptr; }
}  // namespace eckpt

#endif
