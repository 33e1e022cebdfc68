// Whole lists of byte ranges at once, split over threads: copy with CRC32C, CRC32C, prefault.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace eckpt {

using Bytes = std::span<const std::byte>;

struct Copy {
  Bytes source;
  std::byte* target;  // room for source.size() bytes that overlap no other source or target
};

// Copies each source to its target; the CRC32C of each as copied, in order. Large items are split
// over the threads, small ones are batched. All stores are visible to whoever sees this return.
std::vector<uint32_t> CopyAllWithCrc32c(std::span<const Copy> copies, int threads);

// The CRC32C of each range, in order.
std::vector<uint32_t> Crc32cOfAll(std::span<const Bytes> ranges, int threads);

// Makes every page of the range present and writable, and changes no byte, also while others write
// there. std::system_error where the system has no memory for them (and it can tell so).
void Prefault(std::span<std::byte> range, int threads);

// What Prefault does where the kernel cannot populate pages by itself (before Linux 5.14): an
// atomic access to each page. SIGBUS where there is no memory for one, as with any store.
void PrefaultByTouching(std::span<std::byte> range, int threads);

}  // namespace eckpt
