"""Manifest files: the description of one step of one process. FORMAT.md is the specification.

The decoder treats the file as hostile: every length is bounded before use, digests cover the bytes
of the file as read, and the only error is CorruptData with one reason.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

import msgspec

from emergency_ckpt.core.digested_file import Versioned
from emergency_ckpt.core.leaf_rules import check_box, check_crc, check_leaves, corrupt
from emergency_ckpt.core.limits import (
    MAX_INT,
    MAX_LABEL_CHARS,
    MAX_MANIFEST_BYTES,
    MAX_SHARDS,
)
from emergency_ckpt.core.shard_layout import Layout, shard_nbytes
from emergency_ckpt.core.timeline import check_save
from emergency_ckpt.core.wording import short_text
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.json_decoders import decoder_of
from emergency_ckpt.types import (
    SHARD_ALIGNMENT_BYTES,
    Box,
    Contents,
    LeafSpec,
    SaveId,
    ShardEntry,
    Writer,
)

FORMAT_VERSION = 1
_T = TypeVar("_T")


class Published(msgspec.Struct, frozen=True):
    """The contents of a slot, and their encoding, whose SHA-256 is ``digest``.

    Planner and peers refer to the contents by the digest, which is equal for replicas. ``writer``:
    the process that published them, as read from the manifest.
    """

    digest: str
    encoded: bytes
    contents: Contents
    writer: Writer | None = None

    @property
    def save(self) -> SaveId:
        return self.contents.save


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    digest: str
    manifest: msgspec.Raw


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    contents_digest: str
    contents: msgspec.Raw
    writer: Writer


class _ContentsParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    save: SaveId
    leaves: msgspec.Raw
    shards: tuple[ShardEntry, ...]


def build_contents(
    save: SaveId, leaves: Iterable[LeafSpec], layout: Layout, crcs: Sequence[int]
) -> Contents:
    """Build contents from leaves (in any order), a layout and the CRC32C of each of its shards."""
    ordered = tuple(sorted(leaves, key=lambda spec: spec.path))
    index = {spec.path: number for number, spec in enumerate(ordered)}
    entries = tuple(
        ShardEntry(
            leaf=index[placed.shard.leaf],
            box=placed.shard.box,
            offset=placed.offset,
            nbytes=placed.nbytes,
            crc32c=crc,
        )
        for placed, crc in zip(layout.shards, crcs, strict=True)
    )
    return Contents(save=save, leaves=ordered, shards=entries)


def encode_contents(contents: Contents) -> bytes:
    """Return canonical JSON: UTF-8, keys sorted, no spaces. Equal contents give equal bytes."""
    try:
        return msgspec.json.encode(contents, order="sorted")
    except UnicodeEncodeError as error:
        raise _corrupt("a name is not valid Unicode", None, error.object) from error


def contents_digest(encoded: bytes) -> str:
    """Return the SHA-256 (hex) of encoded contents: the name that planner and peers use."""
    return hashlib.sha256(encoded).hexdigest()


def decode_contents(encoded: bytes, expected_digest: str | None = None) -> Contents:
    """Return checked contents from their encoding. CorruptData is the only error."""
    _check_size(encoded, "decode contents")
    if expected_digest is not None and (actual := contents_digest(encoded)) != expected_digest:
        raise _corrupt("contents digest differs", expected_digest, actual)
    parts = _decode(encoded, _ContentsParts)
    check_save(parts.save)
    leaves = _decode_leaves(bytes(parts.leaves))
    _share_boxes(parts.shards)
    _check_shards(leaves, parts.shards)
    return Contents(save=parts.save, leaves=leaves, shards=parts.shards)


def _share_boxes(shards: Sequence[ShardEntry]) -> None:
    """Replace equal boxes by one object, since leaves of one shape have equal boxes.

    More than half of a decoded manifest is boxes, and the leader of a large job holds thousands.
    """
    seen: dict[Box, Box] = {}
    for entry in shards:
        first = seen.setdefault(entry.box, entry.box)
        if first is not entry.box:
            # No other code has the entry yet, and it stays equal.
            msgspec.structs.force_setattr(entry, "box", first)


@lru_cache(maxsize=4)
def _decode_leaves(encoded: bytes) -> tuple[LeafSpec, ...]:
    """Return checked leaves. All manifests of a job have the same, so they share one object."""
    leaves = _decode(encoded, tuple[LeafSpec, ...])
    _check_leaves(leaves)
    return leaves


def wrap_contents(encoded_contents: bytes, writer: Writer) -> bytes:
    """Return the bytes of a manifest file for contents that are already encoded and checked."""
    body = msgspec.json.encode(
        _Body(
            contents_digest=contents_digest(encoded_contents),
            contents=msgspec.Raw(encoded_contents),
            writer=writer,
        ),
        order="sorted",
    )
    digest = hashlib.sha256(body).hexdigest()
    envelope = _Envelope(format=FORMAT_VERSION, digest=digest, manifest=msgspec.Raw(body))
    data = msgspec.json.encode(envelope, order="sorted")
    _check_size(data, "encode manifest")
    return data


def decode_manifest(data: bytes) -> Published:
    """Return what the manifest of a file says is published.

    Checks the version, both digests and every rule of FORMAT.md, not the CRCs of the slot.
    CorruptData is the only error.
    """
    _check_size(data, "decode manifest")
    version = _decode(data, Versioned).format
    if version != FORMAT_VERSION:
        raise _corrupt("unknown format version", FORMAT_VERSION, version)
    envelope = _decode(data, _Envelope)
    body_bytes = bytes(envelope.manifest)
    actual = hashlib.sha256(body_bytes).hexdigest()
    if actual != envelope.digest:
        raise _corrupt("manifest digest differs", envelope.digest, actual)
    body = _decode(body_bytes, _Body)
    _check_writer(body.writer)
    encoded = bytes(body.contents)
    contents = decode_contents(encoded, body.contents_digest)
    return Published(body.contents_digest, encoded, contents, body.writer)


def check_contents(contents: Contents) -> None:
    """Raise CorruptData unless ``contents`` keep every rule and limit of FORMAT.md."""
    check_save(contents.save)
    _check_leaves(contents.leaves)
    _check_shards(contents.leaves, contents.shards)


def _check_leaves(leaves: Sequence[LeafSpec]) -> None:
    check_leaves(leaves, "manifest")
    for before, after in itertools.pairwise(leaves):
        if before.path >= after.path:
            raise _corrupt("leaves are not sorted by path", None, after.path)


def _check_shards(leaves: Sequence[LeafSpec], shards: Sequence[ShardEntry]) -> None:
    _check(len(shards) <= MAX_SHARDS, "too many shards", len(shards))
    end = 0
    previous: tuple[int, Box] | None = None
    for entry in shards:
        key = (entry.leaf, entry.box)
        if not 0 <= entry.leaf < len(leaves):
            raise _corrupt("leaf index out of bounds", None, entry.leaf)
        if previous is not None and previous >= key:
            raise _corrupt("shards are not sorted", None, key)
        _check_shard(leaves[entry.leaf], entry, end)
        previous = key
        end = entry.offset + entry.nbytes


def end_of(contents: Contents) -> int:
    """Return the end of the last shard in bytes: the least size of a slot for these contents."""
    return contents.shards[-1].offset + contents.shards[-1].nbytes if contents.shards else 0


def _check_shard(spec: LeafSpec, entry: ShardEntry, end: int) -> None:
    check_box(spec, entry.box, "manifest")
    expected = shard_nbytes(spec, entry.box)
    if entry.nbytes != expected or expected > MAX_INT:
        raise _corrupt("length does not fit the box", expected, entry.nbytes)
    if entry.offset % SHARD_ALIGNMENT_BYTES:
        raise _corrupt("offset is not aligned", None, entry.offset)
    if not end <= entry.offset <= MAX_INT:
        raise _corrupt("shard overlaps another", f"an offset from {end}", entry.offset)
    check_crc(entry.crc32c, "manifest")


def _check_writer(writer: Writer) -> None:
    numbers = (writer.process_index, writer.process_count, writer.slice_index)
    _check(all(0 <= number <= MAX_INT for number in numbers), "writer out of bounds", numbers)
    _check(len(writer.hostname) <= MAX_LABEL_CHARS, "hostname too long", len(writer.hostname))


def _check_size(data: bytes, operation: str) -> None:
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptData(
            operation,
            "manifest",
            "it is over the limit of the format",
            expected=f"at most {MAX_MANIFEST_BYTES} bytes",
            actual=f"{len(data)} bytes",
        )


def _decode(data: bytes, type_: type[_T]) -> _T:
    try:
        return decoder_of(type_).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptData("decode", "manifest", f"not a manifest: {short_text(error)}") from error


def _check(condition: object, problem: str, actual: object) -> None:
    if not condition:
        raise CorruptData("decode", "manifest", problem, actual=short_text(actual))


def _corrupt(problem: str, expected: object, actual: object) -> CorruptData:
    return corrupt("manifest", problem, expected, actual)
