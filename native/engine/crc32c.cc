#include "engine/crc32c.h"

#include <vector>

#include "engine/crc32c_backend.h"

namespace eckpt {

std::span<const Crc32cBackend> UsableCrc32cBackends() {
  static const std::vector<Crc32cBackend> usable = [] {
    std::vector<Crc32cBackend> found;
    for (const Crc32cBackend* backend : {Crc32cSse42(), Crc32cArmv8(), Crc32cPortable()}) {
      if (backend != nullptr) found.push_back(*backend);
    }
    return found;
  }();
  return usable;
}

namespace {

const Crc32cBackend& Fastest() {
  static const Crc32cBackend& fastest = UsableCrc32cBackends().front();
  return fastest;
}

}  // namespace

uint32_t Crc32c(std::span<const std::byte> data, uint32_t value) {
  return ~Fastest().feed(~value, data.data(), data.size());
}

uint32_t CopyWithCrc32c(std::byte* target, std::span<const std::byte> source) {
  return ~Fastest().copy(~uint32_t{0}, target, source.data(), source.size());
}

Copied CopyAndCount(std::byte* target, std::span<const std::byte> source,
                    const ValuePattern& pattern) {
  if (pattern.width == 0) return {CopyWithCrc32c(target, source), 0};
  if (reinterpret_cast<uintptr_t>(target) % pattern.width != 0) {
    return {CopyWithCrc32c(target, source), CountMatches(source, pattern)};
  }
  bool seen = false;
  const uint32_t state =
      Fastest().copy_and_look(~uint32_t{0}, target, source.data(), source.size(), pattern, seen);
  return {~state, seen ? CountMatches(source, pattern) : 0};
}

const char* Crc32cImplementation() { return Fastest().name; }

}  // namespace eckpt
