#include "engine/crc32c.h"

#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

#include "engine/crc32c_backend.h"
#include "engine/crc32c_combine.h"
#include "tests/check.h"
#include "tests/random_bytes.h"

namespace eckpt {
namespace {

using testing::RandomBytes;

std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// RFC 3720, appendix B.4.
TEST(check_vectors_of_rfc_3720) {
  std::vector<std::byte> zeros(32), ones(32, std::byte{0xff}), up(32), down(32);
  for (size_t i = 0; i < 32; ++i) {
    up[i] = static_cast<std::byte>(i);
    down[i] = static_cast<std::byte>(31 - i);
  }
  CHECK_EQ(0x8a9136aau, Crc32c(zeros));
  CHECK_EQ(0x62a8ab43u, Crc32c(ones));
  CHECK_EQ(0x46dd794eu, Crc32c(up));
  CHECK_EQ(0x113fdb5cu, Crc32c(down));
  constexpr unsigned char kRead10[] = {0x01, 0xc0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
                                       0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00,
                                       0x00, 0x00, 0x04, 0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00,
                                       0x00, 0x18, 0x28, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
                                       0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};
  CHECK_EQ(0xd9963a56u, Crc32c(std::as_bytes(std::span(kRead10))));
  CHECK_EQ(0xe3069283u, Crc32c(AsBytes("123456789")));
  CHECK_EQ(0u, Crc32c({}));
}

TEST(the_portable_one_is_always_usable_and_last) {
  CHECK_EQ(std::string_view("portable"), std::string_view(UsableCrc32cBackends().back().name));
  CHECK_EQ(std::string_view(UsableCrc32cBackends().front().name),
           std::string_view(Crc32cImplementation()));
}

// Lengths on both sides of each loop's bounds: words, lines, short and long blocks of three.
std::vector<size_t> InterestingLengths() {
  std::vector<size_t> lengths;
  for (size_t n = 0; n < 200; ++n) lengths.push_back(n);
  for (size_t edge : {1536, 3072, 3 * 8192, 6 * 8192, 9 * 8192, 100'000}) {
    for (size_t n : {edge - 65, edge - 1, edge, edge + 1, edge + 63, edge + 64, edge + 1000}) {
      lengths.push_back(n);
    }
  }
  return lengths;
}

TEST(every_implementation_feeds_as_the_portable_one) {
  const auto data = RandomBytes(110'000, 1);
  for (const Crc32cBackend& backend : UsableCrc32cBackends()) {
    for (size_t nbytes : InterestingLengths()) {
      const size_t at = nbytes % 67;
      const uint32_t state = static_cast<uint32_t>(nbytes * 2654435761u);
      CHECK_EQ(Crc32cPortable()->feed(state, data.data() + at, nbytes),
               backend.feed(state, data.data() + at, nbytes));
    }
  }
}

TEST(every_implementation_copies_exactly_the_range_at_any_alignment) {
  const auto source = RandomBytes(110'000, 2);
  for (const Crc32cBackend& backend : UsableCrc32cBackends()) {
    for (size_t nbytes : InterestingLengths()) {
      const size_t from = nbytes % 61, to = (nbytes * 7) % 71;
      std::vector<std::byte> target(to + nbytes + 64, std::byte{0x5a});
      const uint32_t state = backend.copy(~0u, target.data() + to, source.data() + from, nbytes);
      CHECK_EQ(Crc32cPortable()->feed(~0u, source.data() + from, nbytes), state);
      CHECK(std::equal(target.begin() + to, target.begin() + to + nbytes, source.begin() + from));
      const auto untouched = [](std::byte byte) { return byte == std::byte{0x5a}; };
      CHECK(std::all_of(target.begin(), target.begin() + to, untouched));
      CHECK(std::all_of(target.begin() + to + nbytes, target.end(), untouched));
    }
  }
}

TEST(every_implementation_takes_an_empty_range_without_an_address) {
  for (const Crc32cBackend& backend : UsableCrc32cBackends()) {
    CHECK_EQ(7u, backend.feed(7, nullptr, 0));
    CHECK_EQ(7u, backend.copy(7, nullptr, nullptr, 0));
  }
  CHECK_EQ(0u, CopyWithCrc32c(nullptr, {}));
}

TEST(a_crc_continues_from_a_value) {
  const auto data = RandomBytes(5000, 3);
  const std::span<const std::byte> all(data);
  for (size_t cut : {0, 1, 63, 64, 2500, 4999, 5000}) {
    CHECK_EQ(Crc32c(all), Crc32c(all.subspan(cut), Crc32c(all.first(cut))));
  }
}

TEST(combined_parts_equal_the_whole) {
  const auto data = RandomBytes(70'000, 4);
  const std::span<const std::byte> all(data);
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    const size_t nbytes = random() % data.size(), cut = nbytes == 0 ? 0 : random() % nbytes;
    const auto part = all.first(nbytes);
    CHECK_EQ(Crc32c(part),
             Crc32cCombine(Crc32c(part.first(cut)), Crc32c(part.subspan(cut)), nbytes - cut));
  }
}

TEST(combining_is_associative_for_lengths_that_no_buffer_has) {
  constexpr uint64_t kHuge = uint64_t{1} << 63;
  constexpr uint32_t a = 0x12345678, b = 0x9abcdef0, c = 0x0fedcba9;
  CHECK_EQ(Crc32cCombine(Crc32cCombine(a, b, kHuge), c, kHuge - 1),
           Crc32cCombine(a, Crc32cCombine(b, c, kHuge - 1), ~uint64_t{0}));
  CHECK_EQ(b, Crc32cCombine(0, b, ~uint64_t{0}));
  CHECK_EQ(a, Crc32cCombine(a, 0, 0));
}

}  // namespace
}  // namespace eckpt
