#include "engine/pieces.h"

#include "engine/crc32c.h"
#include "tests/check.h"
#include "tests/random_bytes.h"

namespace eckpt {
namespace {

TEST(pieces_cover_every_byte_once_and_in_order) {
  const std::vector<size_t> item_bytes{0, 1, 10, 20, 21, 0, 5, 0};
  const auto pieces = CutIntoPieces(item_bytes, 10);
  std::vector<size_t> covered(item_bytes.size(), 0);
  for (const Piece& piece : pieces) {
    CHECK(piece.nbytes >= 1 && piece.nbytes <= 10);
    CHECK_EQ(covered[piece.item], piece.begin);
    covered[piece.item] += piece.nbytes;
  }
  CHECK_EQ(item_bytes, covered);
  CHECK_EQ(size_t{8}, pieces.size());
}

TEST(batches_hold_every_piece_once_and_few_when_pieces_are_small) {
  const std::vector<size_t> item_bytes(5000, 8);
  const auto pieces = CutIntoPieces(item_bytes, kPieceBytes);
  CHECK_EQ(size_t{1}, GroupIntoBatches(pieces, kPieceBytes).size());
  const auto batches = GroupIntoBatches(pieces, 100);
  size_t next = 0;
  for (const Batch& batch : batches) {
    CHECK_EQ(next, batch.first);
    CHECK(batch.last > batch.first && batch.last - batch.first <= 13);
    next = batch.last;
  }
  CHECK_EQ(pieces.size(), next);
  CHECK(GroupIntoBatches({}, 100).empty());
}

TEST(joined_crcs_equal_those_of_the_items) {
  const std::vector<size_t> item_bytes{0, 1000, 1, 0, 333, 64};
  for (size_t piece_bytes : {1, 7, 64, 999, 1000, 5000}) {
    const auto pieces = CutIntoPieces(item_bytes, piece_bytes);
    std::vector<std::vector<std::byte>> items;
    for (size_t nbytes : item_bytes) {
      items.push_back(testing::RandomBytes(nbytes, static_cast<uint32_t>(nbytes)));
    }
    std::vector<uint32_t> piece_crcs, expected;
    for (const Piece& piece : pieces) {
      piece_crcs.push_back(Crc32c(std::span(items[piece.item]).subspan(piece.begin, piece.nbytes)));
    }
    for (const auto& item : items) expected.push_back(Crc32c(item));
    CHECK_EQ(expected, JoinPieceCrcs(items.size(), pieces, piece_crcs));
  }
}

}  // namespace
}  // namespace eckpt
