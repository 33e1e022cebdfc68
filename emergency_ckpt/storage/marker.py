"""The marker and the checksums of a persistent step. FORMAT.md is the specification."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from emergency_ckpt.core.digested_file import DigestedFile, Versioned
from emergency_ckpt.core.leaf_rules import check_box, check_crc, check_leaves, check_state_size
from emergency_ckpt.core.limits import MAX_ITEMS, MAX_MARKER_BYTES
from emergency_ckpt.core.step_names import is_item_name, leaves_by_item
from emergency_ckpt.core.timeline import check_save
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.json_decoders import decoder_of
from emergency_ckpt.types import Box, LeafSpec, SaveId, ShardId

ITEM = "state"
"""The name of a step's item with the arrays, where no other name was given; that of Orbax's v1."""

_UNNAMED = ("default",)
"""The items of steps whose markers name none."""

OURS = "emergency_ckpt"
"""A key in a step's custom metadata: this package wrote the step, whose marker comes last."""

HOST_STATE = "host_state"
MARKER_NAME = "marker.json"
CHECKSUMS_NAME = "checksums.json"

CHECKSUMS_VERSION = 1

_T = TypeVar("_T")


class TensorsId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of a step's tensors: SHA-256 (hex) of two files that Orbax rewrites per save.

    Attributes:
      metadata: of ``_CHECKPOINT_METADATA`` of the step.
      manifest: of ``manifest.ocdbt`` of the item; with several items, of all the manifests that
        exist, in the order of the items' names.
    """

    metadata: str
    manifest: str


class StepMarker(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """``marker.json``: the proof that a persistent step is complete, and its description.

    Attributes:
      digests: SHA-256 (hex) of each process's document, by process index.
      empty: per process, whether its host state is null.
      leaves: every leaf of the state; zero-size arrays are only here, as Orbax cannot hold them.
      checksums: SHA-256 (hex) of ``checksums.json``.
      tensors: identity of the step's tensors.
      items: names of Orbax's items with the arrays; each of several has the leaves below its name.
    """

    save: SaveId
    digests: tuple[str, ...]
    empty: tuple[bool, ...]
    leaves: tuple[LeafSpec, ...]
    checksums: str
    tensors: TensorsId
    items: tuple[str, ...] = _UNNAMED


_FILE = DigestedFile("marker", StepMarker, limit_bytes=MAX_MARKER_BYTES)


class BoxChecksum(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The CRC32C of the bytes of a box at capture time; ``leaf`` is an index into the leaves."""

    leaf: int
    box: Box
    crc32c: int


class Checksums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``checksums.json``: sorted; a box whose copies differed at capture time has no entry."""

    format: int
    boxes: tuple[BoxChecksum, ...]


def encode_checksums(leaves: Sequence[LeafSpec], crcs: Mapping[ShardId, int]) -> bytes:
    """Return the bytes of ``checksums.json`` for some boxes of ``leaves``."""
    index = {leaf.path: number for number, leaf in enumerate(leaves)}
    boxes = sorted((index[shard.leaf], shard.box, crc) for shard, crc in crcs.items())
    checksums = tuple(BoxChecksum(*box) for box in boxes)
    return msgspec.json.encode(Checksums(CHECKSUMS_VERSION, checksums))


def decode_checksums(data: bytes, marker: StepMarker, target: str) -> dict[ShardId, int]:
    """Return the CRC32C of each shard. CorruptData when the digest is not the marker's."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != marker.checksums:
        problem = "the digest differs"
        raise CorruptData("read", target, problem, expected=marker.checksums, actual=actual)
    if decode_file(data, Versioned, target).format != CHECKSUMS_VERSION:
        raise CorruptData("decode", target, "unknown version", expected=CHECKSUMS_VERSION)
    decoded = decode_file(data, Checksums, target)
    for entry in decoded.boxes:
        if not 0 <= entry.leaf < len(marker.leaves):
            raise CorruptData("decode", target, "it names a leaf that does not exist")
        check_box(marker.leaves[entry.leaf], entry.box, target)
        check_crc(entry.crc32c, target)
    return {ShardId(marker.leaves[box.leaf].path, box.box): box.crc32c for box in decoded.boxes}


def build_marker(
    save: SaveId,
    documents: Mapping[int, tuple[str, bool]],
    leaves: Iterable[LeafSpec],
    checksums: bytes,
    tensors: TensorsId,
    items: tuple[str, ...] = (ITEM,),
) -> bytes:
    """Return the bytes of ``marker.json``.

    ``documents``: (SHA-256 in hex, is empty) of every process's host state, by process index.
    """
    order = range(len(documents))
    marker = StepMarker(
        save=save,
        digests=tuple(documents[i][0] for i in order),
        empty=tuple(documents[i][1] for i in order),
        leaves=tuple(leaves),
        checksums=hashlib.sha256(checksums).hexdigest(),
        tensors=tensors,
        items=_UNNAMED if items == _UNNAMED else items,  # left out if it is the very default
    )
    return _FILE.encode(marker)


def check_marker(data: bytes, step: int, target: str) -> StepMarker:
    """Return the marker of ``step`` from its file. CorruptData when it is damaged or of another."""
    marker = _FILE.decode(data, target)
    try:
        check_save(marker.save)
    except CorruptData as error:
        raise CorruptData("decode", target, error.problem, actual=error.actual) from error
    is_consistent = marker.save.step == step and len(marker.empty) == len(marker.digests)
    if not is_consistent or not _has_valid_items(marker):
        raise CorruptData("decode", target, "the marker contradicts itself")
    check_leaves(marker.leaves, target)
    check_state_size(marker.leaves, target)
    return marker


def _has_valid_items(marker: StepMarker) -> bool:
    """Return whether the names are those of items, and each array that Orbax stores is in one."""
    names = set(marker.items)
    if len(names) < len(marker.items) or len(names) > MAX_ITEMS:
        return False
    stored = stored_leaves(marker)
    in_items = sum(map(len, leaves_by_item(names, stored).values()))
    return all(map(is_item_name, names)) and in_items == len(stored)


def stored_leaves(marker: StepMarker) -> dict[str, LeafSpec]:
    """Return the leaves that Orbax stores, by path: those that have elements."""
    return {leaf.path: leaf for leaf in marker.leaves if 0 not in leaf.global_shape}


def decode_file(data: bytes, kind: type[_T], target: str) -> _T:
    """Decode a small JSON file of the persistent tier. CorruptData is the only error."""
    if len(data) > MAX_MARKER_BYTES:
        raise CorruptData("decode", target, f"it is larger than {MAX_MARKER_BYTES} bytes")
    try:
        return decoder_of(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptData("decode", target, f"not such a file: {error!s:.300}") from error
