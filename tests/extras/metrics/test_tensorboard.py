"""Scalars as TensorBoard reads them back from its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent
from tensorboardX.record_writer import RecordWriter
from world import World, save_all

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event, Origin
from emergency_ckpt.extras.metrics import TensorBoard


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """Return (tag, step, value) of each scalar in the directory's files, in order."""
    assert RecordWriter is not None
    found: list[tuple[str, int, float]] = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        data, offset = path.read_bytes(), 0
        while offset < len(data):  # length, its CRC, the record, its CRC
            length = int.from_bytes(data[offset : offset + 8], "little")
            record = TensorBoardEvent.FromString(data[offset + 12 : offset + 12 + length])
            offset += 16 + length
            found += [(v.tag, record.step, v.simple_value) for v in record.summary.value]
    return found


def test_scalars_of_saves_over_the_step(world: World, tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    with world.open(on_event=board) as checkpointer:
        save_all(checkpointer, world, 3, 4)
    board.close()
    found = scalars(tmp_path / "process_00000")
    assert [(s, v) for tag, s, v in found if tag == "eckpt/newest_step/local"] == [(3, 3), (4, 4)]
    saved = [value for tag, _, value in found if tag == "eckpt/saved_bytes_total/local"]
    assert saved == [saved[0], 2 * saved[0]]


def test_directory_in_the_way_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    board = TensorBoard(tmp_path / "file")
    for step in range(3):
        board(Event("save.complete", {"step": step, "seconds": 0.1}, 1.0, Origin(0)))
    board.close()
    board(Event("save.complete", {"step": 9, "seconds": 0.1}, 1.0, Origin(0)))
    assert (tmp_path / "file").read_text() == ""


END = """
import sys
from emergency_ckpt.events import Event, Origin
from emergency_ckpt.extras.metrics import TensorBoard
board = TensorBoard(sys.argv[1])
for step in range(50):
    board(Event("save.complete", {"step": step, "seconds": 0.1}, 1.0, Origin(2)))
"""


def test_program_end_writes_the_rest(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", END, str(tmp_path)], check=True)
    found = scalars(tmp_path / "process_00002")
    assert [s for tag, s, _ in found if tag == "eckpt/newest_step/local"] == list(range(50))


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"emergency-ckpt\[tensorboard\]"):
        TensorBoard(tmp_path)
