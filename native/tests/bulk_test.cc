#include "engine/bulk.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <span>
#include <thread>
#include <vector>

#include "engine/crc32c.h"
#include "engine/mapping.h"
#include "engine/pieces.h"
#include "tests/check.h"
#include "tests/random_bytes.h"
#include "tests/temporary_file.h"

namespace eckpt {
namespace {

using testing::RandomBytes;
using testing::TemporaryFile;

// Copies the sources in sequence with `gap` bytes between, then checks bytes, CRCs and gaps.
void CheckCopies(const std::vector<size_t>& sizes, size_t gap, int threads) {
  size_t total = gap;
  for (size_t nbytes : sizes) total += nbytes + gap;
  const TemporaryFile file(total);
  const Mapping mapping(file.fd(), total, true);
  const auto memory = mapping.Hold()->Write({0, total});
  const auto pool = RandomBytes(*std::max_element(sizes.begin(), sizes.end()) + sizes.size(), 7);
  std::vector<Copy> copies;
  std::vector<Bytes> ranges;
  std::vector<uint32_t> expected;
  size_t offset = gap;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const Bytes source = std::span(pool).subspan(i, sizes[i]);
    copies.push_back({source, memory.data() + offset, {}});
    ranges.push_back(memory.subspan(offset, sizes[i]));
    expected.push_back(Crc32c(source));
    offset += sizes[i] + gap;
  }
  CHECK_EQ(expected, CopyAllWithCrc32c(copies, threads));
  CHECK_EQ(expected, Crc32cOfAll(ranges, threads));
  for (size_t i = 0; i < sizes.size(); ++i) {
    CHECK(std::equal(ranges[i].begin(), ranges[i].end(), copies[i].source.begin()));
    for (size_t k = 1; k <= gap; ++k) CHECK(*(copies[i].target - k) == std::byte{0});
  }
}

TEST(one_large_buffer_is_split_over_threads) {
  for (int threads : {1, 2, 5}) CheckCopies({5 * kPieceBytes + 4321}, 3, threads);
}

TEST(many_small_buffers_are_batched) {
  CheckCopies(std::vector<size_t>(3000, 8), 1, 3);
  CheckCopies(std::vector<size_t>(60, 65'536), 0, 2);
}

TEST(sizes_of_all_kinds_together) {
  CheckCopies({0, 1, kPieceBytes, 0, 7, kPieceBytes + 1, 100'000, kPieceBytes - 1, 0}, 5, 4);
}

TEST(nothing_to_copy_is_nothing_copied) {
  CHECK(CopyAllWithCrc32c({}, 2).empty());
  CHECK(Crc32cOfAll({}, 2).empty());
}

TEST(a_flipped_bit_changes_the_crc) {
  auto data = RandomBytes(3 * kPieceBytes, 8);
  const std::vector<Bytes> ranges{data};
  const auto before = Crc32cOfAll(ranges, 2);
  for (size_t at : {size_t{0}, kPieceBytes - 1, kPieceBytes, data.size() - 1}) {
    data[at] ^= std::byte{0x10};
    CHECK(before != Crc32cOfAll(ranges, 2));
    data[at] ^= std::byte{0x10};
  }
  CHECK_EQ(before, Crc32cOfAll(ranges, 2));
}

const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));

using PrefaultFunction = void (*)(std::span<std::byte>, int);

void PrefaultReserved(std::span<std::byte> range, int threads) { Prefault(range, threads); }

void PrefaultWritten(std::span<std::byte> range, int threads) {
  Prefault(range, threads, Pages::kWritten);
}

size_t CountPresent(std::span<std::byte> pages) {
  std::vector<unsigned char> present(pages.size() / page_bytes);
  CHECK_EQ(0, mincore(pages.data(), pages.size(), present.data()));
  return static_cast<size_t>(std::count_if(present.begin(), present.end(),
                                           [](unsigned char page) { return (page & 1) != 0; }));
}

void CheckPrefault(PrefaultFunction prefault) {
  const size_t nbytes = size_t{20} << 20, begin = (size_t{1} << 20) + 5, inside = size_t{18} << 20;
  const TemporaryFile file(nbytes);
  const Mapping mapping(file.fd(), nbytes, true);
  const auto memory = mapping.Hold()->Write({0, nbytes});
  CHECK_EQ(size_t{0}, CountPresent(memory));
  memory[12'345'678] = std::byte{9};
  prefault(memory.subspan(begin, inside), 3);
  CHECK_EQ(inside / page_bytes + 1, CountPresent(memory));  // unaligned: it touches one page more
  CHECK(memory[12'345'678] == std::byte{9});
  CHECK(memory[begin] == std::byte{0});
  prefault({}, 2);
  prefault(memory.subspan(page_bytes - 1, 2), 1);
  CHECK_EQ(inside / page_bytes + 3, CountPresent(memory));
}

TEST(prefault_makes_pages_present_and_changes_nothing) { CheckPrefault(PrefaultReserved); }

TEST(prefault_of_written_pages_does_the_same) { CheckPrefault(PrefaultWritten); }

TEST(prefault_by_touching_does_the_same) { CheckPrefault(PrefaultByTouching); }

TEST(prefault_keeps_what_others_write_meanwhile) {
  const size_t nbytes = size_t{4} << 20;
  for (const PrefaultFunction prefault : {PrefaultReserved, PrefaultWritten, PrefaultByTouching}) {
    const TemporaryFile file(nbytes);
    const Mapping mapping(file.fd(), nbytes, true);
    const auto memory = mapping.Hold()->Write({0, nbytes});
    std::jthread writer([memory] {
      for (size_t at = 0; at < memory.size(); at += page_bytes) memory[at + 1] = std::byte{7};
    });
    prefault(memory, 2);
    writer.join();
    for (size_t at = 0; at < nbytes; at += page_bytes) CHECK(memory[at + 1] == std::byte{7});
  }
}

}  // namespace
}  // namespace eckpt
