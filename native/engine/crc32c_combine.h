// The algebra of CRC32C: a CRC is a polynomial over GF(2) modulo P, so that the CRC of joined parts
// follows from the CRCs of the parts.
//
// Polynomials are bit-reflected: bit 31 is the coefficient of x^0. Method of zlib's crc32_combine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace eckpt {

// Castagnoli polynomial, reflected (RFC 3720, section 12.1).
inline constexpr uint32_t kCrc32cPolynomial = 0x82f63b78;

// a * b mod P.
constexpr uint32_t MultiplyModP(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kCrc32cPolynomial : b >> 1;
  }
  return product;
}

// x^(2^k) mod P for every bit k of 8 * (a 64-bit length).
using PowerTable = std::array<uint32_t, 67>;

constexpr PowerTable PowersOfTwoModP() {
  PowerTable powers{};
  powers[0] = uint32_t{1} << 30;
  for (size_t k = 1; k < powers.size(); ++k) {
    powers[k] = MultiplyModP(powers[k - 1], powers[k - 1]);
  }
  return powers;
}

inline constexpr PowerTable kPowersOfTwoModP = PowersOfTwoModP();

// x^(8 * nbytes) mod P: multiplying a CRC register by it feeds nbytes zero bytes.
constexpr uint32_t ZeroBytesOperator(uint64_t nbytes) {
  uint32_t product = uint32_t{1} << 31;
  for (size_t k = 3; nbytes != 0; nbytes >>= 1, ++k) {
    if (nbytes & 1) product = MultiplyModP(kPowersOfTwoModP[k], product);
  }
  return product;
}

// CRC32C of A+B from those of A and B and the length of B.
constexpr uint32_t Crc32cCombine(uint32_t first, uint32_t second, uint64_t second_nbytes) {
  return MultiplyModP(ZeroBytesOperator(second_nbytes), first) ^ second;
}

}  // namespace eckpt
