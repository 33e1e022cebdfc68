"""Manifests: canonical, exact, and nothing but CorruptData for what is wrong."""

from __future__ import annotations

import json

import msgspec
import pytest
from golden_example import contents as golden_contents
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GOLDEN

from emergency_ckpt.core.limits import MAX_MANIFEST_BYTES
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES, lay_out, shard_nbytes
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.ram import build_contents, contents_digest
from emergency_ckpt.ram.manifest import (
    check_contents,
    decode_contents,
    decode_manifest,
    encode_contents,
    wrap_contents,
)
from emergency_ckpt.types import Contents, LeafSpec, SaveId, ShardEntry, ShardId, Writer

MANIFEST = (GOLDEN / "manifest_v1.json").read_bytes()

names = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True)
saves = st.builds(SaveId, step=st.integers(0, (1 << 63) - 1), incarnation=names, run_id=names)
paths = st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12
)  # any Unicode but lone surrogates
writers = st.builds(
    Writer,
    process_index=st.integers(0, 1 << 20),
    process_count=st.integers(0, 1 << 20),
    slice_index=st.integers(0, 1 << 20),
    hostname=paths,
)


@st.composite
def leaf_and_boxes(draw: st.DrawFn) -> tuple[LeafSpec, list[ShardId]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    spec = LeafSpec(
        path=draw(paths),
        dtype=draw(st.sampled_from(sorted(DTYPE_ITEM_BYTES))),
        global_shape=shape,
        key_impl=draw(st.none() | st.just("threefry2x32")),
    )
    boxes = draw(
        st.sets(
            st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in shape)),
            max_size=3,
        )
    )
    valid = [box for box in boxes if all(start <= stop for start, stop in box)]
    return spec, [ShardId(spec.path, box) for box in valid]


@st.composite
def contents_values(draw: st.DrawFn) -> Contents:
    drawn = draw(st.lists(leaf_and_boxes(), max_size=5, unique_by=lambda pair: pair[0].path))
    leaves = [spec for spec, _ in drawn]
    sizes = [(box, shard_nbytes(spec, box.box)) for spec, boxes in drawn for box in boxes]
    layout = lay_out(leaves, draw(st.permutations(sizes)))
    crcs = draw(
        st.lists(
            st.integers(0, 0xFFFFFFFF), min_size=len(layout.shards), max_size=len(layout.shards)
        )
    )
    return build_contents(draw(saves), draw(st.permutations(leaves)), layout, crcs)


@pytest.mark.dear
@given(contents_values(), writers)
def test_round_trip(contents: Contents, writer: Writer) -> None:
    data = wrap_contents(encode_contents(contents), writer)
    found = decode_manifest(data)
    assert found.contents == contents
    assert found.writer == writer
    assert found.encoded == encode_contents(contents)
    assert found.digest == contents_digest(found.encoded)
    assert decode_contents(found.encoded, found.digest) == contents


@pytest.mark.dear
@given(contents_values())
def test_encoding_is_the_canonical_json_of_the_standard_library(contents: Contents) -> None:
    plain = json.loads(encode_contents(contents))
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert encode_contents(contents) == canonical.encode()


@pytest.mark.dear
@given(st.data())
def test_layout_does_not_depend_on_the_order_and_never_overlaps(data: st.DataObject) -> None:
    drawn = data.draw(st.lists(leaf_and_boxes(), max_size=5, unique_by=lambda pair: pair[0].path))
    leaves = [spec for spec, _ in drawn]
    sizes = [(box, shard_nbytes(spec, box.box)) for spec, boxes in drawn for box in boxes]
    layout = lay_out(leaves, sizes)
    assert lay_out(leaves[::-1], data.draw(st.permutations(sizes))) == layout
    end = 0
    for placed in layout.shards:
        assert placed.offset % 64 == 0
        assert 0 <= placed.offset - end < 64
        end = placed.offset + placed.nbytes
    assert layout.size_bytes == end
    assert [placed.shard for placed in layout.shards] == sorted(shard for shard, _ in sizes)


def test_lay_out_refuses_what_cannot_be() -> None:
    spec = LeafSpec("w", "float32", (4,))
    whole = ShardId("w", ((0, 4),))
    with pytest.raises(ValueError, match="twice"):
        lay_out([spec], [(whole, 16), (whole, 16)])
    with pytest.raises(ValueError, match="not among"):
        lay_out([], [(whole, 16)])
    with pytest.raises(ValueError, match="its box has 16"):
        lay_out([spec], [(whole, 15)])


