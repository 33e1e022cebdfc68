// How a list of items is cut into tasks for threads, and their CRCs are joined again. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace eckpt {

// Large enough that starting a task costs nothing beside it, small enough that threads end
// together. A power of two makes joining the CRCs cheap.
inline constexpr size_t kPieceBytes = size_t{1} << 20;

// Bytes [begin, begin + nbytes) of item `item`.
struct Piece {
  size_t item;
  size_t begin;
  size_t nbytes;
};

// Pieces [first, last) of a piece list: what one task does.
struct Batch {
  size_t first;
  size_t last;
};

// Cuts each item into pieces of `piece_bytes` and a rest, in order; an empty item has no piece.
std::vector<Piece> CutIntoPieces(std::span<const size_t> item_bytes, size_t piece_bytes);

// Groups neighbours until a batch has `batch_bytes`: thousands of small pieces make few tasks.
std::vector<Batch> GroupIntoBatches(std::span<const Piece> pieces, size_t batch_bytes);

// The CRC32C of each of `items` items from those of their pieces; 0 for an item without pieces.
std::vector<uint32_t> JoinPieceCrcs(size_t items, std::span<const Piece> pieces,
                                    std::span<const uint32_t> piece_crcs);

}  // namespace eckpt
