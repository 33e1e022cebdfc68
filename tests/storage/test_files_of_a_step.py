"""A step's chunks read straight from its files: equal to what is decoded, or an error."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
from state_samples import mesh_of, random_bits, sharded
from world import World

from emergency_ckpt import _native
from emergency_ckpt.core.restore.storage_read import StoredArray
from emergency_ckpt.errors import DeadlineExceeded
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.chunks import ChunkIndex, FileBox, Stretch, read_into
from emergency_ckpt.storage.tier import StoredStep
from emergency_ckpt.types import ShardId
from emergency_ckpt.work_progress import WorkProgress

DTYPES = ("bool", "int4", "int8", "uint16", "float16", "bfloat16", "float32", "float8_e4m3fn")
STEP = 2


def in_time() -> WorkProgress:
    return WorkProgress.until(soon())


def soon() -> float:
    return time.monotonic() + 60


class Memory:
    """A sink in memory."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write(self, data: memoryview, offset: int) -> None:
        self.data[offset : offset + data.nbytes] = data


def state() -> dict[str, Any]:
    mesh = mesh_of(2, 4)
    large = {
        dtype: sharded(random_bits((64, 128), dtype, seed=1), mesh, ("x", "y")) for dtype in DTYPES
    }
    columns = sharded(random_bits((64, 256), "float32", seed=2), mesh, None, "y")
    return {**large, "columns": columns, "point": sharded(np.int32(7), mesh), "host": np.arange(4)}


@pytest.fixture
def tier(world: World) -> PersistentTier:
    with world.open_both(local_save_every=0) as checkpointer:
        assert checkpointer.save(step=STEP, state=state())
        checkpointer.wait_until_finished()
        checkpointer.check_for_errors()
    return PersistentTier(str(world.persistent))


def boxes_of(stored: StoredStep) -> tuple[list[tuple[ShardId, int]], int]:
    """All boxes with a CRC, each at its place, and the bytes of all."""
    boxes: list[tuple[ShardId, int]] = []
    end = 0
    for shard in sorted(stored.crcs):
        sizes = [stop - start for start, stop in shard.box]
        boxes.append((shard, end))
        end += int(np.prod(sizes)) * stored.leaves[shard.leaf].array.item_bytes
    return boxes, end


def read(tier: PersistentTier, stored: StoredStep) -> tuple[dict[ShardId, int], bytes]:
    boxes, size_bytes = boxes_of(stored)
    memory = Memory(size_bytes)
    arrays = {path: leaf.array for path, leaf in stored.leaves.items()}
    crcs = tier.read_into(stored.item, arrays, boxes, memory, complete=True, progress=in_time())
    return dict(zip((shard for shard, _ in boxes), crcs, strict=True)), bytes(memory.data)


def decoded(tier: PersistentTier, stored: StoredStep) -> bytes:
    arrays = {path: leaf.array for path, leaf in stored.leaves.items()}
    shards = [shard for shard, _ in boxes_of(stored)[0]]
    found = tier.read_boxes(stored.item, arrays, shards, complete=True, deadline_s=soon())
    return b"".join(np.ascontiguousarray(array).tobytes() for _, array in found)


def test_bytes_and_checksums_are_those_that_are_decoded(tier: PersistentTier) -> None:
    stored = tier.describe(tier.find(STEP))
    crcs, data = read(tier, stored)
    assert crcs == stored.crcs
    assert data == decoded(tier, stored)


def test_uncompressed_chunks_are_found_in_files(tier: PersistentTier) -> None:
    """Without this the tests here would compare the library with itself."""
    stored = tier.describe(tier.find(STEP))
    index = ChunkIndex.open(stored.item, in_time())
    assert index is not None
    for shard in stored.crcs:
        assert index.parts_of(shard, stored.leaves[shard.leaf].array) is not None


def test_reader_that_hangs_is_left_behind_and_writes_nothing(tmp_path: Path) -> None:
    """A pipe blocks whoever opens it, like a file system that is out of reach."""
    silent, good = tmp_path / "silent", tmp_path / "good"
    os.mkfifo(silent)
    good.write_bytes(b"x" * 100)
    memory = Memory(200)
    before = set(threading.enumerate())
    boxes = [
        FileBox([Stretch(str(silent), 0, 100)], 0),
        FileBox([Stretch(str(good), 0, 100)], 100),
    ]
    with pytest.raises(DeadlineExceeded):
        read_into(boxes, memory, threads=2, progress=WorkProgress.until(time.monotonic() + 0.3))
    left = set(threading.enumerate()) - before
    assert all(thread.daemon for thread in left), "none delays the exit"
    assert bytes(memory.data) == bytes(100) + b"x" * 100
    os.close(os.open(silent, os.O_WRONLY))  # storage answers again
    for thread in left:
        thread.join(60)
    assert not set(threading.enumerate()) - before
    assert bytes(memory.data) == bytes(100) + b"x" * 100


