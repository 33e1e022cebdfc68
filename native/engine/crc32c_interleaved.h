// The CRC32C loop for processors with a CRC instruction. Included by one source file per
// instruction set, which is compiled with flags of its own: hence everything here has internal
// linkage and no inline function of the standard library is used (the linker could keep the copy
// that was compiled for the newer processor and call it on an older one).
//
// The instruction takes three cycles and one can start in each, so three independent stripes are
// fed at once and joined by "feed a stripe of zeros" (tables, see ZeroBytesOperator).
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/crc32c_combine.h"

namespace eckpt {
namespace {

inline constexpr size_t kLineBytes = 64;

// Maps a CRC register to the register after kStripeBytes zero bytes.
struct ZeroStripe {
  uint32_t table[4][256];

  constexpr explicit ZeroStripe(size_t stripe_bytes) : table{} {
    const uint32_t zeros = ZeroBytesOperator(stripe_bytes);
    for (uint32_t k = 0; k < 4; ++k) {
      for (uint32_t byte = 0; byte < 256; ++byte) {
        table[k][byte] = MultiplyModP(zeros, byte << (8 * k));
      }
    }
  }

  uint32_t operator()(uint32_t state) const {
    return table[0][state & 0xff] ^ table[1][(state >> 8) & 0xff] ^ table[2][(state >> 16) & 0xff] ^
           table[3][state >> 24];
  }
};

template <size_t kStripeBytes>
inline constexpr ZeroStripe kZeroStripe{kStripeBytes};

// Instructions: `static uint32_t Byte(uint32_t, uint8_t)`, `static uint32_t Word(uint32_t,
// uint64_t)` feed; `static void Stream(std::byte*, uint64_t)` stores an aligned word past the
// caches. With kStore each word is loaded once, fed and stored: the CRC is of the bytes as stored.
template <class Instructions, bool kStore>
struct Crc32cLoop {
  std::byte* target;
  const std::byte* source;
  size_t nbytes;
  uint32_t state;

  // Feeds all bytes; the target may have any alignment, and so may the source.
  uint32_t Run() {
    const size_t misaligned =
        (kStore ? reinterpret_cast<uintptr_t>(target) : reinterpret_cast<uintptr_t>(source)) %
        kLineBytes;
    size_t head = (kLineBytes - misaligned) % kLineBytes;
    if (head > nbytes) head = nbytes;
    Bytes(head);
    // Long stripes make the joins rare, short ones leave little for the single loop below.
    Stripes<4096>();
    Stripes<kLineBytes * 4>();
    while (nbytes >= kLineBytes) {
      state = Line(state, 0);
      Advance(kLineBytes);
    }
    Bytes(nbytes);
    return state;
  }

 private:
  void Advance(size_t count) {
    source += count;
    if constexpr (kStore) target += count;
    nbytes -= count;
  }

  void Bytes(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const std::byte byte = source[i];
      state = Instructions::Byte(state, static_cast<uint8_t>(byte));
      if constexpr (kStore) target[i] = byte;
    }
    Advance(count);
  }

  [[gnu::always_inline]] uint32_t Word(uint32_t stripe_state, size_t at) const {
    uint64_t word;
    __builtin_memcpy(&word, source + at, sizeof(word));
    if constexpr (kStore) Instructions::Stream(target + at, word);
    return Instructions::Word(stripe_state, word);
  }

  // Whole lines, so that each write-combining buffer leaves the processor full.
  [[gnu::always_inline]] uint32_t Line(uint32_t stripe_state, size_t at) const {
#pragma GCC unroll 8
    for (size_t i = 0; i < kLineBytes; i += sizeof(uint64_t)) {
      stripe_state = Word(stripe_state, at + i);
    }
    return stripe_state;
  }

  template <size_t kStripeBytes>
  void Stripes() {
    static_assert(kStripeBytes % kLineBytes == 0);
    while (nbytes >= 3 * kStripeBytes) {
      uint32_t first = state, second = 0, third = 0;
      for (size_t at = 0; at < kStripeBytes; at += kLineBytes) {
        first = Line(first, at);
        second = Line(second, at + kStripeBytes);
        third = Line(third, at + 2 * kStripeBytes);
      }
      constexpr const ZeroStripe& zeros = kZeroStripe<kStripeBytes>;
      state = zeros(zeros(first) ^ second) ^ third;
      Advance(3 * kStripeBytes);
    }
  }
};

}  // namespace
}  // namespace eckpt
