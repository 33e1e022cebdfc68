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
  static void Stream(std::byte* target, uint64_t word) {
    _mm_stream_si64(reinterpret_cast<long long*>(target), static_cast<long long>(word));
  }
};

uint32_t Feed(uint32_t state, const std::byte* source, size_t nbytes) {
  return Crc32cLoop<Sse42, false>{nullptr, source, nbytes, state}.Run();
}

uint32_t Copy(uint32_t state, std::byte* target, const std::byte* source, size_t nbytes) {
  state = Crc32cLoop<Sse42, true>{target, source, nbytes, state}.Run();
  _mm_sfence();  // non-temporal stores are weakly ordered
  return state;
}

constexpr Crc32cBackend kBackend{"sse4.2", Feed, Copy};

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