def test_error_of_the_place_is_raised_and_ends_all_readers(tmp_path: Path) -> None:
    class Full(Memory):
        def write(self, data: memoryview, offset: int) -> None:
            raise OSError("full")

    file = tmp_path / "file"
    file.write_bytes(bytes(4 << 20))
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="full"):
        read_into(
            [FileBox([Stretch(str(file), 0, 4 << 20)], 0)], Full(0), threads=3, progress=in_time()
        )
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("sizes", [[1], [(1 << 20) + 7, 3], []])
def test_checksum_is_over_all_parts_of_a_box(tmp_path: Path, sizes: list[int]) -> None:
    data = np.random.default_rng(0).bytes(sum(sizes) + 5)
    file = tmp_path / "file"
    file.write_bytes(data)
    parts: list[bytes | Stretch] = []
    at = 0
    for size in sizes:
        parts.append(Stretch(str(file), at, size))
        at += size
    parts.append(data[at:])
    memory = Memory(len(data))
    assert read_into([FileBox(parts, 0)], memory, threads=2, progress=in_time()) == [
        _native.crc32c(data)
    ]
    assert bytes(memory.data) == data


@pytest.mark.parametrize("kind", ["single", "numbered"])
def test_database_of_many_nodes_has_the_place_of_each_key(tmp_path: Path, kind: str) -> None:
    config = {"max_decoded_node_bytes": 200, "max_inline_value_bytes": 8, "manifest_kind": kind}
    base = {"driver": "file", "path": f"{tmp_path}/"}
    database = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": base, "config": config}
    ).result()
    values = {f"prefix/{number:03}": b"x" * number for number in range(40)}
    for key, value in values.items():
        database.write(key, value).result()
    for number in (1, 9, 39):
        database.write(f"array{number}/0", values[f"prefix/{number:03}"]).result()
    index = ChunkIndex.open(str(tmp_path), in_time())
    assert index is not None
    for number in (1, 9, 39):
        array = StoredArray(f"array{number}", (), (), number, plain=True)
        parts = index.parts_of(ShardId("w", ()), array)
        assert parts is not None
        memory = Memory(number)
        read_into([FileBox(parts, 0)], memory, threads=1, progress=in_time())
        assert bytes(memory.data) == b"x" * number


def test_bucket_has_no_files_to_read_from() -> None:
    assert ChunkIndex.open("gs://bucket/item", in_time()) is None


@pytest.mark.parametrize(
    "document",
    [
        b"[" * 100_000,
        b'{"shape": [Infinity], "chunks": [1], "dtype": "<f4"}',
        b'{"shape": [1], "chunks": [0], "dtype": "<f4"}',
        b'{"shape": [1], "chunks": [1], "dtype": "<nonsense"}',
        b'{"shape": [1], "chunks": [1], "dtype": "<O"}',
        b'{"shape": [1], "chunks": [1], "dtype": "<f7"}',
        b'{"shape": [1], "chunks": [1], "dtype": ",f4"}',
        b"\xff",
    ],
    ids=[
        "deep",
        "infinite",
        "empty_chunks",
        "no_dtype",
        "objects",
        "odd_size",
        "fields",
        "no_text",
    ],
)
def test_metadata_that_are_none_are_left_to_tensorstore(document: bytes) -> None:
    assert ChunkIndex("/item", {"w/.zarray": document}).form_of("w") is None


def test_file_named_as_a_step_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax's answer for what is no directory is final: a repeated call ends at the deadline."""
    asked: list[str] = []

    def is_finalized(path: Any) -> bool:
        asked.append(path.name)
        raise ValueError(f"Checkpoint path must be a directory. Got {path}.")

    monkeypatch.setattr("orbax.checkpoint.utils.is_checkpoint_finalized", is_finalized)
    (tmp_path / "6").write_text("")
    looks = PersistentTier(str(tmp_path), timeout_s=2.0).found.inspection()
    assert looks.unlisted(6, ["6"]) is None
    assert asked == ["6"]
