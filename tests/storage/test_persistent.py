"""The persistent tier: Orbax's own format, and the marker that makes a step count."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from forgery import write_sealed
from persistent_steps import complete_steps, life, writer_of
from places import GOLDEN
from state_samples import assert_same, mesh_of, on_host, random_bits, sharded

import emergency_ckpt
from emergency_ckpt.core.boxes import volume
from emergency_ckpt.core.restore.inventory import PersistentStep
from emergency_ckpt.core.timeline import is_plain
from emergency_ckpt.errors import CheckpointError, CorruptData, PersistentTierError
from emergency_ckpt.state import BoxTable, describe, host_state
from emergency_ckpt.state.host_state import document_name
from emergency_ckpt.state.materialize import materialize
from emergency_ckpt.storage import PersistentTier, StepMarker, orbax_reader
from emergency_ckpt.storage.marker import (
    TensorsId,
    build_marker,
    check_marker,
    decode_checksums,
    encode_checksums,
)
from emergency_ckpt.types import LeafSpec, OrbaxStep, SaveId, ShardId

STORABLE = (
    *("bool", "int4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2"),
)


FIRST, SECOND = life(1), life(2)


def save_id(step: int, incarnation: str = FIRST) -> SaveId:
    return SaveId(step=step, incarnation=incarnation, run_id="run")


def state_of(step: int) -> dict[str, Any]:
    mesh = mesh_of(2, 4)
    return {
        "params": {
            dtype: sharded(random_bits((8, 4), dtype, seed=step), mesh, ("x", "y"))
            for dtype in STORABLE
        },
        "columns": sharded(random_bits((2, 8), "float32", seed=step), mesh, None, "y"),
        "point": sharded(np.array(step, np.int32), mesh),
        "keys": jax.random.split(jax.random.key(step), 3),
        "empty": {"device": sharded(np.zeros((0, 4), np.float32), mesh), "host": np.zeros((2, 0))},
        "host": [np.arange(4) + step, np.float16(0.5), step, 0.25 * step, bool(step % 2)],
    }


def write(
    tier: PersistentTier, step: int, state: Any, host: Any = None, incarnation: str = FIRST
) -> None:
    """One save, as ``save.persistent.save`` does it with one process."""
    save = save_id(step, incarnation)
    tree, shards = on_host(state)
    tier.create()
    writer = writer_of(tier)
    writer.begin(incarnation)
    writer.make_room(step)
    data = host_state.encode(save, 0, 1, host_state.capture(host))
    tier.write_document(step, 0, 1, data)
    tier.write_tensors(save, tree, shards, (0,))
    documents = {0: (hashlib.sha256(data).hexdigest(), host is None)}
    writer.publish(tier.finish(save, documents, [leaf.spec for leaf in tree.leaves], {}), None)


def read(tier: PersistentTier, step: int, like: Any = None) -> Any:
    like = state_of(0) if like is None else like
    tree = describe(like, "restore")
    stored = tier.describe(tier.find(step))
    arrays = {path: leaf.array for path, leaf in stored.leaves.items()}
    wanted = [shard for shard in BoxTable(tree, 1).shards_of(0) if shard.leaf in arrays]
    found = dict(
        tier.read_boxes(
            stored.item, arrays, wanted, complete=True, deadline_s=time.monotonic() + 60
        )
    )

    def bytes_of(shard: ShardId) -> np.ndarray:
        if volume(shard.box) == 0:  # storage has none of these
            return np.zeros(0, np.uint8)
        return np.ascontiguousarray(found[shard]).reshape(-1).view(np.uint8)

    return materialize(tree, like, bytes_of)


@pytest.mark.parametrize("limit_bytes", [8, 64])
def test_box_of_many_chunks_is_put_together_from_parts(
    tier: PersistentTier, monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    """So what comes of a large box is seen long before all of it has."""
    written = state_of(3)
    write(tier, 3, written)
    monkeypatch.setattr(orbax_reader, "CHUNK_BYTES", limit_bytes)
    stored = tier.describe(tier.find(3))
    arrays = {path: leaf.array for path, leaf in stored.leaves.items()}
    assert np.prod(arrays["params/float32"].chunk_shape) == 4
    boxes = [
        ShardId("params/float32", ((0, 8), (0, 4))),
        ShardId("point", ()),
        ShardId("params/float32", ((2, 7), (1, 3))),
        ShardId("columns", ((0, 2), (0, 8))),
    ]
    later = time.monotonic() + 60
    read = list(tier.read_boxes(stored.item, arrays, boxes, complete=True, deadline_s=later))
    values = written["params"]["float32"], written["point"], written["columns"]
    whole, point, columns = map(np.asarray, values)
    assert [shard for shard, _ in read] == boxes
    expected = (whole, point, whole[2:7, 1:3], columns)
    assert [array.tobytes() for _, array in read] == [each.tobytes() for each in expected]


def marker_in(tier: PersistentTier, step: int) -> StepMarker:
    marker = tier.find(step).marker
    assert marker is not None
    return marker


def document(tier: PersistentTier, step: int) -> bytes:
    return tier.read_document(step, 0, 1, marker_in(tier, step).digests[0])


def found(tier: PersistentTier) -> list[PersistentStep]:
    """The steps that are there, as their files have them."""
    view = tier.found.view()
    steps: list[PersistentStep] = []
    for each in tier.found.inspect_each(view, view.steps):
        if isinstance(each, CheckpointError):
            raise each
        if each is not None and not each.is_junk:
            steps.append(each.step)
    return steps


def steps(tier: PersistentTier) -> list[int]:
    """The steps of which a restore would take the newest."""
    return [each.step for each in found(tier) if not each.problem]


def next_life(tier: PersistentTier, incarnation: str = SECOND) -> None:
    """What the first save of a life does before anything else."""
    writer_of(tier).begin(incarnation)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "persistent"


@pytest.fixture
def tier(directory: Path) -> PersistentTier:
    return PersistentTier(str(directory))


def marker_of(directory: Path, step: int) -> Path:
    return directory / "host_state" / str(step) / "marker.json"


def test_what_is_written_is_read_bit_for_bit(tier: PersistentTier) -> None:
    write(tier, 7, state_of(7), {"position": 70})
    assert found(tier) == tier.found.counting() == [PersistentStep(7, 1, True, FIRST)]
    assert_same(read(tier, 7), state_of(7))
    decoded = host_state.decode(document(tier, 7))
    assert host_state.value_of(decoded.payload) == {"position": 70}
    assert decoded.save == save_id(7)


def test_marker_knows_every_leaf_and_whether_there_is_host_state(
    tier: PersistentTier,
) -> None:
    write(tier, 1, state_of(1))
    assert found(tier) == tier.found.counting() == [PersistentStep(1, 1, False, FIRST)]
    assert marker_in(tier, 1).leaves == tuple(
        leaf.spec for leaf in describe(state_of(1), "save").leaves
    )


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def _edit(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


@pytest.mark.parametrize("has_log", [True, False])
def test_steps_without_marker_or_tensors_does_not_count(
    tier: PersistentTier, directory: Path, has_log: bool
) -> None:
    """Without a log it is as after a crash in a save."""
    for step in (2, 4, 6):
        write(tier, step, {"x": np.arange(step)})
    marker_of(directory, 4).unlink()
    shutil.rmtree(directory / "6")
    if not has_log:
        shutil.rmtree(directory / "host_state" / "log")
        tier = PersistentTier(str(directory))
        assert steps(tier) == complete_steps(tier) == [2]
        return
    _, four, six = found(tier)
    assert "host_state/4/marker.json cannot be used (it is gone)" in four.problem
    assert six.problem == "its tensors are gone"
    assert steps(tier) == [2]
    write(tier, 4, {"x": np.arange(4)}, incarnation=SECOND)
    assert steps(tier) == complete_steps(tier) == [2, 4]
    assert marker_in(tier, 4).save.incarnation == SECOND


def _write_later(path: Path) -> None:
    write_sealed(path, "marker", json.loads(path.read_text())["marker"], format=2)


def _rename(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"step":4', b'"step":5'))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_truncate, "not such a file"),
        (_write_later, "a newer version of this package wrote it"),
        (_edit(format=2), "the digest differs"),
        (_edit(digest="0" * 64), "the digest differs"),
        (_rename, "the digest differs"),
        (_edit(surprise=1), "not such a file"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not such a file"),
        (lambda path: path.write_bytes(b""), "not such a file"),
        (lambda path: path.write_text("[]"), "not such a file"),
    ],
    ids=[
        *("truncated", "version", "claimed version", "digest", "another step"),
        *("unknown field", "no text", "empty", "no marker"),
    ],
)
@pytest.mark.parametrize("has_log", [True, False])
def test_steps_with_unreadable_marker_names_the_problem(
    tier: PersistentTier,
    directory: Path,
    damage: Callable[[Path], None],
    problem: str,
    has_log: bool,
) -> None:
    for step in (2, 4):
        write(tier, step, {"x": np.arange(step)})
    damage(marker_of(directory, 4))
    if not has_log:
        shutil.rmtree(directory / "host_state" / "log")
        tier = PersistentTier(str(directory))
    two, four = found(tier)
    assert (two.step, two.problem) == (2, "")
    assert four.step == 4
    assert "host_state/4/marker.json cannot be used (" in four.problem
    assert steps(tier) == [2]
    why = "not the one that the step log names" if has_log else problem
    with pytest.raises(CorruptData, match=f"cannot be used.*{why}"):
        tier.find(4)
    next_life(tier)
    assert steps(tier) == [2]
    assert [path for path in directory.glob("4*") if (path / "state").is_dir()]


def test_step_that_lost_its_host_states_has_tensors_only(
    tier: PersistentTier, directory: Path
) -> None:
    for step in (2, 4):
        write(tier, step, {"x": np.arange(step)}, {"position": step})
    shutil.rmtree(directory / "host_state" / "4")
    two, four = found(tier)
    assert two == PersistentStep(2, 1, True, FIRST)
    assert is_plain(four.incarnation)
    assert four == PersistentStep(4, 0, False, four.incarnation, tensors_of=FIRST)
    assert tier.describe(tier.find(4)).marker is None
    next_life(tier)
    assert read(tier, 4, {"x": np.zeros(4, int)})["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("has_log", [True, False])
def test_marker_that_cannot_be_read_is_not_one_that_is_absent(
    tier: PersistentTier, directory: Path, has_log: bool
) -> None:
    """Or a passing fault of storage would bring back an older step in silence."""
    for step in (2, 4):
        write(tier, step, {"x": np.arange(step)})
    if not has_log:
        shutil.rmtree(directory / "host_state" / "log")
        tier = PersistentTier(str(directory))
    marker = marker_of(directory, 4)
    marker.unlink()
    marker.mkdir()
    with pytest.raises(PersistentTierError, match=r"marker\.json"):
        found(tier)
    if has_log:
        next_life(tier)  # what is listed is not looked into, and stays
    else:
        with pytest.raises(PersistentTierError, match=r"marker\.json"):
            next_life(tier)
    with pytest.raises(PersistentTierError, match=r"marker\.json"):
        found(tier)


def test_altered_host_state_is_refused(tier: PersistentTier, directory: Path) -> None:
    write(tier, 4, {"x": np.arange(4)}, {"position": 1})
    path = directory / "host_state" / "4" / document_name(0, 1)
    path.write_bytes(path.read_bytes().replace(b"position", b"positioM"))
    with pytest.raises(CorruptData, match="the digest differs"):
        document(tier, 4)
    path.unlink()
    with pytest.raises(PersistentTierError, match=re.escape(path.name)):
        document(tier, 4)


def test_leftovers_of_a_writer_that_died_are_cleared(tier: PersistentTier, directory: Path) -> None:
    write(tier, 2, {"x": np.arange(2)})
    unfinished = directory / "4.orbax-checkpoint-tmp-eckpt-123"
    unfinished.mkdir()
    (unfinished / "piece").write_bytes(b"half")
    tier.write_document(4, 0, 1, b"{}")  # a save begins with it
    assert steps(tier) == [2]
    write(tier, 4, {"x": np.arange(4)})
    assert not unfinished.exists()
    assert steps(tier) == [2, 4]
    for _ in range(2):
        writer_of(tier).remove([4], FIRST)
        assert steps(tier) == [2]


def test_nothing_there_is_no_step(tier: PersistentTier, directory: Path) -> None:
    assert found(tier) == complete_steps(tier) == []
    assert tier.directory == str(directory)
    tier.create()
    tier.create()
    (directory / "notes.txt").write_text("not a step")
    assert found(tier) == complete_steps(tier) == []


def test_directory_that_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(PersistentTierError, match=re.escape(str(path))):
            PersistentTier(str(path)).create()
    with pytest.raises(PersistentTierError, match="list"):
        PersistentTier(str(file)).found.view()


def test_state_with_nothing_but_empty_leaves(tier: PersistentTier) -> None:
    state = {"x": np.zeros((0, 3)), "y": None}
    write(tier, 1, state)
    assert_same(read(tier, 1, state), state)


EXAMPLE_LIFE = "000000000006-5e9d5e9d5e9d5e9d"
EXAMPLE_TENSORS = TensorsId(metadata="a1" * 32, manifest="b2" * 32)


OLD = OrbaxStep(items=("default",))
"""The item of steps that were written before callers could name it."""


def write_example(directory: Path) -> bytes:
    """The worked example of FORMAT.md; returns its marker, but that its tensors are fixed ones."""
    save = SaveId(step=40, incarnation=EXAMPLE_LIFE, run_id="demo")
    state = {"params": {"w": np.array([1, -0.0, np.nan, 0.5], np.float32)}, "rng": np.uint32(42)}
    tree, shards = on_host(state)
    tier = PersistentTier(str(directory))
    tier.create()
    writer = writer_of(tier, "demo")
    writer.hold(EXAMPLE_LIFE)
    tier.write_tensors(save, tree, shards, (0,), orbax=OLD)
    documents: dict[int, tuple[str, bool]] = {}
    for owner, host in enumerate([{"position": 160}, None]):
        data = host_state.encode(save, owner, 2, host_state.capture(host))
        tier.write_document(40, owner, 2, data)
        documents[owner] = (hashlib.sha256(data).hexdigest(), host is None)
    leaves = [leaf.spec for leaf in tree.leaves]
    entry = tier.finish(save, documents, leaves, {}, orbax=OLD)
    writer.publish(entry, None)
    checksums = encode_checksums(leaves, {})
    return build_marker(save, documents, leaves, checksums, EXAMPLE_TENSORS, items=OLD.items)


def test_specification_shows_the_marker_that_is_written(directory: Path) -> None:
    text = (Path(emergency_ckpt.__file__).parent / "FORMAT.md").read_text("utf-8")
    (example,) = re.findall(r"```json marker\n(.*?)\n```", text, re.DOTALL)
    assert write_example(directory) == example.encode() == (GOLDEN / "marker_v1.json").read_bytes()
    listed = {path.relative_to(directory).as_posix() for path in directory.glob("host_state/40/*")}
    (tree,) = re.findall(r"```files persistent\n(.*?)\n```", text, re.DOTALL)
    shown = [line.split()[0] for line in tree.splitlines() if line.startswith("  ")]
    assert {f"host_state/40/{name}" for name in shown} == listed


@pytest.mark.parametrize("has_log", [True, False])
def test_steps_replaced_by_plain_orbax_has_tensors_only(
    tier: PersistentTier, directory: Path, has_log: bool
) -> None:
    """Somebody deleted the tensors, not the documents; plain Orbax wrote the number again.

    With a log that names the step the new one counts once it is adopted.
    """
    write(tier, 4, {"x": np.arange(4)}, {"position": 1})
    shutil.rmtree(directory / "4")
    with ocp.CheckpointManager(directory) as manager:
        manager.save(4, args=ocp.args.StandardSave({"x": np.arange(4) + 7}))
    if not has_log:
        shutil.rmtree(directory / "host_state" / "log")
        tier = PersistentTier(str(directory))
    else:
        (four,) = found(tier)
        assert "another program wrote it" in four.problem
        (entry,) = writer_of(tier).adopt()
        assert (entry.step, entry.is_plain) == (4, True)
    (four,) = found(tier)
    assert (four.process_count, four.has_host_state, four.problem) == (0, False, "")
    assert is_plain(four.incarnation)
    like = {"x": np.zeros(4, int)}
    assert read(tier, 4, like)["x"].tolist() == [7, 8, 9, 10]
    next_life(tier)
    assert read(tier, 4, like)["x"].tolist() == [7, 8, 9, 10]
    assert steps(tier) == complete_steps(tier) == [4]


def test_leftovers_of_documents_without_tensors_go(tier: PersistentTier, directory: Path) -> None:
    for step in (2, 4):
        write(tier, step, {"x": np.arange(step)})
    shutil.rmtree(directory / "4")
    assert complete_steps(tier) == [2]
    next_life(tier)
    assert sorted(os.listdir(directory / "host_state")) == ["2", "log"]
    assert [each.step for each in found(tier)] == [2]


def test_steps_of_plain_orbax_written_again_is_another(
    tier: PersistentTier, directory: Path
) -> None:
    incarnations: list[str] = []
    for value in (1, 2):
        with ocp.CheckpointManager(directory) as manager:
            manager.save(4, args=ocp.args.StandardSave({"x": np.full(4, value)}))
            manager.wait_until_finished()
            incarnations.append(found(tier)[0].incarnation)
            manager.delete(4)
    assert incarnations[0] != incarnations[1]


@pytest.mark.parametrize("is_nested", [False, True])
def test_steps_with_damaged_orbax_metadata_names_the_problem(
    tier: PersistentTier, directory: Path, is_nested: bool
) -> None:
    """Also of a file that is nested deeper than the interpreter can follow."""
    write(tier, 4, {"x": np.arange(4)}, {"position": 1})
    path = directory / "4" / "_CHECKPOINT_METADATA"
    changed = path.read_bytes().replace(b"state", b"stale")
    path.write_bytes(b"[" * 100_000 if is_nested else changed)
    assert [(each.step, each.problem) for each in found(tier)] == [
        (4, "its file _CHECKPOINT_METADATA is damaged")
    ]


@pytest.mark.parametrize("has_log", [True, False])
def test_first_save_leaves_what_cannot_be_read(
    tier: PersistentTier, directory: Path, has_log: bool
) -> None:
    """Without a log, an unfinished save goes at once."""
    for step in (2, 4, 6):
        write(tier, step, {"x": np.arange(step)})
    _truncate(marker_of(directory, 4))
    marker_of(directory, 6).unlink()
    if not has_log:
        shutil.rmtree(directory / "host_state" / "log")
        tier = PersistentTier(str(directory))
    writer = writer_of(tier)
    writer.begin(FIRST)
    assert (directory / "6").exists() is has_log, "it is of a save that did not end"
    assert (directory / "4" / "state").is_dir()
    assert steps(tier) == [2]
    for step in (4, 6, 8):
        writer.make_room(step)
    assert sorted(path.name for path in directory.iterdir()) == ["2", "host_state"]
    assert steps(tier) == [2]


def test_unlisted_complete_step_fails_saves_of_its_number_alone(
    tier: PersistentTier, directory: Path
) -> None:
    """As one that plain Orbax wrote, or a user moved there, while a job trains."""
    write(tier, 2, {"x": np.arange(2)})
    shutil.copytree(directory / "2", directory / "4")
    writer = writer_of(tier)
    with pytest.raises(PersistentTierError, match="complete step that the step log does not name"):
        write(tier, 4, {"x": np.arange(4)})
    writer.begin(FIRST)
    assert (directory / "4" / "state").is_dir()
    write(tier, 6, {"x": np.arange(6)})
    assert 6 in steps(tier)


SEVERAL = OrbaxStep(
    items=("params", "opt"),
    metrics={"loss": 2.5},
    custom_metadata={"note": "x"},
)


def test_step_of_several_items_is_read_by_both(directory: Path) -> None:
    state = {"params": {"w": np.arange(4, dtype=np.float32)}, "opt": {"mu": np.float32(3)}}
    tree, shards = on_host(state)
    save = SaveId(step=40, incarnation=EXAMPLE_LIFE, run_id="demo")
    tier = PersistentTier(str(directory))
    tier.create()
    writer = writer_of(tier, "demo")
    writer.hold(EXAMPLE_LIFE)
    tier.write_tensors(save, tree, shards, (0,), orbax=SEVERAL)
    leaves = [leaf.spec for leaf in tree.leaves]
    tier.write_document(40, 0, 1, host_state.encode(save, 0, 1, host_state.capture(None)))
    entry = tier.finish(save, {0: ("0" * 64, True)}, leaves, {}, orbax=SEVERAL)
    writer.publish(entry, None)
    found = tier.describe(tier.find(40))
    assert (found.item, set(found.leaves)) == (str(directory / "40"), {"params/w", "opt/mu"})
    arrays = {path: leaf.array for path, leaf in found.leaves.items()}
    wanted = [ShardId("opt/mu", ()), ShardId("params/w", ((1, 3),))]
    later = time.monotonic() + 60
    read = dict(tier.read_boxes(found.item, arrays, wanted, complete=True, deadline_s=later))
    assert [read[shard].tolist() for shard in wanted] == [3.0, [1.0, 2.0]]
    with ocp.CheckpointManager(directory) as manager:
        stored = manager.restore(40)
        assert stored.params["w"].tolist() == [0, 1, 2, 3]
        assert stored.opt["mu"] == 3
        described = manager.metadata(40)
    assert described.metrics == {"loss": 2.5}
    assert described.custom_metadata["note"] == "x"


def test_marker_of_several_items_is_the_golden_one() -> None:
    save = SaveId(step=40, incarnation=EXAMPLE_LIFE, run_id="demo")
    leaves = [LeafSpec("opt/mu", "float32", ()), LeafSpec("params/w", "float32", (4,))]
    checksums = encode_checksums(leaves, {})
    documents = {0: ("0" * 64, True)}
    data = build_marker(save, documents, leaves, checksums, EXAMPLE_TENSORS, items=SEVERAL.items)
    golden = GOLDEN / "marker_v1_items.json"
    assert golden.read_bytes() == data
    marker = check_marker(data, 40, "marker.json")
    assert marker.items == ("params", "opt")


@pytest.mark.parametrize(
    "items",
    [
        *(("",), ("../x",), (".hidden",), ("a/b",), ("a\0",), ("a\n",), ("a" * 256,)),
        *(("params", "opt", "opt"), ("params", "mu"), tuple(f"{n}" for n in range(1000))),
    ],
)
def test_marker_with_items_that_cannot_be_is_damaged(items: tuple[str, ...]) -> None:
    save = SaveId(step=40, incarnation=EXAMPLE_LIFE, run_id="demo")
    leaves = [LeafSpec("opt/mu", "float32", ()), LeafSpec("params", "float32", (4,))]
    checksums = encode_checksums([], {})
    data = build_marker(save, {}, leaves, checksums, EXAMPLE_TENSORS, items=items)
    with pytest.raises(CorruptData, match="contradicts itself"):
        check_marker(data, 40, "marker.json")


@pytest.mark.parametrize(
    "leaf",
    [
        LeafSpec("w", "float31", ()),
        LeafSpec("w", "float32", (-1,)),
        LeafSpec("w", "float32", (2**63,)),
        LeafSpec("w", "float32", (1,) * 33),
        LeafSpec("w", "float32", (2**61,)),
        LeafSpec("w", "uint32", (), "x" * 256),
        LeafSpec("w" * 4097, "float32", ()),
    ],
)
def test_marker_with_a_leaf_that_cannot_be_is_damaged(leaf: LeafSpec) -> None:
    save = SaveId(step=40, incarnation=EXAMPLE_LIFE, run_id="demo")
    data = build_marker(save, {}, [leaf], encode_checksums([], {}), EXAMPLE_TENSORS)
    with pytest.raises(CorruptData):
        check_marker(data, 40, "marker.json")


@pytest.mark.parametrize(
    ("box", "crc"), [(((0, 5),), 1), (((-1, 2),), 1), ((), 1), (((0, 4),), -1), (((0, 4),), 2**32)]
)
def test_checksums_of_a_box_that_cannot_be_are_damaged(
    box: tuple[tuple[int, int], ...], crc: int
) -> None:
    leaves = [LeafSpec("w", "float32", (4,))]
    checksums = encode_checksums(leaves, {ShardId("w", box): crc})
    save = SaveId(step=40, incarnation=EXAMPLE_LIFE, run_id="demo")
    data = build_marker(save, {}, leaves, checksums, EXAMPLE_TENSORS)
    with pytest.raises(CorruptData):
        decode_checksums(checksums, check_marker(data, 40, "marker.json"), "checksums.json")
