// CRC32C of bytes in any division: whole, continued, combined, in pieces, copied, on threads, by
// each implementation; all equal the definition.
#include <algorithm>
#include <numeric>
#include <vector>

#include "engine/bulk.h"
#include "engine/crc32c.h"
#include "engine/crc32c_backend.h"
#include "engine/crc32c_combine.h"
#include "engine/pieces.h"
#include "fuzz/input.h"

namespace eckpt::fuzz {
namespace {

// Above two blocks of three long stripes.
constexpr size_t kMostBytes = 60'000;
// Above a piece (1 MiB), so that threads divide one item.
constexpr size_t kMostDivided = size_t{5} << 18;

void CheckBackends(Input& input) {
  const Bytes bytes = PoolPart(input, kMostBytes);
  const auto before = static_cast<uint32_t>(input.Word(4));
  const uint32_t expected = NaiveCrc32c(bytes, before);
  Expect(Crc32c(bytes, before) == expected, "CRC that continues");
  const size_t misaligned = input.AtMost(130);
  for (const Crc32cBackend& backend : UsableCrc32cBackends()) {
    Expect(~backend.feed(~before, bytes.data(), bytes.size()) == expected, "feed");
    std::vector<std::byte> target(misaligned + bytes.size());  // exact: more is an overflow
    const uint32_t state =
        backend.copy(~before, target.data() + misaligned, bytes.data(), bytes.size());
    Expect(~state == expected, "CRC of a copy");
    Expect(
        std::equal(bytes.begin(), bytes.end(), target.begin() + static_cast<ptrdiff_t>(misaligned)),
        "copy");
    target.resize(misaligned);
    Expect(std::count(target.begin(), target.end(), std::byte{0}) ==
               static_cast<ptrdiff_t>(misaligned),
           "nothing before the target is changed");
  }
}

// Parts of any lengths, each either fed after those before it or combined with them.
void CheckParts(Input& input) {
  Bytes rest = PoolPart(input, kMostBytes);
  const uint32_t expected = NaiveCrc32c(rest);
  uint32_t crc = 0;
  while (!rest.empty()) {
    const uint8_t kind = input.Byte();
    const size_t nbytes = input.done() ? rest.size() : input.AtMost(rest.size());
    const Bytes part = rest.first(nbytes);
    crc = kind & 1 ? Crc32c(part, crc) : Crc32cCombine(crc, Crc32c(part), nbytes);
    rest = rest.subspan(nbytes);
  }
  Expect(crc == expected, "CRC of parts");
}

// Lengths that no buffer has: by the laws that hold for all lengths.
void CheckCombine(Input& input) {
  const auto word = [&] { return static_cast<uint32_t>(input.Word(4)); };
  const uint32_t first = word(), second = word(), third = word();
  const uint64_t nbytes = input.Hostile(1 << 20), more = input.Hostile(1 << 20);
  if (nbytes + more >= nbytes) {
    Expect(Crc32cCombine(Crc32cCombine(first, second, nbytes), third, more) ==
               Crc32cCombine(first, Crc32cCombine(second, third, more), nbytes + more),
           "combining is associative");
  }
  Expect(Crc32cCombine(0, second, nbytes) == second, "nothing before");
  Expect(Crc32cCombine(first, 0, 0) == first, "nothing after");
  const Bytes tail = Pool().first(nbytes % 300);
  Expect(Crc32cCombine(first, NaiveCrc32c(tail), tail.size()) == NaiveCrc32c(tail, first),
         "combined as continued");
}

// The division into tasks: each byte in one piece, each piece in one task, the CRCs of the items.
void CheckPieces(Input& input) {
  const size_t piece_bytes = 1 + input.AtMost(5000), batch_bytes = 1 + input.AtMost(20'000);
  std::vector<size_t> sizes(input.AtMost(20));
  for (size_t& nbytes : sizes) nbytes = input.AtMost(3000);
  const auto pieces = CutIntoPieces(sizes, piece_bytes);
  std::vector<size_t> covered(sizes.size());
  std::vector<uint32_t> crcs, expected;
  for (const Piece& piece : pieces) {
    Expect(piece.nbytes >= 1 && piece.nbytes <= piece_bytes, "size of a piece");
    Expect(piece.item < sizes.size() && piece.begin == covered[piece.item], "order of pieces");
    covered[piece.item] += piece.nbytes;
    crcs.push_back(Crc32c(Pool().subspan(piece.item + piece.begin, piece.nbytes)));
  }
  Expect(covered == sizes, "each byte in one piece");
  size_t next = 0;
  for (const Batch& batch : GroupIntoBatches(pieces, batch_bytes)) {
    Expect(batch.first == next && batch.last > next, "each piece in one task");
    next = batch.last;
  }
  Expect(next == pieces.size(), "all pieces in tasks");
  for (size_t i = 0; i < sizes.size(); ++i) {
    expected.push_back(NaiveCrc32c(Pool().subspan(i, sizes[i])));
  }
  Expect(JoinPieceCrcs(sizes.size(), pieces, crcs) == expected, "CRCs of items from their pieces");
}

// Items on several threads; a large one is divided among them.
void CheckThreads(Input& input) {
  std::vector<Bytes> sources;
  for (size_t count = input.AtMost(4); count != 0; --count) {
    const size_t limit = input.Byte() < 8 ? kMostDivided : 4000;
    sources.push_back(PoolPart(input, limit));
  }
  const int threads = 1 + static_cast<int>(input.AtMost(4));
  const size_t total = std::accumulate(sources.begin(), sources.end(), size_t{0},
                                       [](size_t sum, Bytes each) { return sum + each.size(); });
  std::vector<std::byte> target(total), expected_bytes;
  std::vector<Copy> copies;
  std::vector<uint32_t> expected;
  for (const Bytes source : sources) {
    copies.push_back({source, target.data() + expected_bytes.size()});
    expected_bytes.insert(expected_bytes.end(), source.begin(), source.end());
    expected.push_back(NaiveCrc32c(source));
  }
  Expect(Crc32cOfAll(sources, threads) == expected, "CRCs on threads");
  Expect(CopyAllWithCrc32c(copies, threads) == expected, "CRCs of copies on threads");
  Expect(target == expected_bytes, "copies on threads");
}

void Run(Input input) {
  for (int calls = 0; calls < 4 && !input.done(); ++calls) {
    switch (input.Byte() % 5) {
      case 0:
        CheckBackends(input);
        break;
      case 1:
        CheckParts(input);
        break;
      case 2:
        CheckCombine(input);
        break;
      case 3:
        CheckPieces(input);
        break;
      default:
        CheckThreads(input);
    }
  }
}

}  // namespace
}  // namespace eckpt::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  eckpt::fuzz::Run({data, nbytes});
  return 0;
}
