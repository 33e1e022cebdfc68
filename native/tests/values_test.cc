#include "engine/values.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "engine/bulk.h"
#include "engine/crc32c.h"
#include "engine/crc32c_backend.h"
#include "engine/pieces.h"
#include "tests/check.h"
#include "tests/random_bytes.h"

namespace eckpt {
namespace {

using testing::RandomBytes;

constexpr ValuePattern kFloat64{8, 0x7ff0'0000'0000'0000, 0x7ff0'0000'0000'0000};
constexpr ValuePattern kFloat32{4, 0x7f80'0000, 0x7f80'0000};
constexpr ValuePattern kBfloat16{2, 0x7f80, 0x7f80};
constexpr ValuePattern kFloat8E4m3fn{1, 0x7f, 0x7f};
constexpr ValuePattern kFloat8E4m3fnuz{1, 0xff, 0x80};
constexpr ValuePattern kAll[] = {kFloat64, kFloat32, kBfloat16, kFloat8E4m3fn, kFloat8E4m3fnuz};

uint64_t ValueAt(const std::byte* data, size_t width) {
  uint64_t value = 0;
  std::memcpy(&value, data, width);
  return value;
}

// Written without the engine: one value after the other.
uint64_t Expected(Bytes data, const ValuePattern& pattern) {
  uint64_t count = 0;
  for (size_t at = 0; at + pattern.width <= data.size(); at += pattern.width) {
    count += (ValueAt(&data[at], pattern.width) & pattern.mask) == pattern.match;
  }
  return count;
}

// Clears one bit of the mask in every value that fits, so that none does.
void RemoveMatches(std::span<std::byte> data, const ValuePattern& pattern) {
  for (size_t at = 0; at + pattern.width <= data.size(); at += pattern.width) {
    const uint64_t value = ValueAt(&data[at], pattern.width);
    if ((value & pattern.mask) != pattern.match) continue;
    const uint64_t other = value ^ (pattern.mask & (~pattern.mask + 1));
    std::memcpy(&data[at], &other, pattern.width);
  }
}

TEST(numbers_of_the_language_are_found_by_their_exponent) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const std::vector<double> doubles{0.0, -0.0, 1.5, inf, -inf, nan, -nan, 1e308, 5e-324};
  CHECK_EQ(uint64_t{4}, CountMatches(std::as_bytes(std::span(doubles)), kFloat64));
  const std::vector<float> floats(doubles.begin(), doubles.end());  // 1e308 becomes infinite
  CHECK_EQ(uint64_t{5}, CountMatches(std::as_bytes(std::span(floats)), kFloat32));
}

TEST(an_incomplete_last_value_does_not_count) {
  const std::vector<std::byte> ones(1003, std::byte{0xff});
  CHECK_EQ(uint64_t{125}, CountMatches(ones, kFloat64));
  CHECK_EQ(uint64_t{250}, CountMatches(ones, kFloat32));
  CHECK_EQ(uint64_t{0}, CountMatches(ones, kFloat8E4m3fnuz));
  CHECK_EQ(uint64_t{0}, CountMatches(ones, {}));
  CHECK_EQ(uint64_t{0}, CountMatches({}, kFloat32));
}

TEST(another_width_is_refused_before_a_byte_is_written) {
  const auto source = RandomBytes(100, 1);
  std::vector<std::byte> target(100, std::byte{7});
  const std::vector<Copy> copies{{source, target.data(), {}}, {source, target.data(), {3, 1, 1}}};
  CHECK_THROWS(std::invalid_argument, CountMatches(source, {16, 1, 1}));
  CHECK_THROWS(std::invalid_argument, CopyAllAndCount(copies, 1));
  CHECK(target == std::vector<std::byte>(100, std::byte{7}));
}

// Every place of a value in lines, short and long blocks, head and tail.
TEST(one_value_is_seen_wherever_it_is) {
  constexpr size_t kBytes = 3 * 8192 * 2 + 1536 + 200;
  for (const Crc32cBackend& backend : UsableCrc32cBackends()) {
    for (const ValuePattern& pattern : kAll) {
      auto source = RandomBytes(kBytes, 2);
      RemoveMatches(source, pattern);
      std::vector<std::byte> target(kBytes + 64);
      std::byte* const aligned =
          target.data() + (64 - reinterpret_cast<uintptr_t>(target.data()) % 64) % 64;
      const auto check = [&](size_t head, bool expected) {
        bool seen = !expected;
        const uint32_t state = backend.copy_and_look(~0u, aligned + (64 - head) % 64, source.data(),
                                                     kBytes - 64, pattern, seen);
        CHECK_EQ(expected, seen);
        CHECK_EQ(Crc32cPortable()->feed(~0u, source.data(), kBytes - 64), state);
      };
      check(0, false);
      check(8, false);
      for (size_t at = 0; at + pattern.width <= kBytes - 64; at += 8 * 61) {
        std::byte kept[8];
        std::memcpy(kept, &source[at], pattern.width);
        std::memcpy(&source[at], &pattern.match, pattern.width);
        check(0, true);
        check(24, true);
        std::memcpy(&source[at], kept, pattern.width);
      }
    }
  }
}

TEST(copies_count_as_one_value_after_the_other) {
  for (const ValuePattern& pattern : kAll) {
    const auto pool = RandomBytes(3 * kPieceBytes + 5000, 3);
    const Bytes all(pool);
    std::vector<std::byte> room(2 * pool.size());
    std::vector<Copy> copies;
    size_t offset = 0;
    for (size_t nbytes : {size_t{0}, size_t{7}, size_t{64}, size_t{4999}, pool.size() - 9}) {
      copies.push_back({all.subspan(9, nbytes), room.data() + offset, pattern});
      offset += nbytes + 5;  // mostly not aligned to the width
    }
    copies.push_back({all.subspan(0, 800), room.data() + offset, {}});
    const CopiedAll copied = CopyAllAndCount(copies, 2);
    for (size_t i = 0; i + 1 < copies.size(); ++i) {
      CHECK_EQ(Expected(copies[i].source, pattern), copied.matches[i]);
      CHECK_EQ(Crc32c(copies[i].source), copied.crcs[i]);
    }
    CHECK_EQ(uint64_t{0}, copied.matches.back());
  }
}

// In stretches of a cache and pieces of threads, which a range need not fill.
TEST(each_range_is_checked_and_counted_by_itself_in_one_pass) {
  constexpr size_t kSizes[] = {
      0, 8, 24'568, 24'576, 24'584, 100'000, 2 * kPieceBytes + 8, 3 * kPieceBytes};
  const auto all = RandomBytes(3 * kPieceBytes + 64, 5);
  const auto pool = std::span(all);
  for (const ValuePattern& pattern : kAll) {
    std::vector<Bytes> ranges;
    for (size_t i = 0; i < std::size(kSizes); ++i) {
      ranges.push_back(pool.subspan(i % 3 * pattern.width, kSizes[i]));
    }
    std::vector<ValuePattern> patterns(ranges.size(), pattern);
    ranges.push_back(pool.subspan(0, 50'000));
    patterns.push_back({});
    for (int threads : {1, 3}) {
      const CopiedAll found = CheckAllAndCount(ranges, patterns, threads);
      CHECK_EQ(Crc32cOfAll(ranges, threads), found.crcs);
      for (size_t i = 0; i + 1 < ranges.size(); ++i) {
        CHECK_EQ(Expected(ranges[i], pattern), found.matches[i]);
        CHECK_EQ(Crc32c(ranges[i]), found.crcs[i]);
      }
      CHECK_EQ(uint64_t{0}, found.matches.back());
    }
  }
  const std::vector<Bytes> one{pool.subspan(0, 8)};
  const std::vector<ValuePattern> of_no_width{{3, 1, 1}};
  CHECK_THROWS(std::invalid_argument, CheckAllAndCount(one, of_no_width, 1));
  CHECK(CheckAllAndCount({}, {}, 2).crcs.empty());
}

}  // namespace
}  // namespace eckpt
