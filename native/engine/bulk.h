// Operations on lists of byte ranges with several threads: copy with CRC32C, CRC32C, prefault.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/values.h"

namespace eckpt {

using Bytes = std::span<const std::byte>;

struct Copy {
  Bytes source;
  std::byte* target;  // room for source.size() bytes that overlap no other source or target
  ValuePattern pattern = {};
};

// Copies each source to its target and returns the CRC32C of each as copied, in order. Large items
// are split over the threads, small ones are batched. After the return all stores are visible to
// the caller's thread.
std::vector<uint32_t> CopyAllWithCrc32c(std::span<const Copy> copies, int threads);

// As CopyAllWithCrc32c; also returns, in order, the number of values of each source that fit its
// pattern. std::invalid_argument, with nothing written, for the width of a pattern.
struct CopiedAll {
  std::vector<uint32_t> crcs;
  std::vector<uint64_t> matches;
};
CopiedAll CopyAllAndCount(std::span<const Copy> copies, int threads);

// Returns the CRC32C of each range, in order.
std::vector<uint32_t> Crc32cOfAll(std::span<const Bytes> ranges, int threads);

// As Crc32cOfAll; also returns, in order, the number of values of each range that fit its pattern,
// in the same pass over memory. std::invalid_argument for the width of a pattern.
CopiedAll CheckAllAndCount(std::span<const Bytes> ranges, std::span<const ValuePattern> patterns,
                           int threads);

// The pages of a file before they are mapped: only reserved, or written before.
enum class Pages { kReserved, kWritten };

// Makes every page of the range present and, on tmpfs, writable. Changes no byte, also during
// writes of other threads. `pages` is what most of them are: it decides the speed only.
// std::system_error when the system reports that it has no memory for them.
void Prefault(std::span<std::byte> range, int threads, Pages pages = Pages::kReserved);

// Prefault for kernels that cannot populate pages (before Linux 5.14): an atomic access to each
// page. SIGBUS when there is no memory for one, as with any store.
void PrefaultByTouching(std::span<std::byte> range, int threads);

}  // namespace eckpt
