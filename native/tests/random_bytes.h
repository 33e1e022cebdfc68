// Pseudo-random bytes, equal in every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace eckpt::testing {

inline std::vector<std::byte> RandomBytes(size_t nbytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(nbytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

}  // namespace eckpt::testing
