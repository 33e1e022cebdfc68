"""Manifest files: the description of one step of one process. FORMAT.md is the specification.

The decoder treats the file as hostile: every length is bounded before use, digests cover the bytes
of the file as read, and the only error is CorruptData with one reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from itertools import count, islice, pairwise, starmap
from operator import add, attrgetter, le, lt
from typing import Generic, TypeVar

import msgspec

from emergency_ckpt.core.digested_file import Versioned
from emergency_ckpt.core.limits import (
    MAX_DIMENSIONS,
    MAX_INT,
    MAX_LABEL_CHARS,
    MAX_LEAVES,
    MAX_MANIFEST_BYTES,
    MAX_PATH_CHARS,
    MAX_SHARDS,
)
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES, Layout
from emergency_ckpt.core.timeline import check_save
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.json_decoders import decoder_of
from emergency_ckpt.types import (
    SHARD_ALIGNMENT_BYTES,
    Box,
    Contents,
    LeafSpec,
    Manifest,
    SaveId,
    ShardEntry,
    Writer,
)

FORMAT_VERSION = 1
_MAX_CRC = 0xFFFFFFFF
_CHUNK = 512
"""Shards that are checked together: few enough to stay in the processor's cache."""
_LEAF, _BOX, _OFFSET, _NBYTES, _CRC = map(attrgetter, ("leaf", "box", "offset", "nbytes", "crc32c"))
_UNALIGNED = (SHARD_ALIGNMENT_BYTES - 1).__and__
_T = TypeVar("_T")
_K = TypeVar("_K")


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
    ordered, index = _in_order(tuple(leaves))
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


class _OfLast(Generic[_K, _T]):
    """A function that costs nothing for the very object it was given last. From any thread."""

    def __init__(self, function: Callable[[_K], _T]) -> None:
        self._function = function
        self._last: tuple[_K, _T] | None = None

    def __call__(self, given: _K) -> _T:
        last = self._last
        if last is None or last[0] is not given:
            last = self._last = (given, self._function(given))
        return last[1]


@_OfLast
def _in_order(
    leaves: tuple[LeafSpec, ...],
) -> tuple[tuple[LeafSpec, ...], dict[str, int]]:
    """Return the leaves in order, and the number of each path."""
    ordered = tuple(sorted(leaves, key=lambda spec: spec.path))
    return ordered, {spec.path: number for number, spec in enumerate(ordered)}


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


def decode_manifest(data: bytes) -> tuple[Manifest, bytes]:
    """Return the manifest of a file, and the encoded contents in it.

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
    manifest = Manifest(contents_digest=body.contents_digest, contents=contents, writer=body.writer)
    return manifest, encoded


def check_contents(contents: Contents) -> None:
    """Raise CorruptData unless ``contents`` keep every rule and limit of FORMAT.md."""
    check_save(contents.save)
    _check_leaves(contents.leaves)
    _check_shards(contents.leaves, contents.shards)


def _check_leaves(leaves: Sequence[LeafSpec]) -> None:
    _check(len(leaves) <= MAX_LEAVES, "too many leaves", len(leaves))
    previous_path: str | None = None
    for spec in leaves:
        _check_leaf(spec, previous_path)
        previous_path = spec.path


def _check_shards(leaves: tuple[LeafSpec, ...], shards: Sequence[ShardEntry]) -> None:
    _check(len(shards) <= MAX_SHARDS, "too many shards", len(shards))
    are_alike = True
    for start in range(0, len(shards), _CHUNK):
        # With the shard before, which they must come after.
        some = shards[max(0, start - 1) : start + _CHUNK]
        are_alike = are_alike and _are_sound(leaves, some)
        if not are_alike:
            _check_each_shard(leaves, some)


def _are_sound(leaves: tuple[LeafSpec, ...], shards: Sequence[ShardEntry]) -> bool:
    """Return True for shards of few kinds that keep every rule of ``_check_each_shard``.

    Looks at one field of all of them at a time, and at one shard of each kind, which takes half the
    time: of each save in the background, and of the leader of a restore for every process.
    """
    numbers, boxes = list(map(_LEAF, shards)), list(map(_BOX, shards))
    offsets, sizes = list(map(_OFFSET, shards)), list(map(_NBYTES, shards))
    if not _are_within(numbers, len(leaves) - 1):
        return False
    kinds = _one_of_each_kind(_kinds_of(leaves), numbers, boxes, sizes)
    if len(kinds) > len(shards) // 2 + 1:
        return False
    for place in kinds:
        _check_shard(leaves[numbers[place]], shards[place], 0)
    return (
        _are_within(list(map(_CRC, shards)), _MAX_CRC)
        and _are_within(offsets, MAX_INT)
        and not any(map(_UNALIGNED, offsets))
        and all(map(le, map(add, offsets, sizes), islice(offsets, 1, None)))
        and (
            all(map(lt, numbers, islice(numbers, 1, None)))
            or all(starmap(lt, pairwise(zip(numbers, boxes, strict=True))))
        )
    )


def _are_within(values: Sequence[int], most: int) -> bool:
    return min(values) >= 0 and max(values) <= most


def _one_of_each_kind(
    kinds: Sequence[int], numbers: Iterable[int], boxes: Iterable[Box], sizes: Iterable[int]
) -> Collection[int]:
    """Return the place of one shard of each shape, dtype, box and length."""
    # Boxes by identity, since equal boxes of a manifest are one object.
    alike = zip(map(kinds.__getitem__, numbers), map(id, boxes), sizes, strict=True)
    return dict(zip(alike, count(), strict=False)).values()


@_OfLast
def _kinds_of(leaves: tuple[LeafSpec, ...]) -> list[int]:
    """Return a number for each leaf, equal for those of one shape and dtype."""
    seen: dict[tuple[tuple[int, ...], str], int] = {}
    return [seen.setdefault((s.global_shape, s.dtype), len(seen)) for s in leaves]


def _check_each_shard(leaves: Sequence[LeafSpec], shards: Sequence[ShardEntry]) -> None:
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


def _check_leaf(spec: LeafSpec, previous_path: str | None) -> None:
    # Inlined for speed, as is _check_shard: both may run for each shard of each save.
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
    if impl is not None and len(impl) > MAX_LABEL_CHARS:
        raise _corrupt("key_impl too long", MAX_LABEL_CHARS, len(impl))


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
    if not 0 <= entry.crc32c <= _MAX_CRC:
        raise _corrupt("CRC32C out of bounds", None, entry.crc32c)


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
