#include "engine/bulk.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

#include "engine/crc32c.h"
#include "engine/parallel.h"
#include "engine/pieces.h"

// Linux 5.14; older C libraries do not define it.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace eckpt {
namespace {

// Runs crc_of(piece) for every piece of the items and joins the results.
template <class CrcOf>
std::vector<uint32_t> CrcInPieces(std::span<const size_t> item_bytes, int threads, CrcOf crc_of) {
  const std::vector<Piece> pieces = CutIntoPieces(item_bytes, kPieceBytes);
  const std::vector<Batch> batches = GroupIntoBatches(pieces, kPieceBytes);
  std::vector<uint32_t> crcs(pieces.size());
  ParallelFor(batches.size(), threads, [&](size_t task) {
    for (size_t i = batches[task].first; i < batches[task].last; ++i) crcs[i] = crc_of(pieces[i]);
  });
  return JoinPieceCrcs(item_bytes.size(), pieces, crcs);
}

// Calls populate(first, last, page_bytes) for stretches of whole pages that cover the range.
template <class Populate>
void ForPages(std::span<std::byte> range, int threads, Populate populate) {
  constexpr size_t kTaskBytes = size_t{8} << 20;
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  // Mappings begin at a page, so a range rounded outwards is still inside.
  const size_t before = reinterpret_cast<uintptr_t>(range.data()) % page_bytes;
  std::byte* const begin = range.data() - before;
  const size_t covered = range.empty() ? 0 : range.size() + before;
  const size_t rounded = (covered + page_bytes - 1) / page_bytes * page_bytes;
  ParallelFor((rounded + kTaskBytes - 1) / kTaskBytes, threads, [&](size_t task) {
    const size_t from = task * kTaskBytes;
    populate(begin + from, begin + std::min(from + kTaskBytes, rounded), page_bytes);
  });
}

void TouchPages(std::byte* begin, std::byte* end, size_t page_bytes) {
  for (std::byte* at = begin; at < end; at += page_bytes) {
    // An atomic "or 0" faults the page in for writing and cannot undo another thread's store.
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(at), 0, __ATOMIC_RELAXED);
  }
}

void PopulatePages(std::byte* begin, std::byte* end, size_t page_bytes, int advice) {
  while (madvise(begin, static_cast<size_t>(end - begin), advice) != 0) {
    if (errno == EINTR) continue;
    if (errno == EINVAL) return TouchPages(begin, end, page_bytes);  // an older kernel
    throw std::system_error(errno, std::generic_category(), "prefault");
  }
}

}  // namespace

std::vector<uint32_t> CopyAllWithCrc32c(std::span<const Copy> copies, int threads) {
  return CopyAllAndCount(copies, threads).crcs;
}

CopiedAll CopyAllAndCount(std::span<const Copy> copies, int threads) {
  std::vector<size_t> item_bytes(copies.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    CountMatches({}, copies[i].pattern);  // throws for a width before anything is written
    item_bytes[i] = copies[i].source.size();
  }
  std::vector<std::atomic<uint64_t>> matches(copies.size());
  std::vector<uint32_t> crcs = CrcInPieces(item_bytes, threads, [&](const Piece& piece) {
    const Copy& copy = copies[piece.item];
    const Copied copied = CopyAndCount(
        copy.target + piece.begin, copy.source.subspan(piece.begin, piece.nbytes), copy.pattern);
    if (copied.matches != 0) matches[piece.item] += copied.matches;
    return copied.crc32c;
  });
  return {std::move(crcs), {matches.begin(), matches.end()}};
}

std::vector<uint32_t> Crc32cOfAll(std::span<const Bytes> ranges, int threads) {
  std::vector<size_t> item_bytes(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) item_bytes[i] = ranges[i].size();
  return CrcInPieces(item_bytes, threads, [&](const Piece& piece) {
    return Crc32c(ranges[piece.item].subspan(piece.begin, piece.nbytes));
  });
}

CopiedAll CheckAllAndCount(std::span<const Bytes> ranges, std::span<const ValuePattern> patterns,
                           int threads) {
  // Fits the first cache with room to spare, and the CRC's loops divide it without a rest.
  constexpr size_t kStretchBytes = 24576;
  std::vector<size_t> item_bytes(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) {
    CountMatches({}, patterns[i]);  // throws for a width
    item_bytes[i] = ranges[i].size();
  }
  std::vector<std::atomic<uint64_t>> matches(ranges.size());
  std::vector<uint32_t> crcs = CrcInPieces(item_bytes, threads, [&](const Piece& piece) {
    const Bytes bytes = ranges[piece.item].subspan(piece.begin, piece.nbytes);
    const ValuePattern& pattern = patterns[piece.item];
    if (pattern.width == 0) return Crc32c(bytes);
    uint32_t crc = 0;
    uint64_t count = 0;
    for (size_t at = 0; at < bytes.size(); at += kStretchBytes) {
      const Bytes stretch = bytes.subspan(at, std::min(kStretchBytes, bytes.size() - at));
      crc = Crc32c(stretch, crc);
      count += CountMatches(stretch, pattern);
    }
    if (count != 0) matches[piece.item] += count;
    return crc;
  });
  return {std::move(crcs), {matches.begin(), matches.end()}};
}

void Prefault(std::span<std::byte> range, int threads, Pages pages) {
  // A read maps the neighbours of a page that was written before in the same fault, and in a shared
  // mapping of tmpfs for writing too. A page that was only reserved costs a fault in any case.
  const int advice = pages == Pages::kWritten ? MADV_POPULATE_READ : MADV_POPULATE_WRITE;
  ForPages(range, threads, [advice](std::byte* begin, std::byte* end, size_t page_bytes) {
    PopulatePages(begin, end, page_bytes, advice);
  });
}

void PrefaultByTouching(std::span<std::byte> range, int threads) {
  ForPages(range, threads, TouchPages);
}

}  // namespace eckpt