HOSTILE = [
    b"[" * 200_000,
    b'{"format":1,"digest":"","manifest":' + b"[" * 200_000,
    b'{"format":' + b"9" * 10_000 + b"}",
    b'{"format":2,"digest":"","manifest":{}}',
    b'{"format":1.0}',
    b'{"format":true}',
    b'{"format":1}',
    b"\xff\xfe",
    b"\x00" * 100,
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bytes_are_corrupt_data(data: bytes) -> None:
    with pytest.raises(CorruptData) as caught:
        decode_manifest(data)
    assert len(str(caught.value)) < 1000


def test_manifest_over_the_limit_is_not_parsed() -> None:
    with pytest.raises(CorruptData, match="over the limit"):
        decode_manifest(b" " * (MAX_MANIFEST_BYTES + 1))


def _resealed(edit: object) -> bytes:
    """The golden manifest with its contents edited and every digest made right again."""
    plain = json.loads(encode_contents(golden_contents()))
    edit(plain)  # type: ignore[operator]
    encoded = msgspec.json.encode(plain, order="sorted")
    body = {
        "contents": plain,
        "contents_digest": contents_digest(encoded),
        "writer": json.loads(MANIFEST)["manifest"]["writer"],
    }
    sealed = msgspec.json.encode(body, order="sorted")
    envelope = {"format": 1, "digest": contents_digest(sealed), "manifest": body}
    return msgspec.json.encode(envelope, order="sorted")


def test_resealing_alone_changes_nothing() -> None:
    assert _resealed(lambda plain: None) == MANIFEST


EDITS = {
    "unaligned offset": lambda c: c["shards"][1].update(offset=65),
    "overlap": lambda c: c["shards"][2].update(offset=64),
    "negative offset": lambda c: c["shards"][0].update(offset=-64),
    "huge offset": lambda c: c["shards"][2].update(offset=1 << 63),
    "wrong length": lambda c: c["shards"][1].update(nbytes=15),
    "negative length": lambda c: c["shards"][1].update(nbytes=-16),
    "leaf out of range": lambda c: c["shards"][2].update(leaf=3),
    "negative leaf": lambda c: c["shards"][0].update(leaf=-1),
    "crc too large": lambda c: c["shards"][0].update(crc32c=1 << 32),
    "box outside": lambda c: c["shards"][1].update(box=[[2, 5], [0, 2]]),
    "box reversed": lambda c: c["shards"][1].update(box=[[4, 2], [0, 2]]),
    "box of other rank": lambda c: c["shards"][1].update(box=[[2, 4]]),
    "box of three numbers": lambda c: c["shards"][1].update(box=[[2, 4, 1], [0, 2]]),
    "shards out of order": lambda c: c["shards"].reverse(),
    "shard twice": lambda c: c["shards"].insert(0, c["shards"][0]),
    "leaves out of order": lambda c: c["leaves"].reverse(),
    "leaf twice": lambda c: c["leaves"].insert(0, c["leaves"][0]),
    "unknown dtype": lambda c: c["leaves"][0].update(dtype="object"),
    "too many dimensions": lambda c: c["leaves"][0].update(global_shape=[1] * 33),
    "huge dimension": lambda c: c["leaves"][0].update(global_shape=[1 << 63]),
    "negative dimension": lambda c: c["leaves"][0].update(global_shape=[-1]),
    "long path": lambda c: c["leaves"][2].update(path="s" * 4097),
    "long key_impl": lambda c: c["leaves"][2].update(key_impl="k" * 256),
    "path in run id": lambda c: c["save"].update(run_id="../../etc"),
    "path in incarnation": lambda c: c["save"].update(incarnation="a/b"),
    "empty incarnation": lambda c: c["save"].update(incarnation=""),
    "negative step": lambda c: c["save"].update(step=-1),
    "huge step": lambda c: c["save"].update(step=1 << 63),
    "step as float": lambda c: c["save"].update(step=40.0),
    "unknown field": lambda c: c.update(path="/etc/passwd"),
    "no leaves": lambda c: c.pop("leaves"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_well_sealed_manifest_that_breaks_a_rule_is_corrupt(edit: object) -> None:
    with pytest.raises(CorruptData):
        decode_manifest(_resealed(edit))


def test_what_breaks_a_rule_cannot_be_written() -> None:
    good = golden_contents()
    entry = good.shards[0]
    bad = ShardEntry(entry.leaf, entry.box, entry.offset, entry.nbytes, -1)
    with pytest.raises(CorruptData, match="CRC32C"):
        check_contents(Contents(good.save, good.leaves, (bad, *good.shards[1:])))
    surrogate = Contents(good.save, (LeafSpec("\ud800", "int8", ()),), ())
    with pytest.raises(CorruptData, match="Unicode"):
        encode_contents(surrogate)


def _of_many_leaves() -> Contents:
    """A manifest of leaves of two shapes and two dtypes, each in two parts."""
    leaves, sizes = list[LeafSpec](), list[tuple[ShardId, int]]()
    boxes = [((start, start + 2), (0, 3)) for start in (0, 2)]
    for number in range(40):
        dtype, rows = ("float32", "int8")[number % 2], (4, 6)[number // 2 % 2]
        spec = LeafSpec(f"leaf_{number:02}", dtype, (rows, 3))
        leaves.append(spec)
        for box in boxes:
            sizes.append((ShardId(spec.path, box), shard_nbytes(spec, box)))
    layout = lay_out(leaves, sizes)
    return build_contents(SaveId(1, "a", "run"), leaves, layout, range(len(sizes)))


WRONG_FIELDS = {
    "leaf": (-1, 40, 1 << 70),
    "box": (((0, 2), (0, 4)), ((0, 2),), ((4, 6), (0, 4)), ((2, 0), (0, 3)), ((-1, 1), (0, 3))),
    "offset": (-64, 1, 65, 1 << 63, 1 << 70),
    "nbytes": (-24, 0, 23, 25, 96, 1 << 63),
    "crc32c": (-1, 1 << 32, 1 << 70),
}


@st.composite
def one_wrong_of_many(draw: st.DrawFn) -> list[ShardEntry]:
    """A wrong field, a place over the one before or unaligned, two in each other's place."""
    shards = list(_of_many_leaves().shards)
    place = draw(st.integers(1, len(shards) - 1))
    before, mine = shards[place - 1 : place + 1]
    wrong = {field: draw(st.sampled_from(values)) for field, values in WRONG_FIELDS.items()}
    field = draw(st.sampled_from([*wrong, "overlap", "unaligned", "order"]))
    if field == "overlap":
        shards[place] = msgspec.structs.replace(mine, offset=before.offset)
    elif field == "unaligned":
        shards[place] = msgspec.structs.replace(mine, offset=mine.offset + 8)
    elif field == "order":  # so that the offsets rise all the same
        shards[place - 1] = msgspec.structs.replace(mine, offset=before.offset)
        shards[place] = msgspec.structs.replace(before, offset=mine.offset)
    else:
        at = draw(st.sampled_from([place - 1, place]))
        shards[at] = msgspec.structs.replace(shards[at], **{field: wrong[field]})
    return shards


@pytest.mark.dear
@given(one_wrong_of_many())
@settings(max_examples=200)
def test_one_wrong_shard_of_many_is_found(shards: list[ShardEntry]) -> None:
    good = _of_many_leaves()
    check_contents(good)
    with pytest.raises(CorruptData):
        check_contents(msgspec.structs.replace(good, shards=tuple(shards)))


def test_contents_of_states_that_take_turns_are_their_own() -> None:
    save = SaveId(3, "life", "run")
    states = [tuple(LeafSpec(name, "int8", (2,)) for name in names) for names in ("cab", "bd")]
    again = tuple(LeafSpec(name, "int8", (2,)) for name in "cab")
    for leaves in (states[0], states[1], states[0], again):
        sizes = [(ShardId(leaf.path, ((0, 2),)), 2) for leaf in leaves]
        layout = lay_out(leaves, sizes)
        contents = build_contents(save, leaves, layout, range(len(leaves)))
        paths = sorted(leaf.path for leaf in leaves)
        assert [leaf.path for leaf in contents.leaves] == paths
        assert [contents.shard_id(i).leaf for i in range(len(leaves))] == paths
        assert build_contents(save, list(leaves), layout, range(len(leaves))) == contents
