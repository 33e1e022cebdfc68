#include "engine/pieces.h"

#include <algorithm>

#include "engine/crc32c_combine.h"

namespace eckpt {

std::vector<Piece> CutIntoPieces(std::span<const size_t> item_bytes, size_t piece_bytes) {
  std::vector<Piece> pieces;
  pieces.reserve(item_bytes.size());
  for (size_t item = 0; item < item_bytes.size(); ++item) {
    for (size_t begin = 0; begin < item_bytes[item];) {
      const size_t nbytes = std::min(piece_bytes, item_bytes[item] - begin);
      pieces.push_back({item, begin, nbytes});
      begin += nbytes;
    }
  }
  return pieces;
}

std::vector<Batch> GroupIntoBatches(std::span<const Piece> pieces, size_t batch_bytes) {
  std::vector<Batch> batches;
  for (size_t first = 0; first < pieces.size();) {
    size_t last = first, nbytes = 0;
    while (last < pieces.size() && nbytes < batch_bytes) nbytes += pieces[last++].nbytes;
    batches.push_back({first, last});
    first = last;
  }
  return batches;
}

std::vector<uint32_t> JoinPieceCrcs(size_t items, std::span<const Piece> pieces,
                                    std::span<const uint32_t> piece_crcs) {
  std::vector<uint32_t> crcs(items, 0);
  for (size_t i = 0; i < pieces.size(); ++i) {
    uint32_t& crc = crcs[pieces[i].item];
    crc =
        pieces[i].begin == 0 ? piece_crcs[i] : Crc32cCombine(crc, piece_crcs[i], pieces[i].nbytes);
  }
  return crcs;
}

}  // namespace eckpt
