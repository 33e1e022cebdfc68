"""Manifest files: what one process published for one step. FORMAT.md is the specification.

The decoder trusts nothing: every length is bounded before it is used, digests are taken over the
bytes as they lie in the file, and ``CorruptData`` with one reason is the only thing it raises.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TypeVar

import msgspec

from emergency_ckpt.errors import CorruptData
from emergency_ckpt.types import (
    SHARD_ALIGNMENT_BYTES,
    Box,
    Contents,
    LeafSpec,
    Manifest,
    SaveId,
    ShardEntry,
    ShardId,
    Writer,
)

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
MAX_SHARDS = 1_000_000
MAX_LEAVES = 1_000_000
MAX_DIMENSIONS = 32
MAX_PATH_CHARS = 4096
MAX_NAME_CHARS = 255
MAX_INT = (1 << 63) - 1

NAME_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Run ids and incarnations: safe as one component of a path, and never hidden."""

_T = TypeVar("_T")

DTYPE_ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int1", "uint1", "int2", "uint2", "int4", "uint4"), 1),
    **dict.fromkeys(("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4"), 1),
    **dict.fromkeys(("float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one stored element of each dtype that may be stored."""


class PlacedShard(msgspec.Struct, frozen=True):
    """A shard and its place in a slot, before its CRC is known."""

    shard: ShardId
    offset: int
    nbytes: int


class Layout(msgspec.Struct, frozen=True):
    """Places of all shards of one process, in manifest order, and the bytes they need."""

    shards: tuple[PlacedShard, ...]
    size_bytes: int


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


class _FormatOnly(msgspec.Struct, frozen=True):
    format: int


def shard_nbytes(spec: LeafSpec, box: Box) -> int:
    """Bytes of the part ``box`` of leaf ``spec`` as stored. KeyError for an unknown dtype."""
    return prod(stop - start for start, stop in box) * DTYPE_ITEM_BYTES[spec.dtype]


def lay_out(leaves: Sequence[LeafSpec], shards: Iterable[tuple[ShardId, int]]) -> Layout:
    """Give each (shard, nbytes) its offset: in order of (leaf path, box), aligned up to 64 bytes.

    Pure, and independent of the order of ``shards``, so that replicas that store the same
    shards get equal contents. ValueError for a duplicate, an unknown leaf or a wrong ``nbytes``.
    """
    specs = {spec.path: spec for spec in leaves}
    placed: list[PlacedShard] = []
    end = 0
    for shard, nbytes in sorted(shards):
        if placed and placed[-1].shard == shard:
            raise ValueError(f"lay out {shard}: named twice")
        if shard.leaf not in specs:
            raise ValueError(f"lay out {shard}: its leaf is not among the leaves")
        expected = shard_nbytes(specs[shard.leaf], shard.box)
        if nbytes != expected:
            raise ValueError(f"lay out {shard}: {nbytes} bytes given, its box has {expected}")
        offset = -(-end // SHARD_ALIGNMENT_BYTES) * SHARD_ALIGNMENT_BYTES
        placed.append(PlacedShard(shard=shard, offset=offset, nbytes=nbytes))
        end = offset + nbytes
    return Layout(shards=tuple(placed), size_bytes=end)


def build_contents(
    save: SaveId, leaves: Iterable[LeafSpec], layout: Layout, crcs: Sequence[int]
) -> Contents:
    """Put leaves (any order), a layout and the CRC32C of each of its shards together."""
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
    """Canonical JSON: UTF-8, keys sorted, no spaces. Equal contents give equal bytes."""
    try:
        return msgspec.json.encode(contents, order="sorted")
    except UnicodeEncodeError as error:
        raise _corrupt("a name is not valid Unicode", None, error.object) from error


def contents_digest(encoded: bytes) -> str:
    """SHA-256 (hex) of encoded contents: the name that planner and peers use for them."""
    return hashlib.sha256(encoded).hexdigest()


def decode_contents(encoded: bytes, expected_digest: str | None = None) -> Contents:
    """Contents from their encoding, checked. ``CorruptData`` is the only error."""
    _check_size(encoded, "decode contents")
    if expected_digest is not None and (actual := contents_digest(encoded)) != expected_digest:
        raise _corrupt("contents digest differs", expected_digest, actual)
    parts = _decode(encoded, _ContentsParts)
    check_save(parts.save)
    leaves = _decode_leaves(bytes(parts.leaves))
    _check_shards(leaves, parts.shards)
    _share_boxes(parts.shards)
    return Contents(save=parts.save, leaves=leaves, shards=parts.shards)


def _share_boxes(shards: Sequence[ShardEntry]) -> None:
    """Equal boxes become one object: leaves of one shape have equal ones, and there are few shapes.

    More than half of a decoded manifest is boxes, and the leader of a large job holds thousands.
    """
    seen: dict[Box, Box] = {}
    for entry in shards:
        first = seen.setdefault(entry.box, entry.box)
        if first is not entry.box:
            # Nobody else has the entry yet, and it stays equal to what it was.
            msgspec.structs.force_setattr(entry, "box", first)


@lru_cache(maxsize=4)
def _decode_leaves(encoded: bytes) -> tuple[LeafSpec, ...]:
    """Leaves, checked. The manifests of a job all have the same: they share one object."""
    leaves = _decode(encoded, tuple[LeafSpec, ...])
    _check_leaves(leaves)
    return leaves


def encode_manifest(contents: Contents, writer: Writer) -> bytes:
    """The bytes of a manifest file. ``CorruptData`` when the contents break a rule or a limit."""
    check_contents(contents)
    _check_writer(writer)
    return wrap_contents(encode_contents(contents), writer)


def wrap_contents(encoded_contents: bytes, writer: Writer) -> bytes:
    """A manifest file around contents that are encoded and checked already."""
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


def decode_manifest(data: bytes) -> tuple[Manifest, bytes]:
    """A manifest and the encoded contents inside it, from the bytes of a file.

    Checks the version, both digests and every rule of FORMAT.md, not the CRCs of the slot.
    ``CorruptData`` is the only error.
    """
    _check_size(data, "decode manifest")
    version = _decode(data, _FormatOnly).format
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
    manifest = Manifest(contents_digest=body.contents_digest, contents=contents, writer=body.writer)
    return manifest, encoded


def check_save(save: SaveId) -> None:
    """``CorruptData`` unless the parts of a save's identity are in bounds."""
    _check(0 <= save.step <= MAX_INT, "step out of bounds", save.step)
    _check(NAME_PATTERN.fullmatch(save.run_id), "run id is not a plain name", save.run_id)
    plain = NAME_PATTERN.fullmatch(save.incarnation)
    _check(plain, "incarnation is not a plain name", save.incarnation)


def check_contents(contents: Contents) -> None:
    """``CorruptData`` unless ``contents`` keep every rule and limit of FORMAT.md."""
    check_save(contents.save)
    _check_leaves(contents.leaves)
    _check_shards(contents.leaves, contents.shards)


def _check_leaves(leaves: Sequence[LeafSpec]) -> None:
    _check(len(leaves) <= MAX_LEAVES, "too many leaves", len(leaves))
    previous_path: str | None = None
    for spec in leaves:
        _check_leaf(spec, previous_path)
        previous_path = spec.path


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
    """First byte of a slot that no shard uses: the least size of a slot that holds these."""
    return contents.shards[-1].offset + contents.shards[-1].nbytes if contents.shards else 0


def _check_leaf(spec: LeafSpec, previous_path: str | None) -> None:
    # Written out, as is _check_shard: both run for each shard of each save.
    shape, impl = spec.global_shape, spec.key_impl
    if len(spec.path) > MAX_PATH_CHARS:
        raise _corrupt("leaf path too long", MAX_PATH_CHARS, len(spec.path))
    if previous_path is not None and previous_path >= spec.path:
        raise _corrupt("leaves are not sorted by path", None, spec.path)
    if spec.dtype not in DTYPE_ITEM_BYTES:
        raise _corrupt("unknown dtype", None, spec.dtype)
    if len(shape) > MAX_DIMENSIONS:
        raise _corrupt("too many dimensions", MAX_DIMENSIONS, len(shape))
    if shape and not (min(shape) >= 0 and max(shape) <= MAX_INT):
        raise _corrupt("dimension out of bounds", None, shape)
    if impl is not None and len(impl) > MAX_NAME_CHARS:
        raise _corrupt("key_impl too long", MAX_NAME_CHARS, len(impl))


def _check_shard(spec: LeafSpec, entry: ShardEntry, end: int) -> None:
    if len(entry.box) != len(spec.global_shape):
        raise _corrupt("box of another rank", len(spec.global_shape), len(entry.box))
    elements = 1
    for (start, stop), dim in zip(entry.box, spec.global_shape, strict=True):
        if not 0 <= start <= stop <= dim:
            raise _corrupt("box is not inside the global shape", spec.global_shape, entry.box)
        elements *= stop - start
    expected = elements * DTYPE_ITEM_BYTES[spec.dtype]
    if entry.nbytes != expected or expected > MAX_INT:
        raise _corrupt("length does not fit the box", expected, entry.nbytes)
    if entry.offset % SHARD_ALIGNMENT_BYTES:
        raise _corrupt("offset is not aligned", None, entry.offset)
    if not end <= entry.offset <= MAX_INT:
        raise _corrupt("shard overlaps another", f"an offset from {end}", entry.offset)
    if not 0 <= entry.crc32c <= 0xFFFFFFFF:
        raise _corrupt("CRC32C out of bounds", None, entry.crc32c)


def _check_writer(writer: Writer) -> None:
    numbers = (writer.process_index, writer.process_count, writer.slice_index)
    _check(all(0 <= number <= MAX_INT for number in numbers), "writer out of bounds", numbers)
    _check(len(writer.hostname) <= MAX_NAME_CHARS, "hostname too long", len(writer.hostname))


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
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptData("decode", "manifest", f"not a manifest: {_brief(error)}") from error


def _check(condition: object, problem: str, actual: object) -> None:
    if not condition:
        raise CorruptData("decode", "manifest", problem, actual=_brief(actual))


def _corrupt(problem: str, expected: object, actual: object) -> CorruptData:
    expected = None if expected is None else _brief(expected)
    return CorruptData("decode", "manifest", problem, expected=expected, actual=_brief(actual))


def _brief(value: object) -> str:
    # Values may come from a hostile file: an error message stays short.
    try:
        return str(value)[:200]
    except ValueError:  # an integer beyond the interpreter's limit for printing
        return "a number too long to print"
