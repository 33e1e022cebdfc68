// The division of items into tasks for threads, and the combination of their CRCs. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace eckpt {

// Large enough that the start of a task costs little in comparison, small enough that threads end
// together. With a power of two the CRCs are cheap to combine.
inline constexpr size_t kPieceBytes = size_t{1} << 20;

// Bytes [begin, begin + nbytes) of item `item`.
struct Piece {
  size_t item;
  size_t begin;
  size_t nbytes;
};

// Pieces [first, last) of a piece list: one task.
struct Batch {
  size_t first;
  size_t last;
};

// Divides each item into pieces of `piece_bytes` and a rest, in order; an empty item has no piece.
std::vector<Piece> CutIntoPieces(std::span<const size_t> item_bytes, size_t piece_bytes);

// Groups adjacent pieces until a batch has `batch_bytes`, so that thousands of small ones make few
// tasks.
std::vector<Batch> GroupIntoBatches(std::span<const Piece> pieces, size_t batch_bytes);

// Returns the CRC32C of each of `items` items from those of their pieces; 0 without pieces.
std::vector<uint32_t> JoinPieceCrcs(size_t items, std::span<const Piece> pieces,
                                    std::span<const uint32_t> piece_crcs);

}  // namespace eckpt
